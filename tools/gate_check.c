/* The checks of `ckpt gate` (gate.h): which steps each is made of, and how their results are judged. */
#include "gate.h"
#include "io.h"
#include "shard.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define NO_MANIFEST                                                                                \
    "no manifest to compare with" /* what verify says then; a pinned root replaces it */

/* A unit while it runs. */
typedef struct bench {
    gate *g;
    gate_unit *u;
    const char *dir;  /* its scratch directory */
    const char *path; /* what is checked: the source, or what was made of it */
    ckpt_err *err;
} bench;

/* ---- arguments ------------------------------------------------------------------------------- */

/* Appends texts up to NULL; false: out of memory. */
static bool push(ckpt_strings *argv, ...)
{
    va_list ap;
    bool ok = true;
    va_start(ap, argv);
    for (const char *s = va_arg(ap, const char *); s != NULL && ok; s = va_arg(ap, const char *))
        ok = ckpt_strings_push(argv, s, NULL) == CKPT_OK;
    va_end(ap);
    return ok;
}

static bool push_int(ckpt_arena *arena, ckpt_strings *argv, const char *option, int64_t v)
{
    const char *text = ckpt_arena_printf(arena, "%lld", (long long)v);
    return text != NULL && push(argv, option, text, NULL);
}

static bool push_real(ckpt_arena *arena, ckpt_strings *argv, const char *option, double v)
{
    char text[32];
    ckpt_real_text(v, text);
    const char *copy = ckpt_arena_strdup(arena, text);
    return copy != NULL && push(argv, option, copy, NULL);
}

static bool push_all(ckpt_strings *argv, const ckpt_strings *list)
{
    bool ok = true;
    for (size_t i = 0; i < list->n && ok; i++)
        ok = push(argv, list->items[i], NULL);
    return ok;
}

/* How the source itself is opened. */
static bool push_source_options(ckpt_arena *arena, ckpt_strings *argv, const gate_source *s)
{
    return (s->iteration < 0 || push_int(arena, argv, "--iteration", s->iteration)) &&
           (!s->allow_unknown || push(argv, "--allow-unknown", NULL));
}

/* Sizes that the gate file gives, or (`default_etp`) those that are not what convert takes anyway. */
static bool push_mesh(ckpt_arena *arena, ckpt_strings *argv, const ckpt_mesh *m, bool default_etp)
{
    int least = default_etp ? 2 : 1;
    bool etp = default_etp ? m->etp != m->tp : m->etp > 0;
    return (m->tp < least || push_int(arena, argv, "--tp", m->tp)) &&
           (m->pp < least || push_int(arena, argv, "--pp", m->pp)) &&
           (m->ep < least || push_int(arena, argv, "--ep", m->ep)) &&
           (!etp || push_int(arena, argv, "--etp", m->etp)) &&
           (m->cp < least || push_int(arena, argv, "--cp", m->cp));
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Run one of our commands with the arguments (released here). `built` false: they ran out of memory.
 */
static ckpt_status step(bench *b, ckpt_strings *argv, bool built, gate_child *out)
{
    *out = (gate_child){0};
    ckpt_status status =
        built ? ckpt_gate_self(b->g, &b->u->arena, argv, b->u->row->timeout, out, b->err)
              : ckpt_tool_no_memory(b->err);
    ckpt_strings_release(argv);
    return status;
}

static void CKPT_PRINTF(3, 4) fails(bench *b, gate_result *r, const char *fmt, ...)
{
    ckpt_buf text = {0};
    va_list ap;
    va_start(ap, fmt);
    ckpt_buf_vprintf(&text, fmt, ap);
    va_end(ap);
    const char *copy = text.data != NULL && !text.failed
                           ? ckpt_arena_strdup(&b->u->arena, (const char *)text.data)
                           : NULL;
    r->ok = false;
    r->message = copy != NULL ? copy : "failed";
    ckpt_buf_release(&text);
}

/* The step must end with 0. */
static void judge_exit(bench *b, gate_result *r, const char *what, const gate_child *c)
{
    r->ok = c->exit == 0;
    if (!r->ok)
        fails(b, r, "%s%s%s", what, *what != '\0' ? ": " : "", c->why);
}

static const char *member(const gate_child *c, const char *key)
{
    return ckpt_json_string(ckpt_json_get(c->doc, key));
}

/* ---- the source ------------------------------------------------------------------------------ */

/* A digest of everything `verify --hash` saw: tensors, and all bytes of files outside them. */
static const char *digest_of_document(ckpt_arena *arena, const ckpt_json *doc)
{
    static const char *const parts[] = {"container", "layout", "root", "tensors", "files"};
    uint8_t digest[CKPT_SHA256_LEN];
    char hex[2 * CKPT_SHA256_LEN + 1];
    ckpt_buf text = {0};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const ckpt_json *part = ckpt_json_get(doc, parts[i]);
        ckpt_buf_puts(&text, parts[i]);
        if (part != NULL && !ckpt_json_print(part, 0, true, &text))
            text.failed = true;
        ckpt_buf_putc(&text, '\n');
    }
    const char *copy = NULL;
    ckpt_sha256 sha = {0};
    if (!text.failed && ckpt_sha256_init(&sha, NULL) == CKPT_OK) {
        ckpt_sha256_update(&sha, text.data, text.len);
        ckpt_sha256_final(&sha, digest);
        ckpt_sha256_release(&sha);
        ckpt_hex(digest, hex);
        copy = ckpt_arena_strdup(arena, hex);
    }
    ckpt_buf_release(&text);
    return copy;
}

