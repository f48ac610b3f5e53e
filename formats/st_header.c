/* Safetensors header grammar, name table and validation.
 *
 * header = { name: tensor, ..., "__metadata__": {string: string, ...} | null }
 * tensor = {"dtype": D, "shape": [..], "data_offsets": [begin, end], other fields ignored}
 *
 * Two forms that only serde's derive accepts are accepted as well: a tensor written as the array
 * [dtype, shape, data_offsets], and a dtype written as {"F32": null}. */
#include "st_header.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "checked.h"
#include "source.h"
#include "st_scan.h"

/* An object of strings with more keys than this is not metadata. */
#define METADATA_MAX_KEYS ((size_t)1 << 20)

/* ---- name table ----------------------------------------------------------------------------- */

struct ckpt_st_slot {
    uint32_t hash, entry; /* entry + 1; 0 is empty */
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 m = (unsigned __int128)a * b;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

/* Seeded, so that a header cannot be built to collide; results never depend on the seed. */
static uint32_t hash_name(uint64_t seed, const char *name, size_t n)
{
    uint64_t h = seed ^ n;
    for (; n >= 8; n -= 8, name += 8) {
        uint64_t x;
        memcpy(&x, name, 8);
        h = mix(h ^ x ^ UINT64_C(0x9e3779b97f4a7c15), seed | 1);
    }
    uint64_t tail = 0;
    memcpy(&tail, name, n);
    h = mix(h ^ tail ^ UINT64_C(0xd6e8feb86659fd93), UINT64_C(0xa0761d6478bd642f));
    return (uint32_t)(h ^ h >> 32);
}

void ckpt_st_table_release(ckpt_st_table *table)
{
    free(table->entries);
    free(table->slots);
    memset(table, 0, sizeof *table);
}

static struct ckpt_st_slot *find_slot(const ckpt_st_table *table, const char *name, uint32_t hash)
{
    size_t mask = table->n_slots - 1;
    for (size_t i = hash & mask;; i = (i + 1) & mask) {
        struct ckpt_st_slot *slot = &table->slots[i];
        if (slot->entry == 0 ||
            (slot->hash == hash && strcmp(table->entries[slot->entry - 1].name, name) == 0))
            return slot;
    }
}

uint32_t ckpt_st_table_find(const ckpt_st_table *table, const char *name)
{
    if (table->n_slots == 0)
        return CKPT_ST_NONE;
    uint32_t hash = hash_name(table->seed, name, strlen(name));
    return find_slot(table, name, hash)->entry - 1;
}

static bool grow_slots(ckpt_st_table *table)
{
    size_t n = table->n_slots == 0 ? 64 : table->n_slots * 2;
    struct ckpt_st_slot *slots = calloc(n, sizeof *slots);
    if (slots == NULL)
        return false;
    if (table->n_slots == 0) {
        struct timespec now = {0};
        clock_gettime(CLOCK_MONOTONIC, &now);
        table->seed = mix((uint64_t)now.tv_nsec ^ (uintptr_t)slots, UINT64_C(0xe7037ed1a0b428db)) |
                      UINT64_C(1) << 63;
    }
    for (size_t i = 0; i < table->n_slots; i++) {
        struct ckpt_st_slot slot = table->slots[i];
        if (slot.entry == 0)
            continue;
        size_t j = slot.hash & (n - 1);
        while (slots[j].entry != 0)
            j = (j + 1) & (n - 1);
        slots[j] = slot;
    }
    free(table->slots);
    table->slots = slots;
    table->n_slots = n;
    return true;
}

/* Append an entry. The same name twice in one file is an error; in another file it is chained. */
static ckpt_status table_add(ckpt_st_table *table, const ckpt_st_entry *entry, size_t name_len,
                             ckpt_err *err)
{
    void *array = table->entries;
    if (table->n >= CKPT_ST_NONE - 1)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "more than %" PRIu32 " tensors",
                         CKPT_ST_NONE - 1);
    ckpt_status status = ckpt_grow(&array, &table->cap, table->n + 1, sizeof *table->entries, err);
    table->entries = array;
    if (status != CKPT_OK)
        return status;
    if ((table->n_names + 1) * 4 > table->n_slots * 3 && !grow_slots(table))
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %zu tensor names", table->n);
    uint32_t hash = hash_name(table->seed, entry->name, name_len);
    struct ckpt_st_slot *slot = find_slot(table, entry->name, hash);
    ckpt_st_entry *copy = &table->entries[table->n];
    *copy = *entry;
    copy->next = CKPT_ST_NONE;
    if (slot->entry == 0) {
        table->n_names++;
    } else {
        ckpt_st_entry *older = &table->entries[slot->entry - 1];
        if (older->file == entry->file)
            return ckpt_fail(err, CKPT_E_FORMAT, "duplicate name: the header lists it twice");
        older->older = true;
        copy->next = slot->entry - 1;
    }
    *slot = (struct ckpt_st_slot){hash, (uint32_t)++table->n};
    return CKPT_OK;
}

