/* Writes synthetic checkpoints as Hugging Face directories of safetensors files.
 *
 *   gen kimi DIR --size 2G [--experts N] [--shard 512M] [--seed S]
 *   gen random DIR --seed S [--shard SIZE]        a small random hybrid model
 *   gen plain DIR --seed S                        any names, shapes and dtypes, no model
 *   gen kimi48 DIR [--size SIZE] [--shard SIZE]   Kimi-Linear-48B, all data a hole
 *   gen deepseek671 DIR [--fp8 1] [--shard SIZE]  DeepSeek-V3, all data a hole
 *   gen hole FILE --size SIZE                     one tensor of SIZE bytes, a hole
 *   gen header FILE --tensors N                   one file with N one-byte tensors
 *   gen shards DIR --tensors N                    N files of one tensor each, and their index
 *
 * Format: u64 header length, JSON header padded with blanks to a multiple of 8, data
 * (torch-formats.md section 5). Not sorted or durable: input for tests and benchmarks only. */
#include "synth.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void die(const char *what, const char *name)
{
    fprintf(stderr, "gen: %s: %s%s%s\n", name, what, errno ? ": " : "",
            errno ? strerror(errno) : "");
    exit(errno ? 5 : 2);
}

/* "512M", "2G", "4.5M" is not needed: a whole number and a binary suffix. */
static uint64_t parse_size(const char *text)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);
    uint64_t unit = *end == 'K'   ? UINT64_C(1) << 10
                    : *end == 'M' ? UINT64_C(1) << 20
                    : *end == 'G' ? UINT64_C(1) << 30
                                  : 1;
    if (end == text || n == 0 || (unit > 1 ? end[1] : end[0]) != '\0') {
        errno = 0;
        die("not a size (such as 512M or 2G)", text);
    }
    return n * unit;
}

static FILE *open_out(const char *path)
{
    FILE *f = fopen(path, "wb");
    if (!f)
        die("cannot create", path);
    return f;
}

static void close_out(FILE *f, const char *path)
{
    if (ferror(f) | fclose(f))
        die("cannot write", path);
}

static void put_header_end(FILE *f, uint64_t text_len)
{
    static const char blanks[8] = "       ";
    uint64_t padded = (text_len + 7) / 8 * 8;
    fwrite(blanks, 1, (size_t)(padded - text_len), f);
}

static int entry(char *out, size_t cap, const synth_tensor *t, bool first, uint64_t begin)
{
    int n = snprintf(out, cap, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", first ? "" : ",", t->name,
                     t->dtype);
    for (int i = 0; i < t->rank; i++)
        n += snprintf(out + n, cap - (size_t)n, "%s%lld", i ? "," : "", (long long)t->dims[i]);
    n += snprintf(out + n, cap - (size_t)n, "],\"data_offsets\":[%llu,%llu]}",
                  (unsigned long long)begin, (unsigned long long)(begin + t->bytes));
    return n;
}

static const char header_open[] = "{\"__metadata__\":{\"format\":\"pt\"},";

static void write_file(const char *path, const synth_tensor *t, size_t n, bool hole)
{
    FILE *f = open_out(path);
    char line[512];
    uint64_t len = sizeof header_open - 1 + 1, offset = 0;
    for (size_t i = 0; i < n; i++) {
        len += (uint64_t)entry(line, sizeof line, &t[i], i == 0, offset);
        offset += t[i].bytes;
    }
    uint64_t padded = (len + 7) / 8 * 8;
    fwrite(&padded, 8, 1, f);
    fputs(header_open, f);
    offset = 0;
    for (size_t i = 0; i < n; i++) {
        fwrite(line, 1, (size_t)entry(line, sizeof line, &t[i], i == 0, offset), f);
        offset += t[i].bytes;
    }
    fputc('}', f);
    put_header_end(f, len);
    static unsigned char block[1 << 20];
    if (hole && (fflush(f) != 0 || ftruncate(fileno(f), (off_t)(8 + padded + offset)) != 0))
        die("cannot extend", path);
    for (size_t i = 0; i < n && !hole; i++)
        for (uint64_t at = 0; at < t[i].bytes; at += sizeof block) {
            size_t take = t[i].bytes - at < sizeof block ? (size_t)(t[i].bytes - at) : sizeof block;
            synth_fill(&t[i], at, block, take);
            fwrite(block, 1, take, f);
        }
    close_out(f, path);
}

