/* One entry point a parser, on arbitrary bytes. FUZZ_TARGET names it.
 *
 * Built with libFuzzer (make fuzz) this searches for inputs that crash, leak or hang. Built alone
 * (REPLAY) it runs the committed corpus, corpus/TARGET/FILE, and a fixed number of random changes of
 * each file, which is what `make check` does. Nothing is expected of the results but that they come.
 *
 * The mutators (mutate.c) know a little of the structure; directories are one input each (tree.c). */
#include "data.h"
#include "dcp_meta.h"
#include "json.h"
#include "layout.h"
#include "manifest.h"
#include "mutate.h"
#include "pickle.h"
#include "policy.h"
#include "st_header.h"
#include "st_scan.h"
#include "torch_save.h"
#include "usermap.h"
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

/* Rules for two modules, or the stored text of a policy. What rules give is read back as the same. */
static void run_policy(uint8_t *p, size_t n)
{
    static const char config[] = "{\"pattern\":\"K-*-KE\"}";
    ckpt_model model = {0};
    ckpt_policy policy = {0}, again = {0};
    ckpt_json *rules = NULL;
    ckpt_err err;
    char *text = calloc(1, n + 1);
    if (text == NULL ||
        ckpt_json_parse(config, sizeof config - 1, &model.config, &err) != CKPT_OK ||
        ckpt_policy_open(&policy, &model, &err) != CKPT_OK ||
        ckpt_policy_open(&again, &model, &err) != CKPT_OK)
        abort();
    memcpy(text, p, n);
    (void)!ckpt_policy_restore(&again, text, NULL, &err);
    if (ckpt_json_parse(text, n, &rules, &err) == CKPT_OK &&
        ckpt_policy_resolve(&policy, rules, &err) == CKPT_OK &&
        ckpt_policy_restore(&again, policy.text, policy.digest, &err) != CKPT_OK)
        abort();
    ckpt_policy_release(&policy);
    ckpt_policy_release(&again);
    ckpt_json_free(rules);
    ckpt_json_free(model.config);
    free(text);
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
    ckpt_dcp_meta meta = {0}, nodes = {0};
    ckpt_err err;
    ckpt_status status = ckpt_dcp_meta_parse(p, n, &arena, &meta, &err);
    if (ckpt_dcp_meta_parse_nodes(p, n, &arena, &nodes, &err) != status ||
        (status == CKPT_OK &&
         (meta.n_entries != nodes.n_entries || meta.n_tensors != nodes.n_tensors ||
          meta.n_objects != nodes.n_objects)))
        abort();
    ckpt_json_free(meta.policy);
    ckpt_json_free(nodes.policy);
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

/* ---- targets that need files ------------------------------------------------------------------- */

/* A directory of this process, in memory where the machine has such a place. */
static const char *scratch(const char *suffix)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/ckpt-fuzz.%ld%s",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (long)getpid(), suffix);
    return path;
}

static void read_a_little(const char *path)
{
    ckpt_open_opts opts = {.iteration = -1};
    ckpt_source src = {0};
    ckpt_err err;
    if (ckpt_source_open(&src, path, &opts, &err) == CKPT_OK)
        for (size_t i = 0; i < src.n_tensors && i < 16; i++)
            if (src.tensors[i].n_chunks > 0) {
                uint8_t byte;
                const ckpt_chunk *c = &src.tensors[i].chunks[0];
                (void)!ckpt_source_read(&src, c->file, &byte, 1, c->offset, &err);
            }
    ckpt_source_close(&src);
}

/* Whatever container takes a file for its own. */
static void run_open(uint8_t *p, size_t n)
{
    const char *path = scratch("");
    tree_put(path, p, n);
    read_a_little(path);
    unlink(path);
}

static void run_map(uint8_t *p, size_t n)
{
    const char *path = scratch(".json");
    ckpt_usermap map;
    ckpt_err err;
    tree_put(path, p, n);
    (void)!ckpt_usermap_load(&map, path, &err);
    ckpt_usermap_release(&map);
    unlink(path);
}

/* An index of token sequences beside 64 bytes of tokens. */
static void run_idx(uint8_t *p, size_t n)
{
    static const uint8_t tokens[64];
    char bin[128];
    const ckpt_data_opts opts = {
        .kind = CKPT_DATA_INDEXED, .seq_len = 4, .eod = -1, .vocab = 0, .split = true};
    ckpt_data *data = NULL;
    ckpt_err err;
    snprintf(bin, sizeof bin, "%s", scratch(".bin"));
    tree_put(bin, tokens, sizeof tokens);
    const char *path = scratch(".idx");
    tree_put(path, p, n);
    if (ckpt_data_open(&data, &path, 1, &opts, &err) == CKPT_OK) {
        int32_t ids[8], labels[8];
        int64_t cu[9], n_seq;
        (void)!ckpt_data_batch(data, 0, 1, 2, ids, labels, cu, &n_seq, &err);
    }
    ckpt_data_close(data);
    unlink(path);
    unlink(bin);
}

