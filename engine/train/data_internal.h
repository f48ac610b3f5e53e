/* One data file, shared by data.c and data_index.c. */
#ifndef CKPT_TRAIN_DATA_INTERNAL_H
#define CKPT_TRAIN_DATA_INTERNAL_H

#include "err.h"

#include <stdint.h>

typedef enum ckpt_token_type {
    CKPT_TOKEN_U8,
    CKPT_TOKEN_I8,
    CKPT_TOKEN_U16,
    CKPT_TOKEN_I16,
    CKPT_TOKEN_U32,
    CKPT_TOKEN_I32,
    CKPT_TOKEN_I64
} ckpt_token_type;

int ckpt_token_width(ckpt_token_type type); /* bytes */

typedef struct ckpt_data_file {
    char *path;     /* of the tokens */
    int fd;         /* -1: not open */
    uint64_t bytes; /* of the file */
    ckpt_token_type type;
    int64_t first, tokens; /* place in the stream */
    /* Indexed, else NULL and 0 */
    int64_t n_seq;
    int64_t *pointer; /* [n_seq] byte offsets */
    int64_t *start;   /* [n_seq + 1] tokens before every sequence */
    int64_t n_docs;
    int64_t *docs;            /* [n_docs] tokens before every document, ascending from 0 */
    uint8_t index_digest[32]; /* SHA-256 of the index file */
} ckpt_data_file;

/* Open f->path and read its index. Errors as ckpt_data_open; what was opened is the caller's. */
ckpt_status ckpt_data_index_open(ckpt_data_file *f, const char *idx, ckpt_err *err) CKPT_MUST_USE;

#endif
