/* Inside of the child process that describes an HDF5 file: hdf5_scan.c walks, hdf5_dataset.c looks
 * at one dataset. */
#ifndef CKPT_HDF5_SCAN_H
#define CKPT_HDF5_SCAN_H

#include "hdf5_file.h"

#include <hdf5.h>

typedef struct ckpt_hdf5_describe {
    ckpt_buf *out;
    hid_t file;
    uint64_t user_block; /* bytes in front of the file's own */
    bool failed;         /* a FAIL record was written */
} ckpt_hdf5_describe;

void ckpt_hdf5_put_u64(ckpt_hdf5_describe *d, uint64_t v);
void ckpt_hdf5_put_bytes(ckpt_hdf5_describe *d, const void *p, size_t n);
void ckpt_hdf5_put_text(ckpt_hdf5_describe *d, ckpt_hdf5_record kind, const char *name,
                        const char *text, size_t n);
void ckpt_hdf5_put_number(ckpt_hdf5_describe *d, const char *name, int64_t value);
void ckpt_hdf5_put_fail(ckpt_hdf5_describe *d, ckpt_status code, const char *text);
void ckpt_hdf5_put_end(ckpt_hdf5_describe *d);

/* Append the record of a dataset; false after a FAIL record. */
bool ckpt_hdf5_describe_dataset(ckpt_hdf5_describe *d, hid_t dataset, const char *name);

/* hdf5_driver.c. The interface of drivers changed after 1.12. */
#define CKPT_HDF5_DRIVER (!H5_VERSION_GE(1, 13, 0))
bool ckpt_hdf5_use_driver(hid_t access);
/* Place of the chunk that starts at `offset`, elements; false if there is none. */
bool ckpt_hdf5_locate(const ckpt_hdf5_describe *d, hid_t dataset, const hsize_t *offset,
                      ckpt_hdf5_chunk *out);

#endif
