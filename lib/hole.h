/* Holes of sparse files: not read, and not written where a source has them. */
#ifndef CKPT_HOLE_H
#define CKPT_HOLE_H

#include "err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

/* Whether a file occupies so much less than its size that asking for its holes pays. */
bool ckpt_is_sparse(const struct stat *st);
/* ckpt_pread_full for such a file: what lies in a hole is zeroed without going through the page
 * cache, which would otherwise fill with zeros. n > 0. */
ckpt_status ckpt_pread_holes(int fd, void *buf, size_t n, uint64_t offset,
                             ckpt_err *err) CKPT_MUST_USE;
bool ckpt_all_zero(const uint8_t *p, size_t n);

#endif