/* Whether the only thing that verify misses is a manifest. */
static bool lacks_manifest(const gate_child *c)
{
    const ckpt_json *problems = ckpt_json_get(c->doc, "problems");
    const char *text = ckpt_json_string(ckpt_json_child(problems));
    return c->exit == 1 && ckpt_json_size(problems) == 1 && text != NULL &&
           strncmp(text, NO_MANIFEST, strlen(NO_MANIFEST)) == 0;
}

static void judge_source(gate_source *s, const gate_child *c)
{
    const char *root = member(c, "root");
    s->found_root = root != NULL ? ckpt_arena_strdup(&s->arena, root) : NULL;
    if (c->exit != 0 && !lacks_manifest(c))
        s->problem = ckpt_arena_strdup(&s->arena, c->why);
    else if (root == NULL)
        s->problem = "has no root digest";
    else if (s->root == NULL && c->exit != 0)
        s->problem = ckpt_arena_printf(
            &s->arena, "neither a pinned root nor a manifest to compare with; its root is %s",
            root);
    else if (s->root != NULL && strcmp(root, s->root) != 0)
        s->problem = ckpt_arena_printf(&s->arena, "root is %s, pinned is %s", root, s->root);
    if (s->problem == NULL)
        s->key = digest_of_document(&s->arena, c->doc);
}

static void note_form(gate_source *s, const ckpt_json *doc)
{
    const char *container = ckpt_json_string(ckpt_json_get(doc, "container"));
    const char *layout = ckpt_json_string(ckpt_json_get(doc, "layout"));
    const ckpt_json *mesh = ckpt_json_get(doc, "mesh");
    s->container = container != NULL ? ckpt_arena_strdup(&s->arena, container) : NULL;
    s->layout =
        layout != NULL ? ckpt_arena_strndup(&s->arena, layout, strcspn(layout, ":")) : "keep";
    for (int i = 0; i < CKPT_MESH_STORED; i++) {
        int64_t v = 1;
        (void)ckpt_json_int(ckpt_json_get(mesh, ckpt_mesh_axes[i]), &v);
        *ckpt_mesh_size(&s->mesh, i) = v >= 1 && v <= INT32_MAX ? (int)v : 1;
    }
}

/* One command about the source alone. */
static ckpt_status ask_source(gate *g, ckpt_arena *arena, const gate_source *s, const char *command,
                              const char *option, gate_child *c, ckpt_err *err)
{
    ckpt_strings argv = {0};
    bool built =
        push(&argv, command, s->path, option, NULL) && push_source_options(arena, &argv, s);
    ckpt_status status =
        built ? ckpt_gate_self(g, arena, &argv, 24 * 3600, c, err) : ckpt_tool_no_memory(err);
    ckpt_strings_release(&argv);
    return status;
}

ckpt_status ckpt_gate_look(gate *g, gate_source *s, ckpt_err *err)
{
    ckpt_arena arena = {0};
    gate_child c = {0};
    struct timespec began;
    gate_source how = *s;
    clock_gettime(CLOCK_MONOTONIC, &began);
    ckpt_status status = ask_source(g, &arena, s, "verify", "--hash", &c, err);
    if (status == CKPT_OK)
        judge_source(s, &c);
    ckpt_gate_child_release(&c);
    how.allow_unknown = false; /* inspect refuses none */
    if (status == CKPT_OK && s->problem == NULL) {
        status = ask_source(g, &arena, &how, "inspect", NULL, &c, err);
        if (status == CKPT_OK && c.exit != 0)
            s->problem = ckpt_arena_strdup(&s->arena, c.why);
        else if (status == CKPT_OK)
            note_form(s, c.doc);
        ckpt_gate_child_release(&c);
    }
    s->seconds = ckpt_seconds_since(&began);
    ckpt_arena_free(&arena);
    return status;
}

