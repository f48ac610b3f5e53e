/* Token sources and batches (data.h). Indexes are read in data_index.c. */
#include "data.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checked.h"
#include "data_internal.h"
#include "hash.h"
#include "io.h"
#include "le.h"
#include "philox.h"

struct ckpt_data {
    ckpt_data_opts opts;
    ckpt_data_kind kind;
    ckpt_data_file *files;
    size_t n_files;
    int64_t tokens, epoch;
};

static const char *const kind_names[] = {"auto", "bytes", "u16", "u32", "indexed"};
_Static_assert(sizeof kind_names / sizeof *kind_names == CKPT_DATA_KIND_COUNT, "a name a kind");

bool ckpt_data_kind_parse(const char *name, ckpt_data_kind *out)
{
    for (int i = 0; i < CKPT_DATA_KIND_COUNT; i++)
        if (strcmp(kind_names[i], name) == 0) {
            *out = (ckpt_data_kind)i;
            return true;
        }
    return false;
}

/* ---- opening ---------------------------------------------------------------------------------- */

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n > k && strcmp(name + n - k, end) == 0;
}

/* PREFIX of an indexed data set named PREFIX, PREFIX.idx or PREFIX.bin, plus a suffix. */
static char *sibling(ckpt_arena *arena, const char *path, const char *suffix)
{
    size_t n = strlen(path);
    if (ends_in(path, ".idx") || ends_in(path, ".bin"))
        n -= 4;
    return ckpt_arena_printf(arena, "%.*s%s", n > INT_MAX ? INT_MAX : (int)n, path, suffix);
}

static ckpt_status choose_kind(const char *path, ckpt_arena *arena, ckpt_data_kind *kind,
                               ckpt_err *err)
{
    const char *idx = sibling(arena, path, ".idx");
    if (idx == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    *kind = CKPT_DATA_BYTES;
    ckpt_entry own, index;
    ckpt_status status = ckpt_look(path, &own, err);
    if (status == CKPT_OK)
        status = ckpt_look(idx, &index, err);
    if (status != CKPT_OK)
        return status;
    if (ends_in(path, ".idx") ||
        ((ends_in(path, ".bin") || own == CKPT_ENTRY_NONE) && index != CKPT_ENTRY_NONE))
        *kind = CKPT_DATA_INDEXED;
    else if (ends_in(path, ".bin"))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "%s: a .bin without an .idx beside it: say whether its tokens are u16 or "
                         "u32",
                         path);
    return CKPT_OK;
}

static ckpt_status open_raw(ckpt_data_file *f, ckpt_data_kind kind, ckpt_err *err)
{
    uint64_t size;
    ckpt_status status = ckpt_open_read(f->path, &f->fd, &size, err);
    if (status != CKPT_OK)
        return status;
    f->type = kind == CKPT_DATA_BYTES ? CKPT_TOKEN_U8
              : kind == CKPT_DATA_U16 ? CKPT_TOKEN_U16
                                      : CKPT_TOKEN_U32;
    f->bytes = size;
    const uint64_t width = (uint64_t)ckpt_token_width(f->type);
    if (size % width != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "%s: %llu bytes are no whole number of %llu-byte tokens", f->path,
                         (unsigned long long)size, (unsigned long long)width);
    f->tokens = (int64_t)(size / width);
    return CKPT_OK;
}

static ckpt_status open_file(ckpt_data *d, const char *path, ckpt_err *err)
{
    ckpt_status status;
    ckpt_arena arena = {0};
    ckpt_data_kind kind = d->opts.kind;
    ckpt_data_file *f = &d->files[d->n_files];
    f->fd = -1;
    if (kind == CKPT_DATA_AUTO)
        CKPT_CHECK(choose_kind(path, &arena, &kind, err));
    if (d->n_files > 0 && kind != d->kind) {
        status =
            ckpt_fail(err, CKPT_E_USAGE, "%s is %s, but %s is %s: data files must be of one kind",
                      path, kind_names[kind], d->files[0].path, kind_names[d->kind]);
        goto done;
    }
    d->kind = kind;
    const char *name = kind == CKPT_DATA_INDEXED ? sibling(&arena, path, ".bin") : path;
    const char *idx = kind == CKPT_DATA_INDEXED ? sibling(&arena, path, ".idx") : NULL;
    f->path = name ? strdup(name) : NULL;
    if (f->path == NULL || (kind == CKPT_DATA_INDEXED && idx == NULL)) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    d->n_files++; /* from here on closing releases it */
    if (kind == CKPT_DATA_INDEXED)
        CKPT_CHECK(ckpt_data_index_open(f, idx, err));
    else
        CKPT_CHECK(open_raw(f, kind, err));
    f->first = d->tokens;
    if (!ckpt_add_i64(d->tokens, f->tokens, &d->tokens))
        status = ckpt_fail(err, CKPT_E_FORMAT, "%s: more than 2^63 tokens", path);
done:
    ckpt_arena_free(&arena);
    return status;
}

