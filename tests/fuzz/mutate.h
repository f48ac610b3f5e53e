/* Changes of fuzz inputs that know a little of their structure (mutate.c), and inputs that are
 * directories (tree.c). */
#ifndef CKPT_FUZZ_MUTATE_H
#define CKPT_FUZZ_MUTATE_H

#include <stddef.h>
#include <stdint.h>

/* A number below `below` from one stream, which mutate_seed starts. */
void mutate_seed(uint64_t seed);
uint32_t mutate_draw(uint32_t below);

typedef enum mutate_kind {
    MUTATE_BYTES,
    MUTATE_PICKLE, /* opcodes with plausible arguments */
    MUTATE_ZIP,    /* fields of records */
    MUTATE_JSON,   /* numbers, brackets and words for one another */
    MUTATE_TREE    /* the contents of one file of a directory, by its name */
} mutate_kind;

/* Change p[0 .. n), room for max; the new length. */
size_t mutate(mutate_kind kind, uint8_t *p, size_t n, size_t max);

/* A directory as bytes: frames of u8 name (a number in a table of names), u16 length (little endian),
 * contents; what is left at the end is the contents of the last.
 *
 * One frame at p + at; false at the end. */
typedef struct tree_frame {
    size_t at, head, len; /* contents are p[at + head .. at + head + len) */
    uint8_t name;
} tree_frame;
int tree_next(const uint8_t *p, size_t n, tree_frame *frame);

/* Write the files below dir, which is made, and remove them again. Abort on a failing call. Names are
 * relative, with at most one directory; NULL ends them. */
void tree_write(const char *const *names, const char *dir, const uint8_t *p, size_t n);
void tree_remove(const char *const *names, const char *dir);
/* One whole file; abort on a failing call. */
void tree_put(const char *path, const void *p, size_t n);

#endif
