/* lseek(2), SEEK_DATA and SEEK_HOLE. Moving the descriptor's offset disturbs nobody: all reads are
 * positional. */
#define _GNU_SOURCE /* SEEK_DATA */
#include "hole.h"

#include "checked.h"
#include "io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

bool ckpt_is_sparse(const struct stat *st)
{
    uint64_t held = (uint64_t)st->st_blocks * 512, size = (uint64_t)st->st_size;
    return S_ISREG(st->st_mode) && size >= (uint64_t)1 << 20 && held < size / 2;
}

ckpt_status ckpt_pread_holes(int fd, void *buf, size_t n, uint64_t offset, ckpt_err *err)
{
#ifdef SEEK_DATA
    uint8_t *out = buf;
    while (n > 0) {
        off_t data = lseek(fd, (off_t)offset, SEEK_DATA);
        if (data < 0 && errno != ENXIO)
            break;      /* no such question here: read */
        struct stat st; /* behind the end there is no hole either: reading says so */
        if (data < 0 && (fstat(fd, &st) != 0 || offset + n > (uint64_t)st.st_size))
            break;
        uint64_t hole = data < 0 ? n : ckpt_min_u64((uint64_t)data - offset, n);
        memset(out, 0, (size_t)hole);
        out += hole;
        offset += hole;
        n -= (size_t)hole;
        if (n == 0)
            return CKPT_OK;
        off_t end = lseek(fd, (off_t)offset, SEEK_HOLE);
        if (end <= (off_t)offset)
            break;
        size_t now = (size_t)ckpt_min_u64((uint64_t)end - offset, n);
        ckpt_status status = ckpt_pread_full(fd, out, now, offset, err);
        if (status != CKPT_OK)
            return status;
        out += now;
        offset += now;
        n -= now;
    }
    return n > 0 ? ckpt_pread_full(fd, out, n, offset, err) : CKPT_OK;
#else
    return ckpt_pread_full(fd, buf, n, offset, err);
#endif
}

bool ckpt_all_zero(const uint8_t *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}
