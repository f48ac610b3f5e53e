/* All tensors of a checkpoint in a device's memory, and whether they are what is stored (load_gpu.c on a card,
 * tests/test_load_cuda.c on the emulator). */
#ifndef CKPT_TEST_GPU_LOAD_CASE_H
#define CKPT_TEST_GPU_LOAD_CASE_H

#define CKPT_REAL 32
#include "hash.h"
#include "load.h"
#include "manifest.h"
#include "model.h"
#include "network.h"
#include "stream.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOAD_ALIGN ((uint64_t)256)

/* What a tensor becomes on the device. */
typedef enum load_form {
    LOAD_STORED, /* its own type */
    LOAD_WIDE    /* f32, but integers as they are */
} load_form;

typedef struct load_case {
    ckpt_eng e;
    ckpt_source src;
    ckpt_model model;
    ckpt_manifest manifest;
    bool has_manifest;
    ckpt_arena arena;
    ckpt_gather *gathers;
    ckpt_eng_load_item *items; /* one a tensor of the model */
    ckpt_tensor_hash *hashes;  /* leaves only where digests were asked for */
    size_t n;
    uint64_t bytes;  /* as stored */
    uint8_t *memory; /* on the device */
} load_case;

static inline void load_close(load_case *c)
{
    ckpt_eng_memory_free(&c->e, c->memory);
    ckpt_arena_free(&c->arena);
    ckpt_manifest_release(&c->manifest);
    ckpt_model_release(&c->model);
    ckpt_source_close(&c->src);
    *c = (load_case){0};
}

/* Type and bytes of item i, and its leaves. */
static inline ckpt_status load_item(load_case *c, size_t i, load_form form, bool digests,
                                    ckpt_err *err)
{
    const ckpt_canon *t = &c->model.tensors[i];
    ckpt_gather *g = &c->gathers[i];
    ckpt_eng_load_item *item = &c->items[i];
    ckpt_status status = ckpt_plan_canon(&c->model, i, &c->arena, g, err);
    const bool cast = form == LOAD_WIDE && t->dtype != CKPT_F32 &&
                      ckpt_dtype_get(t->dtype)->kind == CKPT_KIND_FLOAT &&
                      ckpt_dtype_castable(t->dtype, CKPT_F32);
    *item = (ckpt_eng_load_item){.name = t->name, .gather = g, .bytes = t->bytes};
    item->widen = cast && t->dtype == CKPT_BF16;
    if (cast && !item->widen) {
        g->to = CKPT_F32;
        item->bytes = t->bytes * 32 / (uint64_t)ckpt_dtype_get(t->dtype)->bits;
    }
    if (status == CKPT_OK && digests) {
        ckpt_tensor_hash *h = &c->hashes[i];
        h->n_leaves = ckpt_leaf_count(t->bytes);
        h->leaves = ckpt_arena_alloc(&c->arena, (size_t)h->n_leaves * CKPT_SHA256_LEN + 1);
        if (h->leaves == NULL)
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for leaf hashes");
        item->leaves = g->to == g->from ? h->leaves : NULL;
    }
    return status;
}

