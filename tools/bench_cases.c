/* Cases of `ckpt bench`: reading them, and running one. */
#include "bench.h"
#include "checked.h"
#include "io.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_WORDS = 64, MAX_CASES = 256, MAX_PAIRS = 100 };
#define SETTLE_FROM                                                                                \
    ((uint64_t)1 << 30) /* bytes of a source, from which the host's memory matters */

/* ---- words ------------------------------------------------------------------------------------- */

const char *bench_source_path(bench *b, size_t i)
{
    return ckpt_path_join(&b->tool->arena, b->dir, bench_sources[i].file);
}

/* What a placeholder at the start of `word` stands for, and its length; NULL: there is none. */
static const char *placeholder(bench *b, const char *word, size_t *len)
{
    const char *python = getenv("PYTHON");
    const char *const names[] = {"{out}", "{dir}", "{here}", "{python}"};
    const char *const values[] = {b->out, b->dir, b->here,
                                  python != NULL && *python != '\0' ? python : "python3"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(word, names[i], *len = strlen(names[i])) == 0)
            return values[i];
    for (size_t i = 0; i < BENCH_SOURCES; i++)
        if (strncmp(word, bench_sources[i].word, *len = strlen(bench_sources[i].word)) == 0)
            return bench_source_path(b, i);
    return NULL;
}

/* A word with its placeholders replaced; NULL: no memory. */
static const char *fill(bench *b, const char *word)
{
    ckpt_buf text = {0};
    while (*word != '\0') {
        size_t len = 0;
        const char *value = *word == '{' ? placeholder(b, word, &len) : NULL;
        if (value != NULL) {
            ckpt_buf_puts(&text, value);
            word += len;
        } else {
            ckpt_buf_putc(&text, *word++);
        }
    }
    ckpt_buf_putc(&text, 0);
    const char *out =
        text.failed ? NULL : ckpt_arena_strdup(&b->tool->arena, (const char *)text.data);
    ckpt_buf_release(&text);
    return out;
}

static ckpt_status fill_words(bench *b, const char *const **words, ckpt_err *err)
{
    const char *const *from = *words;
    size_t n = 0;
    while (from != NULL && from[n] != NULL)
        n++;
    if (n == 0)
        return CKPT_OK;
    const char **out = ckpt_arena_array(&b->tool->arena, n + 1, sizeof *out);
    if (out == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t i = 0; i < n; i++)
        if ((out[i] = fill(b, from[i])) == NULL)
            return ckpt_tool_no_memory(err);
    out[n] = NULL;
    *words = out;
    return CKPT_OK;
}

/* Keep a case if it is wanted; its texts must last. */
static ckpt_status add(bench *b, bench_case c, ckpt_err *err)
{
    ckpt_status status;
    void *cases = b->cases;
    if (b->only.n > 0 && !ckpt_glob_any(&b->only, c.name))
        return CKPT_OK;
    if (b->n == MAX_CASES)
        return ckpt_fail(err, CKPT_E_FORMAT, "more than %d cases", MAX_CASES);
    const char *const **const lists[] = {&c.subject, &c.baseline, &c.prepare, &c.check, &c.probe};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        CKPT_CHECK(fill_words(b, lists[i], err));
    if (c.needs == NULL)
        c.needs = c.baseline[0];
    CKPT_CHECK(ckpt_grow(&cases, &b->cap, b->n + 1, sizeof *b->cases, err));
    b->cases = cases;
    b->cases[b->n++] = c;
done:
    return status;
}

ckpt_status bench_add_own(bench *b, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; status == CKPT_OK && i < bench_n_cases; i++)
        status = add(b, bench_cases[i], err);
    return status;
}

/* ---- files of cases ---------------------------------------------------------------------------- */

/* An absent member leaves *out NULL. */
static ckpt_status read_words(bench *b, const ckpt_json *c, const char *key, bool required,
                              const char *const **out, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_get(c, key);
    int n = ckpt_json_size(list);
    if (list == NULL && !required)
        return CKPT_OK;
    if (!ckpt_json_is_array(list) || n < 1 || n > MAX_WORDS)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s': expected an array of 1 to %d words", key,
                         MAX_WORDS);
    const char **words = ckpt_arena_array(&b->tool->arena, (size_t)n + 1, sizeof *words);
    if (words == NULL)
        return ckpt_tool_no_memory(err);
    n = 0;
    for (const ckpt_json *w = ckpt_json_child(list); w != NULL; w = ckpt_json_next(w)) {
        if (ckpt_json_string(w) == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s': word %d is not a string", key, n + 1);
        words[n] = ckpt_arena_strdup(&b->tool->arena, ckpt_json_string(w));
        if (words[n++] == NULL)
            return ckpt_tool_no_memory(err);
    }
    words[n] = NULL;
    *out = words;
    return CKPT_OK;
}

