/* Saving a training run: a conversion from memory into any container, layout and mesh, on a thread of
 * its own. What training waits for is one copy of its tensors into a snapshot; there are two, so that a
 * save may still be writing while the next is taken. A device's tensors are copied by a second thread, and
 * training waits only before it changes them (`begin`).
 *
 *   ROOT/iter_0000020/          one checkpoint (ROOT/iter_0000020.h5 for hdf5), renamed into place whole
 *   ROOT/latest_checkpointed_iteration.txt    "20", replaced after it; as Megatron-LM names the newest
 *
 * ROOT is the directory of the run, or, with several formats, DIR/FORMAT for each. Older checkpoints are
 * removed only once a newer one is in place; a failed save leaves all of them alone. */
#ifndef CKPT_TRAIN_SAVE_H
#define CKPT_TRAIN_SAVE_H

#include "sidecar.h"
#include "snapshot.h"
#include "tool.h"

#include <pthread.h>

#define CKPT_SAVE_FORMATS 8

/* CONTAINER[:LAYOUT][:AXIS=N]..., e.g. "torch_dist:megatron:tp=2:ep=2" */
typedef struct ckpt_save_format {
    const char *text;
    const ckpt_container *container;
    const char *group; /* layout group, or NULL: as the base */
    ckpt_mesh mesh;
    const char *root;
    bool file; /* one file a checkpoint */
} ckpt_save_format;

/* One finished save. */
typedef struct ckpt_save_event {
    int64_t step;
    char *path;  /* what was written, NULL if it failed; both are malloc'd */
    char *error; /* or NULL */
    double seconds;
    uint64_t bytes;
    uint8_t digest[CKPT_SHA256_LEN]; /* root */
} ckpt_save_event;

/* Where training stands, for what is written beside the tensors. */
typedef struct ckpt_save_state {
    int64_t step;
    const ckpt_json *training; /* manifest member */
    const ckpt_json *common;   /* members for Megatron's common state, or NULL */
    const ckpt_json *args;     /* members for Megatron's args, or NULL */
} ckpt_save_state;

/* Called by the caller's thread just before a copy that another thread will make. */
typedef ckpt_status (*ckpt_save_begin)(void *self, ckpt_err *err);

/* Copy live values into s->data at the offsets of s->tensors. Of a copy that failed nothing is written. */
typedef ckpt_status (*ckpt_save_copy)(void *self, const ckpt_snapshot *s, ckpt_err *err);

typedef struct ckpt_save_job ckpt_save_job;

/* Ranks of one host that save together: the snapshots lie in memory that all of them see, each copies what it keeps of
 * the tensors there and writes its share of the files. Every rank has a saver and calls the same functions in the
 * same order; the directory, the manifest and the commit are rank 0's, which also finishes alone what was copied
 * when another rank dies. */
typedef struct ckpt_save_crew {
    const ckpt_share *callers;       /* between the callers' threads */
    const ckpt_share *writers;       /* between the savers' */
    const int *snapshots;            /* [2] files of memory */
    const char *(*dead)(void *self); /* words for a rank that died, or NULL; from any thread */
    void *self;
} ckpt_save_crew;

typedef struct ckpt_saver {
    ckpt_tool *tool; /* for its globals and arena, from the caller's thread only */
    const ckpt_model *base;
    const ckpt_manifest *old; /* the base's, or NULL */
    const char *dir;
    int64_t keep;             /* newest checkpoints that stay; 0 = all */
    const char *run_name;     /* only its checkpoints are removed */
    const char *quant_policy; /* stored text, or NULL: none is written */
    bool approximate, allow_unknown;
    ckpt_save_begin
        begin; /* NULL: ckpt_saver_save copies. Else copies run on a thread of their own,
                              beside the caller, which keeps the values until they end */
    const ckpt_save_crew *crew; /* or NULL: this process alone */
    ckpt_save_format formats[CKPT_SAVE_FORMATS];
    size_t n_formats;
    ckpt_sidecars sidecars;
    ckpt_dtype config_dtype; /* what the configuration says of the weights */
    bool set_dtype;
    int lock_fd; /* -1: none */
    /* below: shared with the thread, under lock */
    ckpt_save_job *jobs;      /* two */
    int turn;                 /* the caller's: which one is next */
    pthread_t thread, copier; /* copier: with begin */
    bool copies;              /* it has been started */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool started, stop;
    ckpt_save_event *events; /* finished ones, oldest first, not yet taken */
    size_t n_events, cap_events;
    ckpt_arena arena;
} ckpt_saver;

/* N of the name of a checkpoint, iter_N or iter_N.h5, else -1. */
int64_t ckpt_train_iteration_of(const char *name);

/* Parse --save-format; `base` NULL text: the base's own container, layout and mesh 1 if it can be written.
 * Errors: CKPT_E_USAGE, CKPT_E_UNSUPPORTED. */
ckpt_status ckpt_saver_format(ckpt_saver *s, const char *text, ckpt_err *err) CKPT_MUST_USE;
/* Take the directory (one run at a time), remove what dead runs left in it, and prove by a plan that
 * every format can hold the tensors. s: tool, base, old, dir, keep and formats are set. */
ckpt_status ckpt_saver_open(ckpt_saver *s, const ckpt_snapshot_tensor *tensors, size_t n,
                            ckpt_err *err) CKPT_MUST_USE;
/* Copy and hand over. *stall: seconds until training may go on. Waits only if both snapshots are still
 * being written. tensors NULL: those of the last time. */
ckpt_status ckpt_saver_save(ckpt_saver *s, const ckpt_snapshot_tensor *tensors, size_t n,
                            const ckpt_save_state *state, ckpt_save_copy copy, void *self,
                            double *stall, ckpt_err *err) CKPT_MUST_USE;
/* The next finished save, if any, which the caller frees. */
bool ckpt_saver_event(ckpt_saver *s, ckpt_save_event *out);
void ckpt_save_event_free(ckpt_save_event *event);
/* Wait until nothing is being written. */
void ckpt_saver_drain(ckpt_saver *s);
/* Drain and release; safe on a zeroed structure. */
void ckpt_saver_close(ckpt_saver *s);

/* Rank 0, or a saver without others. */
static inline bool ckpt_saver_leads(const ckpt_saver *s)
{
    return s->crew == NULL || s->crew->callers->rank == 0;
}

#endif
