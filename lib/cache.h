/* What reading a source leaves in the page cache. */
#ifndef CKPT_CACHE_H
#define CKPT_CACHE_H

#include "source.h"

/* The bulk of the source is about to be read, more or less in order: the kernel reads further ahead,
 * and if the files are more than half of `available` bytes of memory (0: what the system says is
 * available now), pages go again CKPT_CACHE_LAG bytes behind the reading, so that a checkpoint
 * does not drive everything else out of memory. May be called again. Best effort: never fails. */
#define CKPT_CACHE_LAG ((uint64_t)64 << 20)
void ckpt_cache_stream(ckpt_source *src, uint64_t available);
/* A file was read up to `end`. */
void ckpt_cache_passed(const ckpt_source *src, uint32_t file, uint64_t end);

#endif
