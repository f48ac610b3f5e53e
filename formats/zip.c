/* Zip reader, as far as torch.save archives and re-zipped ones need it (PKWARE APPNOTE 6.3).
 *
 * end record   50 4b 05 06, u16 disk, u16 cd disk, u16 entries here, u16 entries, u32 cd size,
 *              u32 cd offset, u16 comment length
 * locator      50 4b 06 07, u32 disk, u64 offset of the zip64 end record, u32 disks
 * zip64 end    50 4b 06 06, u64 size of the rest, u16, u16, u32, u32, u64 entries here,
 *              u64 entries, u64 cd size, u64 cd offset
 * central      50 4b 01 02, u16 made by, u16 needed, u16 flags, u16 method, u16 time, u16 date,
 *              u32 crc, u32 csize, u32 usize, u16 name, u16 extra, u16 comment, u16 disk,
 *              u16 attributes, u32 attributes, u32 local offset; name, extra, comment
 * local        50 4b 03 04, u16 needed, u16 flags, u16 method, u16 time, u16 date, u32 crc,
 *              u32 csize, u32 usize, u16 name, u16 extra; name, extra, payload
 *
 * Sizes come from the central directory alone: torch leaves zeros in the local headers. */
#include "zip.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "checked.h"
#include "le.h"

#define BOMB_BYTES ((uint64_t)1 << 24)
#define BOMB_RATIO 200
#define END_LEN 22
#define LOCATOR_LEN 20
#define END64_LEN 56
#define CENTRAL_LEN 46
#define LOCAL_LEN 30
/* miniz, which torch reads with, looks for the end record this far back. */
#define TAIL_MAX ((uint64_t)65535 + END_LEN)
#define CENTRAL_MAX ((uint64_t)1 << 28) /* bytes of central directory, 4 million entries or so */
#define NAME_MAX_LEN 4096
#define INFLATE_STEP ((size_t)1 << 16)
/* A checkpoint has one archive per tensor shard, so an archive must open in few reads: these
 * windows at both ends hold everything but the payload of an item with one tensor. */
#define WINDOW ((size_t)2048)

typedef struct window {
    uint64_t start;
    size_t n;
    uint8_t bytes[WINDOW];
} window;

typedef struct reader {
    ckpt_source *src;
    uint32_t file;
    uint64_t base, length;
    uint64_t end;                /* offset of the end record, or of the zip64 one */
    uint64_t cd_offset, cd_size; /* central directory */
    uint64_t entries;
    uint64_t *local; /* local header offsets, by entry */
    ckpt_err *err;
    window head, tail;
} reader;

static ckpt_status get(const reader *r, uint64_t offset, void *out, size_t n, const char *what)
{
    if (offset > r->length || n > r->length - offset)
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "zip: %s of %zu bytes at %llu past the end of the archive (%llu bytes)",
                         what, n, (unsigned long long)offset, (unsigned long long)r->length);
    const window *const windows[] = {&r->head, &r->tail};
    for (size_t i = 0; i < 2; i++) {
        const window *w = windows[i];
        if (offset >= w->start && offset - w->start <= w->n && n <= w->n - (offset - w->start)) {
            memcpy(out, w->bytes + (offset - w->start), n);
            return CKPT_OK;
        }
    }
    return ckpt_source_read(r->src, r->file, out, n, r->base + offset, r->err);
}

static ckpt_status fill_windows(reader *r)
{
    size_t n = (size_t)ckpt_min_u64(r->length, WINDOW);
    uint64_t start = r->length - n;
    ckpt_status status = ckpt_source_read(r->src, r->file, r->head.bytes, n, r->base, r->err);
    if (status == CKPT_OK)
        status = ckpt_source_read(r->src, r->file, r->tail.bytes, n, r->base + start, r->err);
    if (status == CKPT_OK) {
        r->head.n = r->tail.n = n;
        r->tail.start = start;
    }
    return status;
}

/* ---- end records ------------------------------------------------------------------------------ */

