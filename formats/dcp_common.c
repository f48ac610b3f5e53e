/* The Megatron common state: one dict, stored as torch.save of a one-element list (object
 * common_state/shard_0_1) or of the dict itself (common.pt, Megatron-Core up to 0.18). Both hold
 * only a pickle, except when the state carries tensors (a loss scale); their storages are then
 * copied as they are. Source: megatron-dist-ckpt.md section 1.2; zip: torch-formats.md section 3. */
#include "dcp.h"

#include "checked.h"
#include "crc.h"
#include "le.h"
#include "pickle_internal.h"
#include "torch_save.h"

#include <stdlib.h>
#include <string.h>

#define COMMON_LIMIT ((uint64_t)1 << 28) /* bytes of one record of a common state */

enum { OP_EMPTY_DICT = 0x7d, OP_EMPTY_LIST = 0x5d, OP_MARK = 0x28, OP_SETITEMS = 0x75 };
enum { OP_APPEND = 0x61, OP_TUPLE = 0x74, OP_TUPLE2 = 0x86 };

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

/* ---- args ---------------------------------------------------------------------------------- */

/* Give members the Python type they are displayed from: "torch.float32" is the dtype, and an enum
 * becomes its value, because emitting a class named by input would make the loader call it. */
static ckpt_json *python_args(const ckpt_json *args)
{
    ckpt_json *copy = ckpt_json_new_object();
    for (ckpt_json *c = args ? ckpt_json_child(args) : NULL; copy && c; c = ckpt_json_next(c)) {
        const char *text = ckpt_json_string(c);
        ckpt_dtype dtype;
        ckpt_json *value = NULL;
        if (text && strncmp(text, "torch.", 6) == 0 && ckpt_dtype_from_torch(text + 6, &dtype)) {
            value = ckpt_json_new_object();
            if (value && !ckpt_json_set(value, "$torch", ckpt_json_new_string(text + 6))) {
                ckpt_json_free(value);
                value = NULL;
            }
        } else if (ckpt_json_get(c, "$enum") && ckpt_json_get(c, "value")) {
            value = ckpt_json_dup(ckpt_json_get(c, "value"));
        } else {
            value = ckpt_json_dup(c);
        }
        if (!value || !ckpt_json_set(copy, ckpt_json_key(c), value)) {
            ckpt_json_free(copy);
            copy = NULL;
        }
    }
    return copy;
}

/* Where a node keeps its key, value, ... array: a dict, an OrderedDict, or an object's state. */
typedef struct pair_list {
    ckpt_pkl ***items;
    size_t *n;
} pair_list;

static bool pair_list_of(ckpt_pkl *node, pair_list *out)
{
    if (node->kind == CKPT_PKL_OBJECT && node->state && node->state->kind == CKPT_PKL_DICT)
        node = node->state;
    if (node->kind == CKPT_PKL_DICT)
        *out = (pair_list){&node->items, &node->n_items};
    else if (ckpt_pkl_is_object(node, "collections", "OrderedDict"))
        *out = (pair_list){&node->pairs, &node->n_pairs};
    else
        return false;
    return true;
}

static bool pair_set(ckpt_arena *arena, pair_list *list, ckpt_pkl *key, ckpt_pkl *value)
{
    for (size_t i = *list->n & ~(size_t)1; i >= 2; i -= 2) {
        const char *have = ckpt_pkl_str((*list->items)[i - 2]);
        if (have && strcmp(have, key->str) == 0) {
            (*list->items)[i - 1] = value;
            return true;
        }
    }
    ckpt_pkl **grown = ckpt_arena_array(arena, *list->n + 2, sizeof *grown);
    if (!grown)
        return false;
    if (*list->n)
        memcpy(grown, *list->items, *list->n * sizeof *grown);
    grown[*list->n] = key;
    grown[*list->n + 1] = value;
    *list->items = grown;
    *list->n += 2;
    return true;
}

