/* Tiling checks against brute force, byte ranges, file tables, and how a path is opened. */
#include "source.h"

#include "io.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

Suite *suite_source(void);

enum { MAX_CHUNKS = 64 };

/* A tensor of F32 with row-major chunks packed one after another in one file of ample size. */
typedef struct piece {
    int64_t dims[4];
    int64_t lo[MAX_CHUNKS][4], len[MAX_CHUNKS][4];
    ckpt_chunk chunks[MAX_CHUNKS];
    ckpt_tensor tensor;
    ckpt_file file;
    ckpt_source src;
} piece;

static void piece_init(piece *p, int rank, const int64_t *dims)
{
    memset(p, 0, sizeof *p);
    memcpy(p->dims, dims, (size_t)rank * sizeof *dims);
    p->file = (ckpt_file){.name = "f", .path = "f", .size = 1u << 20, .fd = -1};
    p->src = (ckpt_source){.files = &p->file, .n_files = 1};
    p->tensor = (ckpt_tensor){
        .name = "w", .dims = p->dims, .chunks = p->chunks, .dtype = CKPT_F32, .rank = rank};
}

static void piece_add(piece *p, const int64_t *lo, const int64_t *len)
{
    size_t i = p->tensor.n_chunks++;
    memcpy(p->lo[i], lo, (size_t)p->tensor.rank * sizeof *lo);
    memcpy(p->len[i], len, (size_t)p->tensor.rank * sizeof *len);
    p->chunks[i] = (ckpt_chunk){.lo = p->lo[i], .len = p->len[i]};
}

#define BOX(p, ...)                                                                                \
    do {                                                                                           \
        const int64_t v[] = {__VA_ARGS__};                                                         \
        piece_add(p, v, v + (p)->tensor.rank);                                                     \
    } while (0)

static const struct {
    int rank;
    int64_t dims[3];
    int n;
    int64_t boxes[5][6]; /* lo..., len... */
    const char *message; /* NULL: fine */
} tilings[] = {
    {0, {0},            1, {{0}},                                                                  NULL                                                     },
    {0, {0},            0, {{0}},                                                                  "tensor 'w': elements [] missing"                        },
    {0, {0},            2, {{0}},                                                                  "tensor 'w': chunks [] and [] overlap"                   },
    {1, {0},            0, {{0}},                                                                  NULL                                                     },
    {1, {0},            2, {{0, 0}, {0, 0}},                                                       NULL                                                     },
    {1, {8},            1, {{0, 8}},                                                               NULL                                                     },
    {1, {8},            0, {{0}},                                                                  "tensor 'w': elements [0:8] missing"                     },
    {1, {8},            2, {{4, 4}, {0, 4}},                                                       NULL                                                     },
    {1, {8},            3, {{4, 4}, {4, 0}, {0, 4}},                                               NULL                                                     },
    {1, {8},            2, {{5, 3}, {0, 4}},                                                       "tensor 'w': elements [4:5] missing"                     },
    {1, {8},            2, {{3, 5}, {0, 4}},                                                       "tensor 'w': chunks [0:4] and [3:8] overlap"             },
    {1, {8},            1, {{1, 7}},                                                               "tensor 'w': elements [0:1] missing"                     },
    {2,
     {6, 8},
     2,                    {{0, 0, 4, 8}, {2, 0, 4, 8}},
     "tensor 'w': chunks [0:4,0:8] and [2:6,0:8] overlap"                                                                                                   },
    {2, {6, 8},         2, {{0, 0, 4, 8}, {4, 4, 2, 4}},                                           "tensor 'w': elements [4:6,0:4] missing"                 },
    {2, {6, 8},         1, {{0, 0, 4, 8}},                                                         "tensor 'w': elements [4:6,0:8] missing"                 },
 /* one overlap and one hole of equal size: volumes alone would agree */
    {2,
     {4, 4},
     3,                    {{0, 0, 2, 4}, {1, 0, 2, 2}, {2, 2, 2, 2}},
     "tensor 'w': chunks [0:2,0:4] and [1:3,0:2] overlap"                                                                                                   },
 /* pinwheel: no cut goes through */
    {2, {5, 5},         5, {{0, 0, 2, 3}, {0, 3, 3, 2}, {3, 2, 2, 3}, {2, 0, 3, 2}, {2, 2, 1, 1}}, NULL                                                     },
    {2,
     {5, 5},
     4,                    {{0, 0, 2, 3}, {0, 3, 3, 2}, {3, 2, 2, 3}, {2, 0, 3, 2}},
     "tensor 'w': elements [2:3,2:3] missing"                                                                                                               },
    {2,
     {4, 4},
     2,                    {{0, 0, 4, 4}, {0, 0, 4, 4}},
     "tensor 'w': chunks [0:4,0:4] and [0:4,0:4] overlap"                                                                                                   },
    {3, {2, 2, 2},      2, {{0, 0, 0, 2, 1, 2}, {0, 1, 0, 2, 1, 2}},                               NULL                                                     },
    {2, {4, 4},         1, {{0, 1, 4, 4}},                                                         "tensor 'w': chunk of 4 at 1 on axis 1 outside extent 4" },
    {2, {4, 4},         1, {{-1, 0, 4, 4}},                                                        "tensor 'w': chunk of 4 at -1 on axis 0 outside extent 4"},
    {2, {4, 4},         1, {{0, 0, 4, -4}},                                                        "tensor 'w': chunk of -4 at 0 on axis 1 outside extent 4"},
    {1,
     {8},
     1,                    {{1, INT64_MAX}},
     "tensor 'w': chunk of 9223372036854775807 at 1 on axis 0 outside extent 8"                                                                             },
    {1, {8},            2, {{0, 8}, {9, 0}},                                                       "tensor 'w': chunk of 0 at 9 on axis 0 outside extent 8" },
    {2, {-1, 8},        0, {{0}},                                                                  "tensor 'w': negative extent -1 on axis 0"               },
    {2, {INT64_MAX, 8}, 0, {{0}},                                                                  "tensor 'w': shape of F32 elements has no byte size"     },
    {1, {INT64_MAX},    0, {{0}},                                                                  "tensor 'w': shape of F32 elements has no byte size"     },
};

