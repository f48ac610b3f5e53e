#include "hf_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checked.h"
#include "io.h"
#include "st_header.h"

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory listing files");
}

/* ---- shards --------------------------------------------------------------------------------- */

/* Shards are first counted as they open, then renumbered as they closed. */
ckpt_status ckpt_hf_assign(ckpt_hf_shards *s, ckpt_err *err)
{
    uint64_t size = 0, header = s->header;
    uint32_t closed = 0, open = 0, n_open = 0;
    uint32_t *number = calloc(s->n + 2, sizeof *number);
    if (number == NULL)
        return no_memory(err);
    uint32_t current = open++;
    for (size_t i = 0; i < s->n; i++) {
        uint64_t entry = s->entries != NULL ? s->entries[i] : 0, sum;
        if (s->bytes[i] > s->limit) {
            s->shard[i] = open++;
            number[s->shard[i]] = closed++;
            continue;
        }
        bool fits = ckpt_add_u64(size, s->bytes[i], &sum) && sum <= s->limit;
        if (n_open > 0 && (!fits || header + entry > s->header_max)) {
            number[current] = closed++;
            current = open++;
            size = n_open = 0;
            header = s->header;
        }
        s->shard[i] = current;
        size += s->bytes[i];
        header += entry;
        n_open++;
    }
    if (n_open > 0 || closed == 0)
        number[current] = closed++;
    for (size_t i = 0; i < s->n; i++)
        s->shard[i] = number[s->shard[i]];
    s->n_shards = closed;
    free(number);
    return CKPT_OK;
}

const char *ckpt_hf_shard_name(ckpt_arena *arena, const char *stem, const char *suffix, uint32_t i,
                               uint32_t n, bool numbered)
{
    if (n == 1 && !numbered)
        return ckpt_arena_printf(arena, "%s%s", stem, suffix);
    return ckpt_arena_printf(arena, "%s-%05" PRIu32 "-of-%05" PRIu32 "%s", stem, i + 1, n, suffix);
}

/* ---- index and configuration ---------------------------------------------------------------- */

static int compare_weights(const void *a, const void *b)
{
    return strcmp(((const ckpt_hf_weight *)a)->name, ((const ckpt_hf_weight *)b)->name);
}

static void put_index_metadata(ckpt_buf *b, const ckpt_json *const *extras, size_t n,
                               uint64_t parameters, uint64_t bytes)
{
    const struct {
        const char *key;
        uint64_t value;
    } totals[] = {
        {"total_parameters", parameters},
        {"total_size",       bytes     }
    };
    size_t i = 0, t = 0;
    const char *separator = "\n    ";
    while (i < n || t < 2) {
        const char *key = i < n ? ckpt_json_key(extras[i]) : NULL;
        int order = key == NULL ? 1 : t == 2 ? -1 : strcmp(key, totals[t].key);
        if (key != NULL && (order == 0 || strcmp(key, "format") == 0)) {
            i++;
            continue;
        }
        ckpt_buf_puts(b, separator);
        separator = ",\n    ";
        if (order < 0) {
            ckpt_st_quote(b, key, true);
            ckpt_buf_puts(b, ": ");
            ckpt_st_quote(b, ckpt_json_string(extras[i++]), true);
        } else {
            ckpt_buf_printf(b, "\"%s\": %" PRIu64, totals[t].key, totals[t].value);
            t++;
        }
    }
}

void ckpt_hf_index_text(ckpt_buf *out, ckpt_hf_weight *weights, size_t n,
                        const ckpt_json *const *extras, size_t n_extras, uint64_t parameters,
                        uint64_t bytes)
{
    if (n > 1)
        qsort(weights, n, sizeof *weights, compare_weights);
    ckpt_buf_puts(out, "{\n  \"metadata\": {");
    put_index_metadata(out, extras, n_extras, parameters, bytes);
    ckpt_buf_puts(out, "\n  },\n  \"weight_map\": {");
    for (size_t i = 0; i < n; i++) {
        ckpt_buf_puts(out, i == 0 ? "\n    " : ",\n    ");
        ckpt_st_quote(out, weights[i].name, true);
        ckpt_buf_printf(out, ": \"%s\"", weights[i].file);
    }
    ckpt_buf_puts(out, "\n  }\n}\n");
}

