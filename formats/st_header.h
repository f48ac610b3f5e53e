/* Safetensors header: parsed entries, the name table that finds duplicates, and validation.
 * Layout: torch-formats.md section 5. */
#ifndef CKPT_ST_HEADER_H
#define CKPT_ST_HEADER_H

#include "arena.h"
#include "dtype.h"
#include "json.h"

#define CKPT_ST_HEADER_MAX UINT64_C(100000000) /* bytes of JSON text, reading and writing */
#define CKPT_ST_NONE UINT32_MAX

/* One tensor as one header states it. */
typedef struct ckpt_st_entry {
    const char *name;    /* in the arena, no NUL inside */
    const int64_t *dims; /* in the arena, rank of them */
    const int64_t *lo;   /* DCP saved_offsets, rank of them, or NULL */
    uint64_t begin, end; /* bytes relative to the data section */
    uint32_t file;
    uint32_t next; /* older entry of the same name in another file, or CKPT_ST_NONE */
    uint8_t rank, dtype;
    bool older;   /* reached through another entry's `next` */
    bool indexed; /* named by the weight_map */
} ckpt_st_entry;

/* Entries of all files of a source, and a hash from name to the newest entry of that name.
 * Zero-initialise; release frees scratch but not what lies in the arena. */
typedef struct ckpt_st_table {
    ckpt_st_entry *entries;
    size_t n, cap;
    struct ckpt_st_slot *slots;
    size_t n_slots; /* power of two */
    size_t n_names; /* distinct */
    uint64_t seed;
} ckpt_st_table;

void ckpt_st_table_release(ckpt_st_table *table);
/* Newest entry of that name, or CKPT_ST_NONE. */
uint32_t ckpt_st_table_find(const ckpt_st_table *table, const char *name);

/* Parse the header text of one file and append its entries. `text` has n bytes followed by at least
 * CKPT_ST_SCAN_PAD NUL bytes and is destroyed. *metadata becomes the `__metadata__` object (of
 * strings, keys sorted, the last duplicate wins) or NULL.
 *
 * Stricter than the reference, on purpose: a tensor name that occurs twice (also through different
 * escapes), a NUL in a name or in metadata, dimensions and offsets above 2^63-1 are CKPT_E_FORMAT;
 * rank above CKPT_MAX_RANK is CKPT_E_UNSUPPORTED. */
ckpt_status ckpt_st_header_parse(char *text, size_t n, uint32_t file, ckpt_arena *arena,
                                 ckpt_st_table *table, ckpt_json **metadata,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Validate the entries [first, table->n) of one file against the size of its data section: byte
 * counts agree with dtype and shape, ranges touch, start at 0 and end at data_size. */
ckpt_status ckpt_st_header_check(const ckpt_st_table *table, size_t first, uint64_t data_size,
                                 ckpt_err *err) CKPT_MUST_USE;

/* Append s as a JSON string the way serde_json writes it (ascii false) or Python's json.dumps
 * (ascii true: everything outside ' '..'~' escaped). s is valid UTF-8. */
void ckpt_st_quote(ckpt_buf *out, const char *s, bool ascii);

#endif