/* ---- grammar -------------------------------------------------------------------------------- */

typedef struct parser {
    ckpt_st_scan scan;
    ckpt_arena *arena;
    ckpt_st_table *table;
    ckpt_json **metadata;
    uint32_t file;
    bool metadata_seen;
    /* The dtype most recently looked up; neighbours usually share it. */
    char dtype_name[16];
    size_t dtype_len;
    uint8_t dtype;
} parser;

static ckpt_status out_of_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a safetensors header");
}

static ckpt_status parse_dtype(parser *p, ckpt_st_entry *e)
{
    ckpt_st_scan *s = &p->scan;
    char *name;
    size_t len;
    ckpt_status status;
    bool wrapped = ckpt_st_accept(s, '{');
    if ((status = ckpt_st_string(s, &name, &len)) != CKPT_OK)
        return status;
    if (len != p->dtype_len || memcmp(name, p->dtype_name, len) != 0) {
        ckpt_dtype dtype;
        if (len >= sizeof p->dtype_name || !ckpt_dtype_from_name(name, len, &dtype) ||
            !ckpt_dtype_get(dtype)->safetensors)
            return ckpt_fail(s->err, CKPT_E_FORMAT,
                             "unknown dtype '%.40s', expected a safetensors dtype such as BF16",
                             name);
        memcpy(p->dtype_name, name, len);
        p->dtype_len = len;
        p->dtype = (uint8_t)dtype;
    }
    e->dtype = p->dtype;
    if (!wrapped)
        return CKPT_OK;
    if (!ckpt_st_accept(s, ':') || !ckpt_st_null(s) || !ckpt_st_accept(s, '}'))
        return ckpt_st_unexpected(s, "a dtype string");
    return CKPT_OK;
}

static ckpt_status parse_shape(parser *p, ckpt_st_entry *e)
{
    ckpt_st_scan *s = &p->scan;
    int64_t dims[CKPT_MAX_RANK] = {0};
    size_t rank = 0;
    if (!ckpt_st_accept(s, '['))
        return ckpt_st_unexpected(s, "an array of dimensions");
    if (!ckpt_st_accept(s, ']')) {
        do {
            if (rank == CKPT_MAX_RANK)
                return ckpt_fail(s->err, CKPT_E_UNSUPPORTED, "rank is above the limit of %d",
                                 CKPT_MAX_RANK);
            ckpt_status status = ckpt_st_uint(s, &dims[rank++]);
            if (status != CKPT_OK)
                return status;
        } while (ckpt_st_accept(s, ','));
        if (!ckpt_st_accept(s, ']'))
            return ckpt_st_unexpected(s, "',' or ']'");
    }
    e->rank = (uint8_t)rank;
    e->dims = ckpt_arena_memdup(p->arena, dims, rank * sizeof *dims);
    return e->dims == NULL ? out_of_memory(s->err) : CKPT_OK;
}

