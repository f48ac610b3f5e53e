/* Texts filled to a width: help, and lines of results that are longer than a terminal is wide. */
#ifndef CKPT_WRAP_H
#define CKPT_WRAP_H

#include "arena.h"

/* Append n bytes of text to a line whose first `at` columns are used, in lines of fewer than `columns`
 * columns; 0: one line. Line ends in it are blanks. Lines after the first begin with `indent` blanks, those
 * before the last end with `more`. It breaks at blanks, which it drops; a word that is longer than a line
 * after '|', ',' or '/', or anywhere. Bytes count as columns: what is not ASCII is broken early. */
void ckpt_wrap(ckpt_buf *out, const char *text, size_t n, size_t at, size_t indent,
               const char *more, int columns);
/* Notes: lines that begin with a blank are kept as lines, others are paragraphs, filled anew where one of
 * their lines is too long. Ends with a line end. */
void ckpt_wrap_notes(ckpt_buf *out, const char *text, int columns);
/* Lines of two blanks and a command, which go on behind a backslash so that they can be copied. */
void ckpt_wrap_commands(ckpt_buf *out, const char *text, int columns);

#endif
