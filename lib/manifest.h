/* ckpt.manifest.json: the commit record and all digests (product specification section 4).
 *
 * {"manifest_version":1,"tool":"ckpt VERSION","created":"YYYY-MM-DDThh:mm:ssZ" or absent,
 *  "family":…,"layout":…,"container":…,"mesh":{"tp":…,"pp":…,"ep":…,"etp":…,"cp":…},
 *  "config_digest":hex,"config":{canonical},"foreign":{"hf":{…},"megatron":{…}},
 *  "files":{name:{"size":n,"sha256":hex,"rest":hex}},
 *  "tensors":{canonical:{"dtype":…,"shape":[…],"digest":hex,"leaves":[hex…] when more than one}},
 *  "root":hex,"source_root":hex,"lossy":[…]}
 * Output must be byte-identical for
 * the same input, so "created" is taken from SOURCE_DATE_EPOCH or the newest source file's mtime. */
#ifndef CKPT_MANIFEST_H
#define CKPT_MANIFEST_H

#include "stream.h"

#define CKPT_MANIFEST_NAME "ckpt.manifest.json"

typedef struct ckpt_manifest_tensor {
    const char *name;
    ckpt_dtype dtype;
    int rank;
    const int64_t *dims;
    ckpt_tensor_hash hash; /* leaves may be NULL when the manifest has none */
} ckpt_manifest_tensor;

typedef struct ckpt_manifest_file {
    const char *name;
    uint64_t size;
    uint8_t sha256[CKPT_SHA256_LEN], rest[CKPT_SHA256_LEN];
    bool has_sha256, has_rest;
} ckpt_manifest_file;

typedef struct ckpt_manifest {
    ckpt_arena arena;
    const char *family, *layout, *container; /* NULL if unknown */
    const char *created;
    ckpt_mesh mesh;
    ckpt_json *config;  /* canonical; may be NULL */
    ckpt_json *foreign; /* {"hf":…, "megatron":…, "fla":…} originals carried along; may be NULL */
    ckpt_manifest_file *files; /* sorted by name */
    size_t n_files;
    ckpt_manifest_tensor *tensors; /* sorted by name */
    size_t n_tensors;
    uint8_t root[CKPT_SHA256_LEN], source_root[CKPT_SHA256_LEN];
    bool has_source_root;
    const char **lossy;
    size_t n_lossy;
} ckpt_manifest;

ckpt_status ckpt_manifest_parse(const char *text, size_t n, ckpt_manifest *out, ckpt_err *err)
    CKPT_MUST_USE;
/* Find and read the manifest that belongs to an opened source: root/ckpt.manifest.json, or for a
 * single file PATH.ckpt.manifest.json. *found false when there is none. */
ckpt_status ckpt_manifest_load(const ckpt_source *src, ckpt_manifest *out, bool *found,
                               ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_manifest_print(const ckpt_manifest *m, ckpt_buf *out, ckpt_err *err) CKPT_MUST_USE;
void ckpt_manifest_release(ckpt_manifest *m);

#endif