START_TEST(tensor_chunks_must_tile)
{
    piece p;
    ckpt_err err = {0};
    piece_init(&p, tilings[_i].rank, tilings[_i].dims);
    for (int i = 0; i < tilings[_i].n; i++)
        piece_add(&p, tilings[_i].boxes[i], tilings[_i].boxes[i] + tilings[_i].rank);
    ckpt_status status = ckpt_tensor_check(&p.src, &p.tensor, &err);
    if (tilings[_i].message == NULL) {
        ck_assert_msg(status == CKPT_OK, "%s", err.text);
    } else {
        ck_assert_int_eq(status, CKPT_E_FORMAT);
        ck_assert_str_eq(err.text, tilings[_i].message);
    }
}
END_TEST

static uint64_t rng_state;

static int64_t rng(int64_t n)
{
    rng_state ^= rng_state << 13, rng_state ^= rng_state >> 7, rng_state ^= rng_state << 17;
    return (int64_t)(rng_state % (uint64_t)n);
}

/* Cut a box at random until it is small or the table is full. */
static void split(piece *p, const int64_t *lo, const int64_t *len, int depth)
{
    int axis = (int)rng(p->tensor.rank);
    if (depth == 0 || len[axis] < 2 || rng(4) == 0 || p->tensor.n_chunks > MAX_CHUNKS - 20) {
        piece_add(p, lo, len);
        return;
    }
    int64_t cut = 1 + rng(len[axis] - 1), a_len[4], b_lo[4], b_len[4];
    memcpy(a_len, len, sizeof a_len);
    memcpy(b_lo, lo, sizeof b_lo);
    memcpy(b_len, len, sizeof b_len);
    a_len[axis] = cut;
    b_lo[axis] += cut;
    b_len[axis] -= cut;
    split(p, lo, a_len, depth - 1);
    split(p, b_lo, b_len, depth - 1);
}

/* Times each element is covered: 0 exact, else the first bad element's count + 1, in row-major
 * order, with its index. */