/* Merge the members of the freshly parsed Namespace `fresh` into the dict's args. */
static ckpt_status merge_args(ckpt_arena *arena, ckpt_pkl *dict, ckpt_pkl *key, ckpt_pkl *fresh,
                              const ckpt_json *args, ckpt_err *err)
{
    pair_list top, old, new;
    ckpt_pkl *have = ckpt_pkl_get(dict, "args");
    if (!have || !pair_list_of(have, &old)) {
        if (!pair_list_of(dict, &top))
            return ckpt_fail(err, CKPT_E_FORMAT, "common state is not a dict");
        return pair_set(arena, &top, key, fresh) ? CKPT_OK : no_memory(err);
    }
    if (!pair_list_of(fresh, &new))
        return CKPT_OK; /* no members: nothing to change */
    for (size_t i = 0; i + 1 < *new.n; i += 2) {
        ckpt_pkl *name = (*new.items)[i];
        if (!ckpt_pkl_str(name))
            continue;
        ckpt_pkl *before = ckpt_pkl_get(have, name->str);
        ckpt_json *json = before ? ckpt_pkl_to_json(before) : NULL;
        bool same = json && ckpt_json_equal(json, ckpt_json_get(args, name->str));
        ckpt_json_free(json);
        if (!same && !pair_set(arena, &old, name, (*new.items)[i + 1]))
            return no_memory(err);
    }
    return CKPT_OK;
}

/* ---- zip with storages --------------------------------------------------------------------- */

typedef struct packer {
    ckpt_buf *out, central;
    size_t start; /* of the archive in out */
    unsigned count;
} packer;

static void put16(ckpt_buf *b, unsigned v)
{
    uint8_t raw[2];
    ckpt_put_u16(raw, (uint16_t)v);
    ckpt_buf_append(b, raw, sizeof raw);
}

static void put32(ckpt_buf *b, uint32_t v)
{
    uint8_t raw[4];
    ckpt_put_u32(raw, v);
    ckpt_buf_append(b, raw, sizeof raw);
}

/* The fields that local and central headers share, from version needed to extra length. */
static void pack_fields(ckpt_buf *b, uint32_t crc, uint32_t size, size_t name_len, unsigned extra)
{
    put16(b, 0);
    put16(b, 0x0800); /* UTF-8 names, no descriptor */
    put16(b, 0);
    put32(b, 0); /* time and date */
    put32(b, crc);
    put32(b, size);
    put32(b, size);
    put16(b, (unsigned)name_len);
    put16(b, extra);
}

static void pack(packer *p, const char *record, const uint8_t *data, size_t n)
{
    char name[256] = "archive/";
    strncat(name, record, sizeof name - 9);
    size_t name_len = strlen(name);
    size_t header = p->out->len - p->start;
    unsigned pad = (unsigned)((64 - (header + 34 + name_len) % 64) % 64);
    uint32_t crc = ckpt_crc32(0, data, n);
    put32(p->out, 0x04034b50);
    pack_fields(p->out, crc, (uint32_t)n, name_len, 4 + pad);
    ckpt_buf_append(p->out, name, name_len);
    ckpt_buf_append(p->out, "FB", 2);
    put16(p->out, pad);
    for (unsigned i = 0; i < pad; i++)
        ckpt_buf_putc(p->out, 'Z');
    ckpt_buf_append(p->out, data, n);

    put32(&p->central, 0x02014b50);
    put16(&p->central, 0);
    pack_fields(&p->central, crc, (uint32_t)n, name_len, 0);
    put16(&p->central, 0); /* comment length */
    put16(&p->central, 0); /* disk */
    put16(&p->central, 0); /* internal attributes */
    put32(&p->central, 0);
    put32(&p->central, (uint32_t)header);
    ckpt_buf_append(&p->central, name, name_len);
    p->count++;
}