/* Fill ends[] with one past the last tensor of each shard; returns the number of shards. */
static size_t cut_shards(const synth_model *m, uint64_t max, size_t *ends)
{
    size_t shards = 0;
    uint64_t used = 0;
    for (size_t i = 0; i < m->n; i++) {
        if (used > 0 && used + m->tensors[i].bytes > max) {
            ends[shards++] = i;
            used = 0;
        }
        used += m->tensors[i].bytes;
    }
    ends[shards++] = m->n;
    return shards;
}

static void shard_name(char out[64], size_t i, size_t n)
{
    if (n == 1)
        snprintf(out, 64, "model.safetensors");
    else
        snprintf(out, 64, "model-%05zu-of-%05zu.safetensors", i + 1, n);
}

static void write_model(const synth_model *m, const char *dir, uint64_t max, bool hole)
{
    char path[4096], name[64];
    if (mkdir(dir, 0777) != 0)
        die("cannot create directory", dir);
    size_t *ends = malloc((m->n + 1) * sizeof *ends);
    if (!ends)
        die("out of memory", dir);
    size_t shards = cut_shards(m, max, ends);
    for (size_t i = 0; i < shards; i++) {
        size_t from = i ? ends[i - 1] : 0;
        shard_name(name, i, shards);
        snprintf(path, sizeof path, "%s/%s", dir, name);
        write_file(path, m->tensors + from, ends[i] - from, hole);
    }
    if (shards > 1) {
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
        FILE *f = open_out(path);
        fprintf(f, "{\"metadata\":{\"total_size\":%llu},\"weight_map\":{",
                (unsigned long long)m->bytes);
        for (size_t i = 0, shard = 0; i < m->n; i++) {
            while (i >= ends[shard])
                shard++;
            shard_name(name, shard, shards);
            fprintf(f, "%s\n\"%s\":\"%s\"", i ? "," : "", m->tensors[i].name, name);
        }
        fputs("}}\n", f);
        close_out(f, path);
    }
    if (m->config) {
        snprintf(path, sizeof path, "%s/config.json", dir);
        FILE *f = open_out(path);
        fputs(m->config, f);
        close_out(f, path);
    }
    free(ends);
    printf("%s: %zu tensors, %llu bytes, %zu files\n", dir, m->n, (unsigned long long)m->bytes,
           shards);
}

/* Names are short so that a million stay below the format's header limit of 100,000,000 bytes. */
static void write_many(const char *path, uint64_t n)
{
    FILE *f = open_out(path);
    uint64_t len = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) {
            uint64_t padded = (len + 7) / 8 * 8;
            fwrite(&padded, 8, 1, f);
            fputc('{', f);
        }
        uint64_t count = 2;
        for (uint64_t i = 0; i < n; i++) {
            char line[128];
            int k = snprintf(line, sizeof line,
                             "%s\"layers.%llu.e.%llu.w\":{\"dtype\":\"U8\",\"shape\":[1],"
                             "\"data_offsets\":[%llu,%llu]}",
                             i ? "," : "", (unsigned long long)(i / 1000),
                             (unsigned long long)(i % 1000), (unsigned long long)i,
                             (unsigned long long)i + 1);
            count += (uint64_t)k;
            if (pass == 1)
                fwrite(line, 1, (size_t)k, f);
        }
        len = count;
    }
    fputc('}', f);
    put_header_end(f, len);
    for (uint64_t i = 0; i < n; i++)
        fputc((int)(i & 0xff), f);
    close_out(f, path);
    printf("%s: %llu tensors, header %llu bytes\n", path, (unsigned long long)n,
           (unsigned long long)len);
}