static ckpt_status check_opts(const ckpt_data_opts *o, size_t n_paths, ckpt_err *err)
{
    if (n_paths == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "data: no files");
    if (o->seq_len < 1 || o->seq_len > INT32_MAX)
        return ckpt_fail(err, CKPT_E_USAGE, "data: sequences of %lld tokens, expected 1 to %d",
                         (long long)o->seq_len, INT32_MAX);
    if (o->vocab < 0 || o->eod < -1)
        return ckpt_fail(err, CKPT_E_USAGE, "data: vocabulary %lld, end-of-document token %lld",
                         (long long)o->vocab, (long long)o->eod);
    if ((unsigned)o->kind >= CKPT_DATA_KIND_COUNT || o->n_starts < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "data: unknown kind of file");
    return CKPT_OK;
}

static ckpt_status check_length(ckpt_data *d, ckpt_err *err)
{
    const int64_t S = d->opts.seq_len, need = S + (d->opts.inner_labels ? 0 : 1);
    if (d->tokens < need)
        return ckpt_fail(
            err, CKPT_E_USAGE,
            "data: %lld tokens in all, but one sample of sequence length %lld takes %lld",
            (long long)d->tokens, (long long)S, (long long)need);
    d->epoch = (d->tokens - (need - S)) / S;
    if (d->opts.starts == NULL)
        return CKPT_OK;
    if (d->opts.n_starts == 0)
        return ckpt_fail(err, CKPT_E_USAGE, "data: an empty list of starts");
    d->epoch = d->opts.n_starts;
    for (int64_t i = 0; i < d->opts.n_starts; i++)
        if (d->opts.starts[i] < 0 || d->opts.starts[i] > d->tokens - need)
            return ckpt_fail(err, CKPT_E_USAGE, "data: start %lld is %lld, expected 0 to %lld",
                             (long long)i, (long long)d->opts.starts[i],
                             (long long)(d->tokens - need));
    return CKPT_OK;
}

ckpt_status ckpt_data_open(ckpt_data **out, const char *const *paths, size_t n_paths,
                           const ckpt_data_opts *opts, ckpt_err *err)
{
    ckpt_status status;
    *out = NULL;
    ckpt_data *d = calloc(1, sizeof *d);
    if (d == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(check_opts(opts, n_paths, err));
    d->opts = *opts;
    d->files = calloc(n_paths, sizeof *d->files);
    if (d->files == NULL) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
        goto done;
    }
    for (size_t i = 0; i < n_paths; i++)
        CKPT_CHECK(open_file(d, paths[i], err));
    CKPT_CHECK(check_length(d, err));
    *out = d;
    return CKPT_OK;
done:
    ckpt_data_close(d);
    return status;
}

void ckpt_data_close(ckpt_data *d)
{
    if (d == NULL)
        return;
    for (size_t i = 0; i < d->n_files; i++) {
        ckpt_data_file *f = &d->files[i];
        if (f->fd >= 0)
            close(f->fd);
        free(f->path);
        free(f->pointer);
        free(f->start);
        free(f->docs);
    }
    free(d->files);
    free(d);
}

int64_t ckpt_data_tokens(const ckpt_data *d)
{
    return d->tokens;
}

int64_t ckpt_data_epoch_samples(const ckpt_data *d)
{
    return d->epoch;
}

ckpt_data_kind ckpt_data_kind_of(const ckpt_data *d)
{
    return d->kind;
}

/* ---- identity --------------------------------------------------------------------------------- */

static void put(ckpt_buf *b, uint64_t v)
{
    uint8_t bytes[8];
    ckpt_put_u64(bytes, v);
    ckpt_buf_append(b, bytes, sizeof bytes);
}

ckpt_status ckpt_data_digest(const ckpt_data *d, uint8_t out[32], ckpt_err *err)
{
    ckpt_buf b = {0};
    const ckpt_data_opts *o = &d->opts;
    ckpt_buf_puts(&b, "ckpt.data.v1");
    const uint64_t fields[] = {(uint64_t)d->kind,    (uint64_t)o->seq_len, o->seed,
                               o->shuffle,           (uint64_t)o->eod,     o->split,
                               o->inner_labels,      d->n_files,           (uint64_t)d->tokens,
                               (uint64_t)o->n_starts};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        put(&b, fields[i]);
    for (int64_t i = 0; i < o->n_starts && o->starts != NULL; i++)
        put(&b, (uint64_t)o->starts[i]);
    for (size_t i = 0; i < d->n_files; i++) {
        const ckpt_data_file *f = &d->files[i];
        put(&b, f->bytes);
        put(&b, (uint64_t)f->type);
        put(&b, (uint64_t)f->n_seq);
        put(&b, (uint64_t)f->n_docs);
        ckpt_buf_append(&b, f->index_digest, sizeof f->index_digest);
    }
    if (b.failed) {
        ckpt_buf_release(&b);
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    }
    ckpt_sha256_stream hash;
    ckpt_sha256_stream_init(&hash);
    ckpt_sha256_stream_update2(&hash, b.data, b.len, NULL, NULL, 0);
    ckpt_sha256_stream_final(&hash, out);
    ckpt_buf_release(&b);
    return CKPT_OK;
}