static void pack_end(packer *p)
{
    uint32_t at = (uint32_t)(p->out->len - p->start);
    uint32_t size = (uint32_t)p->central.len;
    if (p->central.failed)
        p->out->failed = true;
    ckpt_buf_append(p->out, p->central.data, p->central.len);
    put32(p->out, 0x06054b50);
    put32(p->out, 0);
    put16(p->out, p->count);
    put16(p->out, p->count);
    put32(p->out, size);
    put32(p->out, at);
    put16(p->out, 0);
    ckpt_buf_release(&p->central);
}

/* Name of an entry below the archive root, or NULL. */
static const char *record_name(const ckpt_zip *zip, const ckpt_zip_entry *entry)
{
    size_t n = strlen(zip->root);
    return strncmp(entry->name, zip->root, n) == 0 && entry->name[n] == '/' ? entry->name + n + 1
                                                                            : NULL;
}

static bool is_storage(const ckpt_zip *zip, const ckpt_zip_entry *entry)
{
    const char *record = record_name(zip, entry);
    return record && strncmp(record, "data/", 5) == 0 && strlen(record) < 200;
}

/* Archive with the given pickle and the storages of `zip`. */
static ckpt_status pack_with_storages(ckpt_source *src, uint32_t file, uint64_t base,
                                      const ckpt_zip *zip, const ckpt_buf *pickle, ckpt_buf *out,
                                      ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    uint64_t total = pickle->len;
    for (size_t i = 0; i < zip->n_entries; i++)
        if (!ckpt_add_u64(total, zip->entries[i].size, &total))
            total = UINT64_MAX;
    if (total > COMMON_LIMIT || zip->n_entries > 10000)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "item of %llu bytes, limit %llu",
                         (unsigned long long)total, (unsigned long long)COMMON_LIMIT);
    packer p = {.out = out, .start = out->len};
    ckpt_buf record = {0};
    pack(&p, "data.pkl", pickle->data, pickle->len);
    const ckpt_zip_entry *order = ckpt_zip_find(zip, "byteorder");
    if (order) {
        CKPT_TRY(ckpt_zip_read(src, file, base, order, 64, &record, err), "byteorder");
        pack(&p, "byteorder", record.data, record.len);
    }
    for (size_t i = 0; i < zip->n_entries; i++) {
        if (!is_storage(zip, &zip->entries[i]))
            continue;
        ckpt_buf_clear(&record);
        CKPT_TRY(ckpt_zip_read(src, file, base, &zip->entries[i], COMMON_LIMIT, &record, err), "%s",
                 zip->entries[i].name);
        pack(&p, record_name(zip, &zip->entries[i]), record.data, record.len);
    }
    pack(&p, "version", (const uint8_t *)"3\n", 2);
    pack_end(&p);
done:
    ckpt_buf_release(&record);
    ckpt_buf_release(&p.central);
    return status;
}

/* ---- repacking ----------------------------------------------------------------------------- */

/* The pickle of an object's payload: data.pkl of a torch.save zip without storages, STOP removed.
 * Its memo slots may repeat those of the stream it is appended to, which is past its own. */
static ckpt_status object_pickle(ckpt_source *src, const ckpt_object *object, ckpt_buf *out,
                                 ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_zip zip;
    ckpt_pkl *root;
    size_t used;
    ckpt_status status;
    CKPT_TRY(ckpt_zip_open(src, object->file, object->offset, object->length, &arena, &zip, err),
             "object '%s'", object->name);
    const ckpt_zip_entry *entry = ckpt_zip_find(&zip, "data.pkl");
    for (size_t i = 0; i < zip.n_entries; i++)
        if (is_storage(&zip, &zip.entries[i]))
            entry = NULL;
    if (!entry) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "object '%s' holds tensors, which cannot move into the common state",
                           object->name);
        goto done;
    }
    CKPT_TRY(ckpt_zip_read(src, object->file, object->offset, entry, COMMON_LIMIT, out, err),
             "object '%s'", object->name);
    CKPT_TRY(ckpt_pkl_parse(out->data, out->len, &arena, NULL, &root, &used, NULL, err),
             "object '%s'", object->name);
    out->len = used - 1;
done:
    ckpt_arena_free(&arena);
    return status;
}

