#include "sidecar.h"

#include <errno.h>
#include <fnmatch.h>
#include <string.h>
#include <sys/stat.h>

#define COPY_LIMIT ((uint64_t)256 << 20) /* larger files are no auxiliary files */
#define TEXT_LIMIT ((size_t)1 << 20)     /* of a file carried inside the manifest */

static const struct {
    const char *pattern;
    bool tokenizer;
} known[] = {
    {"tokenizer*",               true },
    {"tokenization_*.py",        true },
    {"special_tokens_map.json",  true },
    {"added_tokens.json",        true },
    {"chat_template*",           true },
    {"vocab*",                   true },
    {"merges.txt",               true },
    {"*.tiktoken",               true },
    {"*.model",                  true },
    {"*.jinja",                  true },
    {"*.py",                     false},
    {"generation_config.json",   false},
    {"LICENSE*",                 false},
    {"preprocessor_config.json", false},
};

static ckpt_status no_memory(ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_NOMEM, "out of memory");
}

static bool is_known(const char *name, bool *tokenizer)
{
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (fnmatch(known[i].pattern, name, 0) == 0) {
            *tokenizer = known[i].tokenizer;
            return true;
        }
    }
    return false;
}

static ckpt_status push(ckpt_sidecars *list, ckpt_sidecar item, ckpt_err *err)
{
    ckpt_sidecar *grown = ckpt_arena_array(&list->arena, list->n + 1, sizeof *grown);
    if (grown == NULL || item.name == NULL || (item.path == NULL && item.text == NULL))
        return no_memory(err);
    if (list->n > 0)
        memcpy(grown, list->items, list->n * sizeof *grown);
    grown[list->n++] = item;
    list->items = grown;
    return CKPT_OK;
}

/* all: every regular file (a tokenizer directory); otherwise the known names. */
static ckpt_status collect_dir(ckpt_sidecars *list, const char *dir, bool all, ckpt_err *err)
{
    ckpt_status status;
    char **names = NULL;
    size_t n = 0;
    CKPT_CHECK(ckpt_list_dir(dir, &list->arena, &names, &n, err));
    for (size_t i = 0; i < n; i++) {
        struct stat st;
        bool tokenizer = all;
        char *path = ckpt_path_join(&list->arena, dir, names[i]);
        if (path == NULL)
            return no_memory(err);
        if ((!all && !is_known(names[i], &tokenizer)) || !ckpt_name_is_safe(names[i], false))
            continue;
        if (stat(path, &st) != 0) {
            if (errno == ENOENT) /* a dangling link, or removed since */
                continue;
            status = ckpt_fail_errno(err, errno, "%s", path);
            goto done;
        }
        if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size > COPY_LIMIT)
            continue;
        CKPT_CHECK(push(
            list, (ckpt_sidecar){.name = names[i], .path = path, .tokenizer = tokenizer}, err));
    }
done:
    return status;
}

static ckpt_status collect_carried(ckpt_sidecars *list, const ckpt_manifest *old, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_json *files = old != NULL ? ckpt_json_get(old->foreign, "files") : NULL;
    for (const ckpt_json *c = ckpt_json_child(files); c != NULL; c = ckpt_json_next(c)) {
        const char *name = ckpt_json_key(c), *text = ckpt_json_string(c);
        bool tokenizer = false;
        if (text == NULL || !ckpt_name_is_safe(name, false) || !is_known(name, &tokenizer))
            continue; /* only what we ourselves would have put there */
        ckpt_sidecar item = {.name = ckpt_arena_strdup(&list->arena, name),
                             .text = ckpt_arena_strdup(&list->arena, text),
                             .tokenizer = tokenizer};
        CKPT_CHECK(push(list, item, err));
    }
done:
    return status;
}

ckpt_status ckpt_sidecars_collect(ckpt_sidecars *list, const ckpt_source *src,
                                  const ckpt_manifest *old, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    memset(list, 0, sizeof *list);
    if (ckpt_manifest_single(src))
        return collect_carried(list, old, err);
    if (src->config_kind == CKPT_CONFIG_MEGATRON) {
        char *dir = ckpt_path_join(&list->arena, src->root, "tokenizer");
        if (dir == NULL)
            return no_memory(err);
        ckpt_entry what;
        CKPT_CHECK(ckpt_look(dir, &what, err));
        if (what == CKPT_ENTRY_DIR)
            CKPT_CHECK(collect_dir(list, dir, true, err));
        CKPT_CHECK(collect_carried(list, old, err));
    } else {
        CKPT_CHECK(collect_dir(list, src->root, false, err));
    }
done:
    return status;
}