static ckpt_status read_number(const ckpt_json *j, const char *key, double *out, ckpt_err *err)
{
    const ckpt_json *v = ckpt_json_get(j, key);
    if (v != NULL && (!ckpt_json_double(v, out) || !(*out > 0)))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s': expected a number above 0", key);
    return CKPT_OK;
}

static ckpt_status check_keys(const ckpt_json *j, ckpt_err *err)
{
    static const char *const keys[] = {"name",   "subject", "baseline", "beside",
                                       "target", "prepare", "check",    "needs",
                                       "probe",  "memory",  "limit",    "cold"};
    for (const ckpt_json *m = ckpt_json_child(j); m != NULL; m = ckpt_json_next(m)) {
        size_t k = 0;
        while (k < sizeof keys / sizeof *keys && strcmp(keys[k], ckpt_json_key(m)) != 0)
            k++;
        if (k == sizeof keys / sizeof *keys)
            return ckpt_fail(err, CKPT_E_FORMAT, "unknown member '%s'", ckpt_json_key(m));
    }
    return CKPT_OK;
}

static ckpt_status read_case(bench *b, const ckpt_json *j, ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena *arena = &b->tool->arena;
    const char *name = ckpt_json_string(ckpt_json_get(j, "name"));
    const char *beside = ckpt_json_string(ckpt_json_get(j, "beside"));
    const char *needs = ckpt_json_string(ckpt_json_get(j, "needs"));
    const ckpt_json *cold = ckpt_json_get(j, "cold");
    if (name == NULL || beside == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "a case needs 'name' and 'beside', which are texts");
    bench_case c = {.name = ckpt_arena_strdup(arena, name),
                    .beside = ckpt_arena_strdup(arena, beside),
                    .needs = needs != NULL ? ckpt_arena_strdup(arena, needs) : NULL};
    if (c.name == NULL || c.beside == NULL || (needs != NULL && c.needs == NULL))
        return ckpt_tool_no_memory(err);
    CKPT_TRY(check_keys(j, err), "case '%s'", name);
    CKPT_TRY(read_number(j, "target", &c.target, err), "case '%s'", name);
    CKPT_TRY(read_number(j, "memory", &c.memory, err), "case '%s'", name);
    CKPT_TRY(read_number(j, "limit", &c.limit, err), "case '%s'", name);
    if (cold != NULL && !ckpt_json_bool(cold, &c.cold))
        return ckpt_fail(err, CKPT_E_FORMAT, "case '%s': 'cold' is neither true nor false", name);
    CKPT_TRY(read_words(b, j, "subject", true, &c.subject, err), "case '%s'", name);
    CKPT_TRY(read_words(b, j, "baseline", true, &c.baseline, err), "case '%s'", name);
    CKPT_TRY(read_words(b, j, "prepare", false, &c.prepare, err), "case '%s'", name);
    CKPT_TRY(read_words(b, j, "check", false, &c.check, err), "case '%s'", name);
    CKPT_TRY(read_words(b, j, "probe", false, &c.probe, err), "case '%s'", name);
    status = add(b, c, err);
done:
    return status;
}

ckpt_status bench_add_file(bench *b, const char *text, size_t n, ckpt_err *err)
{
    ckpt_json *doc = NULL;
    ckpt_status status = ckpt_json_parse(text, n, &doc, err);
    if (status == CKPT_OK && !ckpt_json_is_array(doc))
        status = ckpt_fail(err, CKPT_E_FORMAT, "expected an array of cases");
    for (const ckpt_json *c = ckpt_json_child(doc); status == CKPT_OK && c != NULL;
         c = ckpt_json_next(c))
        status = read_case(b, c, err);
    ckpt_json_free(doc);
    return status;
}

/* ---- running ----------------------------------------------------------------------------------- */

static bool names(const char *const *words, const char *path)
{
    for (; words != NULL && *words != NULL; words++)
        if (strstr(*words, path) != NULL)
            return true;
    return false;
}

