/* One safetensors blob: a whole file, or the part of a .distcp file from `at` to its end that
 * DCP's SerializationFormat.SAFETENSORS writes after the objects.
 *
 * Blob: u64 N || N bytes of JSON || data (little-endian; torch-formats.md section 5). With
 * DCP_SHARDING_INFO in __metadata__, a JSON text {name: {"saved_offsets": [...]}}, its tensors are
 * pieces of larger ones (section 2). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "le.h"
#include "st_internal.h"
#include "st_scan.h"

#define SHARDING_INFO CKPT_ST_SHARDING_INFO

typedef struct blob {
    ckpt_source *src;
    ckpt_st_table *table;
    uint64_t at; /* byte of the file */
    uint32_t file;
} blob;

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory opening safetensors");
}

/* Read the length and the JSON text into *text (malloc'd, padded). */
static ckpt_status read_header(const blob *b, char **text, size_t *n, ckpt_err *err)
{
    uint64_t size = b->src->files[b->file].size - b->at;
    uint8_t head[8];
    if (size < sizeof head)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "file of %" PRIu64 " bytes is too short for the 8-byte header length",
                         size);
    ckpt_status status = ckpt_source_read(b->src, b->file, head, sizeof head, b->at, err);
    if (status != CKPT_OK)
        return status;
    if (memcmp(head, "PK\3\4", 4) == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "zip archive (torch.save?), not a safetensors file");
    uint64_t len = ckpt_get_u64(head);
    if (len > CKPT_ST_HEADER_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "header length %" PRIu64 " exceeds the limit of %" PRIu64 " bytes", len,
                         CKPT_ST_HEADER_MAX);
    if (len > size - sizeof head)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "header of %" PRIu64 " bytes ends past the end of the file (%" PRIu64
                         " bytes)",
                         len, size);
    *n = (size_t)len;
    *text = malloc(*n + CKPT_ST_SCAN_PAD);
    if (*text == NULL)
        return no_memory(err);
    memset(*text + *n, 0, CKPT_ST_SCAN_PAD);
    return ckpt_source_read(b->src, b->file, *text, *n, b->at + sizeof head, err);
}

/* Attach saved_offsets of DCP_SHARDING_INFO to the entries of the file just parsed. */
static ckpt_status apply_sharding(const blob *b, const ckpt_json *info, ckpt_err *err)
{
    const ckpt_json *item = ckpt_json_child(info);
    for (; item != NULL; item = ckpt_json_next(item)) {
        const char *name = ckpt_json_key(item);
        uint32_t at = ckpt_st_table_find(b->table, name);
        const ckpt_json *offsets = ckpt_json_get(item, "saved_offsets");
        if (at == CKPT_ST_NONE || b->table->entries[at].file != b->file)
            return ckpt_fail(err, CKPT_E_FORMAT, SHARDING_INFO ": no tensor '%.160s' in this file",
                             name);
        ckpt_st_entry *e = &b->table->entries[at];
        if (!ckpt_json_is_array(offsets) || ckpt_json_size(offsets) != e->rank)
            return ckpt_fail(err, CKPT_E_FORMAT,
                             SHARDING_INFO ": tensor '%.160s': expected saved_offsets with %d "
                                           "numbers, found %d",
                             name, e->rank, ckpt_json_size(offsets));
        int64_t *lo = ckpt_arena_array(&b->src->arena, (size_t)e->rank, sizeof *lo);
        if (lo == NULL)
            return no_memory(err);
        const ckpt_json *value = ckpt_json_child(offsets);
        for (int i = 0; i < e->rank; i++, value = ckpt_json_next(value))
            if (!ckpt_json_int(value, &lo[i]) || lo[i] < 0)
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 SHARDING_INFO ": tensor '%.160s': saved_offsets are not "
                                               "non-negative integers",
                                 name);
        e->lo = lo;
    }
    return CKPT_OK;
}

static ckpt_status read_sharding(const blob *b, ckpt_json *metadata, ckpt_err *err)
{
    const char *text = ckpt_json_string(ckpt_json_get(metadata, SHARDING_INFO));
    if (text == NULL)
        return CKPT_OK;
    ckpt_json *info = NULL;
    ckpt_status status;
    CKPT_TRY(ckpt_json_parse(text, strlen(text), &info, err), SHARDING_INFO);
    if (!ckpt_json_is_object(info)) {
        status = ckpt_fail(err, CKPT_E_FORMAT, SHARDING_INFO ": expected an object");
        goto done;
    }
    CKPT_CHECK(apply_sharding(b, info, err));
    /* It describes how this file was cut, not the checkpoint. */
    ckpt_json_delete(metadata, SHARDING_INFO);
    ckpt_json_delete(metadata, "DCP_VERSION");
done:
    ckpt_json_free(info);
    return status;
}

ckpt_status ckpt_st_blob_read(ckpt_source *src, uint32_t file, uint64_t at, ckpt_st_table *table,
                              ckpt_json **metadata, ckpt_err *err)
{
    const blob b = {src, table, at, file};
    char *text = NULL;
    size_t n = 0, first = table->n;
    ckpt_status status;
    CKPT_CHECK(read_header(&b, &text, &n, err));
    CKPT_CHECK(ckpt_st_header_parse(text, n, file, &src->arena, table, metadata, err));
    uint64_t data = at + 8 + (uint64_t)n;
    CKPT_CHECK(ckpt_st_header_check(table, first, src->files[file].size - data, err));
    CKPT_CHECK(read_sharding(&b, *metadata, err));
    for (size_t i = first; i < table->n; i++) {
        table->entries[i].begin += data;
        table->entries[i].end += data;
    }
done:
    free(text);
    return status;
}