/* Shards as a download of very many small files has them. */
static void write_shards(const char *dir, uint64_t n)
{
    synth_model m = {.kind = SYNTH_PLAIN};
    for (uint64_t i = 0; i < n; i++)
        synth_byte(&m, i);
    write_model(&m, dir, 1, false);
    synth_release(&m);
}

static void write_hole(const char *path, uint64_t bytes)
{
    synth_tensor t = {
        .name = "w", .dtype = "BF16", .rank = 2, .dims = {2, (int64_t)(bytes / 4)}
    };
    t.bytes = bytes / 4 * 4;
    write_file(path, &t, 1, true);
    printf("%s: 1 tensor, %llu bytes\n", path, (unsigned long long)t.bytes);
}

static int usage(void)
{
    fputs("usage: gen kimi DIR --size SIZE [--experts N] [--shard SIZE] [--seed S]\n"
          "       gen random|plain DIR --seed S [--shard SIZE]\n"
          "       gen kimi48 DIR [--size SIZE] [--shard SIZE]\n"
          "       gen deepseek671 DIR [--fp8 1] [--shard SIZE]\n"
          "       gen hole FILE --size SIZE\n"
          "       gen header FILE --tensors N\n"
          "       gen shards DIR --tensors N\n",
          stderr);
    return 2;
}

int main(int argc, char **argv)
{
    uint64_t size = 0, experts = 0, shard = UINT64_C(512) << 20, seed = 1, tensors = 0, fp8 = 0;
    if (argc < 3)
        return usage();
    const struct {
        const char *name;
        uint64_t *value;
    } options[] = {
        {"--size",    &size   },
        {"--experts", &experts},
        {"--shard",   &shard  },
        {"--tensors", &tensors},
        {"--fp8",     &fp8    },
        {"--seed",    &seed   }
    };
    for (int i = 3; i < argc; i++) {
        size_t k = 0;
        while (k < sizeof options / sizeof *options && strcmp(argv[i], options[k].name) != 0)
            k++;
        if (k == sizeof options / sizeof *options || i + 1 == argc)
            return usage();
        if (options[k].value == &seed)
            seed = strtoull(argv[++i], NULL, 10);
        else
            *options[k].value = parse_size(argv[++i]);
    }
    synth_model m;
    errno = 0;
    if (strcmp(argv[1], "header") == 0 && tensors > 0) {
        write_many(argv[2], tensors);
        return 0;
    }
    if (strcmp(argv[1], "shards") == 0 && tensors > 0) {
        write_shards(argv[2], tensors);
        return 0;
    }
    if (strcmp(argv[1], "hole") == 0 && size > 0) {
        write_hole(argv[2], size);
        return 0;
    }
    bool hole = false;
    if (strcmp(argv[1], "kimi48") == 0) {
        hole = true;
        if (!synth_kimi48(&m, size))
            die("--size is too small", argv[2]);
    } else if (strcmp(argv[1], "deepseek671") == 0) {
        hole = true;
        synth_deepseek671(&m, fp8 != 0);
    } else if (strcmp(argv[1], "kimi") == 0 && size > 0) {
        if (!synth_kimi(&m, size, (int64_t)experts, seed))
            die("--size is too small for one layer of each kind", argv[2]);
    } else if (strcmp(argv[1], "random") == 0) {
        synth_random(&m, SYNTH_HF, seed);
    } else if (strcmp(argv[1], "plain") == 0) {
        synth_random(&m, SYNTH_PLAIN, seed);
    } else {
        return usage();
    }
    write_model(&m, argv[2], shard, hole);
    synth_release(&m);
    return 0;
}