/* ---- conversion ------------------------------------------------------------------------------ */

/* Where an output of that container goes: HDF5 is a file. */
static const char *output_path(bench *b, const char *name, const char *to)
{
    return ckpt_arena_printf(&b->u->arena, "%s/%s%s", b->dir, name,
                             to != NULL && strcmp(to, "hdf5") == 0 ? ".h5" : "");
}

static ckpt_status convert(bench *b, gate_child *c)
{
    const gate_target *t = b->u->target;
    ckpt_strings argv = {0};
    const char *dst = output_path(b, "made", t->to);
    bool built = dst != NULL && push(&argv, "convert", b->u->source->path, dst, NULL) &&
                 (t->to == NULL || push(&argv, "--to", t->to, NULL)) &&
                 (t->layout == NULL || push(&argv, "--layout", t->layout, NULL)) &&
                 push_mesh(&b->u->arena, &argv, b->u->mesh, false) &&
                 push_all(&argv, &t->options) &&
                 push_source_options(&b->u->arena, &argv, b->u->source);
    b->path = dst;
    return step(b, &argv, built, c);
}

static ckpt_status check_convert(bench *b, gate_result *r)
{
    gate_child c;
    ckpt_status status = convert(b, &c);
    if (status == CKPT_OK)
        judge_exit(b, r, "", &c);
    ckpt_gate_child_release(&c);
    return status;
}

/* ---- checks ---------------------------------------------------------------------------------- */

static bool on_source(const bench *b)
{
    return b->u->target == NULL;
}

static ckpt_status check_structure(bench *b, gate_result *r)
{
    ckpt_strings argv = {0};
    gate_child c;
    bool built = push(&argv, "verify", b->path, b->u->row->strict ? "--strict" : NULL, NULL) &&
                 (!on_source(b) || push_source_options(&b->u->arena, &argv, b->u->source));
    ckpt_status status = step(b, &argv, built, &c);
    if (status == CKPT_OK)
        judge_exit(b, r, "", &c);
    ckpt_gate_child_release(&c);
    return status;
}

/* A source has been looked at already; its digests and root are as they should be. */
static ckpt_status check_hash(bench *b, gate_result *r)
{
    ckpt_strings argv = {0};
    gate_child c;
    const char *want = b->u->row->root != NULL ? b->u->row->root : b->u->source->found_root;
    if (on_source(b)) {
        r->ok = true;
        return CKPT_OK;
    }
    ckpt_status status = step(b, &argv, push(&argv, "verify", b->path, "--hash", NULL), &c);
    const char *root = status == CKPT_OK ? member(&c, "root") : NULL;
    if (status == CKPT_OK && (c.exit != 0 || root == NULL))
        judge_exit(b, r, "", &c);
    else if (status == CKPT_OK && strcmp(root, want) != 0)
        fails(b, r, "root is %s, %s is %s", root,
              b->u->row->root != NULL ? "pinned" : "that of the source", want);
    else if (status == CKPT_OK)
        r->ok = true;
    ckpt_gate_child_release(&c);
    return status;
}

/* Names of containers as the option --to takes them; one that is only read comes back as another. */
static const char *container_option(const char *name)
{
    if (name == NULL)
        return "keep";
    if (strcmp(name, "rank_safetensors") == 0)
        return "ranks";
    return strcmp(name, "zarr") == 0 ? "torch_dist" : name;
}

static bool is_sharded(const char *to)
{
    return strcmp(to, "torch_dist") == 0 || strcmp(to, "mp_rank") == 0 || strcmp(to, "ranks") == 0;
}