/* Append what the changes insert to the open pickle, as one tuple: names of arguments, then a value
 * for each edit. */
static ckpt_status put_additions(ckpt_source *src, const ckpt_dcp_changes *c, ckpt_buf *pickle,
                                 ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf value = {0};
    ckpt_json *python = python_args(c->args);
    if (!python)
        return no_memory(err);
    ckpt_buf_putc(pickle, OP_MARK);
    ckpt_pkl_put_str(pickle, "args");
    ckpt_pkl_put_namespace(pickle, python);
    ckpt_json_free(python);
    for (size_t i = 0; i < c->n_edits; i++) {
        const ckpt_dcp_edit *e = &c->edits[i];
        const char *last = strrchr(e->path, '.');
        ckpt_pkl_put_str(pickle, last ? last + 1 : e->path);
        if (e->json) {
            ckpt_pkl_put_json(pickle, e->json);
            continue;
        }
        if (!e->object) {
            ckpt_pkl_put_str(pickle, e->text);
            continue;
        }
        ckpt_buf_clear(&value);
        CKPT_CHECK(object_pickle(src, e->object, &value, err));
        ckpt_buf_append(pickle, value.data, value.len);
    }
    ckpt_buf_putc(pickle, OP_TUPLE);
done:
    ckpt_buf_release(&value);
    return status;
}

/* By string key, or by number: chained optimizers are counted. */
static ckpt_pkl *member(ckpt_pkl *dict, const char *word)
{
    ckpt_pkl *const *pairs;
    size_t n;
    if (strspn(word, "0123456789") != strlen(word) || !ckpt_pkl_pairs(dict, &pairs, &n))
        return ckpt_pkl_get(dict, word);
    for (size_t i = 0; i + 1 < n; i += 2) {
        int64_t have;
        if (ckpt_pkl_int(pairs[i], &have) && have == strtoll(word, NULL, 10))
            return pairs[i + 1];
    }
    return NULL;
}

/* Apply one edit: its path but for the last word leads through dicts that exist or are made. */
static ckpt_status apply_edit(ckpt_arena *arena, ckpt_pkl *root, const ckpt_dcp_edit *e,
                              ckpt_pkl *key, ckpt_pkl *value, ckpt_err *err)
{
    pair_list list;
    char word[64];
    const char *p = e->path;
    if (e->object && value->kind == CKPT_PKL_LIST && value->n_items == 1)
        value = value->items[0]; /* objects are stored as lists of one */
    for (size_t n; (n = strcspn(p, ".")) < strlen(p); p += n + 1) {
        if (n >= sizeof word)
            return ckpt_fail(err, CKPT_E_INTERNAL, "path '%s'", e->path);
        memcpy(word, p, n);
        word[n] = '\0';
        root = member(root, word);
        if (!root)
            return CKPT_OK; /* a state that never had it does not need it */
    }
    if (!pair_list_of(root, &list))
        return ckpt_fail(err, CKPT_E_FORMAT, "common state: '%s' does not lie in a dict", e->path);
    return pair_set(arena, &list, key, value) ? CKPT_OK : no_memory(err);
}

/* Parse `pickle` with the additions appended, so that old and new nodes share one numbering. *root
 * and *addition receive the two halves. */
static ckpt_status parse_with(ckpt_source *src, ckpt_buf *pickle, const ckpt_dcp_changes *c,
                              ckpt_arena *arena, ckpt_pkl **root, ckpt_pkl **addition,
                              uint32_t *n_nodes, ckpt_err *err)
{
    size_t used;
    ckpt_pkl *both;
    ckpt_arena probe = {0};
    ckpt_status status =
        ckpt_pkl_parse(pickle->data, pickle->len, &probe, NULL, &both, &used, NULL, err);
    ckpt_arena_free(&probe);
    if (status != CKPT_OK)
        return status;
    pickle->len = used - 1; /* drop STOP */
    status = put_additions(src, c, pickle, err);
    if (status != CKPT_OK)
        return status;
    ckpt_buf_putc(pickle, OP_TUPLE2);
    ckpt_pkl_end(pickle);
    if (pickle->failed)
        return no_memory(err);
    status = ckpt_pkl_parse(pickle->data, pickle->len, arena, NULL, &both, NULL, n_nodes, err);
    if (status != CKPT_OK)
        return status;
    if (both->kind != CKPT_PKL_TUPLE || both->n_items != 2 ||
        both->items[1]->kind != CKPT_PKL_TUPLE || both->items[1]->n_items != 2 + 2 * c->n_edits)
        return ckpt_fail(err, CKPT_E_FORMAT, "common state pickle leaves its stack unbalanced");
    *root = both->items[0];
    *addition = both->items[1];
    return CKPT_OK;
}