/* ---- reading ---------------------------------------------------------------------------------- */

int ckpt_token_width(ckpt_token_type type)
{
    switch (type) {
    case CKPT_TOKEN_U8:
    case CKPT_TOKEN_I8:
        return 1;
    case CKPT_TOKEN_U16:
    case CKPT_TOKEN_I16:
        return 2;
    case CKPT_TOKEN_I64:
        return 8;
    case CKPT_TOKEN_U32:
    case CKPT_TOKEN_I32:
        break;
    }
    return 4;
}

/* A token as a number; what does not fit int64_t does not exist. */
static int64_t decode(ckpt_token_type type, const uint8_t *p)
{
    switch (type) {
    case CKPT_TOKEN_U8:
        return *p;
    case CKPT_TOKEN_I8:
        return (int8_t)*p;
    case CKPT_TOKEN_U16:
        return ckpt_get_u16(p);
    case CKPT_TOKEN_I16:
        return (int16_t)ckpt_get_u16(p);
    case CKPT_TOKEN_U32:
        return ckpt_get_u32(p);
    case CKPT_TOKEN_I64:
        return (int64_t)ckpt_get_u64(p);
    case CKPT_TOKEN_I32:
        break;
    }
    return (int32_t)ckpt_get_u32(p);
}

/* n tokens that lie together in the file from byte `offset`; `at` is the first one's number in it. */
static ckpt_status read_run(const ckpt_data *d, const ckpt_data_file *f, uint64_t offset,
                            int64_t at, int64_t n, int32_t *out, ckpt_err *err)
{
    uint8_t bytes[16384];
    const int64_t width = ckpt_token_width(f->type), room = (int64_t)sizeof bytes / width;
    const int64_t limit = d->opts.vocab > 0 ? d->opts.vocab : (int64_t)INT32_MAX + 1;
    for (int64_t done = 0; done < n;) {
        const int64_t k = ckpt_min_i64(room, n - done);
        ckpt_status status = ckpt_pread_full(f->fd, bytes, (size_t)(k * width),
                                             offset + (uint64_t)(done * width), err);
        if (status != CKPT_OK) {
            ckpt_err_frame(err, "%s", f->path);
            return status;
        }
        for (int64_t i = 0; i < k; i++) {
            const int64_t token = decode(f->type, bytes + i * width);
            if (token < 0 || token >= limit)
                return ckpt_fail(err, CKPT_E_FORMAT,
                                 "%s: token %lld is %lld, expected 0 to less than %lld", f->path,
                                 (long long)(at + done + i), (long long)token, (long long)limit);
            out[done + i] = (int32_t)token;
        }
        done += k;
    }
    return CKPT_OK;
}