static ckpt_status read_end64(reader *r, uint64_t locator_at, bool *found)
{
    uint8_t locator[LOCATOR_LEN], end[END64_LEN];
    *found = false;
    ckpt_status status = get(r, locator_at, locator, sizeof locator, "zip64 locator");
    if (status != CKPT_OK || memcmp(locator, "PK\6\7", 4) != 0)
        return status;
    uint64_t at = ckpt_get_u64(locator + 8);
    if (at > locator_at || locator_at - at < END64_LEN)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: zip64 end record at %llu, locator at %llu",
                         (unsigned long long)at, (unsigned long long)locator_at);
    status = get(r, at, end, sizeof end, "zip64 end record");
    if (status != CKPT_OK)
        return status;
    if (memcmp(end, "PK\6\6", 4) != 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: no zip64 end record at %llu",
                         (unsigned long long)at);
    r->entries = ckpt_get_u64(end + 32);
    r->cd_size = ckpt_get_u64(end + 40);
    r->cd_offset = ckpt_get_u64(end + 48);
    r->end = at;
    *found = true;
    return CKPT_OK;
}

static ckpt_status parse_end(reader *r, const uint8_t *end, uint64_t at)
{
    bool zip64 = false;
    r->end = at;
    if (at >= LOCATOR_LEN) {
        ckpt_status status = read_end64(r, at - LOCATOR_LEN, &zip64);
        if (status != CKPT_OK)
            return status;
    }
    if (!zip64) {
        r->entries = ckpt_get_u16(end + 10);
        r->cd_size = ckpt_get_u32(end + 12);
        r->cd_offset = ckpt_get_u32(end + 16);
    }
    if (r->cd_offset > r->end || r->cd_size > r->end - r->cd_offset || r->cd_size > CENTRAL_MAX)
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "zip: central directory of %llu bytes at %llu, end record at %llu",
                         (unsigned long long)r->cd_size, (unsigned long long)r->cd_offset,
                         (unsigned long long)r->end);
    if (r->entries == 0 || r->entries > r->cd_size / CENTRAL_LEN)
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "zip: %llu entries in a central directory of %llu bytes",
                         (unsigned long long)r->entries, (unsigned long long)r->cd_size);
    return CKPT_OK;
}

/* Position of the last end record in n bytes, SIZE_MAX if there is none. */
static size_t last_end(const uint8_t *p, size_t n)
{
    size_t at = n < END_LEN ? SIZE_MAX : n - END_LEN;
    while (at != SIZE_MAX && memcmp(p + at, "PK\5\6", 4) != 0)
        at--;
    return at;
}

static ckpt_status find_end(reader *r)
{
    size_t at = last_end(r->tail.bytes, r->tail.n);
    if (at != SIZE_MAX)
        return parse_end(r, r->tail.bytes + at, r->tail.start + at);
    size_t n = (size_t)ckpt_min_u64(r->length, TAIL_MAX);
    uint64_t start = r->length - n;
    uint8_t *tail = malloc(n ? n : 1);
    if (!tail)
        return ckpt_fail(r->err, CKPT_E_NOMEM, "zip: out of memory");
    ckpt_status status = get(r, start, tail, n, "end of archive");
    if (status == CKPT_OK) {
        at = last_end(tail, n);
        if (at == SIZE_MAX)
            status = ckpt_fail(r->err, CKPT_E_FORMAT,
                               "zip: no end record in the last %zu of %llu bytes (truncated?)", n,
                               (unsigned long long)r->length);
        else
            status = parse_end(r, tail + at, start + at);
    }
    free(tail);
    return status;
}

/* ---- central directory ------------------------------------------------------------------------ */

/* Values whose 32-bit field is all ones, in the order usize, csize, offset. */
static bool apply_zip64(const uint8_t *extra, size_t n, uint64_t *const fields[3])
{
    size_t wanted = 0;
    for (size_t i = 0; i < 3; i++)
        wanted += *fields[i] == UINT32_MAX;
    while (wanted && n >= 4) {
        size_t id = ckpt_get_u16(extra), len = ckpt_get_u16(extra + 2);
        if (len > n - 4)
            return false;
        if (id == 1) {
            const uint8_t *p = extra + 4;
            for (size_t i = 0; i < 3; i++) {
                if (*fields[i] != UINT32_MAX)
                    continue;
                if ((size_t)(extra + 4 + len - p) < 8)
                    return false;
                *fields[i] = ckpt_get_u64(p);
                p += 8;
            }
            return true;
        }
        extra += 4 + len;
        n -= 4 + len;
    }
    return wanted == 0;
}

/* Nothing is extracted here, but an archive with such names is meant for somebody who does. */
static bool leads_out(const char *name)
{
    const char *at = name;
    if (*name == '/')
        return true;
    for (;;) {
        size_t n = strcspn(at, "/");
        if (n == 2 && memcmp(at, "..", 2) == 0)
            return true;
        if (at[n] == '\0')
            return false;
        at += n + 1;
    }
}