/* json.dumps escapes everything outside ASCII; such bytes occur only inside strings. */
static void put_ascii(ckpt_buf *b, const ckpt_buf *from)
{
    const char *s = (const char *)from->data;
    for (size_t i = 0; i < from->len;) {
        size_t len = ckpt_utf8_len(s + i, from->len - i);
        if (len < 2) {
            ckpt_buf_putc(b, s[i++]);
            continue;
        }
        char one[5] = {0};
        ckpt_buf quoted = {0};
        memcpy(one, s + i, len);
        ckpt_st_quote(&quoted, one, true);
        b->failed |= quoted.failed;
        if (!quoted.failed)
            ckpt_buf_append(b, quoted.data + 1, quoted.len - 2);
        ckpt_buf_release(&quoted);
        i += len;
    }
}

void ckpt_hf_config_text(ckpt_buf *out, const ckpt_json *config)
{
    ckpt_buf raw = {0};
    if (ckpt_json_print(config, 2, true, &raw) && !raw.failed)
        put_ascii(out, &raw);
    else
        out->failed = true;
    ckpt_buf_release(&raw);
    ckpt_buf_putc(out, '\n');
}

/* ---- reading -------------------------------------------------------------------------------- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

bool ckpt_hf_listed(char *const *names, size_t n, const char *name)
{
    return n != 0 && bsearch(&name, names, n, sizeof *names, compare_names) != NULL;
}

ckpt_status ckpt_hf_index_shards(const ckpt_json *map, const char *index, char *const *names,
                                 size_t n_names, ckpt_arena *arena, const char ***shards,
                                 size_t *n_shards, ckpt_err *err)
{
    size_t i = 0, kept = 0, absent = 0, n = (size_t)ckpt_json_size(map);
    const char *first_absent = NULL, **list = ckpt_arena_array(arena, n, sizeof *list);
    if (list == NULL)
        return no_memory(err);
    for (const ckpt_json *item = ckpt_json_child(map); item != NULL; item = ckpt_json_next(item)) {
        const char *file = ckpt_json_string(item);
        if (file == NULL || !ckpt_name_is_safe(file, false))
            return ckpt_fail(
                err, CKPT_E_FORMAT,
                "weight_map: tensor '%.160s': expected a plain file name, found %s%.160s%s",
                ckpt_json_key(item), file == NULL ? "another type" : "'", file == NULL ? "" : file,
                file == NULL ? "" : "'");
        list[i++] = file;
    }
    if (n > 1)
        qsort(list, n, sizeof *list, compare_names);
    for (i = 0; i < n; i++) {
        if (kept > 0 && strcmp(list[kept - 1], list[i]) == 0)
            continue;
        list[kept++] = list[i];
        if (!ckpt_hf_listed(names, n_names, list[i]) && absent++ == 0)
            first_absent = list[i];
    }
    *shards = list;
    *n_shards = kept;
    if (absent > 1)
        return ckpt_fail(
            err, CKPT_E_FORMAT,
            "shard '%.160s' and %zu others of %zu that %s lists are absent: incomplete "
            "download?",
            first_absent, absent - 1, kept, index);
    if (absent == 1)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "shard '%.160s' that %s lists is absent: incomplete download?",
                         first_absent, index);
    return CKPT_OK;
}

/* STEM-00002-of-00004SUFFIX, digits only. */
static bool read_number(const char *name, const char *stem, const char *suffix, int *of)
{
    size_t n = strlen(stem);
    int at, end = 0;
    return strncmp(name, stem, n) == 0 && sscanf(name + n, "-%5d-of-%5d%n", &at, of, &end) == 2 &&
           end != 0 && strcmp(name + n + end, suffix) == 0;
}

ckpt_status ckpt_hf_numbering(const char *const *shards, size_t n_shards, const char *stem,
                              const char *suffix, char *const *names, size_t n_names,
                              bool *numbered, ckpt_err *err)
{
    *numbered = false;
    for (size_t i = 0; i < n_shards && !*numbered; i++) {
        int of;
        if (!read_number(shards[i], stem, suffix, &of))
            continue;
        *numbered = true;
        for (int k = 1; k <= of; k++) {
            char name[128];
            snprintf(name, sizeof name, "%s-%05d-of-%05d%s", stem, k, of, suffix);
            if (!ckpt_hf_listed(names, n_names, name))
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 "%s is missing, and there is no index (incomplete download?)",
                                 name);
        }
    }
    return CKPT_OK;
}
