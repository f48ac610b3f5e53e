/* CRC-32 of zip archives (reflected 0xEDB88320). */
#ifndef CKPT_CRC_H
#define CKPT_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Continue `crc` (0 at the start) over n bytes. */
uint32_t ckpt_crc32(uint32_t crc, const void *p, size_t n);

#endif
