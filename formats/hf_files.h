/* What a Hugging Face directory has in common whatever its weight files are: shards and their
 * numbers, the index X.index.json, config.json. Source: torch-formats.md section 5, "HF index". */
#ifndef CKPT_HF_FILES_H
#define CKPT_HF_FILES_H

#include "source.h"

/* Megatron arguments beside weights in a Megatron layout; config.json would claim to be Hugging
 * Face's. */
#define CKPT_HF_MEGATRON_ARGS "megatron_args.json"

/* ---- writing -------------------------------------------------------------------------------- */

/* Shards being filled greedily, in order: an item that would overfill the current shard starts a
 * new one; one larger than the limit gets its own, numbered before the current one, which stays
 * open. A shard also closes before what is said about its items outgrows header_max. */
typedef struct ckpt_hf_shards {
    uint64_t limit;                  /* bytes of payload; UINT64_MAX: none */
    uint64_t header, header_max;     /* bytes of an empty header; largest */
    const uint64_t *bytes, *entries; /* of every item: payload, share of the header (NULL: 0) */
    size_t n;
    uint32_t *shard;   /* out: 0-based, in file name order */
    uint32_t n_shards; /* out: at least 1 */
} ckpt_hf_shards;
ckpt_status ckpt_hf_assign(ckpt_hf_shards *s, ckpt_err *err) CKPT_MUST_USE;
/* "model.safetensors", or "model-00001-of-00003.safetensors" of several or if `numbered`; NULL: out of
 * memory. */
const char *ckpt_hf_shard_name(ckpt_arena *arena, const char *stem, const char *suffix, uint32_t i,
                               uint32_t n, bool numbered);

typedef struct ckpt_hf_weight {
    const char *name, *file;
} ckpt_hf_weight;
/* The index as transformers writes it: json.dumps(index, indent=2, sort_keys=True) and a newline.
 * Sorts the weights. extras: n_extras members with string values, in key order. */
void ckpt_hf_index_text(ckpt_buf *out, ckpt_hf_weight *weights, size_t n,
                        const ckpt_json *const *extras, size_t n_extras, uint64_t parameters,
                        uint64_t bytes);
/* A configuration the same way. */
void ckpt_hf_config_text(ckpt_buf *out, const ckpt_json *config);

/* ---- reading -------------------------------------------------------------------------------- */

/* The basenames that a weight_map refers to, sorted and unique, each in the sorted listing.
 * Errors: CKPT_E_FORMAT a name that is no plain file name, an absent file. */
ckpt_status ckpt_hf_index_shards(const ckpt_json *map, const char *index, char *const *names,
                                 size_t n_names, ckpt_arena *arena, const char ***shards,
                                 size_t *n_shards, ckpt_err *err) CKPT_MUST_USE;
/* Without an index the names themselves say how many shards there were (STEM-00002-of-00004SUFFIX):
 * CKPT_E_FORMAT if one is missing. *numbered: names of this form exist. */
ckpt_status ckpt_hf_numbering(const char *const *shards, size_t n_shards, const char *stem,
                              const char *suffix, char *const *names, size_t n_names,
                              bool *numbered, ckpt_err *err) CKPT_MUST_USE;
/* Whether a sorted listing has the name. */
bool ckpt_hf_listed(char *const *names, size_t n, const char *name);

#endif
