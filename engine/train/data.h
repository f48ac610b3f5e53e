/* Tokens for training. What a sample is, is a pure function of (files, options, seed, sample number):
 * no state moves on, so a data cursor is one number, the consumed samples.
 *
 * Sources, several files of one kind making one stream in the order given:
 *   bytes      the file's bytes are the tokens
 *   u16, u32   raw little-endian integers without a header
 *   indexed    Megatron's PREFIX.idx beside PREFIX.bin (named with or without the suffix):
 *                "MMIDIDX\0\0" | u64 version 1 | u8 dtype | u64 sequences S | u64 document ends D
 *                | i32 length[S] | i64 pointer[S] | i64 document[D] [| i8 mode[S]]
 *              dtype 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16 (6 f64 and 7 f32 are no tokens). pointer is
 *              the byte offset in PREFIX.bin; document ends ascend from 0 to at most S.
 *              Source: megatron.core.datasets.indexed_dataset of Megatron-Core 0.16.
 *
 * Samples. The sequences of all files follow each other, N tokens in all. Sample k of an epoch is
 * tokens kS .. kS+S inclusive, S = seq_len: S inputs and, one further, S labels; the last token of a
 * sample is the first of the next. An epoch has (N-1) / S samples (N / S with inner labels), the rest
 * is dropped. That is
 * what megatron.core.datasets.gpt_dataset (helpers.build_sample_idx) packs when its document index is
 * in order. Sample i of the run is number permute(seed, epoch i / n, i % n) of its epoch, or number
 * i % n when not shuffled (philox.h).
 *
 * Windows, the other order, starts anywhere: sample i begins at token starts[i % n_starts]. */
#ifndef CKPT_TRAIN_DATA_H
#define CKPT_TRAIN_DATA_H

#include "engine.h"

typedef enum ckpt_data_kind {
    CKPT_DATA_AUTO, /* indexed if the name ends in .idx or has a .idx beside it, else an error for
                       .bin (u16 or u32?) and bytes for everything else */
    CKPT_DATA_BYTES,
    CKPT_DATA_U16,
    CKPT_DATA_U32,
    CKPT_DATA_INDEXED,
    CKPT_DATA_KIND_COUNT
} ckpt_data_kind;

bool ckpt_data_kind_parse(const char *name, ckpt_data_kind *out); /* "auto" "bytes" "u16" ... */

typedef struct ckpt_data_opts {
    ckpt_data_kind kind;
    int64_t seq_len; /* >= 1 */
    uint64_t seed;
    bool shuffle;
    int64_t vocab; /* every token must be below it; 0 = not checked */
    int64_t eod;   /* token that ends a document; -1 = none */
    bool split;    /* documents are sequences of their own: cu has their borders, and the last token
                      of each has no label. Borders: the index's documents, and after every eod */
    bool inner_labels;     /* labels only of tokens inside the sample: label of the last is -1 */
    const int64_t *starts; /* or NULL; borrowed while open */
    int64_t n_starts;
} ckpt_data_opts;

typedef struct ckpt_data ckpt_data;

/* Open and validate all files. Errors, naming file and position: CKPT_E_FORMAT (index contradicts
 * itself or the data file; a size that is no multiple of the token), CKPT_E_UNSUPPORTED (no token
 * type), CKPT_E_USAGE (options; fewer than S+1 tokens), CKPT_E_IO. */
ckpt_status ckpt_data_open(ckpt_data **out, const char *const *paths, size_t n_paths,
                           const ckpt_data_opts *opts, ckpt_err *err) CKPT_MUST_USE;
void ckpt_data_close(ckpt_data *d);
int64_t ckpt_data_tokens(const ckpt_data *d);        /* N */
int64_t ckpt_data_epoch_samples(const ckpt_data *d); /* samples an epoch, or n_starts */
ckpt_data_kind ckpt_data_kind_of(const ckpt_data *d);
/* Identity of source and order: SHA-256 over kind, seed, options and, per file, size, token type and
 * the lengths and documents of an index. A run resumes with its own data only if this is equal. */
ckpt_status ckpt_data_digest(const ckpt_data *d, uint8_t out[32], ckpt_err *err) CKPT_MUST_USE;
/* First token of sample i in the stream. i >= 0. */
int64_t ckpt_data_start(const ckpt_data *d, int64_t i);

/* One batch: samples first, first + step, ..., n of them (a rank of data parallelism takes every
 * step-th), one after the other. ids, labels [n * seq_len]; label -1: none. cu: room for
 * n * seq_len + 1 offsets; *n_seq sequences are packed (n unless `split`). Thread-safe. Errors:
 * CKPT_E_FORMAT for a token that is negative or not below vocab, CKPT_E_IO. */
ckpt_status ckpt_data_batch(const ckpt_data *d, int64_t first, int64_t step, int64_t n,
                            int32_t *ids, int32_t *labels, int64_t *cu, int64_t *n_seq,
                            ckpt_err *err) CKPT_MUST_USE;
/* n tokens from position `at` of the stream. */
ckpt_status ckpt_data_read(const ckpt_data *d, int64_t at, int64_t n, int32_t *out,
                           ckpt_err *err) CKPT_MUST_USE;

#endif
