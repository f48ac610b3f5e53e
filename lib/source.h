/* What a container gives (source) and takes (sink). Containers know bytes and names and nothing
 * about models; they do no bulk I/O: a source says where every chunk of every stored tensor lies,
 * a sink says which bytes every output file consists of. The executor (stream.c) moves the data. */
#ifndef CKPT_SOURCE_H
#define CKPT_SOURCE_H

#include "arena.h"
#include "dtype.h"
#include "json.h"

#include <string.h>
#include <sys/uio.h>

#define CKPT_MAX_RANK 16

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct ckpt_file {
    const char *name; /* relative to the checkpoint root, for messages and the manifest */
    const char *path; /* to open */
    uint64_t size;
    int fd;         /* open for reading, or -1. Read through ckpt_file_read */
    bool on_demand; /* one of so many that it is opened whenever it is read; fd is -1 */
    bool is_data;   /* holds tensor or object payload */
    bool sparse;    /* mostly holes (hole.h) */
    /* What it was when it was added, for ckpt_source_unchanged; ino 0: unknown. */
    uint64_t dev, ino;
    int64_t mtime_s, mtime_ns, ctime_s, ctime_ns;
} ckpt_file;

/* One rectangular piece of a stored tensor. Arrays have the tensor's rank. */
typedef struct ckpt_chunk {
    const int64_t *lo;     /* offset in the tensor, elements */
    const int64_t *len;    /* extent, elements */
    const int64_t *stride; /* elements between neighbours in the file; NULL = row-major */
    uint64_t offset;       /* byte of the chunk's element (0,...,0) in the file */
    uint32_t file;
} ckpt_chunk;

typedef struct ckpt_tensor {
    const char *name; /* stored name, unique in the source, UTF-8 without NUL */
    const int64_t *dims;
    ckpt_chunk *chunks; /* validated by the container: inside bounds, disjoint, complete */
    size_t n_chunks;
    ckpt_dtype dtype;
    int rank;
    bool big_endian; /* elements are byte-swapped in the file */
} ckpt_tensor;

/* A second copy of one chunk, in the file of another rank. Only `first` is read for its values. */
typedef struct ckpt_replica {
    const char *name; /* stored name of the tensor */
    ckpt_chunk first, other;
    ckpt_dtype dtype;
    int rank;
} ckpt_replica;

/* An opaque payload carried through byte for byte (a DCP BYTE_IO item). */
typedef struct ckpt_object {
    const char *name;
    uint64_t offset, length;
    uint32_t file;
    const char *unknown_global; /* "module.name" outside the allow-list, or NULL */
    const char *text;           /* one-line rendering for inspect --common, or NULL */
} ckpt_object;

typedef enum ckpt_config_kind {
    CKPT_CONFIG_NONE,
    CKPT_CONFIG_HF,
    CKPT_CONFIG_MEGATRON
} ckpt_config_kind;

typedef struct ckpt_source {
    const struct ckpt_container *container;
    ckpt_arena arena; /* owns everything below except the json documents */
    const char *path; /* as the user named it */
    const char *root; /* directory that file names are relative to (the iteration directory) */
    ckpt_file *files;
    size_t n_files;
    ckpt_tensor *tensors; /* sorted bytewise by name */
    size_t n_tensors;
    ckpt_object *objects; /* sorted bytewise by name */
    size_t n_objects;
    ckpt_replica *replicas; /* copies that a per-rank container holds of chunks above */
    size_t n_replicas;
    const char *no_optimizer; /* why optimizer state that is stored is not among the tensors */
    ckpt_json *config;        /* HF config.json, or Megatron args as an object; NULL if absent */
    ckpt_json *common;        /* decoded common state without tensors, for display; NULL if none */
    ckpt_json *metadata;      /* container-level metadata (safetensors __metadata__), or NULL */
    ckpt_config_kind config_kind;
    const char
        *prefix;       /* left out of the names of the weights: they are stored under it. Or NULL */
    bool is_dir;       /* path led to a directory when it was opened */
    int64_t iteration; /* -1 unknown */
    const char **warnings;
    size_t n_warnings;
    /* The last n_virtual of files are none: read_at makes their bytes (decoded chunks of a file in
     * front of them, whose name they bear). */
    size_t n_virtual;
    uint64_t cache_bytes;           /* room for what read_at decodes; 0: the container's choice */
    struct ckpt_cache_mark *passed; /* per file, for cache.h; NULL: pages stay */
    unsigned reading;             /* count it up, and what read_at decoded before is decoded anew */
    struct ckpt_derived **packed; /* weights in 4 or 8 bits that were found (derive.h), by name */
    size_t n_packed;
    bool unpacked;        /* they were looked for */
    const char *manifest; /* text of a manifest that the container holds itself, or NULL */
    size_t manifest_len;
    /* Reads n bytes at offset of files[file]. NULL means pread on files[file].fd. */
    ckpt_status (*read_at)(struct ckpt_source *src, uint32_t file, void *buf, size_t n,
                           uint64_t offset, ckpt_err *err);
    void (*close)(struct ckpt_source *src); /* container's own state; may be NULL */
    void *self;
} ckpt_source;