/* From the path to a list of what to load; nothing is read yet. `c` is closed by the caller, always. */
static inline ckpt_status load_open(load_case *c, ckpt_eng_device *device, int threads,
                                    const char *path, load_form form, bool digests, ckpt_err *err)
{
    const ckpt_model_opts opts = {.allow_unknown = true};
    uint64_t room = 0;
    ckpt_status status;
    *c = (load_case){0};
    ckpt_eng_init(&c->e, threads);
    c->e.device = device;
    CKPT_CHECK(ckpt_source_open(&c->src, path, NULL, err));
    CKPT_CHECK(ckpt_model_bind(&c->model, &c->src, &opts, err));
    if (digests)
        CKPT_CHECK(ckpt_manifest_load(&c->src, &c->manifest, &c->has_manifest, err));
    c->n = c->model.n_tensors;
    c->gathers = ckpt_arena_array(&c->arena, c->n + 1, sizeof *c->gathers);
    c->items = ckpt_arena_array(&c->arena, c->n + 1, sizeof *c->items);
    c->hashes = ckpt_arena_array(&c->arena, c->n + 1, sizeof *c->hashes);
    if (c->gathers == NULL || c->items == NULL || c->hashes == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu tensors", c->n);
    for (size_t i = 0; i < c->n; i++) {
        CKPT_CHECK(load_item(c, i, form, digests, err));
        c->bytes += c->model.tensors[i].bytes;
        c->items[i].to = (void *)(uintptr_t)room; /* its offset, until there is memory */
        room += c->items[i].bytes * (c->items[i].widen ? 2 : 1);
        room = (room + LOAD_ALIGN - 1) / LOAD_ALIGN * LOAD_ALIGN;
    }
    CKPT_CHECK(device->api->alloc((size_t)room, (void **)(void *)&c->memory, err));
    for (size_t i = 0; i < c->n; i++)
        c->items[i].to = c->memory + (uintptr_t)c->items[i].to;
done:
    return status;
}

/* Digests of what was loaded against the manifest's; none is an error too. */
static inline ckpt_status load_digests(const load_case *c, ckpt_err *err)
{
    ckpt_sha256 sha;
    ckpt_status status = ckpt_sha256_init(&sha, err);
    if (status == CKPT_OK && !c->has_manifest)
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: no manifest", c->src.path);
    for (size_t i = 0; i < c->n && status == CKPT_OK; i++) {
        const ckpt_canon *t = &c->model.tensors[i];
        const ckpt_tensor_hash *h = &c->hashes[i];
        const int64_t at = ckpt_manifest_find_tensor(&c->manifest, t->name);
        uint8_t digest[CKPT_SHA256_LEN];
        ckpt_tensor_digest(&sha, t->dtype, t->rank, t->dims, h->leaves, (size_t)h->n_leaves,
                           digest);
        if (at < 0 || memcmp(c->manifest.tensors[at].hash.digest, digest, sizeof digest) != 0)
            status = ckpt_fail(err, CKPT_E_MISMATCH, "%s: tensor '%s' differs from the manifest",
                               c->src.path, t->name);
    }
    ckpt_sha256_release(&sha);
    return status;
}

/* What the device holds of tensor i against what is stored, read and cast here. */
static inline ckpt_status load_same(const load_case *c, size_t i, ckpt_err *err)
{
    const ckpt_canon *t = &c->model.tensors[i];
    const ckpt_eng_load_item *item = &c->items[i];
    const size_t there = (size_t)item->bytes * (item->widen ? 2 : 1), n = (size_t)t->bytes;
    const bool cast = there != n;
    uint8_t *got = malloc(there + 1), *stored = malloc(n + 1), *want = malloc(there + 1);
    ckpt_status status = CKPT_OK;
    if (got == NULL || stored == NULL || want == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for tensor %s", t->name);
        goto done;
    }
    CKPT_CHECK(ckpt_eng_get(&c->e, got, item->to, there, err));
    CKPT_CHECK(ckpt_model_read(&c->model, i, 0, n, stored, err));
    if (cast)
        ckpt_dtype_cast(CKPT_F32, want, t->dtype, stored, there / sizeof(float));
    for (size_t k = 0; k < there; k++)
        if (got[k] != (cast ? want : stored)[k]) {
            status = ckpt_fail(err, CKPT_E_MISMATCH, "tensor %s: byte %zu of %zu on the device",
                               t->name, k, there);
            break;
        }
done:
    free(got);
    free(stored);
    free(want);
    return status;
}

/* Load all of it and look at every byte; with digests, also at the hash of every leaf. */
static inline ckpt_status load_check(ckpt_eng_device *device, int threads, const char *path,
                                     load_form form, bool digests, size_t piece, size_t *tensors,
                                     ckpt_err *err)
{
    const ckpt_eng_load_opts opts = {.piece = piece};
    const ckpt_stream_opts serial = {.threads = 1, .memory = (uint64_t)8 << 20};
    load_case c;
    ckpt_tensor_hash *want = NULL;
    ckpt_status status;
    CKPT_CHECK(load_open(&c, device, threads, path, form, digests, err));
    *tensors = c.n;
    CKPT_CHECK(ckpt_eng_load(&c.e, &c.src, c.items, c.n, &opts, err));
    for (size_t i = 0; i < c.n; i++)
        CKPT_CHECK(load_same(&c, i, err));
    if (!digests)
        goto done;
    want = calloc(c.n + 1, sizeof *want);
    if (want == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu digests", c.n);
        goto done;
    }
    CKPT_CHECK(ckpt_stream_digest(&c.model, &serial, &c.arena, want, NULL, err));
    for (size_t i = 0; i < c.n; i++)
        if (c.items[i].leaves != NULL &&
            memcmp(want[i].leaves, c.hashes[i].leaves, want[i].n_leaves * CKPT_SHA256_LEN) != 0) {
            status =
                ckpt_fail(err, CKPT_E_MISMATCH, "tensor %s: leaf hashes", c.model.tensors[i].name);
            break;
        }
done:
    free(want);
    load_close(&c);
    return status;
}

#endif
