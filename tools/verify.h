/* Parts of `ckpt verify`: findings are collected as lines and printed by cmd_verify.c. */
#ifndef CKPT_VERIFY_H
#define CKPT_VERIFY_H

#include "tool.h"

typedef struct verify_opts {
    bool hash, files, write, values, strict, duplicates, forward, force, allow_unknown,
        allow_unknown_objects, recompute;
    const char *against, *roundtrip, *signature, *signature_file, *reference, *tokens;
    const char *policy; /* rules for PATH's forward, or NULL */
    int64_t solve;      /* factors of an approximate inverse; below 1 = exact */
    double rtol, grad_rtol, latent_eps, mtp_coef; /* below 0 = not given */
    int device, dtype;  /* ckpt_tool_device; f32, bf16. Below 0 = not given */
    int64_t tp, cp, ep; /* of the ranks that run the model; below 1 = not given */
    int64_t launch;     /* ranks to start here; below 1 = none */
    int cp_mode;        /* ckpt_eng_cp_mode, -1 = not given */
    int64_t iteration;
} verify_opts;

typedef struct lines {
    const char **items;
    size_t n, cap;
} lines;

typedef struct verification {
    ckpt_tool *tool;
    const verify_opts *o;
    const char *path;
    ckpt_source src;
    ckpt_model model;
    ckpt_manifest manifest;
    bool has_manifest, compared; /* compared: digests with the manifest */
    bool compared_other;         /* with what --against names */
    bool part;                   /* one file of a directory: the manifest is cut down to it */
    int rank, ranks;       /* ranks > 1: this process is one of those that divide the digests of
                                    tensors by bytes; rank 0 does what is not a tensor's */
    size_t lo, hi;         /* tensors that are its, of ckpt_verify_compute */
    const char *through;   /* layout that --roundtrip went through and came back from */
    size_t n_signed;       /* files that --signature found as they were signed */
    bool good_signature;   /* valid, and every file is as it was signed */
    const char *signature; /* the file it came from */
    const char **unsigned_names; /* what it leaves out, except git's files and the signature */
    size_t n_unsigned;
    size_t n_finite;           /* tensors that --values looked at */
    ckpt_tensor_hash *tensors; /* NULL: not computed */
    ckpt_file_hash *files;     /* NULL: not computed */
    uint8_t root[CKPT_SHA256_LEN];
    bool *bad; /* per model tensor: something compared differs, or a value is not finite */
    lines problems, warnings, duplicates;
    bool failed_memory;
} verification;

/* A difference, which fails the verification. */
void ckpt_verify_problem(verification *v, const char *fmt, ...) CKPT_PRINTF(2, 3);
/* Something that --strict makes a failure. */
void ckpt_verify_warning(verification *v, const char *fmt, ...) CKPT_PRINTF(2, 3);
void ckpt_verify_duplicate(verification *v, const char *fmt, ...) CKPT_PRINTF(2, 3);
/* Where a file of the manifest lies; NULL: out of memory. */
char *ckpt_verify_path(verification *v, const ckpt_manifest_file *f);
/* Index among the source's files, or -1 for a file that the container does not read. *next (0 before)
 * is where the search begins, behind the file found last: lists of files have one order. */
int64_t ckpt_verify_source_file(const verification *v, const char *name, size_t *next);

/* verify_digests.c */
ckpt_status ckpt_verify_compute(verification *v, bool whole_files, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_verify_manifest(verification *v, ckpt_err *err) CKPT_MUST_USE;
/* Compare the configuration. partial: one side has no stored configuration and knows only what
 * tensor shapes tell, so that only keys of both count. */
ckpt_status ckpt_verify_config(verification *v, const ckpt_json *other, bool partial,
                               const char *whose, ckpt_err *err) CKPT_MUST_USE;
bool ckpt_verify_same_shape(const ckpt_canon *t, const ckpt_manifest_tensor *m);
void ckpt_verify_shape_problem(verification *v, const ckpt_canon *t, const ckpt_manifest_tensor *m,
                               const char *whose);
/* A flipped byte in a header can make a checkpoint unreadable. When every file still has its size,
 * the manifest says which one was altered: that is a failed verification, not an unknown format.
 * *explained tells whether a difference was found. */
ckpt_status ckpt_verify_explain(verification *v, const ckpt_err *open_error, bool *explained,
                                ckpt_err *err) CKPT_MUST_USE;

/* verify_signature.c */
ckpt_status ckpt_verify_signature(verification *v, ckpt_err *err) CKPT_MUST_USE;
/* After the checkpoint was opened: a warning if a file of it is one that the signature leaves out. */
ckpt_status ckpt_verify_unsigned(verification *v, ckpt_err *err) CKPT_MUST_USE;
void ckpt_verify_signature_json(const verification *v, ckpt_jw *w);
/* "; the signature leaves out ...", or "" if it leaves out nothing. NULL: no memory. */
const char *ckpt_verify_unsigned_text(verification *v);

/* verify_forward.c: run the model; prints its results itself */
ckpt_status ckpt_verify_forward(verification *v, ckpt_err *err) CKPT_MUST_USE;

/* verify_roundtrip.c */
/* Through o->roundtrip and back, without writing: the same stored tensors and digests, or problems.
 * Errors: CKPT_E_USAGE (what is asked), those of planning either conversion and of reading. */
ckpt_status ckpt_verify_roundtrip(verification *v, ckpt_err *err) CKPT_MUST_USE;
/* Only what is asked. */
ckpt_status ckpt_verify_ways(const verification *v, ckpt_err *err) CKPT_MUST_USE;

/* verify_more.c */
/* Open what --against names and close it: what cannot be read must fail before the long part. */
ckpt_status ckpt_verify_look_at_other(verification *v, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_verify_against(verification *v, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_verify_values(verification *v, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_verify_duplicates(verification *v, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_verify_write(verification *v, ckpt_err *err) CKPT_MUST_USE;

#endif
