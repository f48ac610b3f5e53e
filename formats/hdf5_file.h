/* HDF5 files: what the parts of formats/hdf5*.c share. The byte layout is described in hdf5.c. */
#ifndef CKPT_HDF5_FILE_H
#define CKPT_HDF5_FILE_H

#include "source.h"

/* Attributes of the root group. */
#define CKPT_HDF5_CONFIG "config.json"
#define CKPT_HDF5_ARGS "megatron_args.json"
#define CKPT_HDF5_METADATA "ckpt.metadata.json"
#define CKPT_HDF5_MANIFEST "ckpt.manifest.json"
#define CKPT_HDF5_ROOT "ckpt.root"
#define CKPT_HDF5_ITERATION "ckpt.iteration"
#define CKPT_HDF5_VERSION "ckpt.hdf5.version"
/* Attributes of a dataset. */
#define CKPT_HDF5_DTYPE "dtype"
#define CKPT_HDF5_SHAPE "shape"
#define CKPT_HDF5_SHA256 "sha256"

/* Decoded bytes of one chunk, at most. */
#define CKPT_HDF5_CHUNK_MAX ((uint64_t)256 << 20)

/* ---- filters (hdf5_filter.c) ----------------------------------------------------------------- */

enum { CKPT_HDF5_MAX_FILTERS = 8 };

typedef enum ckpt_hdf5_filter_kind {
    CKPT_HDF5_SHUFFLE,
    CKPT_HDF5_DEFLATE,
    CKPT_HDF5_FLETCHER32
} ckpt_hdf5_filter_kind;

/* In the order in which they are applied when writing. */
typedef struct ckpt_hdf5_pipeline {
    int n;
    struct {
        ckpt_hdf5_filter_kind kind;
        uint32_t value; /* SHUFFLE: element size; DEFLATE: level */
    } filter[CKPT_HDF5_MAX_FILTERS];
} ckpt_hdf5_pipeline;

/* Bytes that n raw bytes take at most while they are encoded. */
size_t ckpt_hdf5_bound(const ckpt_hdf5_pipeline *p, size_t n);
/* Encode n bytes. a and b hold ckpt_hdf5_bound(p, n) bytes each. mask: bit i set for a filter that
 * was left out because it did not help. */
ckpt_status ckpt_hdf5_encode(const ckpt_hdf5_pipeline *p, const uint8_t *raw, size_t n, uint8_t *a,
                             uint8_t *b, ckpt_encoded *out, ckpt_err *err) CKPT_MUST_USE;
/* Decode stored bytes into exactly `want` bytes at out. Errors: CKPT_E_FORMAT checksum, damaged
 * stream, another length. */
ckpt_status ckpt_hdf5_decode(const ckpt_hdf5_pipeline *p, uint32_t mask, const uint8_t *stored,
                             size_t n, uint8_t *out, size_t want, ckpt_err *err) CKPT_MUST_USE;
/* The checksum of filter 3 (H5_checksum_fletcher32). */
uint32_t ckpt_hdf5_fletcher32(const uint8_t *p, size_t n);

/* ---- description of a file (hdf5_scan.c writes it, hdf5.c reads it) ----------------------------- */

/* A flat list of records of native integers: see put_* in hdf5_scan.c and take_* in hdf5.c. */
typedef enum ckpt_hdf5_record {
    CKPT_HDF5_R_END = 'E',       /* last record: the description is whole */
    CKPT_HDF5_R_FAIL = 'F',      /* code, text: nothing follows */
    CKPT_HDF5_R_ATTR = 'A',      /* name, value: a string attribute of the root group */
    CKPT_HDF5_R_NUMBER = 'N',    /* name, value: an integer one */
    CKPT_HDF5_R_UNDECODED = 'U', /* name, what it is */
    CKPT_HDF5_R_LINK = 'L',      /* name, name of the dataset it is another name of */
    CKPT_HDF5_R_WARN = 'W',      /* text */
    CKPT_HDF5_R_DATASET = 'D'    /* see ckpt_hdf5_dataset */
} ckpt_hdf5_record;

typedef enum ckpt_hdf5_place {
    CKPT_HDF5_NOWHERE, /* no elements */
    CKPT_HDF5_INLINE,  /* bytes in the object header: they follow in the record */
    CKPT_HDF5_DIRECT,  /* contiguous: one offset */
    CKPT_HDF5_CHUNKED  /* one offset, size and mask for each chunk, by chunk grid row-major */
} ckpt_hdf5_place;

/* Have the file at `path` described by a child process. Errors: CKPT_E_FORMAT the library crashed on
 * it or never ended; CKPT_E_IO no child; CKPT_E_INTERRUPTED. */
ckpt_status ckpt_hdf5_describe_file(const char *path, ckpt_buf *out, ckpt_err *err) CKPT_MUST_USE;
/* In that child: end it, since the file cannot be read for another reason than damage. libhdf5 has been
 * seen to crash after a failed read, and is not asked to go on. */
_Noreturn void ckpt_hdf5_unreadable(int why);
/* Describe the file at `path` into out. Runs inside the child process (hdf5_child.c): here, and only
 * here, libhdf5 meets bytes that it did not write itself. Damage is told by a FAIL record; a file that
 * cannot be read ends the process, with errno as its status. */
void ckpt_hdf5_scan(const char *path, ckpt_buf *out);

/* ---- chunks (hdf5_chunks.c) ---------------------------------------------------------------------- */

typedef struct ckpt_hdf5_chunk {
    uint64_t offset; /* in the file */
    uint32_t size;   /* stored bytes */
    uint32_t mask;   /* filters left out */
} ckpt_hdf5_chunk;

/* A dataset whose bytes are made by decoding: range [base, base + bytes) of the virtual file. The
 * range is cut into blocks, each block into chunks, the last of a block shorter than the others. */
typedef struct ckpt_hdf5_virtual {
    const char *name;
    uint64_t base, bytes, block;
    uint64_t chunk_bytes, per_block; /* decoded bytes of a chunk; chunks in a block */
    const ckpt_hdf5_chunk *chunks;
    const uint8_t *inline_bytes; /* instead of chunks */
    ckpt_hdf5_pipeline pipeline;
} ckpt_hdf5_virtual;

typedef struct ckpt_hdf5_cache ckpt_hdf5_cache;

typedef struct ckpt_hdf5_file {
    ckpt_hdf5_virtual *virtuals; /* by base */
    size_t n_virtuals;
    uint64_t virtual_bytes;
    size_t chunk_max; /* largest chunk_bytes */
    ckpt_hdf5_cache *cache;
} ckpt_hdf5_file;

/* src->read_at; src->self is a ckpt_hdf5_file. */
ckpt_status ckpt_hdf5_read_at(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                              ckpt_err *err) CKPT_MUST_USE;
ckpt_hdf5_cache *ckpt_hdf5_cache_new(void);
void ckpt_hdf5_cache_free(ckpt_hdf5_cache *cache);

/* ---- writing (hdf5_write.c) ---------------------------------------------------------------------- */

ckpt_status ckpt_hdf5_layout(ckpt_out *out, ckpt_sink *sink, ckpt_err *err) CKPT_MUST_USE;

#endif
