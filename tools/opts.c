#include "opts.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "wrap.h"

#define MAX_WORD 127
#define HELP_COLUMN 30

ckpt_status ckpt_strings_push(ckpt_strings *list, const char *s, ckpt_err *err)
{
    void *items = list->items;
    ckpt_status status = ckpt_grow(&items, &list->cap, list->n + 1, sizeof *list->items, err);
    list->items = items;
    if (status == CKPT_OK)
        list->items[list->n++] = s;
    return status;
}

void ckpt_strings_release(ckpt_strings *list)
{
    free(list->items);
    memset(list, 0, sizeof *list);
}

size_t ckpt_distance(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b);
    size_t row[MAX_WORD + 1];
    if (na > MAX_WORD || nb > MAX_WORD)
        return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++)
        row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[nb];
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool unit_scale(const char *unit, double *scale)
{
    static const struct {
        const char *name;
        double scale;
    } units[] = {
        {"",    1              },
        {"B",   1              },
        {"kB",  1e3            },
        {"KB",  1e3            },
        {"MB",  1e6            },
        {"GB",  1e9            },
        {"TB",  1e12           },
        {"KiB", 1024.0         },
        {"MiB", 1048576.0      },
        {"GiB", 1073741824.0   },
        {"TiB", 1099511627776.0},
        {"K",   1024.0         },
        {"M",   1048576.0      },
        {"G",   1073741824.0   },
        {"T",   1099511627776.0}
    };
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(unit, units[i].name) == 0) {
            *scale = units[i].scale;
            return true;
        }
    }
    return false;
}

ckpt_status ckpt_parse_size(const char *text, uint64_t *out, ckpt_err *err)
{
    char *end = NULL;
    double scale = 1;
    if (text[0] < '0' || text[0] > '9' || text[1] == 'x' || text[1] == 'X')
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' is not a size such as 8MiB or 5GB", text);
    double v = strtod(text, &end);
    while (*end == ' ')
        end++;
    if (!unit_scale(end, &scale))
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' is not a size such as 8MiB or 5GB", text);
    v = floor(v * scale);
    if (!(v < 9.2e18))
        return ckpt_fail(err, CKPT_E_USAGE, "size '%s' is too large", text);
    *out = (uint64_t)v;
    return CKPT_OK;
}