/* One central record at cd[*pos]. */
static ckpt_status parse_central(reader *r, const uint8_t *cd, size_t *pos, ckpt_arena *arena,
                                 ckpt_zip_entry *entry, uint64_t *local)
{
    size_t left = (size_t)r->cd_size - *pos;
    const uint8_t *p = cd + *pos;
    if (left < CENTRAL_LEN || memcmp(p, "PK\1\2", 4) != 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: no central record at %llu",
                         (unsigned long long)(r->cd_offset + *pos));
    size_t n_name = ckpt_get_u16(p + 28), n_extra = ckpt_get_u16(p + 30);
    size_t total = CENTRAL_LEN + n_name + n_extra + ckpt_get_u16(p + 32);
    const char *name = (const char *)p + CENTRAL_LEN;
    if (total > left || n_name == 0 || n_name > NAME_MAX_LEN || memchr(name, 0, n_name))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: bad name in the central record at %llu",
                         (unsigned long long)(r->cd_offset + *pos));
    entry->name = ckpt_arena_strndup(arena, name, n_name);
    if (entry->name && leads_out(entry->name))
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "zip: entry '%s': expected a path inside the archive", entry->name);
    if (!entry->name)
        return ckpt_fail(r->err, CKPT_E_NOMEM, "zip: out of memory");
    if (ckpt_get_u16(p + 8) & 1)
        return ckpt_fail(r->err, CKPT_E_UNSUPPORTED, "zip: entry '%s' is encrypted", entry->name);
    entry->method = ckpt_get_u16(p + 10);
    entry->crc = ckpt_get_u32(p + 16);
    entry->csize = ckpt_get_u32(p + 20);
    entry->size = ckpt_get_u32(p + 24);
    *local = ckpt_get_u32(p + 42);
    if (!apply_zip64(p + CENTRAL_LEN + n_name, n_extra,
                     (uint64_t *const[3]){&entry->size, &entry->csize, local}))
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: entry '%s': bad zip64 field", entry->name);
    if (entry->method == 0 && entry->size != entry->csize)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: stored entry '%s': sizes %llu and %llu",
                         entry->name, (unsigned long long)entry->size,
                         (unsigned long long)entry->csize);
    *pos += total;
    return CKPT_OK;
}

static ckpt_status locate(reader *r, ckpt_zip_entry *entry, uint64_t local)
{
    uint8_t head[LOCAL_LEN + NAME_MAX_LEN];
    size_t n_name = strlen(entry->name);
    if (local >= r->cd_offset)
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "zip: entry '%s': local header at %llu, central directory at %llu",
                         entry->name, (unsigned long long)local, (unsigned long long)r->cd_offset);
    ckpt_status status = get(r, local, head, LOCAL_LEN + n_name, "local header");
    if (status != CKPT_OK)
        return status;
    if (memcmp(head, "PK\3\4", 4) != 0 || ckpt_get_u16(head + 26) != n_name ||
        memcmp(head + LOCAL_LEN, entry->name, n_name) != 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: entry '%s': no local header of it at %llu",
                         entry->name, (unsigned long long)local);
    entry->offset = local + LOCAL_LEN + n_name + ckpt_get_u16(head + 28);
    if (entry->offset > r->cd_offset || entry->csize > r->cd_offset - entry->offset)
        return ckpt_fail(r->err, CKPT_E_FORMAT,
                         "zip: entry '%s': %llu bytes at %llu run into the directory at %llu",
                         entry->name, (unsigned long long)entry->csize,
                         (unsigned long long)entry->offset, (unsigned long long)r->cd_offset);
    return CKPT_OK;
}

static ckpt_status read_central(reader *r, ckpt_arena *arena, ckpt_zip *zip)
{
    size_t n = (size_t)r->entries, pos = 0;
    ckpt_status status;
    uint8_t *cd = malloc((size_t)r->cd_size);
    zip->entries = ckpt_arena_array(arena, n, sizeof *zip->entries);
    r->local = calloc(n, sizeof *r->local);
    if (!cd || !zip->entries || !r->local) {
        status = ckpt_fail(r->err, CKPT_E_NOMEM, "zip: out of memory for %zu entries", n);
        goto done;
    }
    status = get(r, r->cd_offset, cd, (size_t)r->cd_size, "central directory");
    for (size_t i = 0; status == CKPT_OK && i < n; i++)
        status = parse_central(r, cd, &pos, arena, &zip->entries[i], &r->local[i]);
    if (status == CKPT_OK && pos != r->cd_size)
        status = ckpt_fail(r->err, CKPT_E_FORMAT,
                           "zip: %zu entries fill %zu of %llu bytes of central directory", n, pos,
                           (unsigned long long)r->cd_size);
    for (size_t i = 0; status == CKPT_OK && i < n; i++)
        status = locate(r, &zip->entries[i], r->local[i]);
    zip->n_entries = n;
done:
    free(cd);
    return status;
}

