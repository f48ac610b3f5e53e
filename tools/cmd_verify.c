/* ckpt verify: is a checkpoint whole, is it what its manifest says, does it equal another? */
#include "part.h"
#include "ranks.h"
#include "verify.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define AT(field) offsetof(verify_opts, field)
static const ckpt_opt rows[] = {
    {"hash",                  CKPT_OPT_FLAG,   AT(hash),                  NULL,                "recompute every digest and compare with the manifest",
     0,                                                                                                                                                         0                 },
    {"files",                 CKPT_OPT_FLAG,   AT(files),                 NULL,                "also the serial SHA-256 of every file",                      0, 0                 },
    {"write",                 CKPT_OPT_FLAG,   AT(write),                 NULL,                "compute everything and write the manifest",                  0, 0                 },
    {"force",                 CKPT_OPT_FLAG,   AT(force),                 NULL,                "with --write: replace a manifest that disagrees",            0,
     0                                                                                                                                                                            },
    {"against",               CKPT_OPT_STRING, AT(against),               "MANIFEST|PATH",
     "compare tensors and configuration with another checkpoint",                                                                                            0, 0                 },
    {"values",                CKPT_OPT_FLAG,   AT(values),                NULL,                "look for NaN and infinities",                                0, 0                 },
    {"duplicates",            CKPT_OPT_FLAG,   AT(duplicates),            NULL,                "list distinct tensors of equal content",                     0,
     0                                                                                                                                                                            },
    {"strict",                CKPT_OPT_FLAG,   AT(strict),                NULL,                "warnings are failures",                                      0, 0                 },
    {"iteration",             CKPT_OPT_INT,    AT(iteration),             "N",                 "iteration of a save root (default: newest)",                 0,
     INT64_MAX                                                                                                                                                                    },
    {"allow-unknown",         CKPT_OPT_FLAG,   AT(allow_unknown),         NULL,
     "accept tensors the model does not have",                                                                                                               0, 0                 },
    {"allow-unknown-objects", CKPT_OPT_FLAG,   AT(allow_unknown_objects), NULL,
     "accept pickled objects of unknown classes, unread",                                                                                                    0, 0                 },
    {"roundtrip",             CKPT_OPT_STRING, AT(roundtrip),             "LAYOUT[,tp=N,...]",
     "convert in memory to hf, megatron or fla and back: must be equal",                                                                                     0, 0                 },
    {"forward",               CKPT_OPT_FLAG,   AT(forward),               NULL,
     "run the model forward and backward; with --against compare two",                                                                                       0, 0                 },
    {"reference",             CKPT_OPT_STRING, AT(reference),             "FILE",
     "--forward: compare with a peer's logits and gradients",                                                                                                0, 0                 },
    {"tokens",                CKPT_OPT_STRING, AT(tokens),                "FILE",              "--forward: token ids, one sequence a line",                  0,
     0                                                                                                                                                                            },
    {"rtol",                  CKPT_OPT_REAL,   AT(rtol),                  "X",
     "--forward: allowed relative RMS of logits (reference 2e-5, else 0)",                                                                                   0, 0                 },
    {"grad-rtol",             CKPT_OPT_REAL,   AT(grad_rtol),             "X",
     "--forward: the same of gradients (reference 2e-4, else 0)",                                                                                            0, 0                 },
    {"latent-eps",            CKPT_OPT_REAL,   AT(latent_eps),            "X",
     "--forward: epsilon of MLA's latent norms (default: the model's)",                                                                                      0, 0                 },
    {"mtp-coef",              CKPT_OPT_REAL,   AT(mtp_coef),              "X",
     "--forward: share of multi-token prediction in the gradients (default 0.1)",                                                                            0, 0                 },
    {"device",                CKPT_OPT_CHOICE, AT(device),                "cpu|cuda",
     "--forward: where it is computed (default cpu)",                                                                                                        0, 0                 },
    {"dtype",                 CKPT_OPT_CHOICE, AT(dtype),                 "f32|bf16",
     "--forward on cuda: what products and activations are (default f32)",                                                                                   0, 0                 },
    {"recompute",             CKPT_OPT_FLAG,   AT(recompute),             NULL,
     "--forward: recompute activations, using less memory",                                                                                                  0, 0                 },
    {"tp",                    CKPT_OPT_INT,    AT(tp),                    "N",
     "--forward on ranks (--launch, mpirun): those that share heads (default: what --cp leaves)",                                                            1,
     4096                                                                                                                                                                         },
    {"cp",                    CKPT_OPT_INT,    AT(cp),                    "N",                 "--forward on ranks: those that share sequences (default 1)",
     1,                                                                                                                                                         4096              },
    {"ep",                    CKPT_OPT_INT,    AT(ep),                    "N",                 "--forward on ranks: those that share experts (default 1)",   1,
     4096                                                                                                                                                                         },
    {"cp-mode",               CKPT_OPT_CHOICE, AT(cp_mode),               "heads|chunks",
     "how: each has some heads of the whole sequence (default), or all heads of a part",                                                                     0, 0                 },
    {"launch",                CKPT_OPT_INT,    AT(launch),                "N",
     "start N ranks on this host, without mpirun, which divide the work",                                                                                    1, CKPT_COMM_HOST_MAX},
    {"policy",                CKPT_OPT_STRING, AT(policy),                "FILE",
     "--forward: emulate quantisation by these rules instead of the checkpoint's own",                                                                       0, 0                 },
    {"approximate-solve",     CKPT_OPT_INT,    AT(solve),                 "N",
     "--forward with a policy: invert by a series of N factors, and say how far it is off",                                                                  1, 6                 },
    {"signature",             CKPT_OPT_STRING, AT(signature),             "KEY",
     "check the signature with this public key, before anything else",                                                                                       0, 0                 },
    {"signature-file",        CKPT_OPT_STRING, AT(signature_file),        "FILE",
     "where it is (default PATH/model.sig, or PATH.sig)",                                                                                                    0, 0                 },
    {NULL,                    CKPT_OPT_FLAG,   0,                         NULL,                NULL,                                                         0, 0                 },
};
#undef AT

