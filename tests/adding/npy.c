/* npy container: one array, as numpy.save writes it; the tensor is called "array".
 *
 *   "\x93NUMPY" | major u8, 1 | minor u8 | n u16 | n bytes: a Python dict | row-major data
 *   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
 * Source: NEP 1. Only little-endian f2, f4 and f8 in C order; anything else is refused. */
#include "io.h"
#include "le.h"
#include "source.h"

#include <stdlib.h>

#define HEADER_MAX 4096

/* The text behind 'KEY': in the dict, or NULL. */
static const char *value_of(const char *dict, const char *key)
{
    const char *at = strstr(dict, key);
    return at != NULL ? at + strlen(key) : NULL;
}

static ckpt_status dims_of(const char *s, ckpt_arena *arena, ckpt_tensor *t, ckpt_err *err)
{
    int64_t *dims = ckpt_arena_array(arena, CKPT_MAX_RANK, sizeof *dims);
    if (dims == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    t->dims = dims;
    for (;;) {
        char *end;
        long long n = strtoll(s, &end, 10);
        if (end == s)
            break;
        if (t->rank == CKPT_MAX_RANK || n < 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "tensor 'array': dimension %d is %lld", t->rank,
                             n);
        dims[t->rank++] = n;
        s = end;
        while (*s == ',' || *s == ' ')
            s++;
    }
    return *s == ')' ? CKPT_OK
                     : ckpt_fail(err, CKPT_E_FORMAT, "tensor 'array': no end of the shape");
}

static ckpt_status dict_of(const char *dict, ckpt_arena *arena, ckpt_tensor *t, ckpt_err *err)
{
    static const struct {
        const char *descr;
        ckpt_dtype dtype;
    } types[] = {
        {"'<f2'", CKPT_F16},
        {"'<f4'", CKPT_F32},
        {"'<f8'", CKPT_F64}
    };
    const char *descr = value_of(dict, "'descr': "), *shape = value_of(dict, "'shape': (");
    if (descr == NULL || shape == NULL || value_of(dict, "'fortran_order': False") == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "header: expected descr, shape and fortran_order False");
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (strncmp(descr, types[i].descr, strlen(types[i].descr)) == 0) {
            t->dtype = types[i].dtype;
            return dims_of(shape, arena, t, err);
        }
    }
    return ckpt_fail(err, CKPT_E_UNSUPPORTED, "header: descr %.8s", descr);
}

static ckpt_status open_npy(ckpt_source *src, const ckpt_open_opts *opts, ckpt_err *err)
{
    char text[HEADER_MAX + 1];
    uint8_t head[10];
    uint32_t file;
    ckpt_status status;
    (void)opts;
    ckpt_tensor *t = ckpt_arena_array(&src->arena, 1, sizeof *t);
    ckpt_chunk *chunk = ckpt_arena_array(&src->arena, 1, sizeof *chunk);
    int64_t *zeros = ckpt_arena_array(&src->arena, CKPT_MAX_RANK, sizeof *zeros);
    if (t == NULL || chunk == NULL || zeros == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
    CKPT_CHECK(ckpt_source_add_file(src, ckpt_basename(src->path), src->path, true, &file, err));
    CKPT_CHECK(ckpt_source_read(src, file, head, sizeof head, 0, err));
    size_t n = ckpt_get_u16(head + 8);
    if (head[6] != 1 || n > HEADER_MAX || n + sizeof head > src->files[file].size) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "header: version %d, %zu bytes", head[6], n);
        goto done;
    }
    CKPT_CHECK(ckpt_source_read(src, file, text, n, sizeof head, err));
    text[n] = '\0';
    *t = (ckpt_tensor){.name = "array", .chunks = chunk, .n_chunks = 1};
    CKPT_CHECK(dict_of(text, &src->arena, t, err));
    *chunk = (ckpt_chunk){.lo = zeros, .len = t->dims, .offset = sizeof head + n, .file = file};
    src->files[file].is_data = true;
    src->tensors = t;
    src->n_tensors = 1;
done:
    return status;
}

static ckpt_status probe_npy(const ckpt_probe *probe, int *score, ckpt_err *err)
{
    (void)err;
    *score = probe->head_len > 10 && memcmp(probe->head, "\x93NUMPY", 6) == 0 ? 2 : 0;
    return CKPT_OK;
}

const ckpt_container ckpt_npy = {
    .name = "npy",
    .what = "one array of numpy.save",
    .probe = probe_npy,
    .open = open_npy,
};
