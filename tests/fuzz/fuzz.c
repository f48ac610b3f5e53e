/* One entry point a parser, on arbitrary bytes. FUZZ_TARGET names it.
 *
 * Built with libFuzzer (make fuzz) this searches for inputs that crash, leak or hang. Built alone
 * (REPLAY) it runs the committed corpus, corpus/TARGET/FILE, and a fixed number of random changes of
 * each file, which is what `make check` does. Nothing is expected of the results but that they come.
 *
 * The mutators know a little of the structure: opcodes of pickles, fields of zip records. */
#include "dcp_meta.h"
#include "json.h"
#include "layout.h"
#include "manifest.h"
#include "pickle.h"
#include "st_header.h"
#include "st_scan.h"
#include "torch_save.h"
#include "zip.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIMIT ((size_t)1 << 20) /* of what an entry inflates to */

/* ---- sources in memory ------------------------------------------------------------------------- */

static ckpt_status read_memory(ckpt_source *src, uint32_t file, void *buf, size_t n,
                               uint64_t offset, ckpt_err *err)
{
    (void)file;
    if (offset > src->files[0].size || n > src->files[0].size - offset)
        return ckpt_fail(err, CKPT_E_FORMAT, "past the end");
    memcpy(buf, (uint8_t *)src->self + offset, n);
    return CKPT_OK;
}

static ckpt_source memory(uint8_t *bytes, size_t n, ckpt_file *file)
{
    *file = (ckpt_file){.name = "fuzz", .path = "fuzz", .size = n, .fd = -1};
    return (ckpt_source){.files = file, .n_files = 1, .read_at = read_memory, .self = bytes};
}

/* ---- targets ----------------------------------------------------------------------------------- */

static void run_json(uint8_t *p, size_t n)
{
    ckpt_json *doc = NULL, *again = NULL;
    ckpt_buf text = {0};
    ckpt_err err;
    if (ckpt_json_parse((const char *)p, n, &doc, &err) == CKPT_OK &&
        ckpt_json_print(doc, 0, true, &text)) {
        /* What we print, we read, and it is the same. */
        if (ckpt_json_parse((const char *)text.data, text.len, &again, &err) != CKPT_OK ||
            !ckpt_json_equal(doc, again))
            abort();
    }
    ckpt_json_free(doc);
    ckpt_json_free(again);
    ckpt_buf_release(&text);
}

static void run_manifest(uint8_t *p, size_t n)
{
    ckpt_manifest m;
    ckpt_err err;
    if (ckpt_manifest_parse((const char *)p, n, &m, &err) == CKPT_OK)
        ckpt_manifest_release(&m);
}

/* Every layout's reading of a config.json. */
static void run_config(uint8_t *p, size_t n)
{
    ckpt_json *doc = NULL;
    ckpt_err err;
    if (ckpt_json_parse((const char *)p, n, &doc, &err) != CKPT_OK)
        return;
    for (size_t i = 0; ckpt_json_is_object(doc) && ckpt_layouts[i] != NULL; i++) {
        ckpt_json *canon = ckpt_json_new_object();
        if (canon != NULL && ckpt_layouts[i]->config_read != NULL)
            (void)!ckpt_layouts[i]->config_read(doc, canon, &err);
        ckpt_json_free(canon);
    }
    ckpt_json_free(doc);
}

static void run_pickle(uint8_t *p, size_t n)
{
    ckpt_arena arena = {0};
    ckpt_pkl *root;
    uint32_t nodes;
    ckpt_err err;
    if (ckpt_pkl_parse(p, n, &arena, NULL, &root, NULL, &nodes, &err) == CKPT_OK) {
        ckpt_buf out = {0};
        (void)ckpt_pkl_unknown_global(root, nodes, &arena, &err);
        ckpt_json_free(ckpt_pkl_to_json(root));
        (void)!ckpt_pkl_put_node(&out, root, nodes, &err);
        ckpt_buf_release(&out);
    }
    ckpt_arena_free(&arena);
}

static void run_metadata(uint8_t *p, size_t n)
{
    ckpt_arena arena = {0};
    ckpt_dcp_meta meta = {0};
    ckpt_err err;
    (void)!ckpt_dcp_meta_parse(p, n, &arena, &meta, &err);
    ckpt_arena_free(&arena);
}

static void run_zip(uint8_t *p, size_t n)
{
    ckpt_arena arena = {0};
    ckpt_file file;
    ckpt_source src = memory(p, n, &file);
    ckpt_zip zip;
    ckpt_err err;
    if (ckpt_zip_open(&src, 0, 0, n, &arena, &zip, &err) == CKPT_OK)
        for (size_t i = 0; i < zip.n_entries && i < 16; i++) {
            ckpt_buf out = {0};
            (void)!ckpt_zip_read(&src, 0, 0, &zip.entries[i], LIMIT, &out, &err);
            ckpt_buf_release(&out);
        }
    ckpt_arena_free(&arena);
}