typedef struct ckpt_open_opts {
    int64_t iteration;     /* -1: the newest complete one */
    const char *container; /* force a container by name, or NULL */
} ckpt_open_opts;

/* Files of the source that exist. */
static inline size_t ckpt_source_n_real(const ckpt_source *src)
{
    return src->n_files - src->n_virtual;
}

/* What a probe may look at. */
typedef struct ckpt_probe {
    const char *path;
    bool is_dir;
    uint8_t head[64]; /* first bytes of a file */
    size_t head_len;
    uint64_t size;
    char **names; /* directory listing, sorted; NULL for a file */
    size_t n_names;
} ckpt_probe;

/* ---- writing ------------------------------------------------------------------------------- */

typedef struct ckpt_out_chunk {
    const int64_t *lo, *len; /* elements; tensor's rank */
    int owner;               /* rank that writes it, 0-based */
    uint32_t file;           /* set by layout(): file and byte offset of its row-major payload */
    uint64_t offset;
} ckpt_out_chunk;

typedef struct ckpt_out_tensor {
    const char *name;
    const int64_t *dims;
    ckpt_out_chunk *chunks; /* cover the tensor exactly; one for unsharded containers */
    size_t n_chunks;
    ckpt_dtype dtype;
    int rank;
    bool optimizer; /* optimizer state: kept apart where a reader of the weights may look */
} ckpt_out_tensor;

typedef struct ckpt_out_object {
    const char *name;
    int owner;
    /* Payload: bytes in memory, or a range of a source file when data is NULL. */
    const uint8_t *data;
    uint32_t src_file;
    uint64_t src_offset, length;
    uint32_t file; /* set by layout() */
    uint64_t offset;
} ckpt_out_object;

typedef struct ckpt_out {
    ckpt_out_tensor *tensors; /* write order */
    size_t n_tensors;
    ckpt_out_object *objects;
    size_t n_objects;
    int world;                    /* number of ranks (owners) */
    ckpt_mesh mesh;               /* resolved; all 1 for a container that does not cut tensors */
    uint64_t max_shard_bytes;     /* HF sharding; 0 = one file */
    const ckpt_json *config;      /* config.json for HF-style, args for Megatron; may be NULL */
    ckpt_config_kind config_kind; /* MEGATRON: write a torch_dist directory with common state */
    const ckpt_json *metadata;    /* safetensors __metadata__ extras (strings), may be NULL */
    int64_t iteration;            /* -1: "release" */
    int deflate;                  /* compression level 1-9 where the container can; 0 = none */
    bool single_file;             /* destination is a file, not a directory */
    bool bare;                    /* destination is one iteration's directory, not a save root */
} ckpt_out;

typedef enum ckpt_seg_kind {
    CKPT_SEG_LITERAL, /* bytes from sink->literal() */
    CKPT_SEG_CHUNK,   /* payload of tensors[a].chunks[b], row-major */
    CKPT_SEG_OBJECT,  /* payload of objects[a] */
    CKPT_SEG_SOURCE   /* bytes of the source's file of the same number, at the same place */
} ckpt_seg_kind;

/* Segments of a file are in order, touch, and cover it exactly. */
typedef struct ckpt_seg {
    uint64_t offset, len;
    uint32_t a, b; /* LITERAL: a = container's own id */
    uint8_t kind;
    bool crc;  /* CHUNK/OBJECT: the executor computes CRC-32 (zip) of this payload and passes it to
                 the literal() calls of the LITERAL segments that follow, up to the next payload */
    bool more; /* CHUNK: the CRC goes on from the CHUNK segment just before */
    bool
        copy; /* these count as bytes of no tensor. CHUNK: another segment holds them as well and is
                  the one that is read back */
} ckpt_seg;

typedef struct ckpt_out_file {
    const char *name; /* relative to the destination */
    uint64_t size;
    ckpt_seg *segs;
    size_t n_segs;
    bool is_data; /* holds chunks or objects */
} ckpt_out_file;

struct ckpt_serial;

