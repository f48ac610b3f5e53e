#include "cache.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

struct ckpt_cache_mark {
    atomic_ullong passed; /* bytes before it are no longer wanted */
};

/* MemAvailable of /proc/meminfo, in bytes; 0: unknown. */
static uint64_t memory_available(void)
{
    char line[128];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return 0;
    while (kib == 0 && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) != 1)
            kib = 0;
    fclose(f);
    return kib * 1024;
}

void ckpt_cache_stream(ckpt_source *src, uint64_t available)
{
    uint64_t total = 0;
    if (src->passed != NULL)
        return;
    for (size_t i = 0; i < src->n_files; i++) {
        const ckpt_file *f = &src->files[i];
        if (f->fd < 0 || !f->is_data)
            continue;
        total += f->sparse ? 0 : f->size;
        (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    if (available == 0)
        available = memory_available();
    if (available == 0 || total <= available / 2)
        return;
    src->passed = ckpt_arena_array(&src->arena, src->n_files, sizeof *src->passed);
    for (size_t i = 0; src->passed != NULL && i < src->n_files; i++)
        atomic_init(&src->passed[i].passed, 0);
}

void ckpt_cache_passed(const ckpt_source *src, uint32_t file, uint64_t end)
{
    if (src->passed == NULL || src->files[file].fd < 0)
        return;
    atomic_ullong *passed = &src->passed[file].passed;
    unsigned long long before = atomic_load(passed);
    /* Who moves the mark lets the pages between go. */
    if (end >= before + 2 * CKPT_CACHE_LAG &&
        atomic_compare_exchange_strong(passed, &before, end - CKPT_CACHE_LAG))
        (void)posix_fadvise(src->files[file].fd, (off_t)before,
                            (off_t)(end - CKPT_CACHE_LAG - before), POSIX_FADV_DONTNEED);
}
