/* A .metadata whose objects are taken while it is read must give the tables that one made of nodes
 * gives: real ones, spelled as Python spells them, damaged, and with references that only nodes can
 * follow. */
#include "dcp_test.h"

#include "dcp_meta.h"
#include "dcp_taken.h"

static const char *const real[] = {
    CKPT_FIXTURES "/mcore/legacy_tp2/iter_0000100/.metadata",
    CKPT_FIXTURES "/mcore/gpt_moe/iter_0000010/.metadata",
    CKPT_FIXTURES "/mcore/optim_chained_ep2/iter_0000003/.metadata",
    CKPT_FIXTURES "/mcore/optim_buckets_tp2/iter_0000003/.metadata",
    CKPT_FIXTURES "/torch/megatron_fsdp/.metadata",
    CKPT_FIXTURES "/torch/mcore_flat_0_13_0/.metadata",
    CKPT_FIXTURES "/torch/dcp_fsdp2/.metadata",
    CKPT_FIXTURES "/torch/dcp_2rank/.metadata",
    CKPT_FIXTURES "/torch/dcp_safetensors_items/.metadata",
};

static void same_tensor(const ckpt_dcp_tensor *a, const ckpt_dcp_tensor *b)
{
    size_t bytes = (size_t)a->rank * sizeof *a->dims;
    ck_assert_str_eq(a->name, b->name);
    ck_assert_int_eq(a->rank, b->rank);
    ck_assert_int_eq(a->has_dtype, b->has_dtype);
    ck_assert_int_eq(a->dtype, b->dtype);
    ck_assert_uint_eq(a->n_pieces, b->n_pieces);
    ck_assert_int_eq(a->flat == NULL, b->flat == NULL);
    ck_assert(a->rank == 0 || memcmp(a->dims, b->dims, bytes) == 0);
    for (size_t k = 0; k < a->n_pieces; k++) {
        ck_assert_uint_eq(a->pieces[k].entry, b->pieces[k].entry);
        ck_assert(a->rank == 0 || (memcmp(a->pieces[k].lo, b->pieces[k].lo, bytes) == 0 &&
                                   memcmp(a->pieces[k].len, b->pieces[k].len, bytes) == 0));
    }
}

static void same_meta(const ckpt_dcp_meta *a, const ckpt_dcp_meta *b)
{
    ck_assert_uint_eq(a->n_entries, b->n_entries);
    ck_assert_uint_eq(a->n_tensors, b->n_tensors);
    ck_assert_uint_eq(a->n_objects, b->n_objects);
    ck_assert_uint_eq(a->n_paths, b->n_paths);
    ck_assert_uint_eq(a->n_shapes_found, b->n_shapes_found);
    ck_assert_pstr_eq(a->prefix, b->prefix);
    ck_assert_pstr_eq(a->unknown_global, b->unknown_global);
    for (size_t i = 0; i < a->n_paths; i++)
        ck_assert_str_eq(a->paths[i], b->paths[i]);
    for (size_t i = 0; i < a->n_entries; i++) {
        const ckpt_dcp_entry *x = &a->entries[i], *y = &b->entries[i];
        ck_assert_str_eq(x->fqn, y->fqn);
        ck_assert_pstr_eq(x->transforms, y->transforms);
        ck_assert(x->at == y->at && x->length == y->length && x->path == y->path &&
                  x->used == y->used);
    }
    for (size_t i = 0; i < a->n_objects; i++) {
        ck_assert_str_eq(a->objects[i].name, b->objects[i].name);
        ck_assert_uint_eq(a->objects[i].entry, b->objects[i].entry);
    }
    for (size_t i = 0; i < a->n_tensors; i++)
        same_tensor(&a->tensors[i], &b->tensors[i]);
}

/* Both ways; their status. */
static ckpt_status both(const uint8_t *p, size_t n, size_t *n_tensors)
{
    ckpt_arena arena = {0};
    ckpt_err err[2] = {0};
    ckpt_dcp_meta meta[2] = {0};
    ckpt_status a = ckpt_dcp_meta_parse(p, n, &arena, &meta[0], &err[0]);
    ckpt_status b = ckpt_dcp_meta_parse_nodes(p, n, &arena, &meta[1], &err[1]);
    ck_assert_msg(a == b, "taken: %d %s; nodes: %d %s", a, err[0].text, b, err[1].text);
    if (a == CKPT_OK)
        same_meta(&meta[0], &meta[1]);
    ckpt_json_free(meta[0].policy);
    ckpt_json_free(meta[1].policy);
    *n_tensors = a == CKPT_OK ? meta[0].n_tensors : 0;
    ckpt_arena_free(&arena);
    return a;
}