typedef struct ckpt_sink {
    ckpt_arena arena;
    const struct ckpt_serial *serial; /* the one file is made by calls, and has no segments */
    ckpt_out_file *files;
    size_t n_files;
    bool together;            /* data files advance through the tensors side by side: converting
                                 them in step reads each part of the source once */
    const char *manifest_dir; /* where ckpt.manifest.json goes, relative; "" = top */
    /* Produce the whole of a literal segment (seg->len bytes). crc: CRC-32 of the payload segment
     * just before it in the same file, 0 if none. Repeatable; called for the literals of one file in
     * file order (a zip directory lists the CRCs that passed by), files independently.
     * False: out of memory. */
    bool (*literal)(const struct ckpt_sink *sink, uint32_t file, const ckpt_seg *seg, uint32_t crc,
                    uint8_t *out);
    /* The seg->len bytes of a literal that lies in memory, which literal() would copy; NULL: it is made.
     * The member itself may be NULL. */
    const uint8_t *(*stored)(const struct ckpt_sink *sink, const ckpt_seg *seg);
    void *self; /* in the arena */
} ckpt_sink;

/* Containers whose files are made by a library: nobody knows offsets or even sizes before. The one
 * output file then consists of parts, in put order; a part is a contiguous range of one tensor's
 * row-major bytes, and the parts of a tensor follow each other and cover it. */
typedef struct ckpt_part {
    uint32_t tensor; /* of ckpt_out, each with one chunk */
    uint64_t lo;     /* byte in the tensor */
    size_t len;
} ckpt_part;

/* A part as it will be put. */
typedef struct ckpt_encoded {
    const uint8_t *data;
    size_t len;
    uint32_t mask; /* the container's own */
} ckpt_encoded;

typedef struct ckpt_serial {
    /* Pure, thread-safe. */
    uint64_t (*n_parts)(const ckpt_sink *sink);
    void (*part)(const ckpt_sink *sink, uint64_t index, ckpt_part *out);
    /* Largest part, and room that encode needs for it. */
    void (*sizes)(const ckpt_sink *sink, size_t *part, size_t *room);
    /* Compress and checksum the part's bytes `raw`; out points into raw or room. Thread-safe. */
    ckpt_status (*encode)(const ckpt_sink *sink, uint64_t index, const uint8_t *raw, uint8_t *room,
                          ckpt_encoded *out, ckpt_err *err);
    /* From here on one call at a time: create the file; put the parts in order; finish, with the
     * SHA-256 of every tensor's bytes (n_tensors * 32), or give up. */
    ckpt_status (*open)(ckpt_sink *sink, const char *path, ckpt_err *err);
    ckpt_status (*put)(ckpt_sink *sink, uint64_t index, const ckpt_encoded *part, ckpt_err *err);
    ckpt_status (*finish)(ckpt_sink *sink, const uint8_t *sha256, ckpt_err *err);
    void (*give_up)(ckpt_sink *sink);
    /* Add the manifest to the finished file. */
    ckpt_status (*seal)(ckpt_sink *sink, const char *path, const char *root, const char *manifest,
                        size_t n, ckpt_err *err);
} ckpt_serial;

/* ---- the table ------------------------------------------------------------------------------ */

typedef struct ckpt_container {
    const char *name;    /* "safetensors", "torch_dist", "torch", "hdf5" */
    const char *what;    /* one line for help */
    bool sharded;        /* cuts tensors over a mesh */
    bool mesh_in_config; /* is read by the parallel sizes that its configuration states */
    /* Container in whose form it presents its objects; NULL: a form of its own. */
    const char *objects;
    /* *score (0 before): 0 no, 1 possible, 2 certain. What does not parse is none of it; only what
     * cannot be read is an error (CKPT_E_IO, CKPT_E_NOMEM), as it must not pass for absent. */
    ckpt_status (*probe)(const ckpt_probe *probe, int *score, ckpt_err *err);
    /* Validate headers and fill src (zeroed, path set). Reads no tensor data. */
    ckpt_status (*open)(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err);
    bool own_cuts; /* `cut` decides about every tensor: a layout need not know of meshes */
    /* NULL: a mesh cuts all tensors as their layout says. Else how this container cuts a stored one:
     * into `ways` equal parts along `axis` (-1: not at all; -2: as its layout says). Errors:
     * CKPT_E_USAGE, CKPT_E_UNSUPPORTED. */
    ckpt_status (*cut)(const ckpt_json *config, const ckpt_mesh *mesh, const char *name, int rank,
                       const int64_t *dims, int *axis, int64_t *ways, ckpt_err *err);
    /* Assign every chunk and object its file and offset and list the files. NULL: read-only. */
    ckpt_status (*layout)(ckpt_out *out, ckpt_sink *sink, ckpt_err *err);
} ckpt_container;