/* ---- findings -------------------------------------------------------------------------------- */

static void CKPT_PRINTF(3, 0) add_line(verification *v, lines *list, const char *fmt, va_list ap)
{
    ckpt_buf b = {0};
    ckpt_buf_vprintf(&b, fmt, ap);
    char *text = b.data != NULL && !b.failed
                     ? ckpt_arena_strdup(&v->tool->arena, (const char *)b.data)
                     : NULL;
    void *items = list->items;
    if (text == NULL ||
        ckpt_grow(&items, &list->cap, list->n + 1, sizeof *list->items, NULL) != CKPT_OK) {
        v->failed_memory = true;
    } else {
        list->items = items;
        list->items[list->n++] = ckpt_tool_clean(v->tool, text);
    }
    ckpt_buf_release(&b);
}

void ckpt_verify_problem(verification *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_line(v, &v->problems, fmt, ap);
    va_end(ap);
}

void ckpt_verify_warning(verification *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_line(v, &v->warnings, fmt, ap);
    va_end(ap);
}

void ckpt_verify_duplicate(verification *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    add_line(v, &v->duplicates, fmt, ap);
    va_end(ap);
}

/* ---- structure ------------------------------------------------------------------------------- */

char *ckpt_verify_path(verification *v, const ckpt_manifest_file *f)
{
    if (ckpt_manifest_single(&v->src))
        return ckpt_arena_strdup(&v->tool->arena, v->src.path);
    return ckpt_path_join(&v->tool->arena, v->src.root, f->name);
}

int64_t ckpt_verify_source_file(const verification *v, const char *name, size_t *next)
{
    size_t n = v->src.n_files;
    if (ckpt_manifest_single(&v->src))
        return n > 0 ? 0 : -1;
    for (size_t i = 0; i < n; i++) {
        size_t at = (*next + i) % n;
        if (strcmp(v->src.files[at].name, name) == 0) {
            *next = at + 1;
            return (int64_t)at;
        }
    }
    return -1;
}