ckpt_status bench_make_sources(bench *b, const bench_case *c, ckpt_err *err)
{
    const char *const *const lists[] = {c->subject, c->baseline, c->prepare, c->check, c->probe};
    for (size_t i = 0; i < BENCH_SOURCES; i++) {
        const bench_source *s = &bench_sources[i];
        const char *path = bench_source_path(b, i);
        bool wanted = false;
        if (path == NULL)
            return ckpt_tool_no_memory(err);
        for (size_t k = 0; k < sizeof lists / sizeof *lists; k++)
            wanted = wanted || names(lists[k], path);
        if (!wanted || b->made[i])
            continue;
        ckpt_status status = bench_write_source(s, path, bench_source_size(s, b->size), err);
        if (status != CKPT_OK)
            return status;
        b->made[i] = true;
    }
    return CKPT_OK;
}

/* The reason why a case cannot be run here goes to c->skipped; other failures are errors. */
static ckpt_status skip(bench *b, bench_case *c, const char *why, ckpt_err *err)
{
    c->skipped = ckpt_arena_strdup(&b->tool->arena, why);
    return c->skipped != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

/* Is everything there that the case needs? */
static ckpt_status ready(bench *b, bench_case *c, ckpt_err *err)
{
    bench_run run;
    ckpt_err why = {0};
    if (c->needs[0] != '@' && !bench_has_program(c->needs))
        return skip(b, c, ckpt_arena_printf(&b->tool->arena, "%s not found", c->needs), err);
    ckpt_status status = c->probe != NULL ? bench_child(c->probe, b->errors, &run, &why) : CKPT_OK;
    if (status == CKPT_OK)
        return CKPT_OK;
    if (status == CKPT_E_MISMATCH || status == CKPT_E_UNSUPPORTED)
        return skip(b, c, why.text, err);
    return ckpt_fail(err, status, "%s", why.text);
}

static ckpt_status once(bench *b, bench_case *c, const char *const *argv, bench_run *run,
                        ckpt_err *err)
{
    ckpt_status status;
    double kept = 0;
    ckpt_remove_tree(b->out);
    CKPT_CHECK(ckpt_mkdirs(b->out, err));
    if (c->cold) {
        CKPT_CHECK(bench_drop_cache(b->dir, &kept, err));
        if (kept > 0.05)
            return ckpt_fail(
                err, CKPT_E_UNSUPPORTED,
                "%.0f %% of a file stays in memory when it is dropped from the page cache",
                100 * kept);
    }
    CKPT_CHECK(bench_child(argv, b->errors, run, err));
done:
    return status;
}

/* Does it work on as much as the size says? Others need no memory that the host would have to find. */
static bool is_large(bench *b, const bench_case *c)
{
    const char *src = bench_source_path(b, 0);
    return src != NULL && (names(c->subject, src) || names(c->baseline, src));
}

static ckpt_status measure(bench *b, bench_case *c, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    size_t pairs = (size_t)b->pairs;
    bench_run own[MAX_PAIRS], other[MAX_PAIRS], first;
    if (c->prepare != NULL)
        CKPT_CHECK(bench_child(c->prepare, b->errors, &first, err));
    if (c->subject[0][0] != '@') /* untimed: caches, and what is checked */
        CKPT_CHECK(once(b, c, c->subject, &first, err));
    if (c->check != NULL)
        CKPT_CHECK(bench_child(c->check, b->errors, &first, err));
    if (b->size >= SETTLE_FROM && is_large(b, c))
        CKPT_CHECK(
            bench_child((const char *const[]){"@settle", "3GiB", NULL}, b->errors, &first, err));
    for (size_t i = 0; i < pairs; i++) {
        CKPT_CHECK(once(b, c, c->subject, &own[i], err));
        CKPT_CHECK(once(b, c, c->baseline, &other[i], err));
        CKPT_CHECK(ckpt_check_interrupted(err));
    }
    c->own = bench_median(own, pairs);
    c->other = bench_median(other, pairs);
    c->ratio = c->other.median / c->own.median;
done:
    return status;
}

ckpt_status bench_run_case(bench *b, bench_case *c, ckpt_err *err)
{
    ckpt_status status;
    ckpt_err why = {0};
    CKPT_CHECK(ready(b, c, err));
    if (c->skipped != NULL)
        goto done;
    CKPT_CHECK(bench_make_sources(b, c, err));
    status = measure(b, c, &why);
    if (status == CKPT_E_UNSUPPORTED)
        status = skip(b, c, why.text, err);
    else if (status != CKPT_OK)
        status = ckpt_fail(err, status, "%s", why.text);
done:
    return status;
}