/* ---- cross checks ----------------------------------------------------------------------------- */

typedef struct range {
    uint64_t lo, hi; /* local header to end of payload */
    const char *name;
    uint32_t index;
} range;

static int by_offset(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return x->lo < y->lo ? -1 : x->lo > y->lo;
}

static int by_name(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static ckpt_status check_ranges(reader *r, ckpt_zip *zip, range *ranges)
{
    size_t n = zip->n_entries;
    qsort(ranges, n, sizeof *ranges, by_offset);
    if (ranges[0].lo != 0)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: first entry '%s' at %llu, expected 0",
                         ranges[0].name, (unsigned long long)ranges[0].lo);
    for (size_t i = 1; i < n; i++)
        if (ranges[i].lo < ranges[i - 1].hi)
            return ckpt_fail(r->err, CKPT_E_FORMAT,
                             "zip: entry '%s' at %llu overlaps '%s', which ends at %llu",
                             ranges[i].name, (unsigned long long)ranges[i].lo, ranges[i - 1].name,
                             (unsigned long long)ranges[i - 1].hi);
    qsort(ranges, n, sizeof *ranges, by_name);
    for (size_t i = 0; i < n; i++) {
        zip->by_name[i] = ranges[i].index;
        if (i && strcmp(ranges[i].name, ranges[i - 1].name) == 0)
            return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: entry '%s' occurs twice", ranges[i].name);
    }
    return CKPT_OK;
}

static ckpt_status cross_check(reader *r, ckpt_arena *arena, ckpt_zip *zip)
{
    size_t n = zip->n_entries;
    zip->by_name = ckpt_arena_array(arena, n, sizeof *zip->by_name);
    range *ranges = calloc(n, sizeof *ranges);
    if (!ranges || !zip->by_name) {
        free(ranges);
        return ckpt_fail(r->err, CKPT_E_NOMEM, "zip: out of memory for %zu entries", n);
    }
    for (size_t i = 0; i < n; i++)
        ranges[i] = (range){r->local[i], zip->entries[i].offset + zip->entries[i].csize,
                            zip->entries[i].name, (uint32_t)i};
    ckpt_status status = check_ranges(r, zip, ranges);
    free(ranges);
    if (status != CKPT_OK)
        return status;
    const char *first = zip->entries[0].name, *slash = strchr(first, '/');
    if (!slash)
        return ckpt_fail(r->err, CKPT_E_FORMAT, "zip: first entry '%s' has no root folder", first);
    zip->root = ckpt_arena_strndup(arena, first, (size_t)(slash - first));
    return zip->root ? CKPT_OK : ckpt_fail(r->err, CKPT_E_NOMEM, "zip: out of memory");
}

ckpt_status ckpt_zip_open(ckpt_source *src, uint32_t file, uint64_t base, uint64_t length,
                          ckpt_arena *arena, ckpt_zip *zip, ckpt_err *err)
{
    reader r = {.src = src, .file = file, .base = base, .length = length, .err = err};
    uint64_t end;
    *zip = (ckpt_zip){0};
    if (!ckpt_add_u64(base, length, &end) || end > src->files[file].size)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "zip: %llu bytes at %llu past the end of '%s' (%llu bytes)",
                         (unsigned long long)length, (unsigned long long)base,
                         src->files[file].name, (unsigned long long)src->files[file].size);
    ckpt_status status = fill_windows(&r);
    if (status == CKPT_OK)
        status = find_end(&r);
    if (status == CKPT_OK)
        status = read_central(&r, arena, zip);
    if (status == CKPT_OK)
        status = cross_check(&r, arena, zip);
    free(r.local);
    return status;
}

/* ---- entries ---------------------------------------------------------------------------------- */

/* strcmp(root/name, full) without building the string. */
static int compare_rooted(const char *root, const char *name, const char *full)
{
    size_t n = strlen(root);
    int c = strncmp(root, full, n);
    if (c != 0)
        return c;
    if (full[n] != '/')
        return '/' - (unsigned char)full[n];
    return strcmp(name, full + n + 1);
}

