/* Compares safetensors checkpoints byte for byte, tensor by tensor, without the library under test.
 *
 *   stcmp A B [FROM=TO ...]
 *
 * A and B are files or directories of *.safetensors. Every tensor of A must be in B with the same
 * dtype, shape and bytes, and the other way round. FROM=TO: a name of A that B lacks is looked up
 * again with the first FROM in it replaced by TO. Prints what differs, or one line with the count.
 * Exit 0 same, 1 different, 2 usage or unreadable.
 *
 * Format: u64 header length, JSON object name -> {"dtype","shape","data_offsets"}, data. Only as
 * much JSON is understood as well-formed headers need: this is a test tool, not a validator. */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct tensor {
    char *name;
    char *kind; /* dtype and shape, as text */
    unsigned char *data;
    size_t bytes;
} tensor;

typedef struct set {
    tensor *t;
    size_t n, cap;
} set;

static void die(const char *path, const char *what)
{
    fprintf(stderr, "stcmp: %s: %s\n", path, what);
    exit(2);
}

static void *need(void *p)
{
    if (!p)
        die("memory", "exhausted");
    return p;
}

static char *copy(const char *s, size_t n)
{
    char *out = need(malloc(n + 1));
    memcpy(out, s, n);
    out[n] = '\0';
    return out;
}

/* Past the JSON value at p (string, number, array or object). */
static const char *skip_value(const char *p)
{
    int depth = 0;
    do {
        if (*p == '"') {
            for (p++; *p && *p != '"'; p++)
                if (*p == '\\' && p[1])
                    p++;
        } else if (*p == '{' || *p == '[') {
            depth++;
        } else if (*p == '}' || *p == ']') {
            depth--;
        }
        if (*p)
            p++;
    } while (*p && (depth > 0 || !strchr(",}]", *p)));
    return p;
}

static const char *skip_blanks(const char *p)
{
    while (*p && strchr(" \t\r\n,:", *p))
        p++;
    return p;
}

/* Text of field `key` in the object starting at p. */
static const char *field(const char *p, const char *key, size_t *len)
{
    size_t n = strlen(key);
    p = skip_blanks(p + 1);
    while (*p == '"') {
        const char *name = p + 1;
        const char *value = skip_blanks(strchr(name, '"') + 1);
        const char *end = skip_value(value);
        if (strncmp(name, key, n) == 0 && name[n] == '"') {
            *len = (size_t)(end - value);
            return value;
        }
        p = skip_blanks(end);
    }
    *len = 0;
    return NULL;
}

static void add(set *s, const char *path, const char *name, size_t name_len, const char *object,
                unsigned char *data, size_t data_len)
{
    size_t dtype_len, shape_len, offsets_len;
    const char *dtype = field(object, "dtype", &dtype_len);
    const char *shape = field(object, "shape", &shape_len);
    const char *offsets = field(object, "data_offsets", &offsets_len);
    unsigned long long begin, end;
    if (!dtype || !shape || !offsets || sscanf(offsets, "[%llu,%llu", &begin, &end) != 2 ||
        begin > end || end > data_len)
        die(path, "bad header entry");
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 64;
        s->t = need(realloc(s->t, s->cap * sizeof *s->t));
    }
    char *kind = need(malloc(dtype_len + shape_len + 1));
    size_t k = 0;
    for (size_t i = 0; i < dtype_len + shape_len; i++) {
        char c = i < dtype_len ? dtype[i] : shape[i - dtype_len];
        if (!strchr(" \"", c))
            kind[k++] = c;
    }
    kind[k] = '\0';
    s->t[s->n++] = (tensor){copy(name, name_len), kind, data + begin, (size_t)(end - begin)};
}