/* Last of the n ascending values that is not above x; v[0] <= x. */
static int64_t find_last(const int64_t *v, int64_t n, int64_t x)
{
    int64_t lo = 0, hi = n;
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (v[mid] <= x)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* From token `at` of the file, sequence by sequence; those that follow each other in the data file
 * too are one read. */
static ckpt_status read_indexed(const ckpt_data *d, const ckpt_data_file *f, int64_t at, int64_t n,
                                int32_t *out, ckpt_err *err)
{
    const int64_t width = ckpt_token_width(f->type);
    int64_t s = find_last(f->start, f->n_seq, at);
    while (n > 0) {
        while (f->start[s + 1] <= at) /* empty sequences */
            s++;
        const int64_t offset = f->pointer[s] + (at - f->start[s]) * width;
        int64_t end = s + 1;
        while (end < f->n_seq && f->start[end] < at + n &&
               f->pointer[end] == f->pointer[s] + (f->start[end] - f->start[s]) * width)
            end++;
        const int64_t k = ckpt_min_i64(n, f->start[end] - at);
        ckpt_status status = read_run(d, f, (uint64_t)offset, at, k, out, err);
        if (status != CKPT_OK)
            return status;
        at += k;
        out += k;
        n -= k;
        s = ckpt_min_i64(end, f->n_seq - 1);
    }
    return CKPT_OK;
}

/* The file that token `at` of the stream is in. */
static size_t find_file(const ckpt_data *d, int64_t at)
{
    size_t i = d->n_files - 1;
    while (i > 0 && d->files[i].first > at)
        i--;
    return i;
}

ckpt_status ckpt_data_read(const ckpt_data *d, int64_t at, int64_t n, int32_t *out, ckpt_err *err)
{
    if (at < 0 || n < 0 || at > d->tokens || n > d->tokens - at)
        return ckpt_fail(err, CKPT_E_USAGE, "data: tokens %lld to %lld of %lld", (long long)at,
                         (long long)at + n, (long long)d->tokens);
    size_t i = n > 0 ? find_file(d, at) : 0;
    for (; n > 0; i++) {
        const ckpt_data_file *f = &d->files[i];
        const int64_t here = at - f->first, k = ckpt_min_i64(n, f->tokens - here);
        if (k <= 0)
            continue;
        ckpt_status status =
            f->start != NULL
                ? read_indexed(d, f, here, k, out, err)
                : read_run(d, f, (uint64_t)(here * ckpt_token_width(f->type)), here, k, out, err);
        if (status != CKPT_OK)
            return status;
        at += k;
        out += k;
        n -= k;
    }
    return CKPT_OK;
}

/* ---- batches ---------------------------------------------------------------------------------- */

int64_t ckpt_data_start(const ckpt_data *d, int64_t i)
{
    const int64_t in_epoch = i % d->epoch;
    if (d->opts.starts != NULL)
        return d->opts.starts[in_epoch];
    int64_t k = in_epoch;
    if (d->opts.shuffle)
        k = (int64_t)ckpt_philox_permute(d->opts.seed, CKPT_PHILOX_ORDER, (uint64_t)(i / d->epoch),
                                         (uint64_t)d->epoch, (uint64_t)in_epoch);
    return k * d->opts.seq_len;
}

/* First border of documents or files after token `at` of the stream; INT64_MAX if there is none. */
static int64_t next_border(const ckpt_data *d, int64_t at)
{
    const size_t i = find_file(d, at);
    const ckpt_data_file *f = &d->files[i];
    const int64_t here = at - f->first;
    if (f->n_docs > 0 && here >= 0) {
        /* docs are token numbers of document starts in the file, docs[0] = 0 */
        const int64_t k = find_last(f->docs, f->n_docs, here) + 1;
        if (k < f->n_docs)
            return f->first + f->docs[k];
    }
    return i + 1 < d->n_files ? d->files[i + 1].first : INT64_MAX;
}

/* Cut one sample into its documents: labels across a border go, cu grows. */
static void split_sample(const ckpt_data *d, int64_t at, int64_t base, const int32_t *ids,
                         int32_t *labels, int64_t *cu, int64_t *n_seq)
{
    const int64_t S = d->opts.seq_len;
    int64_t border = next_border(d, at);
    for (int64_t p = 0; p < S; p++) {
        const bool ends =
            at + p + 1 == border || (d->opts.eod >= 0 && ids[p] == (int32_t)d->opts.eod);
        if (!ends)
            continue;
        labels[p] = -1;
        if (at + p + 1 == border)
            border = next_border(d, border);
        if (p + 1 < S)
            cu[++*n_seq] = base + p + 1;
    }
}

ckpt_status ckpt_data_batch(const ckpt_data *d, int64_t first, int64_t step, int64_t n,
                            int32_t *ids, int32_t *labels, int64_t *cu, int64_t *n_seq,
                            ckpt_err *err)
{
    const int64_t S = d->opts.seq_len;
    if (first < 0 || step < 0 || n < 0)
        return ckpt_fail(err, CKPT_E_USAGE, "data: samples from %lld by %lld", (long long)first,
                         (long long)step);
    *n_seq = 0;
    cu[0] = 0;
    for (int64_t k = 0; k < n; k++, ids += S, labels += S) {
        int64_t i;
        if (!ckpt_mul_i64(k, step, &i) || !ckpt_add_i64(i, first, &i))
            return ckpt_fail(err, CKPT_E_USAGE, "data: more than 2^63 samples");
        const int64_t at = ckpt_data_start(d, i);
        ckpt_status status = ckpt_data_read(d, at, S, ids, err);
        if (status != CKPT_OK)
            return status;
        memcpy(labels, ids + 1, (size_t)(S - 1) * sizeof *labels);
        labels[S - 1] = -1;
        if (!d->opts.inner_labels) {
            status = ckpt_data_read(d, at + S, 1, &labels[S - 1], err);
            if (status != CKPT_OK)
                return status;
        }
        if (d->opts.split)
            split_sample(d, at, k * S, ids, labels, cu, n_seq);
        cu[++*n_seq] = (k + 1) * S;
    }
    return CKPT_OK;
}
