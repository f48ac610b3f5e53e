/* The signed statement about a model's files, in the format of OpenSSF model signing 1.0:
 *
 * FILE: a Sigstore bundle {"mediaType", "verificationMaterial":{"publicKey":{"hint"},
 *  "tlogEntries":[]}, "dsseEnvelope":{"payload": base64, "payloadType", "signatures":[{"sig",
 *  "keyid"}]}}
 * payload: an in-toto statement {"_type", "subject":[{"name": directory, "digest":{"sha256": over the
 *  digests of all resources, in order}}], "predicateType", "predicate":{"serialization":{"method":
 *  "files", "hash_type": "sha256", "allow_symlinks", "ignore_paths"}, "resources":[{"name",
 *  "algorithm", "digest"}], "ckpt":{"root"}}}
 * "ckpt" is ours (a reader ignores what it does not know): the root digest of the manifest, if there
 * is one. A single file is named ".". */
#ifndef CKPT_STATEMENT_H
#define CKPT_STATEMENT_H

#include "sign.h"
#include "tool.h"

#define CKPT_STATEMENT_TYPE "application/vnd.in-toto+json"
#define CKPT_SIGNATURE_NAME "model.sig"
#define CKPT_BUNDLE_MAX ((uint64_t)256 << 20) /* bytes of a signature file */
#define CKPT_SIGNATURE_SUFFIX ".sig"          /* after the name of a single file */

typedef struct ckpt_resource {
    const char *name; /* relative to the model */
    uint8_t sha256[CKPT_SHA256_LEN];
} ckpt_resource;

typedef struct ckpt_statement {
    ckpt_arena arena;
    ckpt_resource *files; /* sorted by the components of their names */
    size_t n_files;
    size_t n_linked;      /* files and directories found through symbolic links */
    const char **ignored; /* relative paths, with what lies below them */
    size_t n_ignored;
    bool allow_symlinks;
    const char *root; /* hex, or NULL */
} ckpt_statement;

/* Where the signature of a model lies unless the user says otherwise. Errors: CKPT_E_IO a model that
 * cannot be looked at. */
ckpt_status ckpt_signature_path(ckpt_arena *arena, const char *model, const char **path,
                                ckpt_err *err) CKPT_MUST_USE;
/* Name every file below `model` (or ".", if it is one file) except the ignored ones. Digests are not
 * computed. Errors: CKPT_E_IO; CKPT_E_UNSUPPORTED a symbolic link or a special file. */
ckpt_status ckpt_statement_list(ckpt_statement *s, const char *model, ckpt_err *err) CKPT_MUST_USE;
/* The payload. */
ckpt_status ckpt_statement_print(const ckpt_statement *s, const char *name, ckpt_buf *out,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Errors: CKPT_E_FORMAT; CKPT_E_UNSUPPORTED another predicate, method or hash. */
ckpt_status ckpt_statement_parse(ckpt_statement *s, const char *text, size_t n,
                                 ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_statement_digest(const char *model, ckpt_resource *file,
                                  ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_statement_ignore(ckpt_statement *s, const char *path, ckpt_err *err) CKPT_MUST_USE;
/* What git keeps beside a model is no part of it, as in OpenSSF model signing. */
ckpt_status ckpt_statement_ignore_git(ckpt_statement *s, ckpt_err *err) CKPT_MUST_USE;
/* Is it one of the ignored paths, or below one? */
bool ckpt_statement_ignores(const ckpt_statement *s, const char *name);
/* The signature file itself, if it lies below the model. */
ckpt_status ckpt_statement_ignore_signature(ckpt_statement *s, const char *model, const char *file,
                                            ckpt_err *err) CKPT_MUST_USE;
void ckpt_statement_release(ckpt_statement *s);

#endif
