/* A read-only file driver for libhdf5 that can tell where raw data lies without reading it.
 *
 * libhdf5 before 1.14 has no way to list the chunks of a dataset in less than quadratic time:
 * H5Dget_chunk_info and its relatives walk over the whole index for each. Reading one chunk raw
 * (H5Dread_chunk) looks it up in logarithmic time, and ends in a read of the driver, which only has to
 * note the place. That address is one in the file, user block included. */
#include "hdf5_scan.h"

#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#if CKPT_HDF5_DRIVER

typedef struct driver_file {
    H5FD_t base; /* the library's part comes first */
    int fd;
    haddr_t eoa, eof;
    struct stat id;
    bool noting; /* raw reads are noted instead of done */
    haddr_t at;
    size_t n;
    int reads;
} driver_file;

static H5FD_t *driver_open(const char *name, unsigned flags, hid_t fapl, haddr_t max)
{
    driver_file *f = calloc(1, sizeof *f);
    (void)fapl;
    (void)max;
    if (f == NULL)
        return NULL;
    if ((flags & (H5F_ACC_RDWR | H5F_ACC_TRUNC | H5F_ACC_CREAT)) != 0) {
        free(f);
        return NULL;
    }
    f->fd = open(name, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0 || fstat(f->fd, &f->id) != 0)
        ckpt_hdf5_unreadable(errno);
    f->eof = (haddr_t)f->id.st_size;
    return &f->base;
}

static herr_t driver_close(H5FD_t *file)
{
    driver_file *f = (driver_file *)file;
    close(f->fd);
    free(f);
    return 0;
}

static int driver_compare(const H5FD_t *a, const H5FD_t *b)
{
    const struct stat *x = &((const driver_file *)a)->id, *y = &((const driver_file *)b)->id;
    if (x->st_dev != y->st_dev)
        return x->st_dev < y->st_dev ? -1 : 1;
    return x->st_ino < y->st_ino ? -1 : x->st_ino > y->st_ino;
}

static herr_t driver_query(const H5FD_t *file, unsigned long *flags)
{
    (void)file;
    *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA;
    return 0;
}

static haddr_t driver_get_eoa(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const driver_file *)file)->eoa;
}

static herr_t driver_set_eoa(H5FD_t *file, H5FD_mem_t type, haddr_t at)
{
    (void)type;
    ((driver_file *)file)->eoa = at;
    return 0;
}

static haddr_t driver_get_eof(const H5FD_t *file, H5FD_mem_t type)
{
    (void)type;
    return ((const driver_file *)file)->eof;
}

static herr_t driver_read(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t at, size_t n,
                          void *out)
{
    driver_file *f = (driver_file *)file;
    (void)dxpl;
    if (at > f->eof || n > f->eof - at)
        return -1;
    if (f->noting && type == H5FD_MEM_DRAW) {
        f->at = at;
        f->n = n;
        f->reads++;
        return 0;
    }
    errno = 0;
    if (ckpt_pread_full(f->fd, out, n, at, NULL) == CKPT_OK)
        return 0;
    if (errno != 0)
        ckpt_hdf5_unreadable(errno);
    return -1;
}

static herr_t driver_write(H5FD_t *file, H5FD_mem_t type, hid_t dxpl, haddr_t at, size_t n,
                           const void *data)
{
    (void)file;
    (void)type;
    (void)dxpl;
    (void)at;
    (void)n;
    (void)data;
    return -1;
}

static herr_t driver_handle(H5FD_t *file, hid_t access, void **out)
{
    (void)access;
    *out = file;
    return 0;
}

static const H5FD_class_t driver = {
    .name = "ckpt",
    .maxaddr = ((haddr_t)1 << 62) - 1,
    .fc_degree = H5F_CLOSE_STRONG,
    .open = driver_open,
    .close = driver_close,
    .cmp = driver_compare,
    .query = driver_query,
    .get_eoa = driver_get_eoa,
    .set_eoa = driver_set_eoa,
    .get_eof = driver_get_eof,
    .get_handle = driver_handle,
    .read = driver_read,
    .write = driver_write,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

bool ckpt_hdf5_use_driver(hid_t access)
{
    hid_t id = H5FDregister(&driver);
    return id >= 0 && H5Pset_driver(access, id, NULL) >= 0;
}

bool ckpt_hdf5_locate(const ckpt_hdf5_describe *d, hid_t dataset, const hsize_t *offset,
                      ckpt_hdf5_chunk *out)
{
    void *handle = NULL;
    if (H5Fget_vfd_handle(d->file, H5P_DEFAULT, &handle) < 0 || handle == NULL)
        return false;
    driver_file *f = handle;
    uint8_t nothing[8];
    uint32_t mask = 0;
    f->noting = true;
    f->reads = 0;
    herr_t rc = H5Dread_chunk(dataset, H5P_DEFAULT, offset, &mask, nothing);
    f->noting = false;
    if (rc < 0 || f->reads != 1 || f->n == 0 || f->n > UINT32_MAX)
        return false;
    *out = (ckpt_hdf5_chunk){.offset = f->at, .size = (uint32_t)f->n, .mask = mask};
    return true;
}

#else

bool ckpt_hdf5_use_driver(hid_t access)
{
    (void)access;
    return true;
}

/* 1.14.4 began to add the user block. */
bool ckpt_hdf5_locate(const ckpt_hdf5_describe *d, hid_t dataset, const hsize_t *offset,
                      ckpt_hdf5_chunk *out)
{
    haddr_t at = HADDR_UNDEF;
    hsize_t size = 0;
    unsigned mask = 0;
    if (H5Dget_chunk_info_by_coord(dataset, offset, &mask, &at, &size) < 0 || at == HADDR_UNDEF ||
        size == 0 || size > UINT32_MAX)
        return false;
    uint64_t add = H5_VERSION_GE(1, 14, 4) ? 0 : d->user_block;
    *out = (ckpt_hdf5_chunk){.offset = at + add, .size = (uint32_t)size, .mask = mask};
    return true;
}

#endif