static void load_file(set *s, const char *path)
{
    FILE *f = fopen(path, "rb");
    uint64_t n = 0;
    struct stat st;
    if (!f || stat(path, &st) != 0)
        die(path, strerror(errno));
    if (fread(&n, 8, 1, f) != 1 || n > (uint64_t)st.st_size - 8)
        die(path, "no safetensors header");
    char *header = need(malloc((size_t)n + 1));
    size_t size = (size_t)((uint64_t)st.st_size - 8 - n);
    unsigned char *data = need(malloc(size + 1));
    if (fread(header, 1, (size_t)n, f) != n || fread(data, 1, size, f) != size)
        die(path, "short read");
    fclose(f);
    header[n] = '\0';
    const char *p = skip_blanks(skip_blanks(header) + 1);
    while (*p == '"') {
        const char *name = p + 1, *end = name;
        while (*end && *end != '"')
            end += *end == '\\' ? 2 : 1;
        const char *value = skip_blanks(end + 1);
        size_t name_len = (size_t)(end - name);
        if (strncmp(name, "__metadata__", name_len) != 0)
            add(s, path, name, name_len, value, data, size);
        p = skip_blanks(skip_value(value));
    }
    free(header); /* data stays: tensors point into it */
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const tensor *)a)->name, ((const tensor *)b)->name);
}

static set load(const char *path)
{
    set s = {0};
    struct stat st;
    if (stat(path, &st) != 0)
        die(path, strerror(errno));
    if (!S_ISDIR(st.st_mode)) {
        load_file(&s, path);
    } else {
        DIR *d = opendir(path);
        if (!d)
            die(path, strerror(errno));
        for (struct dirent *e; (e = readdir(d)) != NULL;) {
            const char *dot = strrchr(e->d_name, '.');
            char file[4096];
            snprintf(file, sizeof file, "%s/%s", path, e->d_name);
            if (dot && strcmp(dot, ".safetensors") == 0)
                load_file(&s, file);
        }
        closedir(d);
    }
    if (s.n == 0)
        die(path, "no tensors");
    qsort(s.t, s.n, sizeof *s.t, by_name);
    return s;
}

static const tensor *find(const set *s, const char *name)
{
    tensor key = {.name = copy(name, strlen(name))};
    const tensor *t = bsearch(&key, s->t, s->n, sizeof *s->t, by_name);
    free(key.name);
    return t;
}

static const tensor *find_renamed(const set *s, const char *name, char **rules, int n_rules)
{
    const tensor *t = find(s, name);
    for (int i = 0; !t && i < n_rules; i++) {
        const char *to = strchr(rules[i], '=');
        if (!to)
            die(rules[i], "not FROM=TO");
        char *from = copy(rules[i], (size_t)(to - rules[i]));
        const char *at = strstr(name, from);
        if (at) {
            char renamed[1024];
            snprintf(renamed, sizeof renamed, "%.*s%s%s", (int)(at - name), name, to + 1,
                     at + strlen(from));
            t = find(s, renamed);
        }
        free(from);
    }
    return t;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fputs("usage: stcmp A B [FROM=TO ...]\n", stderr);
        return 2;
    }
    static set a, b; /* held to the end */
    a = load(argv[1]);
    b = load(argv[2]);
    size_t bad = 0, bytes = 0;
    for (size_t i = 0; i < a.n; i++) {
        const tensor *x = &a.t[i], *y = find_renamed(&b, x->name, argv + 3, argc - 3);
        const char *what = NULL;
        if (i > 0 && strcmp(x->name, a.t[i - 1].name) == 0)
            what = "appears twice";
        else if (!y)
            what = "is missing in B";
        else if (strcmp(x->kind, y->kind) != 0)
            what = "has another dtype or shape";
        else if (x->bytes != y->bytes || memcmp(x->data, y->data, x->bytes) != 0)
            what = "has other bytes";
        if (what && bad++ < 20)
            printf("stcmp: %s %s\n", x->name, what);
        bytes += x->bytes;
    }
    if (a.n != b.n) {
        printf("stcmp: %zu tensors in %s, %zu in %s\n", a.n, argv[1], b.n, argv[2]);
        bad++;
    }
    if (bad == 0)
        printf("%zu tensors, %zu bytes: identical\n", a.n, bytes);
    return bad == 0 ? 0 : 1;
}
