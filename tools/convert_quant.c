/* What quantising cost, tensor by tensor. */
#include "convert.h"

#include <stdio.h>

typedef struct worst {
    const ckpt_wquant_tensor *rms, *abs;
    uint64_t saturated;
} worst;

static worst find_worst(const ckpt_wquant *q)
{
    worst w = {.rms = q->tensors, .abs = q->tensors};
    for (size_t i = 0; i < q->n; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        w.rms = t->rel_rms > w.rms->rel_rms ? t : w.rms;
        w.abs = t->max_abs > w.abs->max_abs ? t : w.abs;
        w.saturated += t->saturated;
    }
    return w;
}

void ckpt_convert_quantised(ckpt_tool *tool, const ckpt_wquant *q)
{
    worst w = find_worst(q);
    printf("%zu projection%s in %s, %zu matri%s kept; worst relative RMS error %.3g (%s), largest "
           "error %.3g (%s), %llu value%s saturated\n",
           q->n, ckpt_tool_plural(q->n), ckpt_wquant_name(q->kind), q->n_skipped,
           q->n_skipped == 1 ? "x" : "ces", w.rms->rel_rms, w.rms->name, w.abs->max_abs,
           w.abs->name, (unsigned long long)w.saturated, ckpt_tool_plural(w.saturated));
    for (size_t i = 0; i < q->n && tool->g.verbose; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        printf("  %-60s relative RMS %.3e  max abs %.3e  saturated %llu\n", t->name, t->rel_rms,
               t->max_abs, (unsigned long long)t->saturated);
    }
}

void ckpt_convert_quantised_json(ckpt_jw *w, const ckpt_wquant *q)
{
    ckpt_jw_open(w, "quantised", '{');
    ckpt_jw_string(w, "format", ckpt_wquant_name(q->kind));
    ckpt_jw_lines(w, "kept", q->skipped, q->n_skipped);
    ckpt_jw_open(w, "tensors", '[');
    for (size_t i = 0; i < q->n; i++) {
        const ckpt_wquant_tensor *t = &q->tensors[i];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", t->name);
        ckpt_jw_real(w, "rel_rms", t->rel_rms);
        ckpt_jw_real(w, "max_abs", t->max_abs);
        ckpt_jw_u64(w, "saturated", t->saturated);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_close(w, '}');
}