static ckpt_status check_manifest_files(verification *v, ckpt_err *err)
{
    for (size_t i = 0; i < v->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &v->manifest.files[i];
        struct stat st;
        char *path = ckpt_verify_path(v, f);
        if (path == NULL)
            v->failed_memory = true;
        else if (stat(path, &st) != 0) {
            if (errno != ENOENT && errno != ENOTDIR)
                return ckpt_fail_errno(err, errno, "%s", path);
            ckpt_verify_problem(v, "%s: in the manifest but missing", f->name);
        } else if ((uint64_t)st.st_size != f->size)
            ckpt_verify_problem(v, "%s: %llu bytes, the manifest says %llu", f->name,
                                (unsigned long long)st.st_size, (unsigned long long)f->size);
    }
    return CKPT_OK;
}

static bool looks_like_data(const char *name)
{
    static const char *const suffixes[] = {".safetensors", ".distcp", ".bin", ".pt", ".pth"};
    size_t n = strlen(name);
    for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        size_t m = strlen(suffixes[i]);
        if (n > m && strcmp(name + n - m, suffixes[i]) == 0)
            return true;
    }
    return false;
}

static bool is_mentioned(const ckpt_source *src, const char *name)
{
    for (size_t i = 0; i < src->n_warnings; i++)
        if (strstr(src->warnings[i], name) != NULL)
            return true;
    return false;
}

