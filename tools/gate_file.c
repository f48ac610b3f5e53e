/* Reading the file of `ckpt gate` (gate.h tells its form) and laying out its units. */
#include "command.h"
#include "gate.h"
#include "io.h"
#include "shard.h"

#include <stdlib.h>
#include <string.h>

#define FILE_MAX ((uint64_t)16 << 20)
#define UNITS_MAX ((size_t)100000)
#define TIMEOUT 3600 /* seconds, unless a case says otherwise */

const char *const ckpt_gate_check_names[GATE_N_CHECKS] = {
    "convert", "structure", "hash", "roundtrip", "forward", "gradients", "resume", "load", "refuse",
};

/* ---- members --------------------------------------------------------------------------------- */

/* Every member must be one of `known` (NULL-terminated). */
static ckpt_status only_known(const ckpt_json *j, const char *const *known, ckpt_err *err)
{
    if (!ckpt_json_is_object(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "not an object");
    for (const ckpt_json *m = ckpt_json_child(j); m != NULL; m = ckpt_json_next(m)) {
        const char *key = ckpt_json_key(m), *near = NULL;
        size_t best = 3;
        bool found = false;
        for (size_t i = 0; known[i] != NULL && !found; i++) {
            size_t d = ckpt_distance(key, known[i]);
            found = d == 0;
            if (d < best) {
                best = d;
                near = known[i];
            }
        }
        if (!found && near != NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "unknown member '%s'; did you mean '%s'?", key,
                             near);
        if (!found)
            return ckpt_fail(err, CKPT_E_FORMAT, "unknown member '%s'", key);
    }
    return CKPT_OK;
}

/* Absent members leave *out as it is. */
static ckpt_status text(gate *g, const ckpt_json *j, const char *key, const char **out,
                        ckpt_err *err)
{
    const ckpt_json *m = ckpt_json_get(j, key);
    if (m == NULL)
        return CKPT_OK;
    const char *s = ckpt_json_string(m);
    if (s == NULL || *s == '\0')
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not a text", key);
    *out = ckpt_arena_strdup(&g->arena, s);
    return *out != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

/* Relative to the gate file. */
static const char *resolve(gate *g, const char *path)
{
    return path[0] == '/' ? ckpt_arena_strdup(&g->arena, path)
                          : ckpt_path_join(&g->arena, g->dir, path);
}

static ckpt_status path(gate *g, const ckpt_json *j, const char *key, const char **out,
                        ckpt_err *err)
{
    const char *name = NULL;
    ckpt_status status = text(g, j, key, &name, err);
    if (status != CKPT_OK || name == NULL)
        return status;
    *out = resolve(g, name);
    return *out != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

static ckpt_status whole(const ckpt_json *j, const char *key, int64_t min, int64_t max,
                         int64_t *out, ckpt_err *err)
{
    const ckpt_json *m = ckpt_json_get(j, key);
    int64_t v;
    if (m == NULL)
        return CKPT_OK;
    if (!ckpt_json_int(m, &v) || v < min || v > max)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not a whole number from %lld to %lld", key,
                         (long long)min, (long long)max);
    *out = v;
    return CKPT_OK;
}

static ckpt_status real(const ckpt_json *j, const char *key, double *out, ckpt_err *err)
{
    const ckpt_json *m = ckpt_json_get(j, key);
    double v;
    if (m == NULL)
        return CKPT_OK;
    if (!ckpt_json_double(m, &v) || !(v >= 0))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not a number of at least 0", key);
    *out = v;
    return CKPT_OK;
}

static ckpt_status boolean(const ckpt_json *j, const char *key, bool *out, ckpt_err *err)
{
    const ckpt_json *m = ckpt_json_get(j, key);
    if (m != NULL && !ckpt_json_bool(m, out))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not true or false", key);
    return CKPT_OK;
}

static ckpt_status root(gate *g, const ckpt_json *j, const char **out, ckpt_err *err)
{
    uint8_t digest[CKPT_SHA256_LEN];
    ckpt_status status = text(g, j, "root", out, err);
    if (status == CKPT_OK && *out != NULL && !ckpt_unhex(*out, digest))
        return ckpt_fail(err, CKPT_E_FORMAT, "'root' is not 64 lower-case hexadecimal digits");
    return status;
}

/* A text, or an array of texts. */
static ckpt_status texts(gate *g, const ckpt_json *j, const char *key, bool one_is_enough,
                         ckpt_strings *out, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_json *m = ckpt_json_get(j, key);
    const char *one = one_is_enough ? ckpt_json_string(m) : NULL;
    if (m == NULL)
        return CKPT_OK;
    if (one == NULL && !ckpt_json_is_array(m))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not an array of texts", key);
    for (const ckpt_json *e = one != NULL ? m : ckpt_json_child(m); e != NULL;
         e = one != NULL ? NULL : ckpt_json_next(e)) {
        const char *s = ckpt_json_string(e);
        if (s == NULL)
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s' has an element that is not a text", key);
        s = ckpt_arena_strdup(&g->arena, s);
        if (s == NULL)
            return ckpt_tool_no_memory(err);
        CKPT_CHECK(ckpt_strings_push(out, s, err));
    }
done:
    return status;
}

/* ---- sources, targets, commands -------------------------------------------------------------- */

/* The line on which the file writes that name as a key, from 1; 1 if it does not. */
static int line_of(const char *file, const char *name)
{
    size_t n = strlen(name);
    int line = 1;
    for (const char *p = file; *p != '\0'; p++) {
        if (*p == '\n')
            line++;
        if (*p == '"' && strncmp(p + 1, name, n) == 0 && p[n + 1] == '"') {
            const char *after = p + n + 2;
            if (after[strspn(after, " \t\r\n")] == ':')
                return line;
        }
    }
    return 1;
}

static ckpt_status add_source(gate *g, const ckpt_json *j, const char *file, ckpt_err *err)
{
    static const char *const known[] = {"path",       "root",          "iteration", "reference",
                                        "latent_eps", "allow_unknown", NULL};
    gate_source *s = &g->sources[g->n_sources++];
    ckpt_status status;
    s->iteration = -1;
    s->name = ckpt_arena_strdup(&g->arena, ckpt_json_key(j));
    if (s->name == NULL)
        return ckpt_tool_no_memory(err);
    s->line = line_of(file, s->name);
    CKPT_CHECK(only_known(j, known, err));
    CKPT_CHECK(path(g, j, "path", &s->path, err));
    CKPT_CHECK(path(g, j, "reference", &s->reference, err));
    CKPT_CHECK(root(g, j, &s->root, err));
    CKPT_CHECK(whole(j, "iteration", 0, INT64_MAX, &s->iteration, err));
    CKPT_CHECK(real(j, "latent_eps", &s->latent_eps, err));
    CKPT_CHECK(boolean(j, "allow_unknown", &s->allow_unknown, err));
    if (s->path == NULL)
        status = ckpt_fail(err, CKPT_E_FORMAT, "no 'path'");
done:
    return status;
}

static ckpt_status read_mesh(const ckpt_json *j, ckpt_mesh *mesh, ckpt_err *err)
{
    const char *known[CKPT_MESH_STORED + 1] = {NULL};
    ckpt_status status;
    for (int i = 0; i < CKPT_MESH_STORED; i++)
        known[i] = ckpt_mesh_axes[i];
    CKPT_CHECK(only_known(j, known, err));
    for (int i = 0; i < CKPT_MESH_STORED; i++) {
        int64_t v = 0;
        CKPT_CHECK(whole(j, known[i], 1, 1 << 20, &v, err));
        *ckpt_mesh_size(mesh, i) = (int)v;
    }
done:
    return status;
}

/* Options that another command refuses are a fault of this file, and found before anything runs. */
static ckpt_status check_words(const ckpt_command *command, const ckpt_strings *words,
                               ckpt_err *err)
{
    ckpt_status status = ckpt_command_check(command, words, err);
    if (status != CKPT_E_USAGE)
        return status;
    err->code = CKPT_E_FORMAT;
    return err->code;
}

/* A target as the options of convert. */
static ckpt_status check_target(gate *g, const gate_target *t, ckpt_err *err)
{
    ckpt_strings words = {0};
    ckpt_status status = CKPT_OK;
    const char *const pairs[][2] = {
        {"--to",     t->to    },
        {"--layout", t->layout}
    };
    for (size_t i = 0; i < 2; i++) {
        if (pairs[i][1] == NULL)
            continue;
        CKPT_CHECK(ckpt_strings_push(&words, pairs[i][0], err));
        CKPT_CHECK(ckpt_strings_push(&words, pairs[i][1], err));
    }
    for (size_t m = 0; m < t->n_meshes; m++) {
        for (int i = 0; i < CKPT_MESH_STORED; i++) {
            int size = *ckpt_mesh_size(&t->meshes[m], i);
            const char *word =
                ckpt_arena_printf(&g->arena, "--%s=%d", ckpt_mesh_axes[i], size > 0 ? size : 1);
            if (word == NULL)
                return ckpt_tool_no_memory(err);
            CKPT_CHECK(ckpt_strings_push(&words, word, err));
        }
    }
    for (size_t i = 0; i < t->options.n; i++)
        CKPT_CHECK(ckpt_strings_push(&words, t->options.items[i], err));
    status = check_words(&ckpt_cmd_convert, &words, err);
done:
    ckpt_strings_release(&words);
    return status;
}

static ckpt_status add_target(gate *g, const ckpt_json *j, ckpt_err *err)
{
    static const char *const known[] = {"to", "layout", "mesh", "options", NULL};
    gate_target *t = &g->targets[g->n_targets++];
    ckpt_status status;
    t->name = ckpt_arena_strdup(&g->arena, ckpt_json_key(j));
    CKPT_CHECK(only_known(j, known, err));
    CKPT_CHECK(text(g, j, "to", &t->to, err));
    CKPT_CHECK(text(g, j, "layout", &t->layout, err));
    CKPT_CHECK(texts(g, j, "options", false, &t->options, err));
    const ckpt_json *m = ckpt_json_get(j, "mesh");
    size_t n = ckpt_json_is_array(m) ? (size_t)ckpt_json_size(m) : 1;
    if (n == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'mesh' is empty");
    t->meshes = ckpt_arena_array(&g->arena, n, sizeof *t->meshes);
    if (t->meshes == NULL || t->name == NULL)
        return ckpt_tool_no_memory(err);
    t->n_meshes = n;
    const ckpt_json *e = ckpt_json_is_array(m) ? ckpt_json_child(m) : m;
    for (size_t i = 0; i < n && e != NULL; i++, e = ckpt_json_next(e))
        CKPT_TRY(read_mesh(e, &t->meshes[i], err), "'mesh'");
    status = check_target(g, t, err);
done:
    return status;
}

/* {WORD} must be one of gate.h's, lest a misspelt one reach a program as it is. */
static ckpt_status check_marks(const char *word, ckpt_err *err)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_";
    for (const char *p = strchr(word, '{'); p != NULL; p = strchr(p, '{')) {
        const char *value, *marks[3] = {"", "", ""};
        size_t n = strspn(p + 1, letters), used = ckpt_gate_mark(p, marks, &value);
        if (used == 0 && n > 0 && p[1 + n] == '}')
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "'%.*s' is none of {path}, {source}, {dir}; {{ stands for a brace",
                             (int)n + 2, p);
        p += used > 0 ? used : 1;
    }
    return CKPT_OK;
}

static ckpt_status add_command(gate *g, const ckpt_json *j, const ckpt_json *all, ckpt_err *err)
{
    gate_command *c = &g->commands[g->n_commands++];
    c->name = ckpt_arena_strdup(&g->arena, ckpt_json_key(j));
    ckpt_status status = texts(g, all, ckpt_json_key(j), false, &c->argv, err);
    if (status == CKPT_OK && c->name == NULL)
        return ckpt_tool_no_memory(err);
    if (status == CKPT_OK && c->argv.n == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no program");
    for (size_t i = 0; i < c->argv.n && status == CKPT_OK; i++)
        status = check_marks(c->argv.items[i], err);
    return status;
}

/* An object of named things: its size, and room for as many. */
static ckpt_status named(gate *g, const ckpt_json *doc, const char *key, size_t each,
                         const ckpt_json **first, void *room, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(doc, key);
    if (j != NULL && !ckpt_json_is_object(j))
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is not an object", key);
    void *items = ckpt_arena_array(&g->arena, (size_t)ckpt_json_size(j) + 1, each);
    *first = ckpt_json_child(j);
    memcpy(room, &items, sizeof items);
    return items != NULL ? CKPT_OK : ckpt_tool_no_memory(err);
}

/* ---- cases ----------------------------------------------------------------------------------- */

static ckpt_status read_checks(gate *g, const ckpt_json *j, gate_row *r, ckpt_err *err)
{
    ckpt_strings names = {0};
    ckpt_status status = texts(g, j, "checks", true, &names, err);
    for (size_t i = 0; status == CKPT_OK && i < names.n; i++) {
        gate_check k = GATE_STRUCTURE;
        while (k <= GATE_GRADIENTS && strcmp(ckpt_gate_check_names[k], names.items[i]) != 0)
            k++;
        if (k > GATE_GRADIENTS)
            status = ckpt_fail(err, CKPT_E_FORMAT,
                               "check '%s' is not one of structure, hash, roundtrip, forward, "
                               "gradients (resume, load and refuse are members of the case)",
                               names.items[i]);
        else
            r->want[k] = true;
    }
    ckpt_strings_release(&names);
    return status;
}

static ckpt_status read_resume(gate *g, const ckpt_json *j, gate_row *r, ckpt_err *err)
{
    static const char *const known[] = {"data", "steps", "start", "options", NULL};
    const ckpt_json *steps = ckpt_json_get(j, "steps"), *first = ckpt_json_child(steps);
    ckpt_status status;
    CKPT_CHECK(only_known(j, known, err));
    CKPT_CHECK(path(g, j, "data", &r->data, err));
    CKPT_CHECK(whole(j, "start", 0, INT64_MAX / 4, &r->start, err));
    CKPT_CHECK(texts(g, j, "options", false, &r->train, err));
    CKPT_TRY(check_words(&ckpt_cmd_train, &r->train, err), "'options'");
    if (r->data == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "no 'data'");
    if (!ckpt_json_is_array(steps) || ckpt_json_size(steps) != 2 ||
        !ckpt_json_int(first, &r->steps[0]) ||
        !ckpt_json_int(ckpt_json_next(first), &r->steps[1]) || r->steps[0] < 1 ||
        r->steps[1] <= r->steps[0] || r->steps[1] > INT32_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "'steps' is not [K, N] with 0 < K < N");
    r->want[GATE_RESUME] = true;
done:
    return status;
}

static ckpt_status read_loads(gate *g, const ckpt_json *j, gate_row *r, ckpt_err *err)
{
    ckpt_strings names = {0};
    ckpt_status status = texts(g, j, "load", true, &names, err);
    r->loads = ckpt_arena_array(&g->arena, names.n + 1, sizeof *r->loads);
    if (status == CKPT_OK && r->loads == NULL)
        status = ckpt_tool_no_memory(err);
    for (size_t i = 0; status == CKPT_OK && i < names.n; i++) {
        size_t c = 0;
        while (c < g->n_commands && strcmp(g->commands[c].name, names.items[i]) != 0)
            c++;
        if (c == g->n_commands)
            status = ckpt_fail(err, CKPT_E_FORMAT, "'load': no command '%s'", names.items[i]);
        else
            r->loads[r->n_loads++] = &g->commands[c];
    }
    r->want[GATE_LOAD] = r->n_loads > 0;
    ckpt_strings_release(&names);
    return status;
}

static ckpt_status read_refuse(gate *g, const ckpt_json *j, gate_row *r, ckpt_err *err)
{
    static const char *const known[] = {"exit", "message", NULL};
    ckpt_status status;
    CKPT_CHECK(only_known(j, known, err));
    CKPT_CHECK(whole(j, "exit", 1, 127, &r->refuse_exit, err));
    CKPT_CHECK(text(g, j, "message", &r->refuse_message, err));
    if (r->refuse_exit == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "no 'exit'");
    r->want[GATE_REFUSE] = true;
done:
    return status;
}

/* The sizes that are given, as "tp 4, ep 2". */
static const char *mesh_name(gate *g, const ckpt_mesh *m)
{
    ckpt_mesh mesh = *m;
    ckpt_buf b = {0};
    for (int i = 0; i < CKPT_MESH_STORED; i++)
        if (*ckpt_mesh_size(&mesh, i) > 0)
            ckpt_buf_printf(&b, "%s%s %d", b.len > 0 ? ", " : "", ckpt_mesh_axes[i],
                            *ckpt_mesh_size(&mesh, i));
    const char *text = b.len > 0 && !b.failed
                           ? ckpt_arena_strndup(&g->arena, (const char *)b.data, b.len)
                           : "default mesh";
    ckpt_buf_release(&b);
    return text;
}

/* Units a row makes of one source. */
static ckpt_status add_unit(gate *g, const gate_row *r, gate_source *s, const gate_target *t,
                            const ckpt_mesh *mesh, const ckpt_strings *only, ckpt_err *err)
{
    const char *sizes = mesh != NULL && t->n_meshes > 1 ? mesh_name(g, mesh) : "";
    if (sizes == NULL)
        return ckpt_tool_no_memory(err);
    const char *name = t == NULL ? s->name
                                 : ckpt_arena_printf(&g->arena, "%s -> %s%s%s", s->name, t->name,
                                                     *sizes != '\0' ? ", " : "", sizes);
    if (name == NULL)
        return ckpt_tool_no_memory(err);
    if (only->n > 0 && !ckpt_glob_any(only, name))
        return CKPT_OK;
    if (g->n_units >= UNITS_MAX)
        return ckpt_fail(err, CKPT_E_FORMAT, "more than %zu cases", UNITS_MAX);
    size_t n = (t != NULL && !r->want[GATE_REFUSE]) + r->n_loads;
    for (int k = 0; k < GATE_N_CHECKS; k++)
        n += r->want[k] && k != GATE_LOAD;
    gate_unit *u = &g->units[g->n_units];
    *u = (gate_unit){.name = name, .source = s, .target = t, .mesh = mesh, .row = r};
    u->results = ckpt_arena_array(&g->arena, n + 1, sizeof *u->results);
    if (u->results == NULL)
        return ckpt_tool_no_memory(err);
    if (t != NULL && !r->want[GATE_REFUSE])
        u->results[u->n_results++].check = GATE_CONVERT;
    for (gate_check k = GATE_STRUCTURE; k < GATE_N_CHECKS; k++)
        for (size_t i = 0; r->want[k] && i < (k == GATE_LOAD ? r->n_loads : 1); i++)
            u->results[u->n_results++] =
                (gate_result){.check = k, .load = k == GATE_LOAD ? r->loads[i] : NULL};
    g->n_units++;
    return CKPT_OK;
}

static ckpt_status room_for_units(gate *g, const gate_target *t, size_t *cap, ckpt_err *err)
{
    void *units = g->units;
    ckpt_status status =
        ckpt_grow(&units, cap, g->n_units + (t != NULL ? t->n_meshes : 1), sizeof *g->units, err);
    g->units = units;
    return status;
}

static bool chosen(const ckpt_strings *names, const char *name, bool *used)
{
    bool found = false;
    for (size_t i = 0; i < names->n; i++)
        if (strcmp(names->items[i], name) == 0 || strcmp(names->items[i], "*") == 0)
            found = used[i] = true;
    return found;
}

static ckpt_status all_used(const ckpt_strings *names, const bool *used, const char *what,
                            ckpt_err *err)
{
    for (size_t i = 0; i < names->n; i++)
        if (!used[i])
            return ckpt_fail(err, CKPT_E_FORMAT, "'%s': no %s '%s'", what, what, names->items[i]);
    return CKPT_OK;
}

static ckpt_status multiply(gate *g, const gate_row *r, const ckpt_strings *sources,
                            const ckpt_strings *targets, const ckpt_strings *only, size_t *cap,
                            ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    bool *used_s = ckpt_arena_array(&g->arena, sources->n + 1, sizeof *used_s);
    bool *used_t = ckpt_arena_array(&g->arena, targets->n + 1, sizeof *used_t);
    if (used_s == NULL || used_t == NULL)
        return ckpt_tool_no_memory(err);
    for (size_t s = 0; s < g->n_sources; s++) {
        if (!chosen(sources, g->sources[s].name, used_s))
            continue;
        if (targets->n == 0) {
            CKPT_CHECK(room_for_units(g, NULL, cap, err));
            CKPT_CHECK(add_unit(g, r, &g->sources[s], NULL, NULL, only, err));
        }
        for (size_t t = 0; t < g->n_targets; t++) {
            const gate_target *target = &g->targets[t];
            if (!chosen(targets, target->name, used_t))
                continue;
            CKPT_CHECK(room_for_units(g, target, cap, err));
            for (size_t m = 0; m < target->n_meshes; m++)
                CKPT_CHECK(add_unit(g, r, &g->sources[s], target, &target->meshes[m], only, err));
        }
    }
    CKPT_CHECK(all_used(sources, used_s, "source", err));
    CKPT_CHECK(all_used(targets, used_t, "target", err));
done:
    return status;
}

/* What a row asks for must be possible. */
static ckpt_status check_row(const gate_row *r, size_t n_targets, ckpt_err *err)
{
    size_t n = 0;
    for (int k = 0; k < GATE_N_CHECKS; k++)
        n += r->want[k];
    if (n == 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "nothing is checked: no 'checks', 'resume', 'load', "
                         "'refuse'");
    if (r->want[GATE_REFUSE] && n > 1)
        return ckpt_fail(err, CKPT_E_FORMAT, "what is refused cannot be checked further");
    if (r->want[GATE_ROUNDTRIP] && n_targets == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'roundtrip' needs a 'target'");
    if (r->root != NULL && (n_targets == 0 || !r->want[GATE_HASH]))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "'root' of a case is that of its target, compared by 'hash'");
    return CKPT_OK;
}

static ckpt_status add_row(gate *g, const ckpt_json *j, const ckpt_strings *only, size_t *cap,
                           ckpt_err *err)
{
    static const char *const known[] = {"source", "target",  "checks", "rtol", "grad_rtol",
                                        "root",   "strict",  "resume", "load", "timeout",
                                        "refuse", "comment", NULL};
    gate_row *r = &g->rows[g->n_rows++];
    ckpt_strings sources = {0}, targets = {0};
    ckpt_status status;
    *r = (gate_row){.rtol = -1, .grad_rtol = -1, .start = -1, .timeout = TIMEOUT};
    CKPT_CHECK(only_known(j, known, err));
    CKPT_CHECK(texts(g, j, "source", true, &sources, err));
    CKPT_CHECK(texts(g, j, "target", true, &targets, err));
    CKPT_CHECK(read_checks(g, j, r, err));
    CKPT_CHECK(real(j, "rtol", &r->rtol, err));
    CKPT_CHECK(real(j, "grad_rtol", &r->grad_rtol, err));
    CKPT_CHECK(root(g, j, &r->root, err));
    CKPT_CHECK(boolean(j, "strict", &r->strict, err));
    CKPT_CHECK(whole(j, "timeout", 1, 7 * 24 * 3600, &r->timeout, err));
    CKPT_CHECK(read_loads(g, j, r, err));
    if (ckpt_json_get(j, "resume") != NULL)
        CKPT_TRY(read_resume(g, ckpt_json_get(j, "resume"), r, err), "'resume'");
    if (ckpt_json_get(j, "refuse") != NULL)
        CKPT_TRY(read_refuse(g, ckpt_json_get(j, "refuse"), r, err), "'refuse'");
    if (sources.n == 0) {
        status = ckpt_fail(err, CKPT_E_FORMAT, "no 'source'");
        goto done;
    }
    CKPT_CHECK(check_row(r, targets.n, err));
    status = multiply(g, r, &sources, &targets, only, cap, err);
done:
    ckpt_strings_release(&sources);
    ckpt_strings_release(&targets);
    return status;
}

/* ---- the file -------------------------------------------------------------------------------- */

static ckpt_status read_all(gate *g, const ckpt_json *doc, const char *file,
                            const ckpt_strings *only, ckpt_err *err)
{
    static const char *const known[] = {"gate",  "sources", "targets", "commands",
                                        "cases", "comment", "$schema", NULL};
    const ckpt_json *first;
    ckpt_status status;
    int64_t version = 0;
    size_t cap = 0, number = 0;
    CKPT_CHECK(only_known(doc, known, err));
    if (!ckpt_json_int(ckpt_json_get(doc, "gate"), &version) || version != 1)
        return ckpt_fail(err, CKPT_E_FORMAT, "'gate' is not 1, the version of its form");
    CKPT_CHECK(named(g, doc, "sources", sizeof *g->sources, &first, &g->sources, err));
    for (const ckpt_json *j = first; j != NULL; j = ckpt_json_next(j))
        CKPT_TRY(add_source(g, j, file, err), "source '%s'", ckpt_json_key(j));
    CKPT_CHECK(named(g, doc, "targets", sizeof *g->targets, &first, &g->targets, err));
    for (const ckpt_json *j = first; j != NULL; j = ckpt_json_next(j))
        CKPT_TRY(add_target(g, j, err), "target '%s'", ckpt_json_key(j));
    CKPT_CHECK(named(g, doc, "commands", sizeof *g->commands, &first, &g->commands, err));
    for (const ckpt_json *j = first; j != NULL; j = ckpt_json_next(j))
        CKPT_TRY(add_command(g, j, ckpt_json_get(doc, "commands"), err), "command '%s'",
                 ckpt_json_key(j));
    const ckpt_json *cases = ckpt_json_get(doc, "cases");
    if (!ckpt_json_is_array(cases) || ckpt_json_size(cases) == 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'cases' is not an array of at least one case");
    g->rows = ckpt_arena_array(&g->arena, (size_t)ckpt_json_size(cases), sizeof *g->rows);
    if (g->rows == NULL)
        return ckpt_tool_no_memory(err);
    for (const ckpt_json *j = ckpt_json_child(cases); j != NULL; j = ckpt_json_next(j))
        CKPT_TRY(add_row(g, j, only, &cap, err), "case %zu", ++number);
done:
    return status;
}

ckpt_status ckpt_gate_read(gate *g, const ckpt_strings *only, ckpt_err *err)
{
    ckpt_buf file = {0};
    ckpt_json *doc = NULL;
    ckpt_status status;
    size_t n = (size_t)(ckpt_basename(g->path) - g->path);
    g->dir = n == 0   ? ckpt_arena_strdup(&g->arena, ".")
             : n == 1 ? ckpt_arena_strdup(&g->arena, "/")
                      : ckpt_arena_strndup(&g->arena, g->path, n - 1);
    if (g->dir == NULL)
        return ckpt_tool_no_memory(err);
    CKPT_CHECK(ckpt_read_file(g->path, FILE_MAX, &file, err));
    CKPT_TRY(ckpt_json_parse((const char *)file.data, file.len, &doc, err), "%s", g->path);
    CKPT_TRY(read_all(g, doc, (const char *)file.data, only, err), "%s", g->path);
    if (g->n_units == 0)
        status = ckpt_fail(err, CKPT_E_USAGE, "%s: no case matches --only", g->path);
done:
    ckpt_json_free(doc);
    ckpt_buf_release(&file);
    return status;
}

void ckpt_gate_release(gate *g)
{
    for (size_t i = 0; i < g->n_targets; i++)
        ckpt_strings_release(&g->targets[i].options);
    for (size_t i = 0; i < g->n_commands; i++)
        ckpt_strings_release(&g->commands[i].argv);
    for (size_t i = 0; i < g->n_rows; i++)
        ckpt_strings_release(&g->rows[i].train);
    for (size_t i = 0; i < g->n_sources; i++)
        ckpt_arena_free(&g->sources[i].arena);
    for (size_t i = 0; i < g->n_units; i++)
        ckpt_arena_free(&g->units[i].arena);
    free(g->units);
    ckpt_arena_free(&g->arena);
}
