/* A program that knows libckpt only by its installed header: enumerates, reads, maps, cuts over a mesh,
 * digests, converts, verifies, and makes errors. usage: client CHECKPOINT WORK OTHER. Exit 0: all as it
 * should be; else the line that was not is on stderr. */
#include <ckpt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "client.c:%d: %s: %s\n", __LINE__, #cond, err.text);                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static ckpt_err err;

/* Every tensor: whole, by parts of its first axis, and mapped where that can be: the same bytes. */
static size_t read_all(ckpt_checkpoint *c)
{
    size_t mapped = 0;
    for (size_t i = 0; i < ckpt_tensor_count(c); i++) {
        ckpt_tensor_info t;
        int64_t lo[16] = {0}, len[16];
        const void *at;
        size_t n;
        ckpt_tensor_at(c, i, &t);
        CHECK(t.name != NULL && t.rank <= 16 && ckpt_tensor_find(c, t.name) == (int64_t)i);
        unsigned char *whole = malloc(t.bytes + 1), *parts = malloc(t.bytes + 1);
        CHECK(whole != NULL && parts != NULL);
        CHECK(ckpt_read_part(c, i, NULL, NULL, whole, t.bytes, &err) == CKPT_OK);
        for (int k = 0; k < t.rank; k++)
            len[k] = t.shape[k];
        size_t done = 0;
        for (int64_t row = 0; t.rank > 0 && row < t.shape[0]; row += len[0]) {
            lo[0] = row;
            len[0] = t.shape[0] - row < 3 ? t.shape[0] - row : 3;
            size_t part = (size_t)(t.bytes / (uint64_t)t.shape[0] * (uint64_t)len[0]);
            CHECK(ckpt_read_part(c, i, lo, len, parts + done, part, &err) == CKPT_OK);
            done += part;
        }
        CHECK(t.rank == 0 || (done == t.bytes && memcmp(whole, parts, t.bytes) == 0));
        ckpt_status status = ckpt_map_part(c, i, NULL, NULL, &at, &n, &err);
        CHECK(status == CKPT_OK || status == CKPT_E_UNSUPPORTED);
        if (status == CKPT_OK) {
            CHECK(n == t.bytes && memcmp(whole, at, n) == 0);
            mapped++;
        }
        free(whole);
        free(parts);
    }
    return mapped;
}

/* At a mesh of two, the shards of every stored tensor tile it, and each rank has some. */
static void views(ckpt_checkpoint *c, const char *layout)
{
    ckpt_mesh mesh = {.tp = 2, .pp = 1, .ep = 1, .etp = 0, .cp = 1, .dp = 1};
    ckpt_view *v;
    size_t cut = 0, of_rank[2] = {0, 0};
    CHECK(ckpt_view_open(c, layout, &mesh, &v, &err) == CKPT_OK);
    CHECK(ckpt_view_ranks(v) == 2 && ckpt_view_count(v) > 0);
    for (size_t i = 0; i < ckpt_view_count(v); i++) {
        ckpt_tensor_info t;
        int64_t elements = 0, all = 1;
        ckpt_view_tensor(v, i, &t);
        for (size_t s = 0; s < ckpt_shard_count(v, i); s++) {
            ckpt_shard_info part;
            int64_t n = 1;
            ckpt_shard(v, i, s, &part);
            CHECK(part.owner >= 0 && part.owner < 2);
            of_rank[part.owner]++;
            unsigned char *bytes = malloc(part.bytes + 1);
            CHECK(bytes != NULL);
            CHECK(ckpt_shard_read(v, i, s, bytes, part.bytes, &err) == CKPT_OK);
            free(bytes);
            for (int k = 0; k < t.rank; k++)
                n *= part.len[k];
            elements += n;
        }
        for (int k = 0; k < t.rank; k++)
            all *= t.shape[k];
        CHECK(elements == all);
        cut += ckpt_shard_count(v, i) > 1;
    }
    CHECK(cut > 0 && of_rank[0] > 0 && of_rank[1] > 0);
    ckpt_view_close(v);
    mesh.tp = 7;
    CHECK(ckpt_view_open(c, layout, &mesh, &v, &err) == CKPT_E_USAGE && v == NULL);
    CHECK(strstr(err.text, "divisible") != NULL);
    mesh.tp = 2;
    CHECK(ckpt_view_open(c, "mine", &mesh, &v, &err) == CKPT_E_USAGE);
    CHECK(ckpt_view_open(c, layout, &mesh, &v, &err) == CKPT_OK); /* ends with the checkpoint */
}