/* What is written of an item's value. */
typedef enum form {
    FORM_DICT,
    FORM_LIST, /* of a common state: the dict alone, or in a list */
    FORM_WRAP  /* any value, in a list of one */
} form;

/* The pickle to write; args are merged into a common state. */
static ckpt_status rewrite_pickle(ckpt_source *src, ckpt_buf *pickle, form as,
                                  const ckpt_dcp_changes *c, ckpt_buf *out, ckpt_err *err)
{
    ckpt_arena arena = {0};
    ckpt_pkl *root = NULL, *addition = NULL;
    uint32_t n_nodes = 0;
    ckpt_pkl *const *pairs;
    size_t n_pairs;
    ckpt_status status;
    CKPT_CHECK(parse_with(src, pickle, c, &arena, &root, &addition, &n_nodes, err));
    if (as != FORM_WRAP && root->kind == CKPT_PKL_LIST && root->n_items == 1)
        root = root->items[0];
    if (as != FORM_WRAP && !ckpt_pkl_pairs(root, &pairs, &n_pairs)) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "common state is not a dict");
        goto done;
    }
    if (c->args)
        CKPT_CHECK(merge_args(&arena, root, addition->items[0], addition->items[1], c->args, err));
    for (size_t i = 0; i < c->n_edits; i++)
        CKPT_CHECK(apply_edit(&arena, root, &c->edits[i], addition->items[2 + 2 * i],
                              addition->items[3 + 2 * i], err));
    ckpt_pkl list = {.kind = CKPT_PKL_LIST, .items = &root, .n_items = 1};
    list.id = n_nodes;
    ckpt_pkl_begin(out);
    CKPT_CHECK(ckpt_pkl_put_node(out, as == FORM_DICT ? root : &list, n_nodes + 1, err));
    ckpt_pkl_end(out);
    if (out->failed)
        status = no_memory(err);
done:
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_status repack(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length, form as,
                          const ckpt_dcp_changes *c, ckpt_buf *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena arena = {0};
    ckpt_buf pickle = {0}, rewritten = {0};
    ckpt_zip zip;
    uint8_t magic[4] = {0};
    bool storages = false;
    const char *what = as == FORM_WRAP ? "object" : "common state";
    if (length >= 4)
        CKPT_CHECK(ckpt_source_read(src, file, magic, sizeof magic, base, err));
    if (memcmp(magic, "PK\3\4", 4) != 0) {
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is not a torch.save zip", what);
        goto done;
    }
    CKPT_CHECK(ckpt_zip_open(src, file, base, length, &arena, &zip, err));
    const ckpt_zip_entry *entry = ckpt_zip_find(&zip, "data.pkl");
    if (!entry) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s has no data.pkl", what);
        goto done;
    }
    CKPT_TRY(ckpt_zip_read(src, file, base, entry, COMMON_LIMIT, &pickle, err), "data.pkl");
    CKPT_TRY(rewrite_pickle(src, &pickle, as, c, &rewritten, err), "data.pkl");
    for (size_t i = 0; i < zip.n_entries; i++)
        storages = storages || is_storage(&zip, &zip.entries[i]);
    if (storages)
        CKPT_CHECK(pack_with_storages(src, file, base, &zip, &rewritten, out, err));
    else
        ckpt_zip_object(out, rewritten.data, rewritten.len);
    if (out->failed)
        status = no_memory(err);