static ckpt_status parse_offsets(parser *p, ckpt_st_entry *e)
{
    ckpt_st_scan *s = &p->scan;
    int64_t begin, end;
    ckpt_status status;
    if (!ckpt_st_accept(s, '['))
        return ckpt_st_unexpected(s, "an array of two offsets");
    if ((status = ckpt_st_uint(s, &begin)) != CKPT_OK)
        return status;
    if (!ckpt_st_accept(s, ','))
        return ckpt_st_unexpected(s, "a second offset");
    if ((status = ckpt_st_uint(s, &end)) != CKPT_OK)
        return status;
    if (!ckpt_st_accept(s, ']'))
        return ckpt_st_unexpected(s, "']' after two offsets");
    e->begin = (uint64_t)begin;
    e->end = (uint64_t)end;
    return CKPT_OK;
}

typedef ckpt_status (*field_fn)(parser *p, ckpt_st_entry *e);

/* In the order of the array form. */
static const struct {
    const char *name;
    size_t len;
    field_fn parse;
} fields[] = {
    {"dtype",        5,  parse_dtype  },
    {"shape",        5,  parse_shape  },
    {"data_offsets", 12, parse_offsets},
};
#define N_FIELDS (sizeof fields / sizeof *fields)

static ckpt_status parse_array_form(parser *p, ckpt_st_entry *e)
{
    ckpt_st_scan *s = &p->scan;
    for (size_t i = 0; i < N_FIELDS; i++) {
        ckpt_status status = fields[i].parse(p, e);
        if (status != CKPT_OK)
            return status;
        if (!ckpt_st_accept(s, i + 1 < N_FIELDS ? ',' : ']'))
            return ckpt_st_unexpected(s, "[dtype, shape, data_offsets]");
    }
    return CKPT_OK;
}

static ckpt_status parse_field(parser *p, ckpt_st_entry *e, unsigned *seen)
{
    char *key;
    size_t len, i = 0;
    ckpt_status status = ckpt_st_key(&p->scan, &key, &len);
    if (status != CKPT_OK)
        return status;
    while (i < N_FIELDS && (len != fields[i].len || memcmp(key, fields[i].name, len) != 0))
        i++;
    if (i == N_FIELDS)
        return ckpt_st_skip(&p->scan, 2);
    if (*seen & 1u << i)
        return ckpt_fail(p->scan.err, CKPT_E_FORMAT, "duplicate field '%s'", fields[i].name);
    *seen |= 1u << i;
    status = fields[i].parse(p, e);
    if (status != CKPT_OK)
        ckpt_err_frame(p->scan.err, "%s", fields[i].name);
    return status;
}

static ckpt_status parse_tensor(parser *p, ckpt_st_entry *e)
{
    ckpt_st_scan *s = &p->scan;
    unsigned seen = 0;
    if (ckpt_st_accept(s, '['))
        return parse_array_form(p, e);
    if (!ckpt_st_accept(s, '{'))
        return ckpt_st_unexpected(s, "a tensor description (object)");
    if (!ckpt_st_accept(s, '}')) {
        do {
            ckpt_status status = parse_field(p, e, &seen);
            if (status != CKPT_OK)
                return status;
        } while (ckpt_st_accept(s, ','));
        if (!ckpt_st_accept(s, '}'))
            return ckpt_st_unexpected(s, "',' or '}'");
    }
    for (size_t i = 0; i < N_FIELDS; i++)
        if (!(seen & 1u << i))
            return ckpt_fail(s->err, CKPT_E_FORMAT, "field '%s' is missing", fields[i].name);
    return CKPT_OK;
}

typedef struct pair {
    const char *key, *value; /* inside the header text, unescaped */
} pair;

static int compare_pairs(const void *a, const void *b)
{
    const pair *x = a, *y = b;
    int order = strcmp(x->key, y->key);
    /* Both point into one text: later pairs have higher addresses. */
    return order != 0 ? order : x->value < y->value ? -1 : x->value > y->value;
}