const ckpt_zip_entry *ckpt_zip_find(const ckpt_zip *zip, const char *name)
{
    size_t lo = 0, hi = zip->n_entries;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        const ckpt_zip_entry *entry = &zip->entries[zip->by_name[mid]];
        int c = compare_rooted(zip->root, name, entry->name);
        if (c == 0)
            return entry;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

/* Raw deflate stream of entry->csize bytes into exactly entry->size bytes. */
static ckpt_status inflate_entry(ckpt_source *src, uint32_t file, uint64_t base,
                                 const ckpt_zip_entry *entry, uint8_t *out, ckpt_err *err)
{
    z_stream z = {0};
    uint8_t *in = malloc(INFLATE_STEP);
    uint64_t taken = 0, made = 0;
    int rc = Z_OK;
    ckpt_status status = CKPT_OK;
    if (!in || inflateInit2(&z, -MAX_WBITS) != Z_OK) {
        free(in);
        return ckpt_fail(err, CKPT_E_NOMEM, "zip: out of memory");
    }
    while (rc == Z_OK && status == CKPT_OK && (z.avail_in || taken < entry->csize)) {
        if (z.avail_in == 0) {
            size_t n = (size_t)ckpt_min_u64(INFLATE_STEP, entry->csize - taken);
            status = ckpt_source_read(src, file, in, n, base + entry->offset + taken, err);
            taken += n;
            z.next_in = in;
            z.avail_in = (uInt)n;
        }
        uInt room = (uInt)ckpt_min_u64(entry->size - made, INT_MAX);
        z.next_out = out + made;
        z.avail_out = room;
        if (status == CKPT_OK)
            rc = inflate(&z, Z_NO_FLUSH);
        made += room - z.avail_out;
    }
    if (status == CKPT_OK && (rc != Z_STREAM_END || made != entry->size))
        status =
            ckpt_fail(err, CKPT_E_FORMAT, "zip: entry '%s': bad deflate stream, %llu of %llu bytes",
                      entry->name, (unsigned long long)made, (unsigned long long)entry->size);
    inflateEnd(&z);
    free(in);
    return status;
}

ckpt_status ckpt_zip_read(ckpt_source *src, uint32_t file, uint64_t base,
                          const ckpt_zip_entry *entry, uint64_t limit, ckpt_buf *out, ckpt_err *err)
{
    if (entry->method != 0 && entry->method != 8)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "zip: entry '%s': compression method %u",
                         entry->name, entry->method);
    if (entry->size > limit)
        return ckpt_fail(err, CKPT_E_FORMAT, "zip: entry '%s': %llu bytes, limit %llu", entry->name,
                         (unsigned long long)entry->size, (unsigned long long)limit);
    /* Deflate cannot expand by more than 1032:1, so a larger claim is a lie. */
    if (entry->method == 8 && entry->size / 1032 > entry->csize)
        return ckpt_fail(err, CKPT_E_FORMAT, "zip: entry '%s': %llu bytes deflated to %llu",
                         entry->name, (unsigned long long)entry->size,
                         (unsigned long long)entry->csize);
    /* Pickles of names and shapes deflate to a twentieth; what gains more is there to fill memory. */
    if (entry->method == 8 && entry->size > BOMB_BYTES && entry->size / BOMB_RATIO > entry->csize)
        return ckpt_fail(
            err, CKPT_E_FORMAT,
            "zip: entry '%s': %llu bytes deflated to %llu, more than %d to 1: a zip bomb",
            entry->name, (unsigned long long)entry->size, (unsigned long long)entry->csize,
            BOMB_RATIO);
    size_t n = (size_t)entry->size;
    uint8_t *p = ckpt_buf_extend(out, n);
    if (!p)
        return ckpt_fail(err, CKPT_E_NOMEM, "zip: out of memory for %zu bytes", n);
    ckpt_status status = entry->method == 8
                             ? inflate_entry(src, file, base, entry, p, err)
                             : ckpt_source_read(src, file, p, n, base + entry->offset, err);
    if (status != CKPT_OK)
        return status;
    uint32_t crc = (uint32_t)crc32_z(0, p, n);
    if (entry->crc != 0 && entry->crc != crc)
        return ckpt_fail(err, CKPT_E_FORMAT, "zip: entry '%s': CRC-32 %08x, expected %08x",
                         entry->name, crc, entry->crc);
    return CKPT_OK;
}
