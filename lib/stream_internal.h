/* Between stream_convert.c, which writes pieces and hashes leaves, and stream_order.c, which decides in
 * what order. */
#ifndef CKPT_STREAM_INTERNAL_H
#define CKPT_STREAM_INTERNAL_H

#include "job.h"
#include "journal.h"

#define CKPT_PAGE 4096

/* State of one output file. */
typedef struct ckpt_stream_file {
    char *path;
    int fd, direct_fd;
    int read_fd;        /* for what has left the window; opened when first needed */
    atomic_ullong done; /* bytes written and bytes in the digest, together */
    ckpt_sha256_stream whole, rest;
    uint32_t crc; /* of the payload segment in progress or just ended */
} ckpt_stream_file;

/* Neighbouring files that are written in step. */
typedef struct ckpt_lane {
    uint32_t first, n;  /* files */
    uint64_t step;      /* bytes of each file that one piece covers */
    uint64_t size;      /* of the longest file that this run writes */
    uint64_t passed;    /* bytes of each that went through the turnstile */
    uint32_t first_seq; /* in seqs: numbers of its pieces */
    bool served;        /* somebody passes what was offered */
    int waiting;        /* workers, for `passed` */
    pthread_mutex_t lock;
    pthread_cond_t turn;
} ckpt_lane;

#define CKPT_NO_LANE UINT32_MAX
typedef struct ckpt_item_of_work {
    uint64_t offset; /* of the piece in the files */
    size_t first_leaf;
    uint32_t lane; /* CKPT_NO_LANE: leaves alone */
    uint32_t n_leaves;
    uint32_t seq; /* of the piece */
} ckpt_item_of_work;

/* A piece that is filled and awaits its digest. */
typedef struct ckpt_offer {
    const ckpt_item_of_work *item;
    ckpt_slot *slot;  /* NULL: not offered yet */
    atomic_uint left; /* of digest and write */
} ckpt_offer;

typedef struct ckpt_stream_job {
    ckpt_plan *plan;
    ckpt_arena *arena;
    const char *dir;
    ckpt_journal *journal; /* files that are done already, and where to enter others; or NULL */
    ckpt_stream_file *files;
    ckpt_lane *lanes;
    size_t n_lanes;
    uint32_t side_by_side; /* lanes that advance together */
    uint32_t *lane_of;     /* per file */
    uint32_t *seqs;        /* of all pieces, lane by lane: their number in the order of work */
    size_t n_pieces;
    ckpt_offer *offers;    /* per number */
    ckpt_leaf_list leaves; /* that this process hashes while it writes, by due */
    ckpt_leaf_list late;   /* of files of several processes: when all are written */
    ckpt_leaf_shares shares;
    ckpt_written written;
    ckpt_item_of_work *items;
    size_t n_items;
    pthread_mutex_t open_lock;
    atomic_bool no_sharing; /* of blocks with the source: it was tried */
    bool sparse;            /* the source has holes: what is zero becomes one */
    const ckpt_share *share;
    int *owner;  /* rank that writes each file; NULL: this process, all */
    bool beside; /* leaves are hashed beside the file digest of a lane with one file */
} ckpt_stream_job;

/* Bytes [lo, hi) of a file; none if they are equal. */
typedef struct ckpt_range {
    uint64_t lo, hi;
} ckpt_range;

/* Bytes of a file that this run writes. */
uint64_t ckpt_stream_size(const ckpt_stream_job *c, size_t f);
/* Lanes, for so many processors; *waves: some have several files. */
ckpt_status ckpt_stream_lanes(ckpt_stream_job *c, int cores, bool *waves,
                              ckpt_err *err) CKPT_MUST_USE;
/* Pieces of at most `slot` bytes and leaves in the order of work of so many workers and processors.
 * Leaves come with those of all results and are divided: this process's, and late ones. */
ckpt_status ckpt_stream_order(ckpt_stream_job *c, uint64_t slot, int workers, int cores,
                              ckpt_err *err) CKPT_MUST_USE;

/* ---- output files (stream_files.c) --------------------------------------------------------------- */

/* First segment that ends after `offset`. */
size_t ckpt_stream_seg(const ckpt_out_file *file, uint64_t offset);
/* Written by an earlier run. */
bool ckpt_stream_is_done(const ckpt_stream_job *c, size_t f);
ckpt_status ckpt_stream_open_files(ckpt_stream_job *c, ckpt_err *err) CKPT_MUST_USE;
void ckpt_stream_close_files(ckpt_stream_job *c);
/* Let blocks of [lo, hi) be those of the source, where they can: *shared, page-aligned, was not read. */
ckpt_status ckpt_stream_share(ckpt_stream_job *c, uint32_t f, uint64_t lo, uint64_t hi,
                              ckpt_range *shared, ckpt_err *err) CKPT_MUST_USE;
/* [lo, hi) of file f without what is shared; buf and lo page-aligned. */
ckpt_status ckpt_stream_write(ckpt_stream_job *c, uint32_t f, const uint8_t *buf, uint64_t lo,
                              uint64_t hi, const ckpt_range *shared, ckpt_err *err) CKPT_MUST_USE;
/* n more bytes of file f went into its digest. When all are written and digested, the file is synced,
 * closed and entered into the journal. */
ckpt_status ckpt_stream_count(ckpt_stream_job *c, uint32_t f, uint64_t n,
                              ckpt_err *err) CKPT_MUST_USE;
/* For ckpt_written: what was written (or shared) is read. self: the job. */
ckpt_status ckpt_stream_read_back(void *self, uint32_t f, void *buf, size_t n, uint64_t offset,
                                  ckpt_err *err) CKPT_MUST_USE;
ckpt_journal_entry ckpt_stream_file_digests(const ckpt_stream_file *of);

#endif