static ckpt_status check_roundtrip(bench *b, gate_result *r)
{
    const gate_source *s = b->u->source;
    const char *to = container_option(s->container), *back = output_path(b, "back", to);
    ckpt_strings argv = {0};
    gate_child c;
    bool built = back != NULL &&
                 push(&argv, "convert", b->path, back, "--to", to, "--layout", s->layout, NULL) &&
                 (!is_sharded(to) || push_mesh(&b->u->arena, &argv, &s->mesh, true)) &&
                 (!s->allow_unknown || push(&argv, "--allow-unknown", NULL));
    ckpt_status status = step(b, &argv, built, &c);
    if (status == CKPT_OK)
        judge_exit(b, r, "back", &c);
    ckpt_gate_child_release(&c);
    if (status != CKPT_OK || !r->ok)
        return status;
    argv = (ckpt_strings){0};
    status = step(b, &argv, push(&argv, "diff", s->path, back, NULL), &c);
    if (status == CKPT_OK && c.exit == 1) {
        const ckpt_json *first = ckpt_json_child(ckpt_json_get(c.doc, "differences"));
        const char *name = ckpt_json_string(ckpt_json_get(first, "name"));
        const char *kind = ckpt_json_string(ckpt_json_get(first, "kind"));
        fails(b, r, "%d tensors differ, first '%s' (%s)",
              ckpt_json_size(ckpt_json_get(c.doc, "differences")), name != NULL ? name : "?",
              kind != NULL ? kind : "?");
    } else if (status == CKPT_OK)
        judge_exit(b, r, "", &c);
    ckpt_gate_child_release(&c);
    if (back != NULL)
        ckpt_remove_tree(back);
    return status;
}

/* Of the problems of `verify --forward`: those of gradients say so. */
static void judge_forward(bench *b, gate_result *r, const gate_child *c)
{
    const ckpt_json *problems = ckpt_json_get(c->doc, "problems");
    int n = 0;
    const char *first = NULL;
    if (c->exit != 0 && c->exit != 1) {
        judge_exit(b, r, "", c);
        return;
    }
    for (const ckpt_json *p = ckpt_json_child(problems); p != NULL; p = ckpt_json_next(p)) {
        const char *text = ckpt_json_string(p);
        bool gradient = text != NULL && strncmp(text, "gradient of ", 12) == 0;
        if (text == NULL || gradient != (r->check == GATE_GRADIENTS))
            continue;
        first = n++ == 0 ? text : first;
    }
    if (c->exit == 1 && ckpt_json_size(problems) == 0)
        judge_exit(b, r, "", c);
    else if (n > 1)
        fails(b, r, "%s (and %d more)", first, n - 1);
    else if (n == 1)
        fails(b, r, "%s", first);
    else
        r->ok = true;
}

/* One pass serves both checks. */
static ckpt_status check_forward(bench *b, gate_result *logits, gate_result *gradients)
{
    const gate_source *s = b->u->source;
    const gate_row *row = b->u->row;
    bool compares = !on_source(b) || s->reference != NULL;
    ckpt_strings argv = {0};
    gate_child c;
    bool built =
        push(&argv, "verify", s->path, "--forward", NULL) &&
        (on_source(b) || push(&argv, "--against", b->path, NULL)) &&
        (!on_source(b) || s->reference == NULL || push(&argv, "--reference", s->reference, NULL)) &&
        (!compares || row->rtol < 0 || push_real(&b->u->arena, &argv, "--rtol", row->rtol)) &&
        (!compares || row->grad_rtol < 0 ||
         push_real(&b->u->arena, &argv, "--grad-rtol", row->grad_rtol)) &&
        (s->latent_eps <= 0 || push_real(&b->u->arena, &argv, "--latent-eps", s->latent_eps)) &&
        push_source_options(&b->u->arena, &argv, s);
    ckpt_status status = step(b, &argv, built, &c);
    if (status == CKPT_OK && logits != NULL)
        judge_forward(b, logits, &c);
    if (status == CKPT_OK && gradients != NULL)
        judge_forward(b, gradients, &c);
    ckpt_gate_child_release(&c);
    return status;
}

/* Train from `from` up to a step, saving into `save`; start >= 0: with the optimizer's state of the
 * checkpoint, whose step that is. A resumed run keeps its own options. */
static ckpt_status train(bench *b, gate_result *r, const char *from, bool resumed, int64_t steps,
                         const char *save, const char *what)
{
    const gate_row *row = b->u->row;
    ckpt_strings argv = {0};
    gate_child c;
    bool built =
        push(&argv, "train", "--resume", from, "--data", row->data, "--save", save, NULL) &&
        push_int(&b->u->arena, &argv, "--steps", steps + (row->start > 0 ? row->start : 0)) &&
        (resumed || row->start >= 0 || push(&argv, "--reset-optimizer", NULL)) &&
        (resumed || push_all(&argv, &row->train));
    ckpt_status status = step(b, &argv, built, &c);
    if (status == CKPT_OK)
        judge_exit(b, r, what, &c);
    ckpt_gate_child_release(&c);
    return status;
}