/* Through text, because adding keys one by one to a JSON object is quadratic. */
static ckpt_status build_metadata(pair *pairs, size_t n, ckpt_json **out, ckpt_err *err)
{
    ckpt_buf text = {0};
    if (n > 1)
        qsort(pairs, n, sizeof *pairs, compare_pairs);
    ckpt_buf_putc(&text, '{');
    for (size_t i = 0; i < n; i++) {
        if (i + 1 < n && strcmp(pairs[i].key, pairs[i + 1].key) == 0)
            continue;
        if (text.len > 1)
            ckpt_buf_putc(&text, ',');
        ckpt_st_quote(&text, pairs[i].key, false);
        ckpt_buf_putc(&text, ':');
        ckpt_st_quote(&text, pairs[i].value, false);
    }
    ckpt_buf_putc(&text, '}');
    ckpt_status status = text.failed ? out_of_memory(err)
                                     : ckpt_json_parse((const char *)text.data, text.len, out, err);
    ckpt_buf_release(&text);
    return status;
}

static ckpt_status parse_pair(ckpt_st_scan *s, pair *out)
{
    char *key, *value;
    size_t key_len, value_len;
    ckpt_status status = ckpt_st_key(s, &key, &key_len);
    if (status != CKPT_OK)
        return status;
    ckpt_st_space(s);
    if (*s->p != '"') {
        ckpt_st_unexpected(s, "a string");
        ckpt_err_frame(s->err, "key '%.160s'", key);
        return CKPT_E_FORMAT;
    }
    if ((status = ckpt_st_string(s, &value, &value_len)) != CKPT_OK)
        return status;
    if (strlen(key) != key_len || strlen(value) != value_len)
        return ckpt_fail(s->err, CKPT_E_FORMAT, "key '%.160s': contains a NUL character", key);
    *out = (pair){key, value};
    return CKPT_OK;
}

static ckpt_status parse_metadata(parser *p)
{
    ckpt_st_scan *s = &p->scan;
    pair *pairs = NULL;
    size_t n = 0, cap = 0;
    ckpt_status status = CKPT_OK;
    ckpt_err *err = s->err;
    if (ckpt_st_null(s))
        return CKPT_OK;
    if (!ckpt_st_accept(s, '{'))
        return ckpt_st_unexpected(s, "an object of strings or null");
    if (!ckpt_st_accept(s, '}')) {
        do {
            void *array = pairs;
            if (n == METADATA_MAX_KEYS) {
                status = ckpt_fail(err, CKPT_E_UNSUPPORTED, "more than %zu keys", n);
                goto done;
            }
            status = ckpt_grow(&array, &cap, n + 1, sizeof *pairs, err);
            pairs = array;
            CKPT_CHECK(status);
            CKPT_CHECK(parse_pair(s, &pairs[n++]));
        } while (ckpt_st_accept(s, ','));
        if (!ckpt_st_accept(s, '}')) {
            status = ckpt_st_unexpected(s, "',' or '}'");
            goto done;
        }
    }
    status = build_metadata(pairs, n, p->metadata, err);
done:
    free(pairs);
    return status;
}

static ckpt_status parse_member(parser *p)
{
    ckpt_st_scan *s = &p->scan;
    ckpt_err *err = s->err;
    char *name;
    size_t len;
    ckpt_status status = ckpt_st_key(s, &name, &len);
    if (status != CKPT_OK)
        return status;
    if (strcmp(name, "__metadata__") == 0 && len == 12) {
        status =
            p->metadata_seen ? ckpt_fail(err, CKPT_E_FORMAT, "duplicate key") : parse_metadata(p);
        p->metadata_seen = true;
        if (status != CKPT_OK)
            ckpt_err_frame(err, "__metadata__");
        return status;
    }
    if (strlen(name) != len)
        return ckpt_fail(err, CKPT_E_FORMAT, "tensor name '%.160s...' contains a NUL character",
                         name);
    ckpt_st_entry e = {.file = p->file};
    CKPT_TRY(parse_tensor(p, &e), "tensor '%.160s'", name);
    e.name = ckpt_arena_memdup(p->arena, name, len + 1);
    if (e.name == NULL)
        return out_of_memory(err);
    CKPT_TRY(table_add(p->table, &e, len, err), "tensor '%.160s'", name);
done:
    return status;
}