done:
    ckpt_buf_release(&rewritten);
    ckpt_buf_release(&pickle);
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_dcp_repack(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length,
                            bool as_list, const ckpt_json *args, ckpt_buf *out, ckpt_err *err)
{
    ckpt_dcp_changes c = {.args = args};
    return repack(src, file, base, length, as_list ? FORM_LIST : FORM_DICT, &c, out, err);
}

ckpt_status ckpt_dcp_wrap_object(ckpt_source *src, uint32_t file, uint64_t length, ckpt_buf *out,
                                 ckpt_err *err)
{
    ckpt_dcp_changes c = {0};
    return repack(src, file, 0, length, FORM_WRAP, &c, out, err);
}

static ckpt_status read_memory(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    uint64_t size = src->files[file].size;
    if (offset > size || n > size - offset)
        return ckpt_fail(err, CKPT_E_FORMAT, "offset %llu + length %zu past end %llu",
                         (unsigned long long)offset, n, (unsigned long long)size);
    if (n)
        memcpy(buf, (const uint8_t *)src->self + offset, n);
    return CKPT_OK;
}

/* A source that is one item in memory; `file` must outlive it. */
static ckpt_source memory_source(const uint8_t *data, uint64_t length, ckpt_file *file)
{
    *file = (ckpt_file){.name = "memory", .path = "memory", .size = length, .fd = -1};
    uint8_t *bytes = NULL;
    memcpy(&bytes, &data, sizeof bytes); /* self is not const; read_memory never writes */
    return (ckpt_source){.files = file, .n_files = 1, .read_at = read_memory, .self = bytes};
}

ckpt_status ckpt_dcp_repack_bytes(const uint8_t *data, uint64_t length, bool as_list,
                                  const ckpt_json *args, ckpt_buf *out, ckpt_err *err)
{
    ckpt_file file;
    ckpt_source src = memory_source(data, length, &file);
    return ckpt_dcp_repack(&src, 0, 0, length, as_list, args, out, err);
}

ckpt_status ckpt_dcp_common_edit(const uint8_t *data, uint64_t length, const ckpt_dcp_changes *c,
                                 ckpt_buf *object_payload, ckpt_err *err)
{
    ckpt_file file;
    ckpt_source src = memory_source(data, length, &file);
    return repack(&src, 0, 0, length, FORM_LIST, c, object_payload, err);
}

static ckpt_status find_storage(void *context, const ckpt_pkl *p)
{
    bool *found = context;
    *found = *found || p->kind == CKPT_PKL_PERSID;
    return CKPT_OK;
}

ckpt_status ckpt_dcp_common_members(const uint8_t *data, uint64_t length,
                                    bool (*keep)(const char *key), ckpt_buf *out, ckpt_err *err)
{
    ckpt_status status;
    ckpt_file file;
    ckpt_source src = memory_source(data, length, &file);
    ckpt_arena arena = {0};
    ckpt_pt pt;
    ckpt_pkl *const *pairs;
    size_t n;
    CKPT_CHECK(ckpt_pt_open(&src, 0, 0, length, &arena, &pt, err));
    const ckpt_pkl *root = pt.root;
    if (root->kind == CKPT_PKL_LIST && root->n_items == 1)
        root = root->items[0];
    if (!ckpt_pkl_pairs(root, &pairs, &n)) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "common state is not a dict");
        goto done;
    }
    for (size_t i = 0; i + 1 < n; i += 2) {
        const char *key = ckpt_pkl_str(pairs[i]);
        bool tensors = false;
        if (key == NULL || !keep(key))
            continue;
        CKPT_CHECK(ckpt_pkl_walk(pairs[i + 1], pt.n_nodes, find_storage, &tensors, err));
        if (tensors)
            continue;
        ckpt_pkl_put_str(out, key);
        CKPT_CHECK(ckpt_pkl_put_node(out, pairs[i + 1], pt.n_nodes, err));
    }
    if (out->failed)
        status = no_memory(err);
