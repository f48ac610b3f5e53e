/* Declarative option tables: one table parses the command line and prints the help.
 *
 * `--name=value`, `--name value` and, for flags, `--name`; `--` ends options. A table row says
 * where in the command's options structure the value goes. Errors are CKPT_E_USAGE with the
 * nearest known spelling. */
#ifndef CKPT_OPTS_H
#define CKPT_OPTS_H

#include "arena.h"

typedef struct ckpt_strings {
    const char **items;
    size_t n, cap;
} ckpt_strings;

typedef enum ckpt_opt_kind {
    CKPT_OPT_FLAG,   /* bool */
    CKPT_OPT_INT,    /* int64_t, from min to max */
    CKPT_OPT_RANK,   /* int64_t: at least 1, or the word "none" = -1 */
    CKPT_OPT_SIZE,   /* uint64_t bytes: 5GB decimal, 8MiB binary */
    CKPT_OPT_REAL,   /* double, >= 0 */
    CKPT_OPT_STRING, /* const char * */
    CKPT_OPT_CHOICE, /* int: index in `arg`, choices separated by '|' */
    CKPT_OPT_LIST    /* ckpt_strings: may be given several times */
} ckpt_opt_kind;

typedef struct ckpt_opt {
    const char *name; /* without dashes */
    ckpt_opt_kind kind;
    size_t offset;   /* of the field */
    const char *arg; /* placeholder in help, or the choices; NULL for flags */
    const char *help;
    int64_t min, max; /* INT */
} ckpt_opt;

typedef struct ckpt_opt_table {
    const char *title;
    const ckpt_opt *rows; /* ends with name NULL */
    void *base;           /* structure the offsets refer to */
    bool *given;          /* per row: it was on the command line; may be NULL */
    const char **values;  /* per row: its text there, the last one; may be NULL */
} ckpt_opt_table;

/* An option of one value that was given again with another one: the last counts, so that an override can be
 * appended to a command line, and the caller says so. */
typedef struct ckpt_opt_again {
    const char *name, *before, *value;
} ckpt_opt_again;

typedef struct ckpt_opt_agains {
    ckpt_opt_again *items;
    size_t n, cap;
} ckpt_opt_agains;

/* Split argv[0..argc) into options (stored through the tables) and operands. Both arrays end up in
 * the caller's storage; lists grow by malloc and are released with ckpt_strings_release. again: of tables with
 * values, in the order of the command line; may be NULL, else its items are freed by the caller. */
ckpt_status ckpt_opts_parse(const ckpt_opt_table *tables, size_t n_tables, int argc, char **argv,
                            ckpt_strings *operands, ckpt_opt_agains *again,
                            ckpt_err *err) CKPT_MUST_USE;
/* The first n options, texts wrapped to that width (wrap.h). */
void ckpt_opts_help(const ckpt_opt_table *table, size_t n, int columns, ckpt_buf *out);
/* "8MiB", "5GB", "4096", "1.5GiB" -> bytes. */
ckpt_status ckpt_parse_size(const char *text, uint64_t *out, ckpt_err *err) CKPT_MUST_USE;
ckpt_status ckpt_strings_push(ckpt_strings *list, const char *s, ckpt_err *err) CKPT_MUST_USE;
void ckpt_strings_release(ckpt_strings *list);

/* Edit distance for suggestions; texts beyond 127 bytes count as far apart. */
size_t ckpt_distance(const char *a, const char *b);

#endif