static void run_torch(uint8_t *p, size_t n)
{
    ckpt_arena arena = {0};
    ckpt_file file;
    ckpt_source src = memory(p, n, &file);
    ckpt_pkl *const *pairs;
    size_t n_pairs;
    ckpt_pt pt;
    ckpt_err err;
    if (ckpt_pt_open(&src, 0, 0, n, &arena, &pt, &err) == CKPT_OK &&
        ckpt_pkl_pairs(pt.root, &pairs, &n_pairs))
        for (size_t i = 1; i < n_pairs && i < 64; i += 2) {
            ckpt_pt_tensor tensor;
            bool is_tensor;
            const char *what;
            (void)!ckpt_pt_tensor_of(&pt, pairs[i], &arena, &tensor, &is_tensor, &what, &err);
        }
    ckpt_arena_free(&arena);
}

/* A file from its first byte: length, header, data. */
static void run_safetensors(uint8_t *p, size_t n)
{
    ckpt_arena arena = {0};
    ckpt_st_table table = {0};
    ckpt_json *metadata = NULL;
    ckpt_err err;
    char *text = n >= 8 ? calloc(1, n - 8 + CKPT_ST_SCAN_PAD) : NULL;
    if (text != NULL) {
        size_t header = 0;
        for (size_t i = 0; i < 8; i++)
            header |= (size_t)p[i] << (8 * i);
        header = header < n - 8 ? header : n - 8;
        memcpy(text, p + 8, header);
        if (ckpt_st_header_parse(text, header, 0, &arena, &table, &metadata, &err) == CKPT_OK)
            (void)!ckpt_st_header_check(&table, 0, n - 8 - header, &err);
    }
    free(text);
    ckpt_st_table_release(&table);
    ckpt_json_free(metadata);
    ckpt_arena_free(&arena);
}

/* Whatever container takes a file for its own, through the file system. */
static void run_open(uint8_t *p, size_t n)
{
    char path[] = "/tmp/ckpt-fuzz.XXXXXX";
    ckpt_open_opts opts = {.iteration = -1};
    ckpt_source src = {0};
    ckpt_err err;
    int fd = mkstemp(path);
    if (fd < 0 || write(fd, p, n) != (ssize_t)n)
        abort();
    if (ckpt_source_open(&src, path, &opts, &err) == CKPT_OK)
        for (size_t i = 0; i < src.n_tensors && i < 16; i++)
            if (src.tensors[i].n_chunks > 0) {
                uint8_t byte;
                const ckpt_chunk *c = &src.tensors[i].chunks[0];
                (void)!ckpt_source_read(&src, c->file, &byte, 1, c->offset, &err);
            }
    ckpt_source_close(&src);
    close(fd);
    unlink(path);
}

static const struct {
    const char *name;
    void (*run)(uint8_t *p, size_t n);
} targets[] = {
    {"json",        run_json       },
    {"manifest",    run_manifest   },
    {"config",      run_config     },
    {"pickle",      run_pickle     },
    {"metadata",    run_metadata   },
    {"zip",         run_zip        },
    {"torch",       run_torch      },
    {"safetensors", run_safetensors},
    {"open",        run_open       },
};

static size_t target;

static bool choose(const char *name)
{
    for (target = 0; target < sizeof targets / sizeof targets[0]; target++)
        if (strcmp(targets[target].name, name) == 0)
            return true;
    fprintf(stderr, "fuzz: unknown target '%s'\n", name);
    return false;
}

/* A copy of its own length, so that reading past its end is seen. */
static void run_one(const uint8_t *data, size_t n)
{
    uint8_t *copy = malloc(n > 0 ? n : 1);
    if (copy == NULL)
        return;
    if (n > 0)
        memcpy(copy, data, n);
    targets[target].run(copy, n);
    free(copy);
}

/* ---- mutators ---------------------------------------------------------------------------------- */

static uint64_t random_state;

static uint32_t draw(uint32_t below) /* splitmix64 */
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return below > 0 ? (uint32_t)((z ^ (z >> 31)) % below) : 0;
}

static size_t insert(uint8_t *p, size_t n, size_t max, size_t at, const void *bytes, size_t k)
{
    if (k > max - n)
        return n;
    memmove(p + at + k, p + at, n - at);
    memcpy(p + at, bytes, k);
    return n + k;
}

/* Opcodes with plausible arguments, so that the stack machine goes on. */
static size_t mutate_pickle(uint8_t *p, size_t n, size_t max)
{
#define OP(text)                                                                                   \
    {                                                                                              \
        text, sizeof(text) - 1                                                                     \
    }
    static const struct {
        const char *bytes;
        uint8_t n;
    } ops[] = {
        OP("K\1"),
        OP("N"),
        OP("("),
        OP("t"),
        OP("\x85"),
        OP("\x86"),
        OP("\x87"),
        OP("}"),
        OP("]"),
        OP("s"),
        OP("u"),
        OP("a"),
        OP("e"),
        OP("q\0"),
        OP("h\0"),
        OP("\x94"),
        OP("R"),
        OP("\x81"),
        OP("b"),
        OP("Q"),
        OP("2"),
        OP("0"),
        OP("1"),
        OP("\x8a\1\1"),
        OP("\x8b\xff\xff\xff\x7f"),
        OP("X\1\0\0\0a"),
        OP("\x8c\1a"),
        OP("cos\nsystem\n"),
        OP("ctorch._utils\n_rebuild_tensor_v2\n"),
        OP("J\xff\xff\xff\xff"),
        OP("\x95\4\0\0\0\0\0\0\0"),
        OP("."),
    };
#undef OP
    size_t k = draw(sizeof ops / sizeof ops[0]), at = draw((uint32_t)n + 1);
    return insert(p, n, max, at, ops[k].bytes, ops[k].n);
}

