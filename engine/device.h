/* A device that the engine runs on instead of this process's processors: its plug-in, its streams.
 *
 * A context that has one (ckpt_eng.device) takes its arrays from the device's memory: ckpt_eng_reserve
 * allocates there, ckpt_eng_take gives out pointers that only operations may read. The operations of
 * such a context are those of the device builds (real.h), written in engine/device/ on the functions of
 * engine/cuda/plugin.h: they queue work in one stream and return. What they find out comes at the end of
 * a run (move.h: fetch_results), so a failure on the device shows there.
 *
 * A context of this kind is for one thread. Errors: CKPT_E_UNSUPPORTED no plug-in, no card; CKPT_E_NOMEM,
 * CKPT_E_IO of the device. */
#ifndef CKPT_ENGINE_DEVICE_H
#define CKPT_ENGINE_DEVICE_H

#include "cuda/plugin.h"
#include "engine.h"

typedef struct ckpt_eng_device {
    const ckpt_cuda_plugin *api;
    ckpt_cuda_card card;
    int number; /* of the card */
    char name[128];
    const int64_t *cu;  /* offsets that the newest bring_seq brought (this process's) ... */
    int64_t *on_device; /* ... and where they are */
    /* Of a micro-batch cut over ranks, on the device (cut.h: bring_cut); whole_cu NULL: there is none. */
    const int64_t *whole_cu; /* this process's offsets of the whole, */
    int64_t *whole;          /* there; */
    int32_t *order,
        *place; /* tokens by the rank that works on them, and where each stands in that; */
    struct ckpt_cuda_part *parts;
} ckpt_eng_device;

/* Load the plug-in `path` and open card `number`, of as many as there are: ranks beyond them share. */
ckpt_status ckpt_eng_device_load(ckpt_eng_device *d, const char *path, int number,
                                 ckpt_err *err) CKPT_MUST_USE;
/* The same with a table that is there already (tests: the emulator's). */
ckpt_status ckpt_eng_device_open(ckpt_eng_device *d, const ckpt_cuda_plugin *api, int number,
                                 ckpt_err *err) CKPT_MUST_USE;
/* After the contexts and networks that use it; a zeroed one is allowed. */
void ckpt_eng_device_close(ckpt_eng_device *d);

/* ---- memory of a context's device, or of this process without one ---------------------------- */

/* Zeroed. */
ckpt_status ckpt_eng_memory_new(const ckpt_eng *e, int64_t count, size_t size, void **out,
                                ckpt_err *err) CKPT_MUST_USE;
void ckpt_eng_memory_free(const ckpt_eng *e, void *p);
/* From this process's memory, and back. */
ckpt_status ckpt_eng_put(const ckpt_eng *e, void *to, const void *from, size_t bytes,
                         ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_eng_get(const ckpt_eng *e, void *to, const void *from, size_t bytes,
                         ckpt_err *err) CKPT_MUST_USE;
/* Inside that memory. */
ckpt_status ckpt_eng_move(const ckpt_eng *e, void *to, const void *from, size_t bytes,
                          ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_eng_clear(const ckpt_eng *e, void *p, size_t bytes, ckpt_err *err) CKPT_MUST_USE;

/* ---- networks of either kind ------------------------------------------------------------------ */

/* The functions of network.h of one build, for callers that are compiled once. `net`, `batch`, `run` are
 * that build's structures; those of the device builds have the form of the f32 build's (their pointers
 * point into the device's memory), and network_size is compared. */
typedef struct ckpt_eng_networks {
    size_t network_size, param_size;
    bool bf16; /* products in bf16: `matrices` has to follow `data` */
    ckpt_status (*open)(void *net, const ckpt_eng *e, const void *model, const void *opts,
                        bool gradients, ckpt_err *err);
    void (*close)(void *net);
    ckpt_status (*run)(ckpt_eng *e, const void *net, const void *batch, void *run, ckpt_err *err);
    ckpt_status (*zero_grads)(void *net, ckpt_err *err);
    /* After data was changed: the matrices that products read. */
    ckpt_status (*refresh)(const ckpt_eng *e, void *net, ckpt_err *err);
    /* Ranks (network.h); gather of parameter i, `from` in the memory of e, `to` here. */
    ckpt_status (*sum_grads)(ckpt_eng *e, void *net, ckpt_err *err);
    ckpt_status (*gather)(ckpt_eng *e, void *net, const void *model, size_t i, const void *from,
                          void *to, ckpt_err *err);
} ckpt_eng_networks;
extern const ckpt_eng_networks ckpt_eng_networks_f32, ckpt_eng_networks_f64, ckpt_eng_networks_d32,
    ckpt_eng_networks_d16;
/* Of a context: on its device in bf16 or f32, without one f32. */
static inline const ckpt_eng_networks *ckpt_eng_networks_of(const ckpt_eng *e, bool bf16)
{
    return e->device == NULL ? &ckpt_eng_networks_f32
           : bf16            ? &ckpt_eng_networks_d16
                             : &ckpt_eng_networks_d32;
}

#endif