ckpt_status ckpt_st_header_parse(char *text, size_t n, uint32_t file, ckpt_arena *arena,
                                 ckpt_st_table *table, ckpt_json **metadata, ckpt_err *err)
{
    parser p = {
        .scan = {text, text, text + n, err},
        .arena = arena,
        .table = table,
        .metadata = metadata,
        .file = file
    };
    ckpt_st_scan *s = &p.scan;
    *metadata = NULL;
    ckpt_status status = ckpt_st_utf8(text, n, err);
    if (status != CKPT_OK)
        return status;
    if (!ckpt_st_accept(s, '{'))
        return ckpt_st_unexpected(s, "'{'");
    if (!ckpt_st_accept(s, '}')) {
        do {
            CKPT_CHECK(parse_member(&p));
        } while (ckpt_st_accept(s, ','));
        if (!ckpt_st_accept(s, '}')) {
            status = ckpt_st_unexpected(s, "',' or '}'");
            goto done;
        }
    }
    ckpt_st_space(s);
    if (s->p != s->end)
        status = ckpt_st_unexpected(s, "nothing but white space after '}'");
done:
    if (status != CKPT_OK) {
        ckpt_json_free(*metadata);
        *metadata = NULL;
    }
    return status;
}

/* ---- validation ----------------------------------------------------------------------------- */

static void format_shape(const ckpt_st_entry *e, char *out, size_t cap)
{
    size_t used = (size_t)snprintf(out, cap, "[");
    for (int i = 0; i < e->rank && used < cap; i++)
        used += (size_t)snprintf(out + used, cap - used, "%s%" PRId64, i ? "," : "", e->dims[i]);
    if (used < cap)
        snprintf(out + used, cap - used, "]");
}

static ckpt_status check_size(const ckpt_st_entry *e, ckpt_err *err)
{
    const ckpt_dtype_info *info = ckpt_dtype_get((ckpt_dtype)e->dtype);
    int64_t numel;
    uint64_t bits = 0;
    bool fits = ckpt_numel(e->rank, e->dims, &numel) &&
                ckpt_mul_u64((uint64_t)numel, (uint64_t)info->bits, &bits);
    if (fits && bits % 8 == 0 && bits / 8 == e->end - e->begin)
        return CKPT_OK;
    char shape[CKPT_MAX_RANK * 21 + 3];
    format_shape(e, shape, sizeof shape);
    if (!fits)
        return ckpt_fail(err, CKPT_E_FORMAT, "dtype %s shape %s overflows a 64-bit size",
                         info->name, shape);
    if (bits % 8 != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "dtype %s shape %s is %" PRIu64 " bits, not a whole number of bytes",
                         info->name, shape, bits);
    return ckpt_fail(err, CKPT_E_FORMAT,
                     "dtype %s shape %s needs %" PRIu64 " bytes, data_offsets give %" PRIu64,
                     info->name, shape, bits / 8, e->end - e->begin);
}

static ckpt_status check_entry(const ckpt_st_entry *e, const ckpt_st_entry *before, uint64_t at,
                               uint64_t data_size, ckpt_err *err)
{
    if (e->end < e->begin)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "data_offsets [%" PRIu64 ",%" PRIu64 "] end before they begin", e->begin,
                         e->end);
    if (e->begin > at)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "hole at byte %" PRIu64 ": no tensor covers bytes %" PRIu64 " to %" PRIu64,
                         at, at, e->begin);
    if (e->begin < at)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "overlap at byte %" PRIu64 ": tensor '%.160s' ends at byte %" PRIu64,
                         e->begin, before == NULL ? "" : before->name, at);
    ckpt_status status = check_size(e, err);
    if (status == CKPT_OK && e->end > data_size)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "offset %" PRIu64 " past end %" PRIu64 " of the data: file is truncated",
                         e->end, data_size);
    return status;
}