static ckpt_status check_resume(bench *b, gate_result *r)
{
    const gate_row *row = b->u->row;
    ckpt_arena *arena = &b->u->arena;
    const char *half = ckpt_arena_printf(arena, "%s/half", b->dir);
    const char *rest = ckpt_arena_printf(arena, "%s/rest", b->dir);
    const char *at_once = ckpt_arena_printf(arena, "%s/whole", b->dir);
    ckpt_status status = CKPT_OK;
    ckpt_strings argv = {0};
    gate_child c = {0};
    if (half == NULL || rest == NULL || at_once == NULL)
        return ckpt_tool_no_memory(b->err);
    status = train(b, r, b->path, false, row->steps[0], half, "first steps");
    if (status == CKPT_OK && r->ok)
        status = train(b, r, half, true, row->steps[1], rest, "resumed");
    if (status == CKPT_OK && r->ok)
        status = train(b, r, b->path, false, row->steps[1], at_once, "all steps at once");
    if (status == CKPT_OK && r->ok) {
        status = step(b, &argv, push(&argv, "diff", rest, at_once, NULL), &c);
        if (status == CKPT_OK && c.exit == 1)
            fails(b, r, "%lld steps and %lld resumed differ from %lld at once in %d tensors",
                  (long long)row->steps[0], (long long)(row->steps[1] - row->steps[0]),
                  (long long)row->steps[1], ckpt_json_size(ckpt_json_get(c.doc, "differences")));
        else if (status == CKPT_OK)
            judge_exit(b, r, "", &c);
        ckpt_gate_child_release(&c);
    }
    ckpt_remove_tree(half);
    ckpt_remove_tree(rest);
    ckpt_remove_tree(at_once);
    return status;
}

size_t ckpt_gate_mark(const char *text, const char *const values[3], const char **value)
{
    static const char *const marks[] = {"{path}", "{source}", "{dir}", "{{"};
    size_t i = 0, n = sizeof marks / sizeof marks[0];
    while (i < n && strncmp(text, marks[i], strlen(marks[i])) != 0)
        i++;
    *value = i < 3 ? values[i] : "{";
    return i < n ? strlen(marks[i]) : 0;
}

/* An argument with its marks replaced. */
static const char *expand(bench *b, const char *text)
{
    const char *const values[3] = {b->path, b->u->source->path, b->dir};
    const char *value;
    ckpt_buf out = {0};
    while (*text != '\0') {
        size_t used = ckpt_gate_mark(text, values, &value);
        if (used > 0)
            ckpt_buf_puts(&out, value);
        else
            ckpt_buf_putc(&out, *text);
        text += used > 0 ? used : 1;
    }
    const char *copy =
        out.failed ? NULL : ckpt_arena_strndup(&b->u->arena, (const char *)out.data, out.len);
    ckpt_buf_release(&out);
    return copy;
}

/* The program runs where the gate file lies; the shell is there only to go to that directory. */
static ckpt_status check_load(bench *b, gate_result *r)
{
    const ckpt_strings *words = &r->load->argv;
    const char **argv = ckpt_arena_array(&b->u->arena, words->n + 5, sizeof *argv);
    gate_child c = {0};
    size_t n = 0;
    if (argv == NULL)
        return ckpt_tool_no_memory(b->err);
    argv[n++] = "/bin/sh";
    argv[n++] = "-c";
    argv[n++] = "cd -- \"$0\" && exec \"$@\"";
    argv[n++] = b->g->dir;
    for (size_t i = 0; i < words->n; i++) {
        argv[n] = expand(b, words->items[i]);
        if (argv[n++] == NULL)
            return ckpt_tool_no_memory(b->err);
    }
    ckpt_status status = ckpt_gate_spawn(b->g, &b->u->arena, argv, b->u->row->timeout, &c, b->err);
    if (status == CKPT_OK)
        judge_exit(b, r, words->items[0], &c);
    ckpt_gate_child_release(&c);
    return status;
}