/* registry.c */
extern const ckpt_container ckpt_safetensors, ckpt_torch_dist, ckpt_torch_save, ckpt_hdf5,
    ckpt_mp_rank, ckpt_zarr, ckpt_rank_safetensors;
/* May objects of `from` be carried byte for byte into `to`? */
static inline bool ckpt_carries_objects(const ckpt_container *from, const ckpt_container *to)
{
    return from == to || (from != NULL && from->objects != NULL && to != NULL &&
                          strcmp(from->objects, to->name) == 0);
}
extern const ckpt_container *const ckpt_containers[]; /* NULL-terminated */
const ckpt_container *ckpt_container_find(const char *name);
/* Which container is at a path, without opening it. Errors: as ckpt_source_open has them. */
ckpt_status ckpt_source_probe(const char *path, const ckpt_container **out,
                              ckpt_err *err) CKPT_MUST_USE;
/* Probe, open, sort and validate. opts may be NULL. On error everything is released. Errors:
 * CKPT_E_FORMAT nothing that is known; CKPT_E_USAGE more than one container fits, or an unknown
 * one is forced. */
ckpt_status ckpt_source_open(ckpt_source *src, const char *path, const ckpt_open_opts *opts,
                             ckpt_err *err) CKPT_MUST_USE;
void ckpt_source_close(ckpt_source *src);

/* Every file still is what it was when the source was opened: identity, size, time of change. To be
 * called after the last read. Errors: CKPT_E_IO naming the file. */
ckpt_status ckpt_source_unchanged(const ckpt_source *src, ckpt_err *err) CKPT_MUST_USE;

/* n bytes at offset of a file as they lie there; holes and files that are not kept open included. */
ckpt_status ckpt_file_read(const ckpt_file *f, void *buf, size_t n, uint64_t offset,
                           ckpt_err *err) CKPT_MUST_USE;

/* source.c: helpers for containers and users. */
/* Append to the source's tables, which only these two functions may grow. With open_it the file
 * must hold data: a Git LFS pointer or an HTML page in its place is refused (CKPT_E_FORMAT) with a
 * message that says so. Both strings are copied. */
ckpt_status ckpt_source_add_file(ckpt_source *src, const char *name, const char *path, bool open_it,
                                 uint32_t *index, ckpt_err *err) CKPT_MUST_USE;
/* CKPT_E_FORMAT if the first n bytes of a file of `size` bytes are not those of data but of a Git
 * LFS pointer or an HTML/XML page; else CKPT_OK. */
ckpt_status ckpt_refuse_stand_in(const uint8_t *head, size_t n, uint64_t size,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Kept texts are capped; beyond 1000 only their number is kept. */
ckpt_status ckpt_source_warn(ckpt_source *src, ckpt_err *err, const char *fmt, ...)
    CKPT_PRINTF(3, 4);
ckpt_status ckpt_source_read(ckpt_source *src, uint32_t file, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err) CKPT_MUST_USE;
/* The same for a real file that may hold no tensors and not be open: a description, a list of shards. */
ckpt_status ckpt_source_read_real(ckpt_source *src, uint32_t file, void *buf, size_t n,
                                  uint64_t offset, ckpt_err *err) CKPT_MUST_USE;
/* Whether a file can be read into several pieces of memory by one call, and doing so (io.h). */
bool ckpt_source_vectored(const ckpt_source *src, uint32_t file);
ckpt_status ckpt_source_readv(ckpt_source *src, uint32_t file, const struct iovec *into, int n,
                              uint64_t offset, ckpt_err *err) CKPT_MUST_USE;
/* Compare every replica with the chunk it copies; names of tensors with a different copy are given to
 * differs(self, replica), once a replica. */
ckpt_status ckpt_replicas_compare(ckpt_source *src,
                                  ckpt_status (*differs)(void *self, const ckpt_replica *r,
                                                         ckpt_err *err),
                                  void *self, ckpt_err *err) CKPT_MUST_USE;
/* Index by exact stored name, or -1. */
int64_t ckpt_source_find(const ckpt_source *src, const char *name);
/* Check that the tensor's chunks lie in bounds, do not overlap and cover it. Sorts the chunks by
 * lo (lexicographic, axis 0 first). Chunks with a zero extent are dropped. Also checks that the
 * bytes each chunk touches lie inside its file. Errors: CKPT_E_FORMAT naming the tensor and the
 * first overlapping or missing coordinates. Linear in chunks beyond the sort, for any tiling; the
 * chance that a defect passes is below 2^-56, with keys drawn anew in every process. */
ckpt_status ckpt_tensor_check(const ckpt_source *src, ckpt_tensor *tensor,
                              ckpt_err *err) CKPT_MUST_USE;

#endif
