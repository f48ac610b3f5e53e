/* `ckpt verify FILE` where FILE is one of many: its directory's manifest, cut down to it. */
#include "verify.h"

#include <string.h>

static char *beside(verification *v, const char *name)
{
    ckpt_arena *arena = &v->tool->arena;
    size_t keep = (size_t)(ckpt_basename(v->src.path) - v->src.path);
    const char *dir = keep == 0 ? "." : ckpt_arena_strndup(arena, v->src.path, keep);
    return dir != NULL ? ckpt_path_join(arena, dir, name) : NULL;
}

/* The first tensors of a block may be all that a file holds of it: only the configuration tells its
 * kind then. One that does not parse leaves the names to the tensors. */
static ckpt_status load_config(verification *v, const ckpt_layout *layout, ckpt_err *err)
{
    enum { LIMIT = 16 << 20 };
    ckpt_buf text = {0};
    ckpt_json *config = NULL;
    bool hf = layout->config_kind == CKPT_CONFIG_HF;
    if (v->src.config != NULL || layout->config_kind == CKPT_CONFIG_NONE)
        return CKPT_OK;
    char *path = beside(v, hf ? "config.json" : "megatron_args.json");
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
        v->src.config = config;
        v->src.config_kind = layout->config_kind;
    }
    ckpt_buf_release(&text);
    return ckpt_only_faults(status, &why, err);
}

/* The manifest of the directory that holds the one file of the source. */
static ckpt_status load(verification *v, int64_t *at, ckpt_err *err)
{
    const char *name = ckpt_basename(v->src.path);
    char *path = beside(v, CKPT_MANIFEST_NAME);
    *at = -1;
    if (path == NULL)
        return ckpt_tool_no_memory(err);
    if (!ckpt_exists(path))
        return CKPT_OK;
    ckpt_status status = ckpt_manifest_read(path, &v->manifest, err);
    if (status == CKPT_OK)
        *at = ckpt_manifest_find_file(&v->manifest, name);
    return status;
}

/* Which of the manifest's tensors lie in which file is not recorded: what the file lost shows in
 * its own digests. */
static void cut_down(verification *v, size_t file)
{
    ckpt_manifest *m = &v->manifest;
    size_t kept = 0;
    for (size_t i = 0; i < m->n_tensors; i++)
        if (ckpt_model_find(&v->model, m->tensors[i].name) >= 0)
            m->tensors[kept++] = m->tensors[i];
    m->n_tensors = kept;
    m->files[0] = m->files[file];
    m->n_files = 1;
    ckpt_json_free(m->config); /* the tensors of one file do not tell the configuration */
    m->config = NULL;
}

ckpt_status ckpt_verify_part(verification *v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t at = -1;
    ckpt_model_opts bind = {.lenient = true, .allow_unknown = true, .layout_group = ""};
    if (!ckpt_manifest_single(&v->src))
        return CKPT_OK;
    char *own = ckpt_manifest_path(&v->src, &v->tool->arena);
    if (own == NULL)
        return ckpt_tool_no_memory(err);
    if (v->o->write)
        return CKPT_OK;
    ckpt_entry what;
    CKPT_CHECK(ckpt_look(own, &what, err));
    if (what != CKPT_ENTRY_NONE)
        goto done;
    CKPT_CHECK(load(v, &at, err));
    if (at < 0) {
        ckpt_manifest_release(&v->manifest);
        goto done;
    }
    for (size_t i = 0; v->manifest.layout != NULL && ckpt_layouts[i] != NULL; i++)
        if (strcmp(ckpt_layouts[i]->name, v->manifest.layout) == 0)
            bind.layout = ckpt_layouts[i];
    if (bind.layout != NULL)
        CKPT_CHECK(load_config(v, bind.layout, err));
    CKPT_CHECK(ckpt_model_bind(&v->model, &v->src, &bind, err));
    size_t all = v->manifest.n_tensors;
    cut_down(v, (size_t)at);
    v->model.n_notes = 0; /* what is missing lies in the other files */
    v->part = v->has_manifest = true;
    if (v->manifest.n_tensors < all)
        ckpt_tool_note(v->tool,
                       "%s: %zu of the %zu tensors that the manifest of its directory lists",
                       v->path, v->manifest.n_tensors, all);
done:
    if (status != CKPT_OK)
        ckpt_tool_frame(err, v->path);
    return status;
}