static int brute_force(const piece *p, int64_t *where)
{
    int64_t n = 1, at[4];
    for (int a = 0; a < p->tensor.rank; a++)
        n *= p->dims[a];
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i;
        for (int a = p->tensor.rank - 1; a >= 0; a--) {
            at[a] = rest % p->dims[a];
            rest /= p->dims[a];
        }
        int count = 0;
        for (size_t c = 0; c < p->tensor.n_chunks; c++) {
            bool in = true;
            for (int a = 0; a < p->tensor.rank; a++)
                in = in && at[a] >= p->lo[c][a] && at[a] < p->lo[c][a] + p->len[c][a];
            count += in;
        }
        if (count != 1) {
            memcpy(where, at, sizeof at);
            return count + 1;
        }
    }
    return 0;
}

/* Whether the box at *text ("[0:2,3:4]") holds the element and, if asked, starts there. */
static bool box_holds(const char **text, int rank, const int64_t *where, bool starts)
{
    bool ok = *(*text)++ == '[';
    for (int a = 0; a < rank; a++) {
        char *end;
        int64_t lo = strtoll(*text, &end, 10), hi = strtoll(end + 1, &end, 10);
        ok = ok && (starts ? lo == where[a] : lo <= where[a]) && where[a] < hi;
        *text = end + 1;
    }
    return ok;
}

/* The first bad element in row-major order is the one the message is about. */
static bool names_element(const char *message, int rank, const int64_t *where, int want)
{
    const char *text = strchr(message, '[');
    if (want == 1)
        return strstr(message, "missing") && box_holds(&text, rank, where, true);
    if (!strstr(message, "overlap") || !box_holds(&text, rank, where, false))
        return false;
    text = strchr(text, '[');
    return box_holds(&text, rank, where, false);
}

START_TEST(tensor_random_tilings_agree_with_brute_force)
{
    int bad = 0;
    rng_state = 0x9e3779b97f4a7c15u;
    for (int round = 0; round < 20000; round++) {
        piece p;
        int rank = 1 + (int)rng(4);
        int64_t dims[4], zero[4] = {0}, where[4];
        for (int a = 0; a < 4; a++)
            dims[a] = 1 + rng(6);
        piece_init(&p, rank, dims);
        memcpy(p.dims, dims, sizeof dims);
        split(&p, zero, dims, 5);
        for (int64_t mutations = rng(3); mutations > 0; mutations--) {
            size_t i = (size_t)rng((int64_t)p.tensor.n_chunks);
            int a = (int)rng(rank);
            switch (rng(4)) {
            case 0: /* drop */
                if (p.tensor.n_chunks > 1) {
                    size_t last = --p.tensor.n_chunks;
                    memcpy(p.lo[i], p.lo[last], sizeof p.lo[i]);
                    memcpy(p.len[i], p.len[last], sizeof p.len[i]);
                }
                break;
            case 1: /* twice */
                piece_add(&p, p.lo[i], p.len[i]);
                break;
            case 2: /* shift, inside */
                p.lo[i][a] = rng(dims[a] - p.len[i][a] + 1);
                break;
            default: /* resize, inside */
                p.len[i][a] = 1 + rng(dims[a] - p.lo[i][a]);
            }
        }
        for (size_t i = p.tensor.n_chunks; i > 1; i--) { /* shuffle */
            size_t j = (size_t)rng((int64_t)i);
            ckpt_chunk swap = p.chunks[i - 1];
            p.chunks[i - 1] = p.chunks[j];
            p.chunks[j] = swap;
        }
        int want = brute_force(&p, where);
        ckpt_err err = {0};
        ckpt_status status = ckpt_tensor_check(&p.src, &p.tensor, &err);
        bad += want != 0;
        ck_assert_msg((status == CKPT_OK) == (want == 0), "round %d: %s", round, err.text);
        for (size_t i = 1; i < p.tensor.n_chunks && want == 0; i++) {
            int a = 0;
            while (a < rank && p.chunks[i - 1].lo[a] == p.chunks[i].lo[a])
                a++;
            ck_assert(a < rank && p.chunks[i - 1].lo[a] < p.chunks[i].lo[a]);
        }
        if (want == 0)
            continue;
        ck_assert_msg(names_element(err.text, rank, where, want), "round %d: %s", round, err.text);
    }
    ck_assert_int_gt(bad, 5000);
    ck_assert_int_lt(bad, 18000);
}
END_TEST

