/* The plan of `ckpt convert --dry-run`, and what its numbers count. */
#include "convert.h"

#include <string.h>
#include <unistd.h>

#include "wrap.h"

/* Bytes of one source file that a chunk touches, from first to last. */
typedef struct touched {
    uint32_t file;
    uint64_t lo, hi;
    size_t copies;
} touched;

enum { MAX_TOUCHED = 64 };

static void touch(const ckpt_gather *g, const ckpt_copy *copy, touched *list, size_t *n,
                  size_t *elided)
{
    uint64_t lo = copy->src;
    uint64_t hi = copy->src + (uint64_t)ckpt_dtype_get(g->from)->bits / 8;
    for (int l = 0; l < copy->n_loops; l++) {
        int64_t reach = (copy->loop[l].n - 1) * copy->loop[l].src;
        if (reach < 0)
            lo -= (uint64_t)-reach;
        else
            hi += (uint64_t)reach;
    }
    for (size_t i = 0; i < *n; i++) {
        if (list[i].file == copy->file) {
            list[i].lo = lo < list[i].lo ? lo : list[i].lo;
            list[i].hi = hi > list[i].hi ? hi : list[i].hi;
            list[i].copies++;
            return;
        }
    }
    if (*n == MAX_TOUCHED) {
        (*elided)++;
        return;
    }
    list[(*n)++] = (touched){copy->file, lo, hi, 1};
}

static size_t sources_of(const ckpt_gather *g, touched list[MAX_TOUCHED], size_t *elided)
{
    size_t n = 0;
    *elided = 0;
    for (size_t i = 0; i < g->n_copies; i++)
        touch(g, &g->copies[i], list, &n, elided);
    return n;
}

static const char *file_name(const ckpt_plan *plan, uint32_t file)
{
    const ckpt_source *src = plan->model->src;
    return file < src->n_files ? src->files[file].name : "(computed)";
}

/* A line of the plan; on a terminal it goes on below the names. */
static void print_line(ckpt_buf *b)
{
    ckpt_buf line = {0};
    if (b->data != NULL && !b->failed)
        ckpt_wrap(&line, (const char *)b->data, b->len, 0, 8, "",
                  ckpt_terminal_width(STDOUT_FILENO));
    ckpt_buf_putc(&line, '\n');
    if (!line.failed)
        fwrite(line.data, 1, line.len, stdout);
    ckpt_buf_release(&line);
    ckpt_buf_clear(b);
}

static void show_chunk(ckpt_buf *b, const ckpt_plan *plan, const ckpt_seg *seg)
{
    ckpt_arena scratch = {0};
    touched list[MAX_TOUCHED];
    size_t elided;
    const ckpt_out_tensor *t = &plan->out.tensors[seg->a];
    const ckpt_out_chunk *c = &t->chunks[seg->b];
    const ckpt_gather *g = &plan->chunks[seg->a][seg->b];
    ckpt_buf_printf(b, "  %12llu  %s %s %s", (unsigned long long)seg->offset,
                    ckpt_clean(&scratch, t->name), ckpt_dtype_get(t->dtype)->name,
                    ckpt_shape(&scratch, t->rank, c->len));
    if (t->n_chunks > 1)
        ckpt_buf_printf(b, " at %s of %s", ckpt_shape(&scratch, t->rank, c->lo),
                        ckpt_shape(&scratch, t->rank, t->dims));
    if (g->to != g->from)
        ckpt_buf_printf(b, " cast from %s", ckpt_dtype_get(g->from)->name);
    if (g->pad > 0)
        ckpt_buf_printf(b, " with %llu zero bytes", (unsigned long long)g->pad);
    size_t n = sources_of(g, list, &elided);
    for (size_t i = 0; i < n; i++)
        ckpt_buf_printf(b, "%s %s[%llu..%llu)", i == 0 ? " <-" : ",",
                        ckpt_clean(&scratch, file_name(plan, list[i].file)),
                        (unsigned long long)list[i].lo, (unsigned long long)list[i].hi);
    if (elided > 0)
        ckpt_buf_printf(b, " and %zu more pieces", elided);
    print_line(b);
    ckpt_arena_free(&scratch);
}

static void show_object(ckpt_buf *b, const ckpt_plan *plan, const ckpt_seg *seg)
{
    ckpt_arena scratch = {0};
    const ckpt_out_object *o = &plan->out.objects[seg->a];
    ckpt_buf_printf(b, "  %12llu  object %s, %llu bytes <- ", (unsigned long long)seg->offset,
                    ckpt_clean(&scratch, o->name), (unsigned long long)seg->len);
    if (o->data != NULL)
        ckpt_buf_puts(b, "rewritten");
    else
        ckpt_buf_printf(b, "%s[%llu..%llu)", ckpt_clean(&scratch, file_name(plan, o->src_file)),
                        (unsigned long long)o->src_offset,
                        (unsigned long long)(o->src_offset + o->length));
    print_line(b);
    ckpt_arena_free(&scratch);
}