static void run_tree(const char *const *names, uint8_t *p, size_t n)
{
    const char *dir = scratch(".d");
    tree_write(names, dir, p, n);
    read_a_little(dir);
    tree_remove(names, dir);
}

static void run_dcp(uint8_t *p, size_t n)
{
    static const char *const names[] = {".metadata", "__0_0.distcp",       "__1_0.distcp",
                                        "common.pt", "metadata.json",      "w/.zarray",
                                        "w/0",       "ckpt.manifest.json", NULL};
    run_tree(names, p, n);
}

/* Shards with an index: safetensors and torch.save. */
static void run_index(uint8_t *p, size_t n)
{
    static const char *const names[] = {"model.safetensors.index.json",
                                        "model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors",
                                        "config.json",
                                        "pytorch_model.bin.index.json",
                                        "pytorch_model-00001-of-00002.bin",
                                        "optimizer-00001.safetensors",
                                        "pytorch_model-00002-of-00002.bin",
                                        NULL};
    run_tree(names, p, n);
}

/* One file a rank: Megatron's and safetensors. */
static void run_ranks(uint8_t *p, size_t n)
{
    static const char *const names[] = {"mp_rank_00/model_optim_rng.pt",
                                        "mp_rank_01/model_optim_rng.pt",
                                        "mp_rank_00_001/model_optim_rng.pt",
                                        "model-rank-0-part-0.safetensors",
                                        "model-rank-1-part-0.safetensors",
                                        "latest_checkpointed_iteration.txt",
                                        NULL};
    run_tree(names, p, n);
}

static const struct {
    const char *name;
    void (*run)(uint8_t *p, size_t n);
    mutate_kind kind;
    unsigned cost; /* of one input, beside a parser's in memory */
} targets[] = {
    {"json",        run_json,        MUTATE_JSON,   1 },
    {"manifest",    run_manifest,    MUTATE_JSON,   1 },
    {"config",      run_config,      MUTATE_JSON,   1 },
    {"policy",      run_policy,      MUTATE_JSON,   5 },
    {"pickle",      run_pickle,      MUTATE_PICKLE, 1 },
    {"metadata",    run_metadata,    MUTATE_PICKLE, 1 },
    {"zip",         run_zip,         MUTATE_ZIP,    1 },
    {"torch",       run_torch,       MUTATE_ZIP,    1 },
    {"safetensors", run_safetensors, MUTATE_JSON,   1 },
    {"open",        run_open,        MUTATE_BYTES,  50},
    {"map",         run_map,         MUTATE_JSON,   5 },
    {"idx",         run_idx,         MUTATE_BYTES,  5 },
    {"dcp",         run_dcp,         MUTATE_TREE,   10},
    {"index",       run_index,       MUTATE_TREE,   10},
    {"ranks",       run_ranks,       MUTATE_TREE,   10},
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

/* ---- libFuzzer --------------------------------------------------------------------------------- */

#ifndef REPLAY

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t n, size_t max, unsigned seed);
extern size_t LLVMFuzzerMutate(uint8_t *data, size_t n, size_t max);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *name = getenv("FUZZ_TARGET");
    if (*argc == 2 && strcmp((*argv)[1], "-list") == 0) {
        for (size_t t = 0; t < sizeof targets / sizeof targets[0]; t++)
            puts(targets[t].name);
        exit(0);
    }
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
    mutate_seed(seed);
    return mutate_draw(2) == 0 ? mutate(targets[target].kind, data, n, max)
                               : LLVMFuzzerMutate(data, n, max);
}

#else

/* ---- replay ------------------------------------------------------------------------------------ */

#define ROOM ((size_t)1 << 16)

static size_t replay_file(const char *path, size_t changes) /* inputs run */
{
    static uint8_t bytes[ROOM], changed[ROOM];
    FILE *f = fopen(path, "rb");
    size_t n = f != NULL ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f != NULL)
        fclose(f);
    run_one(bytes, n);
    for (size_t i = 0; i < changes; i++) {
        size_t k = n, steps = 1 + mutate_draw(4);
        memcpy(changed, bytes, n);
        while (steps-- > 0)
            k = mutate(targets[target].kind, changed, k, sizeof changed);
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
                mutate_seed(t);
                inputs += replay_file(path, strtoul(argv[2], NULL, 10) / targets[t].cost);
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