/* A million shuffled tiles of 2 x 3, then with one missing, then with one of them twice. */
START_TEST(tensor_million_chunk_grid_is_fast)
{
    enum { SIDE = 1000, N = SIDE * SIDE };
    static const int64_t dims[2] = {2 * SIDE, 3 * SIDE}, len[2] = {2, 3}, again[2] = {800, 600};
    static const char *const wants[] = {NULL, "tensor 'w': elements [1998:2000,2997:3000] missing",
                                        "tensor 'w': chunks [800:802,600:603] and "
                                        "[800:802,600:603] overlap"};
    int64_t *lo = malloc(2 * N * sizeof *lo);
    ckpt_chunk *chunks = malloc((N + 1) * sizeof *chunks);
    ck_assert(lo != NULL && chunks != NULL);
    ckpt_file file = {.name = "f", .path = "f", .size = 1u << 30, .fd = -1};
    ckpt_source src = {.files = &file, .n_files = 1};
    for (int defect = 0; defect < 3; defect++) {
        size_t n = 0;
        for (size_t i = 0; i < N; i++) {
            size_t j = i * 7919u % N; /* coprime, so a permutation */
            if (defect == 1 && j == N - 1)
                continue;
            lo[2 * i] = (int64_t)(j / SIDE) * 2;
            lo[2 * i + 1] = (int64_t)(j % SIDE) * 3;
            chunks[n++] = (ckpt_chunk){.lo = lo + 2 * i, .len = len, .offset = 24 * i};
        }
        if (defect == 2)
            chunks[n++] = (ckpt_chunk){.lo = again, .len = len};
        ckpt_tensor t = {.name = "w",
                         .dims = dims,
                         .chunks = chunks,
                         .n_chunks = n,
                         .dtype = CKPT_F32,
                         .rank = 2};
        ckpt_err err = {0};
        ckpt_status status = ckpt_tensor_check(&src, &t, &err);
        ck_assert_int_eq(status, wants[defect] == NULL ? CKPT_OK : CKPT_E_FORMAT);
        if (wants[defect] != NULL)
            ck_assert_str_eq(err.text, wants[defect]);
    }
    free(lo);
    free(chunks);
}
END_TEST

static const struct {
    ckpt_dtype dtype;
    int64_t dims[2];
    int64_t stride[2]; /* {-1} row-major */
    uint64_t offset, size;
    const char *message;
} ranges[] = {
    {CKPT_F32, {2, 3}, {-1, 0},        0,              24,  NULL                                          },
    {CKPT_F32, {2, 3}, {-1, 0},        1,              24,  "chunk [0:2,0:3]: bytes 1:25 past end 24 of f"},
    {CKPT_F32, {2, 3}, {-1, 0},        UINT64_MAX - 3, 24,  "have no whole byte range"                    },
    {CKPT_F32, {2, 3}, {1, 2},         0,              24,  NULL                                          }, /* transposed */
    {CKPT_F32, {2, 3}, {0, 1},         0,              12,  NULL                                          }, /* expanded */
    {CKPT_F32, {2, 3}, {10, 1},        0,              52,  NULL                                          }, /* the last element ends at (10+2+1)*4 */
    {CKPT_F32, {2, 3}, {10, 1},        0,              51,  "bytes 0:52 past end 51"                      },
    {CKPT_F32, {2, 3}, {3, -1},        16,             100, "have no whole byte range"                    },
    {CKPT_F32, {2, 3}, {INT64_MAX, 1}, 0,              100, "have no whole byte range"                    },
    {CKPT_F4,  {2, 2}, {-1, 0},        0,              2,   NULL                                          },
    {CKPT_F4,  {2, 2}, {2, 1},         0,              2,   "have no whole byte range"                    },
    {CKPT_F4,  {1, 3}, {-1, 0},        0,              2,   "shape of F4 elements has no byte size"       },
    {CKPT_F32, {0, 3}, {-1, 0},        999,            2,   NULL                                          },
};