static int by_text(const void *a, const void *b)
{
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

/* Data files that nothing refers to: remains of an older or interrupted save. */
static ckpt_status check_stale(verification *v, ckpt_err *err)
{
    char **names = NULL;
    size_t n = 0, n_files = v->src.n_files;
    if (ckpt_manifest_single(&v->src))
        return CKPT_OK;
    const char **files = ckpt_arena_array(&v->tool->arena, n_files + 1, sizeof *files);
    if (files == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory for the names of %zu files", n_files);
    for (size_t f = 0; f < n_files; f++)
        files[f] = v->src.files[f].name;
    qsort(files, n_files, sizeof *files, by_text);
    ckpt_status status = ckpt_list_dir(v->src.root, &v->tool->arena, &names, &n, err);
    for (size_t i = 0; status == CKPT_OK && i < n; i++) {
        bool used = (v->has_manifest && ckpt_manifest_find_file(&v->manifest, names[i]) >= 0) ||
                    bsearch(&names[i], files, n_files, sizeof *files, by_text) != NULL;
        if (!used && looks_like_data(names[i]) && !is_mentioned(&v->src, names[i]))
            ckpt_verify_warning(v, "%s: stale data file, part of nothing", names[i]);
    }
    return status;
}

/* PATH is one file that the manifest of its directory lists: bind what is there and compare with
 * that manifest. v->part stays false, and nothing is bound, if it is not. */
static ckpt_status open_part(verification *v, ckpt_err *err)
{
    size_t all;
    if (v->o->write)
        return CKPT_OK;
    ckpt_status status =
        ckpt_part_bind(v->tool, &v->src, &v->model, &v->manifest, &all, &v->part, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, v->path);
    if (!v->part)
        return status;
    v->has_manifest = true;
    v->model.n_notes = 0; /* what is missing lies in the other files */
    if (v->manifest.n_tensors < all)
        ckpt_tool_note(v->tool,
                       "%s: %zu of the %zu tensors that the manifest of its directory lists",
                       v->path, v->manifest.n_tensors, all);
    return status;
}

static ckpt_status open_all(verification *v, ckpt_err *err)
{
    ckpt_status status;
    ckpt_model_opts bind = {.allow_unknown = v->o->allow_unknown};
    CKPT_CHECK(ckpt_tool_open(v->tool, &v->src, v->path, v->o->iteration, err));
    if (!v->o->allow_unknown_objects)
        CKPT_CHECK(ckpt_tool_check_objects(&v->src, err));
    CKPT_CHECK(open_part(v, err));
    if (v->part)
        goto done;
    CKPT_CHECK(ckpt_tool_bind(v->tool, &v->model, &v->src, &bind, err));
    status = ckpt_manifest_load(&v->src, &v->manifest, &v->has_manifest, err);
    if (status != CKPT_OK && v->o->write && v->o->force) {
        ckpt_verify_warning(v, "%s: replaced", err->text);
        *err = (ckpt_err){0};
        v->has_manifest = false;
        status = CKPT_OK;
    }
    /* a manifest over F8 weights and their scales as they are stored */
    if (status == CKPT_OK && v->has_manifest && v->model.n_fp8 > 0 &&
        ckpt_tool_is_fp8(&v->manifest)) {
        ckpt_model_release(&v->model);
        bind.fp8_raw = true;
        status = ckpt_tool_bind(v->tool, &v->model, &v->src, &bind, err);
    }
done:
    return status;
}

/* A manifest that is about to be replaced proves nothing. */
static bool replacing(const verification *v)
{
    return v->o->write && v->o->force;
}

/* Tensors that only repeat others have no digest of their own. */
static ckpt_status check_copies(verification *v, ckpt_err *err)
{
    const ckpt_model *m = &v->model;
    for (size_t i = 0; i < m->n_copies; i++) {
        bool equal;
        ckpt_status status = ckpt_model_copy_equal(m, i, &equal, err);
        if (status != CKPT_OK)
            return status;
        if (!equal)
            ckpt_verify_problem(v, "'%s' must repeat %s, but differs from it",
                                m->src->tensors[m->copies[i].stored].name, m->copies[i].name);
    }
    return CKPT_OK;
}

static ckpt_status replica_differs(void *self, const ckpt_replica *r, ckpt_err *err)
{
    verification *v = self;
    (void)err;
    ckpt_verify_problem(v, "tensor '%s': the copy in %s differs from that in %s", r->name,
                        v->src.files[r->other.file].name, v->src.files[r->first.file].name);
    return CKPT_OK;
}

static ckpt_status check_structure(verification *v, ckpt_err *err)
{
    for (size_t i = 0; i < v->src.n_warnings; i++)
        ckpt_verify_warning(v, "%s", v->src.warnings[i]);
    for (size_t i = 0; i < v->model.n_notes; i++)
        ckpt_verify_warning(v, "%s", v->model.notes[i]);
    ckpt_tied tied = CKPT_TIED_NO_QUESTION;
    const char *said = v->has_manifest && !replacing(v) && !v->part
                           ? ckpt_tool_odd_layout(&v->tool->arena, &v->model, &v->manifest)
                           : NULL;
    if (said != NULL)
        ckpt_verify_warning(v, "the manifest contradicts the tensors: %s", said);
    ckpt_status status = v->has_manifest && !replacing(v) ? check_manifest_files(v, err) : CKPT_OK;
    if (status != CKPT_OK)
        return status;
    if (!v->part) {
        status = ckpt_model_tied(&v->model, &tied, err);
        if (status == CKPT_OK)
            status = check_copies(v, err);
        if (status == CKPT_OK)
            status = ckpt_replicas_compare(&v->src, replica_differs, v, err);
        if (status != CKPT_OK)
            return status;
    }
    if (tied == CKPT_TIED_DIFFERS)
        ckpt_verify_problem(v, "the configuration ties the head to the embedding, but head.weight "
                               "differs from embed.weight");
    else if (tied == CKPT_TIED_EQUAL)
        ckpt_verify_warning(v, "tied, but head.weight is stored as well; it equals embed.weight");
    return check_stale(v, err);
}

/* ---- result ---------------------------------------------------------------------------------- */

static bool failed(const verification *v)
{
    return v->problems.n > 0 || (v->o->strict && (v->warnings.n > 0 || v->duplicates.n > 0));
}

static void json_tensors(verification *v, ckpt_jw *w)
{
    ckpt_jw_open(w, "tensors", '[');
    for (size_t i = 0; v->tensors != NULL && i < v->model.n_tensors; i++) {
        const ckpt_canon *t = &v->model.tensors[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", t->name);
        ckpt_jw_string(w, "dtype", ckpt_dtype_get(t->dtype)->name);
        ckpt_jw_dims(w, "shape", t->rank, t->dims);
        ckpt_jw_hex(w, "digest", v->tensors[i].digest);
        if (v->bad[i] || v->compared || v->compared_other)
            ckpt_jw_bool(w, "ok", !v->bad[i]);
        else
            ckpt_jw_string(w, "ok", NULL);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static void json_files(verification *v, ckpt_jw *w)
{
    bool whole = v->o->files || v->o->write;
    ckpt_jw_open(w, "files", '[');
    for (size_t i = 0; v->files != NULL && i < ckpt_source_n_real(&v->src); i++) {
        const ckpt_file_hash *h = &v->files[i];
        int64_t at = ckpt_manifest_find_file(&v->manifest, v->src.files[i].name);
        const ckpt_manifest_file *f = at >= 0 ? &v->manifest.files[at] : NULL;
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", v->src.files[i].name);
        ckpt_jw_u64(w, "size", h->size);
        ckpt_jw_hex(w, "rest", h->rest);
        if (whole)
            ckpt_jw_hex(w, "sha256", h->sha256);
        if (f == NULL || !f->has_rest || !v->compared)
            ckpt_jw_string(w, "ok", NULL);
        else
            ckpt_jw_bool(w, "ok",
                         memcmp(f->rest, h->rest, CKPT_SHA256_LEN) == 0 &&
                             (!whole || !f->has_sha256 ||
                              memcmp(f->sha256, h->sha256, CKPT_SHA256_LEN) == 0));
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}

static void write_json(verification *v)
{
    ckpt_jw *w = &v->tool->json;
    if (v->src.container != NULL) {
        ckpt_jw_string(w, "container", v->src.container->name);
        ckpt_jw_string(w, "layout", v->model.layout != NULL ? v->model.layout->name : NULL);
    }
    if (v->tensors != NULL) {
        ckpt_jw_hex(w, "root", v->root);
        ckpt_jw_bool(w, "manifest", v->has_manifest);
        json_tensors(v, w);
        json_files(v, w);
    }
    if (v->through != NULL)
        ckpt_jw_string(w, "through", v->through);
    if (v->o->signature != NULL)
        ckpt_verify_signature_json(v, w);
    ckpt_jw_lines(w, "problems", v->problems.items, v->problems.n);
    ckpt_jw_lines(w, "warnings", v->warnings.items, v->warnings.n);
    if (v->o->duplicates)
        ckpt_jw_lines(w, "duplicates", v->duplicates.items, v->duplicates.n);
}

static void print_lines(const verification *v, FILE *out, ckpt_paint paint, const char *kind,
                        const lines *list)
{
    bool c = out == stdout && v->tool->color;
    for (size_t i = 0; i < list->n; i++)
        fprintf(out, "%s%s%s%s\n", ckpt_paint_on(c, paint), kind, ckpt_paint_off(c),
                list->items[i]);
}

static void print_proved(verification *v)
{
    if (v->n_signed > 0)
        printf(", good signature, %zu file%s as signed", v->n_signed,
               ckpt_tool_plural(v->n_signed));
    if (v->compared)
        printf(", all digests match the manifest");
    if (v->compared_other)
        printf(", identical to %s", ckpt_tool_clean(v->tool, v->o->against));
    if (v->through != NULL)
        printf(", equal after %s and back", v->through);
    if (v->o->values)
        printf(", no NaN or infinity in %zu floating tensor%s", v->n_finite,
               ckpt_tool_plural(v->n_finite));
    if (v->o->duplicates && v->duplicates.n == 0)
        printf(", no duplicates");
    if (v->o->forward)
        printf(", ran forward and backward");
    if (v->tensors == NULL && !v->o->values && !v->o->forward && v->n_signed == 0)
        printf(", headers and sizes only: --hash reads the data");
}

static void print_text(verification *v)
{
    char hex[2 * CKPT_SHA256_LEN + 1];
    bool c = v->tool->color;
    if (v->tool->g.quiet)
        return;
    print_lines(v, stdout, CKPT_RED, "failed: ", &v->problems);
    print_lines(v, stdout, CKPT_YELLOW, "warning: ", &v->warnings);
    if (v->o->duplicates)
        print_lines(v, stdout, CKPT_YELLOW, "duplicate: ", &v->duplicates);
    if (v->tensors != NULL) {
        ckpt_hex(v->root, hex);
        printf("root %s%s\n", hex, v->model.fp8_raw ? " (F8 blocks as they are stored)" : "");
    }
    if (failed(v)) {
        printf("%sFAILED%s: %zu problem%s, %zu warning%s\n", ckpt_paint_on(c, CKPT_RED),
               ckpt_paint_off(c), v->problems.n, ckpt_tool_plural(v->problems.n), v->warnings.n,
               ckpt_tool_plural(v->warnings.n));
        return;
    }
    size_t files = ckpt_source_n_real(&v->src);
    printf("%sok%s: %zu tensor%s, %zu file%s", ckpt_paint_on(c, CKPT_GREEN), ckpt_paint_off(c),
           v->src.n_tensors, ckpt_tool_plural(v->src.n_tensors), files, ckpt_tool_plural(files));
    print_proved(v);
    const char *left_out = ckpt_verify_unsigned_text(v);
    printf("%s\n", left_out != NULL ? ckpt_tool_clean(v->tool, left_out) : "");
}

/* ---- the command ----------------------------------------------------------------------------- */

static const char *no_write(const void *context)
{
    const verification *v = context;
    return v->o->write ? NULL : "it belongs to --write";
}

static const char *no_comparison(const void *context)
{
    const verification *v = context;
    return v->o->against != NULL || v->o->reference != NULL
               ? NULL
               : "nothing is compared without --against or --reference";
}

static const char *not_cut(const void *context)
{
    const verification *v = context;
    return v->o->cp >= 1 ? NULL : "sequences are not cut; --cp N says on how many ranks";
}

static ckpt_status check_options(const verification *v, ckpt_err *err)
{
    static const ckpt_effect rows_of[] = {
        {"cp-mode",   not_cut      },
        {"force",     no_write     },
        {"rtol",      no_comparison},
        {"grad-rtol", no_comparison},
        {NULL,        NULL         },
    };
    const verify_opts *o = v->o;
    if (o->signature_file != NULL && o->signature == NULL)
        return ckpt_fail(err, CKPT_E_USAGE, "--signature-file needs --signature KEY");
    bool needs_forward = o->reference != NULL || o->tokens != NULL || o->rtol >= 0 ||
                         o->grad_rtol >= 0 || o->latent_eps > 0 || o->mtp_coef >= 0 ||
                         o->device >= 0 || o->recompute || o->policy != NULL || o->solve > 0 ||
                         o->tp > 0 || o->cp > 0 || o->ep > 0 || o->cp_mode >= 0;
    if (needs_forward && !o->forward)
        return ckpt_fail(err, CKPT_E_USAGE, "%s needs --forward",
                         o->reference != NULL ? "--reference"
                         : o->tokens != NULL  ? "--tokens"
                         : o->recompute       ? "--recompute"
                         : o->latent_eps > 0  ? "--latent-eps"
                         : o->mtp_coef >= 0   ? "--mtp-coef"
                         : o->policy != NULL  ? "--policy"
                         : o->solve > 0       ? "--approximate-solve"
                         : o->device >= 0     ? "--device"
                         : o->tp > 0          ? "--tp"
                         : o->cp > 0          ? "--cp"
                         : o->ep > 0          ? "--ep"
                         : o->cp_mode >= 0    ? "--cp-mode"
                                              : "a tolerance");
    if (o->reference != NULL && (o->against != NULL || o->tokens != NULL))
        return ckpt_fail(err, CKPT_E_USAGE,
                         "--reference brings its own tokens and numbers: not "
                         "together with --tokens or --against");
    if (o->dtype >= 0 && o->device < 1)
        return ckpt_fail(err, CKPT_E_USAGE, "--dtype needs --device cuda");
    ckpt_status status = o->roundtrip != NULL ? ckpt_verify_ways(v, err) : CKPT_OK;
    return status == CKPT_OK ? ckpt_tool_effects(v->tool, rows_of, v, err) : status;
}

static const char *no_iteration(const void *context)
{
    const verification *v = context;
    return ckpt_no_iteration(&v->src, v->o->iteration);
}

static const char *no_latent(const void *context)
{
    const verification *v = context;
    for (size_t i = 0; i < v->model.n_tensors; i++)
        if (strstr(v->model.tensors[i].name, ".mla.") != NULL)
            return NULL;
    return "no MLA block is known in the source";
}

/* Options whose effect depends on what was opened. */
static ckpt_status check_effects(const verification *v, ckpt_err *err)
{
    static const ckpt_effect rows_of[] = {
        {"iteration",  no_iteration},
        {"latent-eps", no_latent   },
        {NULL,         NULL        },
    };
    return ckpt_tool_effects(v->tool, rows_of, v, err);
}

static ckpt_status check_hashes(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const verify_opts *o = v->o;
    bool against = o->against != NULL && !o->forward;
    bool compare = v->has_manifest && !replacing(v) && (o->hash || o->files || o->write);
    if (!o->hash && !o->files && !o->write && !against && !o->duplicates)
        return CKPT_OK;
    CKPT_CHECK(ckpt_verify_compute(v, o->files || o->write, err));
    if (compare)
        CKPT_CHECK(ckpt_verify_manifest(v, err));
    if (!v->has_manifest && (o->hash || o->files) && !o->write && o->against == NULL)
        ckpt_verify_problem(v, "no manifest to compare with; --write makes one");
    if (against)
        CKPT_CHECK(ckpt_verify_against(v, err));
    if (o->duplicates)
        CKPT_CHECK(ckpt_verify_duplicates(v, err));
done:
    return status;
}

/* Ranks that run the model together: all that were started, on one batch. */
static ckpt_status join_ranks(const verification *v, ckpt_err *err)
{
    const verify_opts *o = v->o;
    const int64_t size = v->tool->ranks != NULL ? v->tool->ranks->world.size : 1;
    ckpt_rank_opts mesh = {
        .tp = o->tp, .cp = o->cp > 0 ? o->cp : 1, .dp = 1, .ep = o->ep, .cp_mode = o->cp_mode};
    if (!o->forward)
        return CKPT_OK;
    if (mesh.tp < 1)
        mesh.tp = size / mesh.cp > 0 ? size / mesh.cp : 1;
    if (mesh.tp * mesh.cp != size || o->ep > size)
        return ckpt_fail(
            err, CKPT_E_USAGE,
            "--forward with tp %lld, cp %lld and ep %lld, and %lld rank%s; start as many "
            "as tp x cp with --launch or mpirun -np",
            (long long)mesh.tp, (long long)mesh.cp, (long long)(o->ep > 0 ? o->ep : 1),
            (long long)size, ckpt_tool_plural((uint64_t)size));
    return ckpt_ranks_join(v->tool, &mesh, err);
}

static ckpt_status verify(verification *v, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(check_options(v, err));
    CKPT_CHECK(ckpt_ranks_divide(v->tool, v->o->launch, err));
    CKPT_CHECK(ckpt_tool_device(v->tool, v->o->device, err));
    CKPT_CHECK(join_ranks(v, err));
    if (v->o->signature != NULL) {
        CKPT_CHECK(ckpt_verify_signature(v, err));
        if (v->problems.n > 0) /* nothing of it is parsed */
            goto done;
    }
    CKPT_CHECK(ckpt_verify_look_at_other(v, err));
    status = open_all(v, err);
    if (status != CKPT_OK && status != CKPT_E_IO && status != CKPT_E_INTERRUPTED &&
        (v->o->hash || v->o->files)) {
        ckpt_err open_error = *err;
        bool explained = false;
        if (ckpt_verify_explain(v, &open_error, &explained, err) == CKPT_OK && explained) {
            *err = (ckpt_err){0};
            return CKPT_OK;
        }
        *err = open_error;
    }
    if (status != CKPT_OK)
        goto done;
    CKPT_CHECK(check_effects(v, err));
    CKPT_CHECK(ckpt_verify_unsigned(v, err));
    CKPT_CHECK(check_structure(v, err));
    CKPT_CHECK(check_hashes(v, err));
    if (v->o->roundtrip != NULL)
        CKPT_CHECK(ckpt_verify_roundtrip(v, err));
    if (v->o->values)
        CKPT_CHECK(ckpt_verify_values(v, err));
    if (v->o->forward)
        CKPT_CHECK(ckpt_verify_forward(v, err));
    CKPT_CHECK(ckpt_source_unchanged(&v->src, err));
    if (v->o->write && v->problems.n > 0 && !v->o->force)
        ckpt_verify_problem(v, "manifest not written; --force replaces it");
    else if (v->o->write) {
        const ckpt_share *share = v->tool->share;
        status = ckpt_ranks_lead(v->tool->ranks) ? ckpt_verify_write(v, err) : CKPT_OK;
        CKPT_CHECK(ckpt_share_agree(share, status, err));
    }
done:
    return status;
}

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    verification v = {.tool = tool, .o = opts, .path = tool->operands.items[0]};
    ckpt_status status = verify(&v, err);
    if (status == CKPT_OK && v.failed_memory)
        status = ckpt_tool_no_memory(err);
    if (status == CKPT_OK) {
        if (tool->g.json)
            write_json(&v);
        else
            print_text(&v);
        if (failed(&v))
            status = CKPT_E_MISMATCH;
    }
    if (status == CKPT_E_MISMATCH && tool->g.quiet && err->text[0] == '\0' &&
        ckpt_ranks_lead(tool->ranks))
        (void)ckpt_fail(err, CKPT_E_MISMATCH, "%s: %s", v.path,
                        v.problems.n > 0 ? v.problems.items[0] : "warnings under --strict");
    free(v.problems.items);
    free(v.warnings.items);
    free(v.duplicates.items);
    ckpt_manifest_release(&v.manifest);
    ckpt_model_release(&v.model);
    ckpt_source_close(&v.src);
    return status;
}

static void defaults(void *opts)
{
    verify_opts *o = opts;
    o->iteration = -1;
    o->rtol = o->grad_rtol = o->mtp_coef = -1;
    o->device = o->dtype = o->cp_mode = -1;
}

/* A card's driver opens its devices for writing; ranks of mpirun talk over sockets, others are forked. */
static bool only_reads(const void *opts)
{
    const verify_opts *o = opts;
    return !o->write && o->device < 1 && o->launch < 1 && !ckpt_ranks_started();
}

const ckpt_command ckpt_cmd_verify = {
    .name = "verify",
    .synopsis = "PATH",
    .what = "check structure, digests and values; compare checkpoints",
    .opts = rows,
    .opts_size = sizeof(verify_opts),
    .min_operands = 1,
    .max_operands = 1,
    .divides = true,
    .writes = true,
    .only_reads = only_reads,
    .defaults = defaults,
    .run = run,
    .examples = "  ckpt verify kimi/ --write\n"
                "  ckpt verify kimi/ --hash\n"
                "  ckpt verify mg/ --forward --against kimi/\n",
    .notes =
        "The manifest is ckpt.manifest.json beside the data, or FILE.ckpt.manifest.json.\n"
        "A file that the manifest of its directory lists is compared with that.\n"
        "F8 blocks: a manifest beside them lists blocks and scales as they are stored, with a\n"
        "root of its own; two checkpoints are compared by the values that blocks stand for.\n"
        "--hash without one prints the root and exits 1: nothing was proved.\n",
};