typedef struct range {
    uint64_t begin, end;
    size_t entry;
} range;

static int compare_ranges(const void *a, const void *b)
{
    const range *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

/* Ranges by offset, or *out NULL when the header lists them so already, as the serializer does. */
static ckpt_status sort_ranges(const ckpt_st_table *table, size_t first, range **out, ckpt_err *err)
{
    const ckpt_st_entry *e = table->entries;
    size_t i = first + 1, n = table->n - first;
    *out = NULL;
    while (i < table->n && (e[i - 1].begin < e[i].begin ||
                            (e[i - 1].begin == e[i].begin && e[i - 1].end <= e[i].end)))
        i++;
    if (i >= table->n)
        return CKPT_OK;
    range *ranges = calloc(n, sizeof *ranges);
    if (ranges == NULL)
        return out_of_memory(err);
    for (i = 0; i < n; i++)
        ranges[i] = (range){e[first + i].begin, e[first + i].end, first + i};
    qsort(ranges, n, sizeof *ranges, compare_ranges);
    *out = ranges;
    return CKPT_OK;
}

ckpt_status ckpt_st_header_check(const ckpt_st_table *table, size_t first, uint64_t data_size,
                                 ckpt_err *err)
{
    range *ranges;
    uint64_t at = 0;
    const ckpt_st_entry *before = NULL;
    ckpt_status status = sort_ranges(table, first, &ranges, err);
    if (status != CKPT_OK)
        return status;
    for (size_t i = first; i < table->n; i++) {
        const ckpt_st_entry *e = &table->entries[ranges == NULL ? i : ranges[i - first].entry];
        CKPT_TRY(check_entry(e, before, at, data_size, err), "tensor '%.160s'", e->name);
        at = e->end;
        before = e;
    }
    if (at < data_size)
        status = ckpt_fail(err, CKPT_E_FORMAT,
                           "%" PRIu64 " bytes after the last tensor: data ends at byte %" PRIu64
                           ", the file's data section has %" PRIu64,
                           data_size - at, at, data_size);
done:
    free(ranges);
    return status;
}

/* ---- strings -------------------------------------------------------------------------------- */

static unsigned decode_utf8(const char *s, size_t len)
{
    static const unsigned char lead[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    unsigned cp = (unsigned char)s[0] & (unsigned)lead[len];
    for (size_t i = 1; i < len; i++)
        cp = cp << 6 | ((unsigned char)s[i] & 0x3fu);
    return cp;
}

static void put_escaped(ckpt_buf *out, unsigned cp)
{
    if (cp >= 0x10000)
        ckpt_buf_printf(out, "\\u%04x\\u%04x", 0xd800 + ((cp - 0x10000) >> 10),
                        0xdc00 + ((cp - 0x10000) & 0x3ff));
    else
        ckpt_buf_printf(out, "\\u%04x", cp);
}

void ckpt_st_quote(ckpt_buf *out, const char *s, bool ascii)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    size_t n = strlen(s), run = 0;
    ckpt_buf_putc(out, '"');
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\' && (c < 0x7f || !ascii)) {
            i++;
            continue;
        }
        size_t len = c < 0x80 ? 1 : ckpt_utf8_len(s + i, n - i);
        const char *simple = strchr(from, c);
        if (len == 0)
            len = 1;
        ckpt_buf_append(out, s + run, i - run);
        if (simple != NULL)
            ckpt_buf_printf(out, "\\%c", to[simple - from]);
        else
            put_escaped(out, decode_utf8(s + i, len));
        i += len;
        run = i;
    }
    ckpt_buf_append(out, s + run, n - run);
    ckpt_buf_putc(out, '"');
}
