/* What surrounds the writing of `ckpt convert`: values that are computed beforehand, and the journal
 * by which a killed run is continued. */
#include "convert.h"
#include "factor.h"

ckpt_status ckpt_convert_factors(ckpt_tool *tool, ckpt_plan *plan, const char *src, const char *dst,
                                 ckpt_err *err)
{
    ckpt_bar bar;
    size_t n = (size_t)(ckpt_basename(dst) - dst);
    const char *dir = n == 0 ? "." : ckpt_arena_strndup(&tool->arena, dst, n);
    if (dir == NULL)
        return ckpt_tool_no_memory(err);
    if (plan->factors == NULL)
        return CKPT_OK;
    ckpt_bar_start(&bar, "factorise", tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(tool, &bar);
    ckpt_status status = ckpt_factor_run(plan, dir, &opts, err);
    ckpt_bar_stop(&bar);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, src);
    return status;
}

/* A single file has no journal. */
static ckpt_status alone(ckpt_tool *tool, const ckpt_commit *commit, ckpt_err *err)
{
    const char *dead;
    ckpt_status status = ckpt_commit_rivals(commit, &tool->arena, &dead, err);
    if (status == CKPT_OK && dead != NULL)
        ckpt_tool_note(tool, "note: %s was left by an interrupted run: remove it by hand", dead);
    return status;
}

ckpt_status ckpt_convert_journal(ckpt_tool *tool, ckpt_journal *j, ckpt_commit *commit, bool resume,
                                 ckpt_err *err)
{
    if (!j->active)
        return alone(tool, commit, err);
    ckpt_bar bar;
    ckpt_bar_start(&bar, "resume", tool->progress);
    ckpt_stream_opts opts = ckpt_tool_stream(tool, &bar);
    ckpt_status status = ckpt_journal_begin(j, commit, resume, &opts, err);
    ckpt_bar_stop(&bar);
    for (size_t i = 0; status == CKPT_OK && i < j->n_notes; i++)
        ckpt_tool_note(tool, "note: %s", j->notes[i]);
    if (status == CKPT_OK && resume)
        ckpt_tool_note(tool, "note: %zu of %zu files taken over from an earlier run, %s",
                       j->n_resumed, j->sink->n_files, ckpt_human(&tool->arena, j->resumed_bytes));
    return status;
}

void ckpt_convert_keep(ckpt_tool *tool, const ckpt_journal *j, ckpt_commit *commit,
                       ckpt_status status)
{
    if ((status != CKPT_E_IO && status != CKPT_E_INTERRUPTED) || !commit->active)
        return;
    const size_t n = ckpt_journal_count(j);
    if (n == 0)
        return;
    ckpt_tool_note(tool, "note: %zu finished file%s kept in %s for --resume", n, n == 1 ? "" : "s",
                   commit->temp_path);
    ckpt_commit_keep(commit);
}

ckpt_status ckpt_convert_seal(ckpt_plan *plan, ckpt_manifest *m, ckpt_convert_result *result,
                              const char *path, ckpt_err *err)
{
    ckpt_status status;
    ckpt_buf text = {0};
    size_t n = m->n_files;
    if (plan->sink.serial == NULL)
        return CKPT_OK;
    m->n_files = 0;
    CKPT_CHECK(ckpt_manifest_print(m, &text, err));
    m->n_files = n;
    CKPT_CHECK(ckpt_stream_seal(plan, path, (const char *)text.data, text.len, result, err));
    m->files[0].size = result->files[0].size;
    memcpy(m->files[0].sha256, result->files[0].sha256, CKPT_SHA256_LEN);
    memcpy(m->files[0].rest, result->files[0].rest, CKPT_SHA256_LEN);
done:
    ckpt_buf_release(&text);
    return status;
}