START_TEST(tensor_bytes_must_lie_in_the_file)
{
    piece p;
    ckpt_err err = {0};
    static const int64_t zero[2] = {0, 0};
    piece_init(&p, 2, ranges[_i].dims);
    p.tensor.dtype = ranges[_i].dtype;
    p.file.size = ranges[_i].size;
    piece_add(&p, zero, ranges[_i].dims);
    p.chunks[0].offset = ranges[_i].offset;
    if (ranges[_i].stride[0] >= 0)
        p.chunks[0].stride = ranges[_i].stride;
    ckpt_status status = ckpt_tensor_check(&p.src, &p.tensor, &err);
    if (ranges[_i].message == NULL) {
        ck_assert_msg(status == CKPT_OK, "%s", err.text);
    } else {
        ck_assert_int_eq(status, CKPT_E_FORMAT);
        ck_assert_msg(strstr(err.text, ranges[_i].message) != NULL, "%s", err.text);
    }
}
END_TEST

START_TEST(tensor_bad_file_and_rank_are_refused)
{
    piece p;
    ckpt_err err = {0};
    const int64_t dims[1] = {2};
    piece_init(&p, 1, dims);
    BOX(&p, 0, 2);
    p.chunks[0].file = 7;
    ck_assert_int_eq(ckpt_tensor_check(&p.src, &p.tensor, &err), CKPT_E_FORMAT);
    ck_assert_str_eq(err.text, "tensor 'w': chunk [0:2]: file 7 of 1");
    p.tensor.rank = CKPT_MAX_RANK + 1;
    ck_assert_int_eq(ckpt_tensor_check(&p.src, &p.tensor, &err), CKPT_E_UNSUPPORTED);
}
END_TEST

/* ---- tables and opening --------------------------------------------------------------------- */

static char dir[64];

static void setup(void)
{
    snprintf(dir, sizeof dir, "/tmp/ckpt-src-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(dir));
}

static void teardown(void)
{
    ckpt_remove_tree(dir);
}

static const char *put(const char *name, const void *data, size_t n)
{
    static char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, n, f), n);
    fclose(f);
    return path;
}