static void commands(const char *path, const char *work, const uint8_t root[32])
{
    char dst[4096], *json = NULL;
    uint8_t again[32];
    ckpt_checkpoint *c;
    const char *const to[] = {"--to", "torch_dist", "--tp", "2", "--layout", "megatron", NULL};
    const char *const hash[] = {"--hash", NULL}, *const bad[] = {"--no-such", NULL};
    snprintf(dst, sizeof dst, "%s/converted", work);
    CHECK(ckpt_convert(path, dst, to, &json, &err) == CKPT_OK);
    CHECK(json != NULL && strstr(json, "\"command\":\"convert\"") && strstr(json, "\"ok\":true"));
    ckpt_free(json);
    CHECK(ckpt_convert(path, dst, to, &json, &err) == CKPT_E_USAGE && strstr(err.text, dst));
    CHECK(json != NULL && strstr(json, "\"ok\":false"));
    ckpt_free(json);
    CHECK(ckpt_verify(dst, hash, NULL, &err) == CKPT_OK);
    CHECK(ckpt_diff(path, dst, NULL, NULL, &err) == CKPT_OK);
    CHECK(ckpt_verify(dst, bad, &json, &err) == CKPT_E_USAGE && strstr(err.text, "no-such"));
    ckpt_free(json);
    CHECK(ckpt_open(dst, NULL, &c, &err) == CKPT_OK);
    CHECK(ckpt_digest(c, again, &err) == CKPT_OK && memcmp(root, again, 32) == 0);
    CHECK(strcmp(ckpt_container_name(c), "torch_dist") == 0 && ckpt_stored_mesh(c).tp == 2);
    ckpt_close(c);
}

static void errors(ckpt_checkpoint *c, const char *other)
{
    ckpt_checkpoint *none;
    ckpt_open_options o = {.iteration = -1, .reserved = {1}};
    ckpt_tensor_info t;
    int64_t lo[16] = {1}, len[16] = {0};
    uint8_t digest[32];
    char byte;
    ckpt_tensor_at(c, 0, &t);
    for (int k = 0; k < t.rank; k++)
        len[k] = t.shape[k];
    CHECK(ckpt_read_part(c, 0, lo, len, &byte, 1, &err) == CKPT_E_USAGE);
    CHECK(ckpt_read_part(c, 0, NULL, NULL, &byte, 1, &err) == CKPT_E_USAGE);
    CHECK(strstr(err.text, t.name) != NULL);
    CHECK(ckpt_read_part(c, ckpt_tensor_count(c), NULL, NULL, &byte, 1, NULL) == CKPT_E_USAGE);
    CHECK(ckpt_digest_of(c, 0, digest, &err) == CKPT_E_USAGE);
    ckpt_tensor_at(c, ckpt_tensor_count(c), &t);
    CHECK(t.name == NULL && ckpt_tensor_find(c, "nothing") == -1);
    CHECK(ckpt_open("/nowhere", NULL, &none, &err) == CKPT_E_IO && none == NULL);
    CHECK(strstr(err.text, "/nowhere") != NULL);
    CHECK(ckpt_open(other, NULL, &none, &err) == CKPT_E_FORMAT && err.code == CKPT_E_FORMAT);
    CHECK(ckpt_open(other, &o, &none, &err) == CKPT_E_USAGE);
    ckpt_close(NULL);
}

int main(int argc, char **argv)
{
    ckpt_checkpoint *c;
    uint8_t root[32], first[32];
    if (argc != 4 || strcmp(ckpt_version(), CKPT_VERSION) != 0 || ckpt_abi() != CKPT_ABI)
        return 2;
    CHECK(ckpt_open(argv[1], NULL, &c, &err) == CKPT_OK);
    CHECK(ckpt_layout_name(c) != NULL && ckpt_config(c) != NULL && ckpt_config(c)[0] == '{');
    errors(c, argv[3]);
    size_t mapped = read_all(c);
    views(c, "megatron");
    CHECK(ckpt_digest(c, root, &err) == CKPT_OK && ckpt_digest_of(c, 0, first, &err) == CKPT_OK);
    commands(argv[1], argv[2], root);
    printf("%s, %zu tensors, %zu of them mapped, root ", ckpt_layout_name(c), ckpt_tensor_count(c),
           mapped);
    for (int i = 0; i < 32; i++)
        printf("%02x", root[i]);
    printf("\n");
    ckpt_close(c);
    return 0;
}