const char *ckpt_convert_counts(ckpt_arena *arena, const ckpt_plan *plan)
{
    const char *plural = plan->n_results == 1 ? "" : "s";
    const char *text =
        plan->n_results == plan->out.n_tensors
            ? ckpt_arena_printf(arena, "%s tensor%s", ckpt_count(arena, plan->n_results), plural)
            : ckpt_arena_printf(arena, "%s tensor%s stored as %s",
                                ckpt_count(arena, plan->n_results), plural,
                                ckpt_count(arena, plan->out.n_tensors));
    return text != NULL ? text : "?";
}

void ckpt_convert_show(ckpt_tool *tool, const ckpt_plan *plan)
{
    ckpt_arena *arena = &tool->arena;
    ckpt_buf b = {0};
    for (size_t f = 0; f < plan->sink.n_files; f++) {
        const ckpt_out_file *file = &plan->sink.files[f];
        printf("%s%s%s  %llu bytes\n", ckpt_paint_on(tool->color, CKPT_BOLD),
               ckpt_clean(arena, file->name), ckpt_paint_off(tool->color),
               (unsigned long long)file->size);
        for (size_t s = 0; s < file->n_segs; s++) {
            if (file->segs[s].kind == CKPT_SEG_CHUNK)
                show_chunk(&b, plan, &file->segs[s]);
            else if (file->segs[s].kind == CKPT_SEG_OBJECT)
                show_object(&b, plan, &file->segs[s]);
        }
    }
    ckpt_buf_printf(&b,
                    "plan: %s, %zu object%s, %s in %zu file%s, %s of it tensor data; nothing "
                    "written",
                    ckpt_convert_counts(arena, plan), plan->out.n_objects,
                    plan->out.n_objects == 1 ? "" : "s", ckpt_human(arena, plan->total_bytes),
                    plan->sink.n_files, plan->sink.n_files == 1 ? "" : "s",
                    ckpt_human(arena, plan->payload_bytes));
    print_line(&b);
    ckpt_buf_release(&b);
}

static void json_chunk(ckpt_jw *w, const ckpt_plan *plan, const ckpt_seg *seg)
{
    touched list[MAX_TOUCHED];
    size_t elided;
    const ckpt_out_tensor *t = &plan->out.tensors[seg->a];
    const ckpt_gather *g = &plan->chunks[seg->a][seg->b];
    ckpt_jw_open(w, NULL, '{');
    ckpt_jw_string(w, "tensor", t->name);
    ckpt_jw_string(w, "dtype", ckpt_dtype_get(t->dtype)->name);
    ckpt_jw_dims(w, "lo", t->rank, t->chunks[seg->b].lo);
    ckpt_jw_dims(w, "len", t->rank, t->chunks[seg->b].len);
    ckpt_jw_u64(w, "offset", seg->offset);
    ckpt_jw_u64(w, "bytes", seg->len);
    ckpt_jw_u64(w, "zero_bytes", g->pad);
    size_t n = sources_of(g, list, &elided);
    ckpt_jw_open(w, "sources", '[');
    for (size_t i = 0; i < n; i++) {
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "file", file_name(plan, list[i].file));
        ckpt_jw_u64(w, "from", list[i].lo);
        ckpt_jw_u64(w, "to", list[i].hi);
        ckpt_jw_u64(w, "copies", list[i].copies);
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
    ckpt_jw_close(w, '}');
}

void ckpt_convert_show_json(ckpt_tool *tool, const ckpt_plan *plan)
{
    ckpt_jw *w = &tool->json;
    ckpt_jw_open(w, "files", '[');
    for (size_t f = 0; f < plan->sink.n_files; f++) {
        const ckpt_out_file *file = &plan->sink.files[f];
        ckpt_jw_open(w, NULL, '{');
        ckpt_jw_string(w, "name", file->name);
        ckpt_jw_u64(w, "size", file->size);
        ckpt_jw_open(w, "chunks", '[');
        for (size_t s = 0; s < file->n_segs; s++)
            if (file->segs[s].kind == CKPT_SEG_CHUNK)
                json_chunk(w, plan, &file->segs[s]);
        ckpt_jw_close(w, ']');
        ckpt_jw_close(w, '}');
    }
    ckpt_jw_close(w, ']');
}