static ckpt_status parse_int(const char *text, int64_t min, int64_t max, int64_t *out,
                             ckpt_err *err)
{
    char *end = NULL;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (*text == '\0' || *end != '\0' || errno != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' is not a whole number", text);
    if (v < min || v > max)
        return ckpt_fail(err, CKPT_E_USAGE, "%s is outside %lld..%lld", text, (long long)min,
                         (long long)max);
    *out = v;
    return CKPT_OK;
}

static ckpt_status parse_real(const char *text, double *out, ckpt_err *err)
{
    char *end = NULL;
    double v = strtod(text, &end);
    if (*text == '\0' || *end != '\0' || !(v >= 0) || isinf(v))
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' is not a number of at least 0", text);
    *out = v;
    return CKPT_OK;
}

static ckpt_status parse_choice(const char *choices, const char *text, int *out, ckpt_err *err)
{
    size_t n = strlen(text);
    int index = 0;
    for (const char *p = choices;; index++) {
        size_t len = strcspn(p, "|");
        if (len == n && strncmp(p, text, n) == 0) {
            *out = index;
            return CKPT_OK;
        }
        if (p[len] == '\0')
            break;
        p += len + 1;
    }
    return ckpt_fail(err, CKPT_E_USAGE, "'%s' is not one of %s", text, choices);
}

static ckpt_status store(const ckpt_opt *opt, void *base, const char *text, ckpt_err *err)
{
    void *field = (char *)base + opt->offset;
    switch (opt->kind) {
    case CKPT_OPT_FLAG:
        *(bool *)field = true;
        return CKPT_OK;
    case CKPT_OPT_INT:
        return parse_int(text, opt->min, opt->max, field, err);
    case CKPT_OPT_RANK:
        if (strcmp(text, "none") == 0) {
            *(int64_t *)field = -1;
            return CKPT_OK;
        }
        return parse_int(text, 1, 1 << 20, field, err);
    case CKPT_OPT_SIZE:
        return ckpt_parse_size(text, field, err);
    case CKPT_OPT_REAL:
        return parse_real(text, field, err);
    case CKPT_OPT_STRING:
        *(const char **)field = text;
        return CKPT_OK;
    case CKPT_OPT_CHOICE:
        return parse_choice(opt->arg, text, field, err);
    case CKPT_OPT_LIST:
        return ckpt_strings_push(field, text, err);
    }
    return ckpt_fail(err, CKPT_E_INTERNAL, "option table");
}

/* ---- parsing --------------------------------------------------------------------------------- */

static ckpt_status unknown(const ckpt_opt_table *tables, size_t n_tables, const char *name,
                           ckpt_err *err)
{
    const char *best = NULL;
    size_t best_distance = strlen(name) / 3 + 2; /* farther is no likely misspelling */
    for (size_t t = 0; t < n_tables; t++) {
        for (const ckpt_opt *o = tables[t].rows; o->name != NULL; o++) {
            size_t d = ckpt_distance(name, o->name);
            if (d < best_distance) {
                best_distance = d;
                best = o->name;
            }
        }
    }
    if (best != NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "unknown option '--%s'; did you mean '--%s'?", name,
                         best);
    return ckpt_fail(err, CKPT_E_USAGE, "unknown option '--%s'; see --help", name);
}

static const ckpt_opt *find(const ckpt_opt_table *tables, size_t n_tables, const char *name,
                            const ckpt_opt_table **table)
{
    for (size_t t = 0; t < n_tables; t++) {
        for (const ckpt_opt *o = tables[t].rows; o->name != NULL; o++) {
            if (strcmp(o->name, name) == 0) {
                *table = &tables[t];
                return o;
            }
        }
    }
    return NULL;
}

/* That it was given, and what was said before; lists take all. */
static ckpt_status note(const ckpt_opt_table *table, const ckpt_opt *opt, const char *value,
                        ckpt_opt_agains *again, ckpt_err *err)
{
    const size_t row = (size_t)(opt - table->rows);
    if (table->given != NULL)
        table->given[row] = true;
    if (table->values == NULL || value == NULL || opt->kind == CKPT_OPT_LIST)
        return CKPT_OK;
    const char *before = table->values[row];
    table->values[row] = value;
    if (again == NULL || before == NULL || strcmp(before, value) == 0)
        return CKPT_OK;
    void *items = again->items;
    ckpt_status status = ckpt_grow(&items, &again->cap, again->n + 1, sizeof *again->items, err);
    again->items = items;
    if (status == CKPT_OK)
        again->items[again->n++] = (ckpt_opt_again){opt->name, before, value};
    return status;
}

/* One option at argv[0]; *used receives how many arguments it took. */
static ckpt_status parse_one(const ckpt_opt_table *tables, size_t n_tables, int argc, char **argv,
                             int *used, ckpt_opt_agains *again, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    char name[MAX_WORD + 1];
    const char *text = argv[0] + 2;
    size_t len = strcspn(text, "=");
    const ckpt_opt_table *table = NULL;
    if (len > MAX_WORD)
        return ckpt_fail(err, CKPT_E_USAGE, "unknown option '%s'", argv[0]);
    memcpy(name, text, len);
    name[len] = '\0';
    const ckpt_opt *opt = find(tables, n_tables, name, &table);
    if (opt == NULL)
        return unknown(tables, n_tables, name, err);
    const char *value = text[len] == '=' ? text + len + 1 : NULL;
    *used = 1;
    if (opt->kind == CKPT_OPT_FLAG && value != NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "option '--%s' takes no value", name);
    if (opt->kind != CKPT_OPT_FLAG && value == NULL) {
        if (argc < 2)
            return ckpt_fail(err, CKPT_E_USAGE, "option '--%s' needs a value %s", name, opt->arg);
        value = argv[1];
        *used = 2;
    }
    CKPT_TRY(store(opt, table->base, value, err), "option '--%s'", name);
    CKPT_CHECK(note(table, opt, value, again, err));
done:
    return status;
}

ckpt_status ckpt_opts_parse(const ckpt_opt_table *tables, size_t n_tables, int argc, char **argv,
                            ckpt_strings *operands, ckpt_opt_agains *again, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool options = true;
    for (int i = 0; i < argc;) {
        const char *arg = argv[i];
        int used = 1;
        if (options && strcmp(arg, "--") == 0) {
            options = false;
        } else if (options && strcmp(arg, "-h") == 0) {
            char help[] = "--help", *one[] = {help};
            CKPT_CHECK(parse_one(tables, n_tables, 1, one, &used, NULL, err));
        } else if (options && arg[0] == '-' && arg[1] == '-') {
            CKPT_CHECK(parse_one(tables, n_tables, argc - i, argv + i, &used, again, err));
        } else if (options && arg[0] == '-' && arg[1] != '\0') {
            return ckpt_fail(err, CKPT_E_USAGE, "unknown option '%s'; options have two dashes",
                             arg);
        } else {
            CKPT_CHECK(ckpt_strings_push(operands, arg, err));
        }
        i += used;
    }
done:
    return status;
}

void ckpt_opts_help(const ckpt_opt_table *table, size_t n, int columns, ckpt_buf *out)
{
    /* Without room for two columns the text is below the name. */
    const size_t column = columns > 0 && columns < HELP_COLUMN + 28 ? 6 : HELP_COLUMN;
    ckpt_buf_printf(out, "%s:\n", table->title);
    for (const ckpt_opt *o = table->rows; o->name != NULL && n > 0; o++, n--) {
        size_t start = out->len;
        ckpt_buf_printf(out, "  --%s%s", o->name, o->arg != NULL ? " " : "");
        if (o->arg != NULL)
            ckpt_wrap(out, o->arg, strlen(o->arg), out->len - start, 6, "", columns);
        size_t width = out->len - start;
        if (width >= column) {
            ckpt_buf_putc(out, '\n');
            width = 0;
        }
        ckpt_buf_printf(out, "%*s", (int)(column - width), "");
        ckpt_wrap(out, o->help, strlen(o->help), column, column, "", columns);
        ckpt_buf_putc(out, '\n');
    }
}