START_TEST(source_tables_grow)
{
    ckpt_source src = {0};
    ckpt_err err = {0};
    char name[16], byte;
    for (uint32_t i = 0; i < 100; i++) {
        uint32_t index = 0;
        (void)snprintf(name, sizeof name, "f%u", i);
        const char *path = put(name, &(char){(char)i}, 1);
        ck_assert_int_eq(ckpt_source_add_file(&src, name, path, i % 2 == 0, &index, &err), CKPT_OK);
        ck_assert_uint_eq(index, i);
    }
    for (uint32_t i = 0; i < 100; i++) {
        (void)snprintf(name, sizeof name, "f%u", i);
        ck_assert_str_eq(src.files[i].name, name);
        ck_assert_uint_eq(src.files[i].size, 1);
        ck_assert_int_eq(src.files[i].fd >= 0, i % 2 == 0);
        if (i % 2 == 0) {
            ck_assert_int_eq(ckpt_source_read(&src, i, &byte, 1, 0, &err), CKPT_OK);
            ck_assert_int_eq(byte, (char)i);
        }
    }
    ck_assert_int_eq(ckpt_source_read(&src, 0, &byte, 1, 1, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, "f0: read of 1 bytes at offset 1 past end 1"), "%s", err.text);
    ck_assert_int_eq(ckpt_source_read(&src, 100, &byte, 1, 0, &err), CKPT_E_INTERNAL);
    ck_assert_int_eq(ckpt_source_add_file(&src, "x", "/absent/x", false, NULL, &err), CKPT_E_IO);
    for (int i = 0; i < 2000; i++)
        ck_assert_int_eq(ckpt_source_warn(&src, &err, "line\n%d", i), CKPT_OK);
    ck_assert_uint_eq(src.n_warnings, 1001);
    ck_assert_str_eq(src.warnings[999], "line\\x0a999");
    ck_assert_str_eq(src.warnings[1000], "further warnings are not shown");
    ckpt_source_close(&src);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(source_opens_more_files_than_the_soft_limit)
{
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = 32;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    ckpt_source src = {0};
    ckpt_err err = {0};
    const char *path = put("f", "x", 1);
    for (int i = 0; i < 64; i++)
        ck_assert_msg(ckpt_source_add_file(&src, "f", path, true, NULL, &err) == CKPT_OK, "%s",
                      err.text);
    ckpt_source_close(&src);
}
END_TEST

START_TEST(source_find_is_exact)
{
    ckpt_tensor tensors[] = {
        {.name = ""}, {.name = "B"}, {.name = "a"}, {.name = "a.b"}, {.name = "a\xc3\xa9"}};
    ckpt_source src = {.tensors = tensors, .n_tensors = 5};
    for (int64_t i = 0; i < 5; i++)
        ck_assert_int_eq(ckpt_source_find(&src, tensors[i].name), i);
    ck_assert_int_eq(ckpt_source_find(&src, "b"), -1);
    ck_assert_int_eq(ckpt_source_find(&src, "a."), -1);
}
END_TEST

#define LFS                                                                                        \
    "version https://git-lfs.github.com/spec/v1\n"                                                 \
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"

static const struct {
    const char *name, *data;
    size_t n;
    ckpt_status status;
    const char *message;
} refused[] = {
    {"model.safetensors", LFS,                                            sizeof LFS - 1, CKPT_E_FORMAT,
     "model.safetensors: Git LFS pointer, not the file itself (oid "
     "sha256:4d7a214614ab2935c943f9e0ff69"
     "d22eadbb8f32b1258daaa5e2ca24d17e2393, size 12345): fetch it with 'git lfs pull'"                                                    },
    {"model.safetensors", "version https://git-lfs.github.com/spec/v1\n", 43,             CKPT_E_FORMAT,
     "Git LFS pointer, not the file itself (oid missing, size missing)"                                                                   },
    {"model.safetensors", "\n <!DOCTYPE HTML><html>",                     22,             CKPT_E_FORMAT,
     "HTML page saved as a checkpoint"                                                                                                    },
    {"pytorch_model.bin", "<html>",                                       6,              CKPT_E_FORMAT, "HTML page saved as a checkpoint"},
    {"model.pt",          "<?xml version=\"1.0\"?>",                      21,             CKPT_E_FORMAT, "XML document saved as"          },
    {"model.safetensors", "",                                             0,              CKPT_E_FORMAT, "model.safetensors: empty file"  },
    {"notes.txt",         "hello, world",                                 12,             CKPT_E_FORMAT,
     "notes.txt: expected a safetensors, torch_dist, torch, hdf5, mp_rank, zarr, "
     "rank_safetensors checkpoint, found bytes "
     "68 65 6c "
     "6c 6f "
     "2c 20 77"                                                                                                                           },
};

START_TEST(source_open_says_what_was_found_instead)
{
    ckpt_source src;
    ckpt_err err = {0};
    const char *path = put(refused[_i].name, refused[_i].data, refused[_i].n);
    ck_assert_int_eq(ckpt_source_open(&src, path, NULL, &err), refused[_i].status);
    ck_assert_msg(strstr(err.text, refused[_i].message) != NULL, "%s", err.text);
    ck_assert_msg(strncmp(err.text, path, strlen(path)) == 0, "%s", err.text);
}
END_TEST

START_TEST(source_open_bad_paths_are_named)
{
    ckpt_source src;
    ckpt_err err = {0};
    ck_assert_int_eq(ckpt_source_open(&src, "/absent/x", NULL, &err), CKPT_E_IO);
    ck_assert_str_eq(err.text, "/absent/x: No such file or directory");
    ck_assert_int_eq(ckpt_source_open(&src, "/dev/null", NULL, &err), CKPT_E_IO);
    ck_assert_str_eq(err.text, "/dev/null: expected a regular file, found a device");
    ck_assert_int_eq(ckpt_source_open(&src, dir, NULL, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, ": empty directory") != NULL, "%s", err.text);
    (void)put("README", "x", 1);
    ck_assert_int_eq(ckpt_source_open(&src, dir, NULL, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, "checkpoint, found README") != NULL, "%s", err.text);
    ckpt_open_opts opts = {.iteration = -1, .container = "gguf"};
    ck_assert_int_eq(ckpt_source_open(&src, dir, &opts, &err), CKPT_E_USAGE);
    ck_assert_msg(strstr(err.text, "unknown container 'gguf', expected one of safetensors, "
                                   "torch_dist, torch"),
                  "%s", err.text);
    ck_assert_ptr_null(ckpt_container_find("gguf"));
    ck_assert_str_eq(ckpt_container_find("torch_dist")->name, "torch_dist");
}
END_TEST

START_TEST(source_open_two_candidates_ask_for_a_choice)
{
    ckpt_source src;
    ckpt_err err = {0};
    (void)put(".metadata", "x", 1);
    (void)put("model.safetensors", "x", 1);
    ck_assert_int_eq(ckpt_source_open(&src, dir, NULL, &err), CKPT_E_USAGE);
    ck_assert_msg(
        strstr(err.text,
               ": may be safetensors and torch_dist: keep each in a directory of its own"),
        "%s", err.text);
    ckpt_open_opts opts = {.iteration = -1, .container = "safetensors"};
    ck_assert_int_eq(ckpt_source_open(&src, dir, &opts, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, "model.safetensors") != NULL, "%s", err.text);
}
END_TEST

START_TEST(source_open_pointer_among_shards_is_named)
{
    ckpt_source src;
    ckpt_err err = {0};
    (void)put("model-00001-of-00001.safetensors", LFS, sizeof LFS - 1);
    ck_assert_int_eq(ckpt_source_open(&src, dir, NULL, &err), CKPT_E_FORMAT);
    ck_assert_msg(strstr(err.text, "/model-00001-of-00001.safetensors: Git LFS pointer"), "%s",
                  err.text);
    ck_assert_ptr_null(src.files);
}
END_TEST

static const struct {
    const char *path, *container;
} fixtures[] = {
    {"hf/kimi_linear_tiny",                       "safetensors"},
    {"hf/deepseek_v3_tiny",                       "safetensors"},
    {"hf/kimi_linear_tiny.reference.safetensors", "safetensors"},
    {"fla/kda_trained",                           "safetensors"},
    {"mcore/legacy_tp2",                          "torch_dist" },
    {"mcore/legacy_tp2/iter_0000100",             "torch_dist" },
    {"torch/dcp_2rank",                           "torch_dist" },
    {"torch/torch_save_zip.pt",                   "torch"      },
    {"torch/torch_save_legacy.pt",                "torch"      },
    {"torch/state_dict.bin",                      "torch"      },
};

START_TEST(source_open_real_checkpoints_are_recognised)
{
    ckpt_source src;
    ckpt_err err = {0};
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", CKPT_FIXTURES, fixtures[_i].path);
    ck_assert_msg(ckpt_source_open(&src, path, NULL, &err) == CKPT_OK, "%s", err.text);
    ck_assert_str_eq(src.container->name, fixtures[_i].container);
    ck_assert_uint_gt(src.n_tensors, 0);
    for (size_t i = 0; i < src.n_tensors; i++)
        ck_assert_int_eq(ckpt_source_find(&src, src.tensors[i].name), (int64_t)i);
    ckpt_source_close(&src);
}
END_TEST

Suite *suite_source(void)
{
    Suite *s = suite_create("source");
    TCase *t = tcase_create("tiling");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, tensor_chunks_must_tile, 0, (int)(sizeof tilings / sizeof tilings[0]));
    tcase_add_test(t, tensor_random_tilings_agree_with_brute_force);
    tcase_add_test(t, tensor_million_chunk_grid_is_fast);
    tcase_add_loop_test(t, tensor_bytes_must_lie_in_the_file, 0,
                        (int)(sizeof ranges / sizeof ranges[0]));
    tcase_add_test(t, tensor_bad_file_and_rank_are_refused);
    suite_add_tcase(s, t);
    t = tcase_create("open");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_add_test(t, source_tables_grow);
    tcase_add_test(t, source_opens_more_files_than_the_soft_limit);
    tcase_add_test(t, source_find_is_exact);
    tcase_add_loop_test(t, source_open_says_what_was_found_instead, 0,
                        (int)(sizeof refused / sizeof refused[0]));
    tcase_add_test(t, source_open_bad_paths_are_named);
    tcase_add_test(t, source_open_two_candidates_ask_for_a_choice);
    tcase_add_test(t, source_open_pointer_among_shards_is_named);
    tcase_add_loop_test(t, source_open_real_checkpoints_are_recognised, 0,
                        (int)(sizeof fixtures / sizeof fixtures[0]));
    suite_add_tcase(s, t);
    return s;
}