/* Objects taken of a pickle; -1: it cannot be parsed so. */
static long taken_of(const uint8_t *p, size_t n)
{
    ckpt_arena arena = {0};
    ckpt_pkl *root;
    ckpt_err err = {0};
    ckpt_dcp_taken taken = {.keep = &arena, .scratch = &arena};
    ckpt_pkl_taker taker = ckpt_dcp_taker(&taken);
    uint32_t nodes;
    long count = -1;
    if (ckpt_pkl_parse_taking(p, n, &arena, &taker, &root, &nodes, &err) == CKPT_OK)
        count = (long)(taken.n_chunks + taken.n_tensors + taken.n_indexes + taken.n_infos);
    ckpt_dcp_taken_release(&taken);
    ckpt_arena_free(&arena);
    return count;
}

START_TEST(parse_real_metadata_taken_equals_nodes)
{
    ckpt_buf b = {0};
    size_t n;
    get_file(real[_i], &b);
    ck_assert_int_eq(both(b.data, b.len, &n), CKPT_OK);
    ck_assert_uint_gt(n, 0);
    /* Of four objects a tensor, all but the first of each class and of each new dtype; Megatron-Core
     * 0.13 stores plans of the save beside them, which refer to chunks. */
    long taken = taken_of(b.data, b.len);
    if (strstr(real[_i], "mcore_flat_0_13_0"))
        ck_assert_int_eq(taken, -1);
    else
        ck_assert_msg(taken >= (long)(2 * n), "%ld of %zu tensors", taken, n);
    ckpt_buf_release(&b);
}
END_TEST

START_TEST(parse_damaged_metadata_taken_equals_nodes)
{
    ckpt_buf b = {0};
    size_t n;
    uint64_t x = (uint64_t)_i + 1;
    int bad = 0;
    get_file(real[_i], &b);
    for (int round = 0; round < 60; round++) {
        uint8_t *copy = malloc(b.len); /* of its own length, so that a sanitizer sees its end */
        memcpy(copy, b.data, b.len);
        for (int k = 0; k <= round % 3; k++) {
            x = x * UINT64_C(6364136223846793005) + 1442695040888963407u;
            copy[(x >> 20) % b.len] = (uint8_t)(x >> 56);
        }
        bad += both(copy, round % 10 == 9 ? b.len / 2 : b.len, &n) != CKPT_OK;
        free(copy);
    }
    ck_assert_int_gt(bad, 5);
    ckpt_buf_release(&b);
}
END_TEST

/* ---- as Python writes it ------------------------------------------------------------------------ */

#define META "torch.distributed.checkpoint.metadata"

typedef struct py {
    ckpt_buf b;
    uint32_t n;           /* memo entries */
    uint32_t size, chunk; /* torch.Size and ChunkStorageMetadata */
    uint32_t offsets;     /* the Size said last */
    uint32_t dict;        /* of the chunk said last */
} py;

static uint32_t memo(py *p)
{
    ckpt_buf_putc(&p->b, 0x94);
    return p->n++;
}

static uint32_t text(py *p, const char *s)
{
    ckpt_buf_putc(&p->b, 0x8c);
    ckpt_buf_putc(&p->b, (int)strlen(s));
    ckpt_buf_puts(&p->b, s);
    return memo(p);
}

static void get_memo(py *p, uint32_t index)
{
    ckpt_buf_putc(&p->b, 'j');
    for (int i = 0; i < 4; i++)
        ckpt_buf_putc(&p->b, (int)(index >> (8 * i) & 255));
}

static uint32_t global(py *p, const char *module, const char *name)
{
    text(p, module);
    text(p, name);
    ckpt_buf_putc(&p->b, 0x93);
    return memo(p);
}

static uint32_t size_of(py *p, int a, int b)
{
    get_memo(p, p->size);
    ckpt_buf_putc(&p->b, 'K'), ckpt_buf_putc(&p->b, a);
    ckpt_buf_putc(&p->b, 'K'), ckpt_buf_putc(&p->b, b);
    ckpt_buf_putc(&p->b, 0x86), memo(p);
    ckpt_buf_putc(&p->b, 0x85), memo(p);
    ckpt_buf_putc(&p->b, 'R');
    return p->offsets = memo(p);
}