static ckpt_status check_refuse(bench *b, gate_result *r)
{
    const gate_row *row = b->u->row;
    ckpt_strings argv = {0};
    gate_child c;
    ckpt_status status;
    if (on_source(b))
        status = step(b, &argv,
                      push(&argv, "verify", b->u->source->path, NULL) &&
                          push_source_options(&b->u->arena, &argv, b->u->source),
                      &c);
    else
        status = convert(b, &c);
    if (status != CKPT_OK)
        return status;
    if (c.exit != row->refuse_exit)
        fails(b, r, "exit %d, expected %lld: %s", c.exit, (long long)row->refuse_exit,
              c.exit == 0 ? "it was not refused" : c.why);
    else if (row->refuse_message != NULL && strstr(c.why, row->refuse_message) == NULL)
        fails(b, r, "refused, but not with '%s': %s", row->refuse_message, c.why);
    else
        r->ok = true;
    ckpt_gate_child_release(&c);
    return CKPT_OK;
}

/* ---- a unit ---------------------------------------------------------------------------------- */

static gate_result *find(gate_unit *u, gate_check check)
{
    for (size_t i = 0; i < u->n_results; i++)
        if (u->results[i].check == check)
            return &u->results[i];
    return NULL;
}

static ckpt_status run_check(bench *b, gate_result *r)
{
    switch (r->check) {
    case GATE_CONVERT:
        return check_convert(b, r);
    case GATE_STRUCTURE:
        return check_structure(b, r);
    case GATE_HASH:
        return check_hash(b, r);
    case GATE_ROUNDTRIP:
        return check_roundtrip(b, r);
    case GATE_FORWARD:
        return check_forward(b, r, find(b->u, GATE_GRADIENTS));
    case GATE_GRADIENTS:
        return find(b->u, GATE_FORWARD) != NULL ? CKPT_OK : check_forward(b, NULL, r);
    case GATE_RESUME:
        return check_resume(b, r);
    case GATE_LOAD:
        return check_load(b, r);
    case GATE_REFUSE:
        return check_refuse(b, r);
    case GATE_N_CHECKS:
        break;
    }
    return ckpt_fail(b->err, CKPT_E_INTERNAL, "gate: check %d", (int)r->check);
}

/* Marks what is known from earlier runs; false if something is left to do. */
static bool all_known(gate *g, gate_unit *u)
{
    size_t left = 0;
    for (size_t i = 0; i < u->n_results; i++) {
        gate_result *r = &u->results[i];
        r->ok = r->cached = r->check != GATE_CONVERT && ckpt_gate_cached(g, u, r);
        left += !r->ok && r->check != GATE_CONVERT;
    }
    /* forward and gradients are one pass: both are known, or both run */
    gate_result *f = find(u, GATE_FORWARD), *d = find(u, GATE_GRADIENTS);
    if (f != NULL && d != NULL && f->cached != d->cached)
        f->cached = d->cached = f->ok = d->ok = false;
    gate_result *c = find(u, GATE_CONVERT);
    if (c != NULL && left == 0 && u->n_results > 1)
        c->ok = c->cached = true;
    return left == 0 && (c == NULL || c->ok);
}

static ckpt_status run_all(bench *b)
{
    ckpt_status status = CKPT_OK;
    bool made = true;
    for (size_t i = 0; i < b->u->n_results && status == CKPT_OK; i++) {
        gate_result *r = &b->u->results[i];
        struct timespec began;
        if (r->cached)
            continue;
        if (!made) {
            r->message = "not run: the conversion failed";
            continue;
        }
        clock_gettime(CLOCK_MONOTONIC, &began);
        status = run_check(b, r);
        r->seconds = ckpt_seconds_since(&began);
        if (r->check == GATE_CONVERT)
            made = r->ok;
        if (status == CKPT_OK && r->ok)
            status = ckpt_gate_remember(b->g, b->u, r, b->err);
    }
    return status;
}

ckpt_status ckpt_gate_unit(gate *g, gate_unit *u, size_t number, ckpt_err *err)
{
    bench b = {.g = g, .u = u, .path = u->source->path, .err = err};
    struct timespec began;
    ckpt_status status;
    clock_gettime(CLOCK_MONOTONIC, &began);
    if (u->source->problem != NULL && !u->row->want[GATE_REFUSE]) {
        for (size_t i = 0; i < u->n_results; i++)
            u->results[i].message = i == 0 ? u->source->problem : "not run: the source failed";
        return CKPT_OK;
    }
    if (all_known(g, u))
        return CKPT_OK;
    b.dir = ckpt_arena_printf(&u->arena, "%s/case-%zu", g->work, number);
    if (b.dir == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_mkdirs(b.dir, err));
    status = run_all(&b);
    u->seconds = ckpt_seconds_since(&began);
    if (!g->keep || ckpt_gate_passed(u))
        ckpt_remove_tree(b.dir);
done:
    return status;
}
