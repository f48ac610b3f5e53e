/* Zip as torch.save writes it: reader (central directory only) and writer of small archives with
 * one large payload. Layout: torch-formats.md section 3. */
#ifndef CKPT_ZIP_H
#define CKPT_ZIP_H

#include "source.h"

typedef struct ckpt_zip_entry {
    const char *name; /* full name with root folder */
    uint64_t offset;  /* of the payload, relative to the archive start */
    uint64_t size;    /* uncompressed */
    uint64_t csize;
    uint16_t method; /* 0 stored, 8 deflated */
    uint32_t crc;
} ckpt_zip_entry;

typedef struct ckpt_zip {
    ckpt_zip_entry *entries; /* central directory order */
    size_t n_entries;
    const char *root;  /* text of the first entry's name up to '/', without it */
    uint32_t *by_name; /* entry numbers sorted bytewise by name */
} ckpt_zip;

/* Read the directory of the archive occupying [base, base+length) of a source file. Every payload
 * range is checked to lie inside, local and central names to agree, entries not to overlap and
 * names not to repeat. Text after the end record is ignored, text before the first entry is
 * refused. Entries live in the arena. Errors: CKPT_E_FORMAT; CKPT_E_UNSUPPORTED for encryption. */
ckpt_status ckpt_zip_open(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length,
                          ckpt_arena *arena, ckpt_zip *zip, ckpt_err *err) CKPT_MUST_USE;
/* Entry root/name, or NULL. */
const ckpt_zip_entry *ckpt_zip_find(const ckpt_zip *zip, const char *name);
/* Whole entry into memory (appended to *out), inflating if needed (zlib), refused above `limit`
 * before anything is allocated. A CRC other than 0 is verified: 0 may mean "not computed". */
ckpt_status ckpt_zip_read(ckpt_source *src, uint32_t file, uint64_t base,
                          const ckpt_zip_entry *entry, uint64_t limit, ckpt_buf *out,
                          ckpt_err *err) CKPT_MUST_USE;

/* One torch.save item holding a single tensor: head || payload || tail. Root "archive"; records in
 * torch order data.pkl, byteorder, data/0, version; local headers with data descriptors exactly as
 * torch (flags 0x0808; 0x0800 for an empty payload), zip64 where needed, payload 64-byte aligned
 * within the item, true CRCs. out->failed is set when memory is exhausted and for what torch
 * cannot hold: a dtype without a torch name (F6), F4 with an odd last extent, size overflow.
 * Each function appends; offsets count from where the item starts, so `tail` needs only its own
 * arguments. */
void ckpt_zip_tensor_head(ckpt_buf *out, ckpt_dtype dtype, int rank, const int64_t *dims);
void ckpt_zip_tensor_tail(ckpt_buf *out, ckpt_dtype dtype, int rank, const int64_t *dims,
                          uint32_t payload_crc);
/* A torch.save item whose data.pkl is the given pickle and which holds no tensors. */
void ckpt_zip_object(ckpt_buf *out, const uint8_t *pickle, size_t n);

/* ---- parts of a larger archive (torch_write.c) ---------------------------------------------- */

#define CKPT_ZIP_ROOT "archive"

typedef struct ckpt_zip_record {
    const char *name;      /* full name with root folder */
    uint64_t size, header; /* payload bytes; offset of the local header in the archive */
    uint32_t crc;
} ckpt_zip_record;

/* Local header with padding: the payload starts where it ends. Reads name, size and header. */
void ckpt_zip_put_local(ckpt_buf *b, const ckpt_zip_record *r);
/* What follows the payload; nothing after an empty one. */
void ckpt_zip_put_descriptor(ckpt_buf *b, const ckpt_zip_record *r);
/* Local header, payload and descriptor of a small record at offset `at` of the archive; fills r. */
void ckpt_zip_put_record(ckpt_buf *b, uint64_t at, ckpt_zip_record *r, const void *payload,
                         size_t n);
void ckpt_zip_put_central(ckpt_buf *b, const ckpt_zip_record *r);
/* End records of a directory of n entries and `size` bytes that starts at offset `at`. */
void ckpt_zip_put_end(ckpt_buf *b, uint64_t n, uint64_t size, uint64_t at);
/* Pickle opcodes of a contiguous tensor that owns the storage data/KEY: torch._utils
 * _rebuild_tensor_v2, or v3 for dtypes without a typed storage (the persistent id then counts bytes
 * instead of elements). False: torch cannot hold it (see ckpt_zip_tensor_head). */
bool ckpt_zip_put_tensor(ckpt_buf *b, ckpt_dtype dtype, int rank, const int64_t *dims,
                         uint64_t key);

#endif