/* class, ')' NEWOBJ, '}' '(', with memo entries; that of the dict. */
static uint32_t open_object(py *p, uint32_t cls)
{
    get_memo(p, cls);
    ckpt_buf_putc(&p->b, ')'), ckpt_buf_putc(&p->b, 0x81), memo(p);
    ckpt_buf_putc(&p->b, '}');
    uint32_t dict = memo(p);
    ckpt_buf_putc(&p->b, '(');
    return dict;
}

static void close_object(py *p)
{
    ckpt_buf_puts(&p->b, "ub");
}

/* Memo entries of what is said at the start. */
typedef struct names {
    uint32_t tensor, properties, index, info, bf16, path;
    uint32_t k[10];
} names;

enum { K_PROPERTIES, K_SIZE, K_CHUNKS, K_OFFSETS, K_SIZES, K_FQN, K_OFFSET, K_PATH, K_LENGTH };

static void say_names(py *p, names *g)
{
    static const char *const keys[] = {"properties", "size",   "chunks",        "offsets", "sizes",
                                       "fqn",        "offset", "relative_path", "length"};
    g->tensor = global(p, META, "TensorStorageMetadata");
    g->properties = global(p, META, "TensorProperties");
    p->chunk = global(p, META, "ChunkStorageMetadata");
    g->index = global(p, META, "MetadataIndex");
    g->info = global(p, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    p->size = global(p, "torch", "Size");
    g->bf16 = global(p, "torch", "bfloat16");
    g->path = text(p, "__0_0.distcp");
    for (int i = 0; i < COUNT(keys); i++)
        g->k[i] = text(p, keys[i]);
    /* The first Size of a stream is the one that is recognised. */
    size_of(p, 1, 2);
    for (int i = 0; i < 8 + COUNT(keys) + 1; i++)
        ckpt_buf_putc(&p->b, '0');
}

static void say_chunk(py *p, const names *g, int row, bool alone)
{
    p->dict = open_object(p, p->chunk);
    get_memo(p, g->k[K_OFFSETS]);
    uint32_t at = size_of(p, row, 0);
    get_memo(p, g->k[K_SIZES]);
    size_of(p, 1, 3);
    p->offsets = at;
    close_object(p);
    if (alone)
        ckpt_buf_putc(&p->b, 'a');
}

enum trick { PLAIN, SHARED_OFFSET, TAKEN_DICT, TAKEN_LIST, ORPHAN };

static void say_tensor(py *p, const names *g, uint32_t *fqn, uint32_t *offsets, int i, int chunks,
                       enum trick trick)
{
    char name[32];
    snprintf(name, sizeof name, "layers.%d.weight", i);
    *fqn = text(p, name);
    open_object(p, g->tensor);
    get_memo(p, g->k[K_PROPERTIES]);
    get_memo(p, g->properties);
    ckpt_buf_putc(&p->b, ')'), ckpt_buf_putc(&p->b, 0x81), memo(p);
    ckpt_buf_putc(&p->b, '('), get_memo(p, g->bf16), ckpt_buf_puts(&p->b, "NN"),
        ckpt_buf_putc(&p->b, 't');
    memo(p), ckpt_buf_putc(&p->b, 'b');
    get_memo(p, g->k[K_SIZE]), size_of(p, chunks, 3);
    get_memo(p, g->k[K_CHUNKS]);
    ckpt_buf_putc(&p->b, ']');
    uint32_t list = memo(p);
    if (chunks > 1)
        ckpt_buf_putc(&p->b, '(');
    for (int c = 0; c < chunks; c++) {
        say_chunk(p, g, c, chunks == 1);
        offsets[c] = p->offsets;
    }
    if (chunks > 1)
        ckpt_buf_putc(&p->b, 'e');
    if (trick == TAKEN_LIST && i == 3) {
        text(p, "again");
        get_memo(p, list);
    }
    if (trick == ORPHAN && i == 3) { /* a field that no grammar here knows */
        text(p, "more");
        ckpt_buf_puts(&p->b, "}");
    }
    close_object(p);
}

static void say_entry(py *p, const names *g, uint32_t fqn, uint32_t offset, int row, int at,
                      enum trick trick)
{
    open_object(p, g->index);
    get_memo(p, g->k[K_FQN]), get_memo(p, fqn);
    get_memo(p, g->k[K_OFFSET]);
    if (trick == SHARED_OFFSET)
        get_memo(p, offset);
    else
        size_of(p, row, 0);
    close_object(p);
    open_object(p, g->info);
    get_memo(p, g->k[K_PATH]), get_memo(p, g->path);
    get_memo(p, g->k[K_OFFSET]);
    ckpt_buf_putc(&p->b, 'M'), ckpt_buf_putc(&p->b, at & 255), ckpt_buf_putc(&p->b, at >> 8);
    get_memo(p, g->k[K_LENGTH]);
    ckpt_buf_puts(&p->b, "K\x06");
    close_object(p);
}

static void say_metadata(py *p, int tensors, int chunks, enum trick trick)
{
    names g;
    uint32_t fqn[64], offsets[64][8];
    ckpt_buf_putc(&p->b, 0x80), ckpt_buf_putc(&p->b, 4);
    say_names(p, &g);
    uint32_t cls = global(p, META, "Metadata");
    ckpt_buf_putc(&p->b, '0');
    open_object(p, cls);
    text(p, "state_dict_metadata");
    ckpt_buf_puts(&p->b, "}(");
    for (int i = 0; i < tensors; i++)
        say_tensor(p, &g, &fqn[i], offsets[i], i, chunks, trick);
    ckpt_buf_puts(&p->b, "u");
    text(p, "storage_data");
    ckpt_buf_puts(&p->b, "}(");
    for (int i = 0, at = 0; i < tensors; i++)
        for (int c = 0; c < chunks; c++, at += 6)
            say_entry(p, &g, fqn[i], offsets[i][c], c, at, trick);
    ckpt_buf_puts(&p->b, "u");
    if (trick == TAKEN_DICT) {
        text(p, "planner_data");
        get_memo(p, p->dict);
    }
    close_object(p);
    ckpt_buf_putc(&p->b, '.');
}

/* A reference to a part of what was taken gives the ordinary parse, and its result. */
static const struct {
    enum trick trick;
    int chunks;
    bool whole; /* everything can be taken */
} tricks[] = {
    {PLAIN,         1, true },
    {PLAIN,         3, true },
    {SHARED_OFFSET, 1, true },
    {SHARED_OFFSET, 8, true },
    {TAKEN_DICT,    2, false},
    {TAKEN_LIST,    2, true },
    {ORPHAN,        2, true }
};

START_TEST(parse_python_spelling_taken_equals_nodes)
{
    enum { TENSORS = 20 };
    py p = {0};
    size_t n;
    int chunks = tricks[_i].chunks;
    say_metadata(&p, TENSORS, chunks, tricks[_i].trick);
    ck_assert(!p.b.failed);
    ck_assert_int_eq(both(p.b.data, p.b.len, &n), CKPT_OK);
    ck_assert_uint_eq(n, TENSORS);
    long taken = taken_of(p.b.data, p.b.len), all = TENSORS * (1 + 3 * chunks);
    if (!tricks[_i].whole)
        ck_assert_int_eq(taken, -1);
    else if (tricks[_i].trick == PLAIN || tricks[_i].trick == SHARED_OFFSET)
        ck_assert_int_eq(taken, all);
    else /* one tensor is made of nodes */
        ck_assert_msg(taken >= all - 1, "%ld of %ld", taken, all);
    ckpt_buf_release(&p.b);
}
END_TEST

/* What is left of a taken object has no room for what the root of a graph holds. */
START_TEST(parse_pickle_of_a_taken_object_is_done_by_nodes)
{
    py p = {0};
    names g;
    size_t n;
    ckpt_buf_putc(&p.b, 0x80), ckpt_buf_putc(&p.b, 4);
    say_names(&p, &g);
    say_chunk(&p, &g, 0, false);
    ckpt_buf_putc(&p.b, '.');
    ck_assert_int_eq(taken_of(p.b.data, p.b.len), -1);
    ck_assert_int_eq(both(p.b.data, p.b.len, &n), CKPT_E_FORMAT);
    ckpt_buf_release(&p.b);
}
END_TEST

Suite *suite_dcp_meta(void)
{
    Suite *s = suite_create("dcp_meta");
    TCase *t = tcase_create("dcp_meta");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, parse_real_metadata_taken_equals_nodes, 0, COUNT(real));
    tcase_add_loop_test(t, parse_damaged_metadata_taken_equals_nodes, 0, COUNT(real));
    tcase_add_loop_test(t, parse_python_spelling_taken_equals_nodes, 0, COUNT(tricks));
    tcase_add_test(t, parse_pickle_of_a_taken_object_is_done_by_nodes);
    suite_add_tcase(s, t);
    return s;
}