/* A 16-, 32- or 64-bit field of a zip record becomes an extreme, or a neighbour of what it was. */
static size_t mutate_zip(uint8_t *p, size_t n)
{
    static const uint64_t extremes[] = {0, 1, 0xffff, 0xffffffff, 0x7fffffff, UINT64_MAX};
    size_t found = 0, at = 0;
    for (size_t i = 0; i + 4 < n; i++)
        if (p[i] == 'P' && p[i + 1] == 'K' && draw((uint32_t)++found) == 0)
            at = i;
    size_t width = (size_t)2 << draw(3), offset = at + 4 + draw(44);
    if (found == 0 || offset + width > n)
        return n;
    uint64_t v = extremes[draw(sizeof extremes / sizeof extremes[0])];
    if (draw(2) == 0) {
        memcpy(&v, p + offset, width);
        v += draw(2) == 0 ? 1 : (uint64_t)-1;
    }
    memcpy(p + offset, &v, width);
    return n;
}

static size_t mutate_bytes(uint8_t *p, size_t n, size_t max)
{
    if (n == 0)
        return insert(p, n, max, 0, "\0", 1);
    size_t at = draw((uint32_t)n);
    switch (draw(5)) {
    case 0:
        p[at] ^= (uint8_t)(1u << draw(8));
        return n;
    case 1:
        p[at] = (uint8_t)draw(256);
        return n;
    case 2: /* cut out */
        memmove(p + at, p + at + 1, n - at - 1);
        return n - 1;
    case 3: /* cut off */
        return draw(8) == 0 ? at : n;
    default: {
        uint8_t b = (uint8_t)draw(256);
        return insert(p, n, max, at, &b, 1);
    }
    }
}

static size_t mutate(uint8_t *p, size_t n, size_t max)
{
    const char *name = targets[target].name;
    bool archive = strcmp(name, "zip") == 0 || strcmp(name, "torch") == 0;
    bool pickle = strcmp(name, "pickle") == 0 || strcmp(name, "metadata") == 0;
    if (pickle && draw(2) == 0)
        return mutate_pickle(p, n, max);
    if (archive && draw(2) == 0)
        return mutate_zip(p, n);
    return mutate_bytes(p, n, max);
}

/* ---- libFuzzer --------------------------------------------------------------------------------- */

#ifndef REPLAY

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max, unsigned seed);
extern size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *name = getenv("FUZZ_TARGET");
    (void)argc;
    (void)argv;
    if (!choose(name != NULL ? name : ""))
        exit(2);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    run_one(data, n);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max, unsigned seed)
{
    random_state = seed;
    return draw(2) == 0 ? mutate(data, n, max) : LLVMFuzzerMutate(data, n, max);
}

#else

/* ---- replay ------------------------------------------------------------------------------------ */

#define ROOM ((size_t)1 << 16)

static size_t replay_file(const char *path, size_t changes)
{
    static uint8_t bytes[ROOM], changed[ROOM];
    FILE *f = fopen(path, "rb");
    size_t n = f != NULL ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f != NULL)
        fclose(f);
    run_one(bytes, n);
    for (size_t i = 0; i < changes; i++) {
        size_t k = n, steps = 1 + draw(4);
        memcpy(changed, bytes, n);
        while (steps-- > 0)
            k = mutate(changed, k, sizeof changed);
        run_one(changed, k);
    }
    return 1 + changes;
}

/* fuzz-replay CORPUS CHANGES: each of CORPUS/TARGET/FILE. */
int main(int argc, char **argv)
{
    size_t inputs = 0, files = 0;
    if (argc != 3)
        return 2;
    for (size_t t = 0; t < sizeof targets / sizeof targets[0]; t++) {
        char dir[2048], path[4096];
        struct dirent **list;
        snprintf(dir, sizeof dir, "%s/%s", argv[1], targets[t].name);
        int n = scandir(dir, &list, NULL, alphasort);
        if (n <= 2 || !choose(targets[t].name)) {
            fprintf(stderr, "fuzz: no corpus in %s\n", dir);
            return 1;
        }
        for (int i = 0; i < n; i++) {
            if (list[i]->d_name[0] != '.') {
                snprintf(path, sizeof path, "%s/%s", dir, list[i]->d_name);
                random_state = t;
                inputs += replay_file(path, strtoul(argv[2], NULL, 10) / (t == 8 ? 50 : 1));
                files++;
            }
            free(list[i]);
        }
        free(list);
    }
    printf("fuzz: %zu inputs from %zu files\n", inputs, files);
    return 0;
}

#endif
