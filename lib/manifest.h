/* ckpt.manifest.json: the commit record and all digests (product specification section 4).
 *
 * {"manifest_version":1,"tool":"ckpt VERSION","created":"YYYY-MM-DDThh:mm:ssZ" or absent,
 *  "family":…,"layout":…,"container":…,"mesh":{"tp":…,"pp":…,"ep":…,"etp":…,"cp":…},
 *  "config_digest":hex,"config":{canonical},"foreign":{"hf":{…},"megatron":{…},"files":{…}},
 *  "training":{…} (engine/train.h; of a checkpoint that training continues from),
 *  "quant_policy":text (policy.h; as the container stores it, where it has a place for it),
 *  "files":{name:{"size":n,"sha256":hex,"rest":hex}},
 *  "tensors":{canonical:{"dtype":…,"shape":[…],"digest":hex,"leaves":[hex…] when more than one}},
 *  "root":hex,"source_root":hex,"lossy":[…]}
 * One file or tensor a line, so that two manifests can be compared as text. Output must be
 * byte-identical for the same input, so "created" is taken from SOURCE_DATE_EPOCH or the newest
 * source file's mtime. foreign.files holds the text of small auxiliary files by name. */
#ifndef CKPT_MANIFEST_H
#define CKPT_MANIFEST_H

#include "stream.h"

#define CKPT_MANIFEST_NAME "ckpt.manifest.json"
#define CKPT_MANIFEST_SUFFIX ".ckpt.manifest.json" /* after the name of a single file */

typedef struct ckpt_manifest_tensor {
    const char *name;
    ckpt_dtype dtype;
    int rank;
    const int64_t *dims;
    ckpt_tensor_hash hash; /* leaves may be NULL when the manifest has none */
} ckpt_manifest_tensor;

typedef struct ckpt_manifest_file {
    const char *name; /* relative to the directory of the manifest */
    uint64_t size;
    uint8_t sha256[CKPT_SHA256_LEN], rest[CKPT_SHA256_LEN];
    bool has_sha256, has_rest;
} ckpt_manifest_file;

typedef struct ckpt_manifest {
    ckpt_arena arena;
    const char *family, *layout, *container; /* NULL if unknown */
    const char *created;
    ckpt_mesh mesh;
    ckpt_json *config; /* canonical; may be NULL */
    ckpt_json *foreign; /* {"hf":…, "megatron":…, "fla":…} originals carried along; may be NULL */
    ckpt_json *training;       /* where training stands; carried by every conversion; may be NULL */
    const char *quant_policy;  /* stored text of a quantisation policy, or NULL; carried as well */
    ckpt_manifest_file *files; /* sorted by name */
    size_t n_files;
    ckpt_manifest_tensor *tensors; /* sorted by name */
    size_t n_tensors;
    uint8_t root[CKPT_SHA256_LEN], source_root[CKPT_SHA256_LEN];
    bool has_source_root;
    const char **lossy;
    size_t n_lossy;
} ckpt_manifest;

/* Errors: CKPT_E_FORMAT (syntax, a field, a digest that contradicts its own leaves, a root that
 * contradicts the tensors), CKPT_E_UNSUPPORTED (another manifest_version). */
ckpt_status ckpt_manifest_parse(const char *text, size_t n, ckpt_manifest *out,
                                ckpt_err *err) CKPT_MUST_USE;
/* Read the manifest file at `path`. */
ckpt_status ckpt_manifest_read(const char *path, ckpt_manifest *out, ckpt_err *err) CKPT_MUST_USE;
/* Find and read the manifest that belongs to an opened source: root/ckpt.manifest.json, or for a
 * single file PATH.ckpt.manifest.json, else the one the container holds itself. *found false when
 * there is none. */
ckpt_status ckpt_manifest_load(const ckpt_source *src, ckpt_manifest *out, bool *found,
                               ckpt_err *err) CKPT_MUST_USE;
/* Sorts files and tensors by name. */
ckpt_status ckpt_manifest_print(ckpt_manifest *m, ckpt_buf *out, ckpt_err *err) CKPT_MUST_USE;
void ckpt_manifest_release(ckpt_manifest *m);

/* Where the manifest of an opened source lies, whether or not it exists; NULL: out of memory. */
char *ckpt_manifest_path(const ckpt_source *src, ckpt_arena *arena);
/* True if the source is one plain file rather than a directory or an index. */
bool ckpt_manifest_single(const ckpt_source *src);
/* "created" for something made from these files; NULL if nothing is known. Errors: CKPT_E_IO a file
 * that cannot be looked at. */
ckpt_status ckpt_manifest_created(const ckpt_source *src, ckpt_arena *arena, const char **created,
                                  ckpt_err *err) CKPT_MUST_USE;

/* Index by name, or -1. */
int64_t ckpt_manifest_find_tensor(const ckpt_manifest *m, const char *name);
int64_t ckpt_manifest_find_file(const ckpt_manifest *m, const char *name);

/* Fill tensors, files, root and description of an empty manifest. Strings and leaves are borrowed
 * from the arguments. Of the plan only files below sink.manifest_dir are listed, relative to it;
 * single_name (may be NULL) is what the one file of a single-file output is called. */
ckpt_status ckpt_manifest_of_plan(ckpt_manifest *m, const ckpt_plan *plan,
                                  const ckpt_convert_result *result, const char *single_name,
                                  ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_manifest_of_model(ckpt_manifest *m, const ckpt_model *model,
                                   const ckpt_tensor_hash *tensors, const ckpt_file_hash *files,
                                   const uint8_t root[CKPT_SHA256_LEN],
                                   ckpt_err *err) CKPT_MUST_USE;
/* One more file, whose digests are of all its bytes. The name is copied. */
ckpt_status ckpt_manifest_add_file(ckpt_manifest *m, const char *name, uint64_t size,
                                   const uint8_t sha256[CKPT_SHA256_LEN],
                                   ckpt_err *err) CKPT_MUST_USE;

#endif