/* ---- writing --------------------------------------------------------------------------------- */

static bool plan_writes(const ckpt_sink *sink, const char *name)
{
    for (size_t i = 0; i < sink->n_files; i++)
        if (strcmp(sink->files[i].name, name) == 0)
            return true;
    return false;
}

static ckpt_status read_item(const ckpt_sidecar *item, ckpt_buf *data, ckpt_err *err)
{
    if (item->path != NULL)
        return ckpt_read_file(item->path, COPY_LIMIT, data, err);
    if (item->text != NULL)
        ckpt_buf_puts(data, item->text);
    else
        ckpt_buf_append(data, item->data, item->n);
    return data->failed ? no_memory(err) : CKPT_OK;
}

ckpt_status ckpt_sidecars_load(ckpt_sidecars *list, uint64_t limit, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf data = {0};
    for (size_t i = 0; i < list->n; i++) {
        ckpt_sidecar *item = &list->items[i];
        if (item->path == NULL)
            continue;
        ckpt_buf_clear(&data);
        CKPT_CHECK(read_item(item, &data, err));
        if (data.len > limit)
            continue;
        limit -= data.len;
        item->data = ckpt_arena_memdup(&list->arena, data.data, data.len);
        if (item->data == NULL && data.len > 0) {
            status = no_memory(err);
            goto done;
        }
        item->n = data.len;
        item->path = NULL;
    }
done:
    ckpt_buf_release(&data);
    return status;
}

static bool is_text(const ckpt_buf *data)
{
    if (data->len > TEXT_LIMIT)
        return false;
    for (size_t i = 0; i < data->len;) {
        size_t n = ckpt_utf8_len(data->data + i, data->len - i);
        if (n == 0 || data->data[i] == '\0')
            return false;
        i += n;
    }
    return true;
}

static ckpt_status carry_text(ckpt_manifest *m, const char *name, const ckpt_buf *data,
                              ckpt_err *err)
{
    if (!is_text(data))
        return CKPT_OK;
    if (m->foreign == NULL)
        m->foreign = ckpt_json_new_object();
    ckpt_json *files = ckpt_json_get(m->foreign, "files");
    if (files == NULL) {
        files = ckpt_json_new_object();
        if (files == NULL || !ckpt_json_set(m->foreign, "files", files))
            return no_memory(err);
    }
    const char *text = data->len > 0 ? (const char *)data->data : "";
    return ckpt_json_set(files, name, ckpt_json_new_string(text)) ? CKPT_OK : no_memory(err);
}

static ckpt_status write_item(const ckpt_sidecar *item, const ckpt_buf *data, ckpt_commit *commit,
                              const ckpt_sink *sink, bool megatron, ckpt_manifest *m,
                              ckpt_sha256 *sha, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_arena scratch = {0};
    uint8_t digest[CKPT_SHA256_LEN];
    const char *dir = sink->manifest_dir != NULL ? sink->manifest_dir : "";
    const char *name = megatron ? ckpt_path_join(&scratch, "tokenizer", item->name) : item->name;
    const char *where = name != NULL ? ckpt_path_join(&scratch, dir, name) : NULL;
    if (where == NULL) {
        status = no_memory(err);
        goto done;
    }
    if (plan_writes(sink, where))
        goto done;
    CKPT_CHECK(ckpt_commit_write(commit, where, data->len > 0 ? (const void *)data->data : "",
                                 data->len, err));
    ckpt_sha256_update(sha, data->data, data->len);
    ckpt_sha256_final(sha, digest);
    CKPT_CHECK(ckpt_manifest_add_file(m, name, data->len, digest, err));
done:
    ckpt_arena_free(&scratch);
    return status;
}

ckpt_status ckpt_sidecars_write(const ckpt_sidecars *list, ckpt_commit *commit,
                                const ckpt_sink *sink, bool megatron, ckpt_manifest *m,
                                ckpt_err *err)
{
    ckpt_status status;
    ckpt_sha256 sha = {0};
    ckpt_buf data = {0};
    CKPT_CHECK(ckpt_sha256_init(&sha, err));
    for (size_t i = 0; i < list->n; i++) {
        const ckpt_sidecar *item = &list->items[i];
        ckpt_buf_clear(&data);
        CKPT_CHECK(read_item(item, &data, err));
        if (megatron && !item->tokenizer)
            CKPT_CHECK(carry_text(m, item->name, &data, err));
        else
            CKPT_CHECK(write_item(item, &data, commit, sink, megatron, m, &sha, err));
    }
done:
    ckpt_buf_release(&data);
    ckpt_sha256_release(&sha);
    return status;
}

