/* FILE where it is one of many: its directory's manifest, cut down to it. */
#include "part.h"

#include <string.h>

static char *beside(ckpt_tool *tool, const ckpt_source *src, const char *name)
{
    ckpt_arena *arena = &tool->arena;
    size_t keep = (size_t)(ckpt_basename(src->path) - src->path);
    const char *dir = keep == 0 ? "." : ckpt_arena_strndup(arena, src->path, keep);
    return dir != NULL ? ckpt_path_join(arena, dir, name) : NULL;
}

/* The first tensors of a block may be all that a file holds of it: only the configuration tells its
 * kind then. One that does not parse leaves the names to the tensors. */
static ckpt_status load_config(ckpt_tool *tool, ckpt_source *src, const ckpt_layout *layout,
                               ckpt_err *err)
{
    enum { LIMIT = 16 << 20 };
    ckpt_buf text = {0};
    ckpt_json *config = NULL;
    bool hf = layout->config_kind == CKPT_CONFIG_HF;
    if (src->config != NULL || layout->config_kind == CKPT_CONFIG_NONE)
        return CKPT_OK;
    char *path = beside(tool, src, hf ? "config.json" : "megatron_args.json");
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_entry what;
    ckpt_err why;
    ckpt_status status = ckpt_look(path, &what, &why);
    if (status == CKPT_OK && what == CKPT_ENTRY_FILE)
        status = ckpt_read_file(path, LIMIT, &text, &why);
    if (status == CKPT_OK && what == CKPT_ENTRY_FILE)
        status = ckpt_json_parse((const char *)text.data, text.len, &config, &why);
    if (config != NULL) {
        src->config = config;
        src->config_kind = layout->config_kind;
    }
    ckpt_buf_release(&text);
    return ckpt_only_faults(status, &why, err);
}

/* The manifest of the directory that holds the one file of the source. */
static ckpt_status load(ckpt_tool *tool, const ckpt_source *src, ckpt_manifest *m, int64_t *at,
                        ckpt_err *err)
{
    char *path = beside(tool, src, CKPT_MANIFEST_NAME);
    *at = -1;
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    if (!ckpt_exists(path))
        return CKPT_OK;
    ckpt_status status = ckpt_manifest_read(path, m, err);
    if (status == CKPT_OK)
        *at = ckpt_manifest_find_file(m, ckpt_basename(src->path));
    return status;
}

/* Which of the manifest's tensors lie in which file is not recorded: what the file lost shows in
 * its own digests. */
static void cut_down(ckpt_manifest *m, const ckpt_model *model, size_t file)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->n_tensors; i++)
        if (ckpt_model_find(model, m->tensors[i].name) >= 0)
            m->tensors[kept++] = m->tensors[i];
    m->n_tensors = kept;
    m->files[0] = m->files[file];
    m->n_files = 1;
    ckpt_json_free(m->config); /* the tensors of one file do not tell the configuration */
    m->config = NULL;
}

ckpt_status ckpt_part_bind(ckpt_tool *tool, ckpt_source *src, ckpt_model *model, ckpt_manifest *m,
                           size_t *all, bool *found, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t at = -1;
    ckpt_model_opts bind = {.lenient = true, .allow_unknown = true, .layout_group = ""};
    *found = false;
    *all = 0;
    if (!ckpt_manifest_single(src))
        return CKPT_OK;
    char *own = ckpt_manifest_path(src, &tool->arena);
    if (own == NULL)
        return ckpt_tool_no_memory(err);
    ckpt_entry what;
    CKPT_CHECK(ckpt_look(own, &what, err));
    if (what != CKPT_ENTRY_NONE)
        goto done;
    CKPT_CHECK(load(tool, src, m, &at, err));
    if (at < 0) {
        ckpt_manifest_release(m);
        goto done;
    }
    for (size_t i = 0; m->layout != NULL && ckpt_layouts[i] != NULL; i++)
        if (strcmp(ckpt_layouts[i]->name, m->layout) == 0)
            bind.layout = ckpt_layouts[i];
    if (bind.layout != NULL)
        CKPT_CHECK(load_config(tool, src, bind.layout, err));
    bind.fp8_raw = ckpt_tool_is_fp8(m);
    CKPT_CHECK(ckpt_model_bind(model, src, &bind, err));
    *all = m->n_tensors;
    cut_down(m, model, (size_t)at);
    *found = true;
done:
    return status;
}
