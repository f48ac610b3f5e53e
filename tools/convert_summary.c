/* What a conversion did: the lines after it, and its JSON document. */
#include "conversion.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

static const char *plural(size_t n)
{
    return n == 1 ? "" : "s";
}

/* Tensors of the source that the result does not hold. */
static size_t left_out(const conversion *c)
{
    size_t used = 0;
    for (size_t i = 0; i < c->plan.n_results; i++)
        used += (size_t)c->plan.results[i].replaces;
    size_t of_model = c->model.n_tensors > used ? c->model.n_tensors - used : 0;
    return of_model + c->removed.n + c->report.undecoded;
}

static const char *why_root_differs(conversion *c)
{
    ckpt_buf b = {0};
    size_t cast = 0, missing = left_out(c);
    for (size_t i = 0; i < c->plan.n_results; i++)
        cast += c->plan.results[i].gather.from != c->plan.results[i].gather.to;
    if (c->renamed)
        ckpt_buf_puts(&b, "tensors renamed");
    if (missing > 0)
        ckpt_buf_printf(&b, "%s%zu tensor%s left out", b.len > 0 ? ", " : "", missing,
                        plural(missing));
    if (cast > 0)
        ckpt_buf_printf(&b, "%s%zu tensor%s cast", b.len > 0 ? ", " : "", cast, plural(cast));
    if (c->plan.n_lossy > 0)
        ckpt_buf_printf(&b, "%s%zu lossy step%s", b.len > 0 ? ", " : "", c->plan.n_lossy,
                        plural(c->plan.n_lossy));
    if (b.len == 0)
        ckpt_buf_puts(&b, "the source's is another");
    const char *text = b.failed ? NULL : ckpt_arena_strdup(&c->tool->arena, (const char *)b.data);
    ckpt_buf_release(&b);
    return text != NULL ? text : "?";
}

/* What became of the source's tensors. */
typedef struct counts {
    size_t mapped, carried, reset, dropped;
} counts;

static counts count(const conversion *c)
{
    counts n = {.reset = c->plan.n_reset};
    for (size_t i = 0; i < c->plan.n_results; i++) {
        const ckpt_result_tensor *r = &c->plan.results[i];
        *(r->carried ? &n.carried : &n.mapped) += (size_t)r->replaces;
    }
    size_t out = left_out(c);
    n.dropped = (out > n.reset ? out - n.reset : 0) + c->model.n_ignored;
    return n;
}

void ckpt_convert_summary(conversion *c)
{
    char root[2 * CKPT_SHA256_LEN + 1];
    ckpt_arena *arena = &c->tool->arena;
    bool equal = c->result.has_source_root && left_out(c) == 0 &&
                 memcmp(c->result.root, c->result.source_root, CKPT_SHA256_LEN) == 0;
    ckpt_hex(c->result.root, root);
    printf("%s, %zu file%s, %s in %.2f s, root %s, %s%s%s%s\n",
           ckpt_convert_counts(arena, &c->plan), c->plan.sink.n_files, plural(c->plan.sink.n_files),
           ckpt_human(arena, c->result.bytes), c->seconds, root,
           ckpt_paint_on(c->tool->color, equal ? CKPT_GREEN : CKPT_YELLOW),
           equal ? "root equals source" : "root differs: ", equal ? "" : why_root_differs(c),
           ckpt_paint_off(c->tool->color));
    counts n = count(c);
    printf("%zu mapped, %zu carried, %zu reset, %zu dropped; %zu of optimizer state\n", n.mapped,
           n.carried, n.reset, n.dropped, c->plan.n_states);
    if (c->quant.kind != CKPT_WQUANT_NONE)
        ckpt_convert_quantised(c->tool, &c->quant);
}

void ckpt_convert_json(conversion *c)
{
    ckpt_jw *w = &c->tool->json;
    struct rusage usage;
    ckpt_jw_string(w, "destination", c->dst_path);
    ckpt_jw_string(w, "container", c->container->name);
    ckpt_jw_string(w, "layout", c->layout != NULL ? c->layout->name : NULL);
    ckpt_tool_json_mesh(w, &c->plan_opts.mesh);
    ckpt_jw_u64(w, "tensors", c->plan.n_results);
    ckpt_jw_u64(w, "stored_tensors", c->plan.out.n_tensors);
    counts n = count(c);
    ckpt_jw_open(w, "counts", '{');
    ckpt_jw_u64(w, "mapped", n.mapped);
    ckpt_jw_u64(w, "carried", n.carried);
    ckpt_jw_u64(w, "reset", n.reset);
    ckpt_jw_u64(w, "dropped", n.dropped);
    ckpt_jw_u64(w, "optimizer", c->plan.n_states);
    ckpt_jw_close(w, '}');
    ckpt_jw_lines(w, "lossy", c->report.lossy.items, c->report.lossy.n);
    ckpt_jw_lines(w, "warnings", c->report.warnings.items, c->report.warnings.n);
    ckpt_jw_lines(w, "kept", c->report.kept.items, c->report.kept.n);
    ckpt_jw_lines(w, "dropped", c->report.dropped.items, c->report.dropped.n);
    ckpt_jw_lines(w, "not_cast", c->plan.not_cast, c->plan.n_not_cast);
    ckpt_jw_lines(w, "notes", c->model.notes, c->model.n_notes);
    ckpt_jw_bool(w, "dry_run", c->o->dry_run);
    if (c->o->dry_run) {
        ckpt_jw_u64(w, "bytes", c->plan.total_bytes);
        ckpt_convert_show_json(c->tool, &c->plan);
        return;
    }
    if (c->result.has_source_root)
        ckpt_jw_hex(w, "source_root", c->result.source_root);
    else
        ckpt_jw_string(w, "source_root", NULL);
    ckpt_jw_hex(w, "root", c->result.root);
    if (c->quant.kind != CKPT_WQUANT_NONE)
        ckpt_convert_quantised_json(c->tool, &c->quant);
    ckpt_jw_u64(w, "bytes", c->result.bytes);
    ckpt_jw_real(w, "seconds", c->seconds);
    getrusage(RUSAGE_SELF, &usage);
    ckpt_jw_u64(w, "peak_memory", (uint64_t)usage.ru_maxrss * 1024);
    ckpt_jw_u64(w, "buffer_memory", c->result.buffer_bytes);
    ckpt_jw_open(w, "files", '[');
    for (size_t i = 0; i < c->manifest.n_files; i++) {
        const ckpt_manifest_file *f = &c->manifest.files[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", f->name);
        ckpt_jw_u64(w, "size", f->size);
        ckpt_jw_hex(w, "sha256", f->sha256);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}