ckpt_status ckpt_sidecars_carry(const ckpt_sidecars *list, ckpt_manifest *m, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    ckpt_buf data = {0};
    for (size_t i = 0; i < list->n; i++) {
        ckpt_buf_clear(&data);
        CKPT_CHECK(read_item(&list->items[i], &data, err));
        CKPT_CHECK(carry_text(m, list->items[i].name, &data, err));
    }
done:
    ckpt_buf_release(&data);
    return status;
}

void ckpt_sidecars_release(ckpt_sidecars *list)
{
    ckpt_arena_free(&list->arena);
    memset(list, 0, sizeof *list);
}

/* ---- foreign configurations ------------------------------------------------------------------ */

const ckpt_json *ckpt_foreign_config(const ckpt_manifest *m, const char *group)
{
    const ckpt_json *j = m != NULL ? ckpt_json_get(m->foreign, group) : NULL;
    return ckpt_json_is_object(j) ? j : NULL;
}

const char *ckpt_foreign_tags(const ckpt_manifest *m, const char *group)
{
    const ckpt_json *tags = m != NULL ? ckpt_json_get(m->foreign, "tags") : NULL;
    return ckpt_json_string(ckpt_json_get(tags, group));
}

static ckpt_status carry_tags(ckpt_manifest *m, const ckpt_model *model, const char *source_group,
                              const char *target_group, ckpt_err *err)
{
    ckpt_json *tags = ckpt_json_get(m->foreign, "tags");
    if (tags == NULL) {
        tags = ckpt_json_new_object();
        if (tags == NULL || !ckpt_json_set(m->foreign, "tags", tags))
            return no_memory(err);
    }
    if (source_group != NULL && model->tags != NULL && model->tags[0] != '\0') {
        ckpt_json *text = ckpt_json_new_string(model->tags);
        if (text == NULL || !ckpt_json_set(tags, source_group, text))
            return no_memory(err);
    }
    if (target_group != NULL)
        ckpt_json_delete(tags, target_group);
    if (ckpt_json_child(tags) == NULL)
        ckpt_json_delete(m->foreign, "tags");
    return CKPT_OK;
}

/* Where training stands goes with the optimizer's state: without it, it would not be true. */
static ckpt_status carry_training(ckpt_manifest *m, const ckpt_manifest *old,
                                  const ckpt_model *model, ckpt_err *err)
{
    int64_t updates = 0;
    bool states = false;
    if (old == NULL || old->training == NULL || m->training != NULL)
        return CKPT_OK;
    (void)ckpt_json_int(ckpt_json_get(old->training, "updates"), &updates);
    for (size_t i = 0; i < model->n_tensors && !states; i++)
        states = model->tensors[i].state != NULL;
    if (updates > 0 && !states)
        return CKPT_OK;
    m->training = ckpt_json_dup(old->training);
    return m->training != NULL ? CKPT_OK : no_memory(err);
}

ckpt_status ckpt_foreign_carry(ckpt_manifest *m, const ckpt_manifest *old, const ckpt_model *model,
                               const char *source_group, const char *target_group, ckpt_err *err)
{
    const ckpt_source *src = model->src;
    m->foreign =
        old != NULL && old->foreign != NULL ? ckpt_json_dup(old->foreign) : ckpt_json_new_object();
    if (m->foreign == NULL)
        return no_memory(err);
    /* collected as sidecars: they come back as files or into the same place */
    ckpt_json_delete(m->foreign, "files");
    if (source_group != NULL && src->config != NULL) {
        ckpt_json *copy = ckpt_json_dup(src->config);
        if (copy == NULL || !ckpt_json_set(m->foreign, source_group, copy))
            return no_memory(err);
    }
    if (target_group != NULL)
        ckpt_json_delete(m->foreign, target_group);
    ckpt_status status = carry_tags(m, model, source_group, target_group, err);
    if (status == CKPT_OK)
        status = carry_training(m, old, model, err);
    if (status != CKPT_OK)
        return status;
    if (ckpt_json_child(m->foreign) == NULL) {
        ckpt_json_free(m->foreign);
        m->foreign = NULL;
    }
    return CKPT_OK;
}