done:
    ckpt_arena_free(&arena);
    return status;
}

ckpt_status ckpt_dcp_common_changed(ckpt_source *src, const ckpt_dcp_changes *c,
                                    ckpt_buf *object_payload, ckpt_err *err)
{
    for (size_t i = 0; i < src->n_files; i++) {
        const ckpt_file *f = &src->files[i];
        if (strcmp(f->name, CKPT_DCP_COMMON_FILE) != 0 || (f->fd < 0 && !f->on_demand))
            continue;
        ckpt_status status =
            repack(src, (uint32_t)i, 0, src->files[i].size, FORM_LIST, c, object_payload, err);
        if (status != CKPT_OK)
            ckpt_err_frame(err, CKPT_DCP_COMMON_FILE);
        return status;
    }
    for (size_t i = 0; i < src->n_objects; i++) {
        const ckpt_object *o = &src->objects[i];
        if (strcmp(o->name, CKPT_DCP_COMMON_OBJECT) != 0)
            continue;
        ckpt_status status =
            repack(src, o->file, o->offset, o->length, FORM_LIST, c, object_payload, err);
        if (status != CKPT_OK)
            ckpt_err_frame(err, "object '%s'", o->name);
        return status;
    }
    return ckpt_fail(err, CKPT_E_FORMAT, "no common state (neither %s nor object '%s')",
                     CKPT_DCP_COMMON_FILE, CKPT_DCP_COMMON_OBJECT);
}

ckpt_status ckpt_dcp_common_with_args(ckpt_source *src, const ckpt_json *args,
                                      ckpt_buf *object_payload, ckpt_err *err)
{
    ckpt_dcp_changes c = {.args = args};
    return ckpt_dcp_common_changed(src, &c, object_payload, err);
}

/* ---- a new one ----------------------------------------------------------------------------- */

ckpt_status ckpt_dcp_new_common(const ckpt_json *args, int64_t iteration, const char *sharding_type,
                                bool as_list, ckpt_buf *out, ckpt_err *err)
{
    ckpt_json *python = python_args(args);
    if (!python)
        return no_memory(err);
    ckpt_buf b = {0};
    ckpt_pkl_begin(&b);
    if (as_list)
        ckpt_buf_putc(&b, OP_EMPTY_LIST);
    ckpt_buf_putc(&b, OP_EMPTY_DICT);
    ckpt_buf_putc(&b, OP_MARK);
    ckpt_pkl_put_str(&b, "args");
    ckpt_pkl_put_namespace(&b, python);
    ckpt_pkl_put_str(&b, "checkpoint_version");
    ckpt_pkl_put_float(&b, 3.0);
    ckpt_pkl_put_str(&b, "iteration");
    ckpt_pkl_put_int(&b, iteration < 0 ? 0 : iteration);
    ckpt_pkl_put_str(&b, "num_floating_point_operations_so_far");
    ckpt_pkl_put_int(&b, 0);
    ckpt_pkl_put_str(&b, "content_metadata");
    ckpt_buf_putc(&b, OP_EMPTY_DICT);
    ckpt_buf_putc(&b, OP_MARK);
    ckpt_pkl_put_str(&b, "singleton_local_shards");
    ckpt_pkl_put_bool(&b, false);
    ckpt_pkl_put_str(&b, "distrib_optim_sharding_type");
    if (sharding_type)
        ckpt_pkl_put_str(&b, sharding_type);
    else
        ckpt_pkl_put_none(&b);
    ckpt_buf_putc(&b, OP_SETITEMS);
    ckpt_buf_putc(&b, OP_SETITEMS);
    if (as_list)
        ckpt_buf_putc(&b, OP_APPEND);
    ckpt_pkl_end(&b);
    if (!b.failed)
        ckpt_zip_object(out, b.data, b.len);
    bool failed = b.failed || out->failed;
    ckpt_buf_release(&b);
    ckpt_json_free(python);
    return failed ? no_memory(err) : CKPT_OK;
}
