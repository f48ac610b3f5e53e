/* See hf_common.h. */
#include "hf_common.h"

#include <string.h>

#include "checked.h"

static bool one_of(const char *const *list, const char *name)
{
    for (; name != NULL && *list != NULL; list++)
        if (strcmp(*list, name) == 0)
            return true;
    return false;
}

int ckpt_hf_claims(const ckpt_json *config, const char *const *classes, const char *const *types)
{
    const ckpt_json *list = ckpt_json_get(config, "architectures");
    const char *type = ckpt_json_string(ckpt_json_get(config, "model_type"));
    if (ckpt_json_child(list) == NULL)
        return type == NULL ? 0 : one_of(types, type) ? 1 : -1;
    for (const ckpt_json *a = ckpt_json_child(list); a != NULL; a = ckpt_json_next(a))
        if (one_of(classes, ckpt_json_string(a)))
            return 1;
    return -1;
}

/* ---- layers ----------------------------------------------------------------------------------- */

ckpt_status ckpt_hf_layers_open(ckpt_hf_layers *x, const ckpt_json *stored, const char *mtp_path,
                                ckpt_err *err)
{
    ckpt_status status;
    *x = (ckpt_hf_layers){.n = 0};
    CKPT_CHECK(ckpt_field_size(stored, "num_hidden_layers", false, &x->n, err));
    if (x->n == 0 || x->n > CKPT_HYBRID_MAX_LAYERS)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'num_hidden_layers': found %lld, expected 1 to %d", (long long)x->n,
                         CKPT_HYBRID_MAX_LAYERS);
    if (mtp_path != NULL)
        CKPT_CHECK(ckpt_field_size(stored, mtp_path, true, &x->mtp, err));
    if (x->mtp > CKPT_HYBRID_MAX_LAYERS)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': found %lld, expected at most %d",
                         mtp_path, (long long)x->mtp, CKPT_HYBRID_MAX_LAYERS);
    x->mixers = ckpt_arena_array(&x->arena, (size_t)(x->n + x->mtp) + 1, 1);
    x->mlps = ckpt_arena_array(&x->arena, (size_t)(x->n + x->mtp) + 1, 1);
    if (x->mixers == NULL || x->mlps == NULL)
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer list");
done:
    return status;
}

static ckpt_status put_pattern(const ckpt_hf_layers *x, ckpt_json *canon, ckpt_err *err)
{
    ckpt_buf pattern = {0};
    ckpt_status status;
    for (int64_t i = 0; i < x->n + x->mtp; i++) {
        ckpt_buf_putc(&pattern, x->mixers[i]);
        ckpt_buf_putc(&pattern, x->mlps[i]);
    }
    if (pattern.failed) {
        status = ckpt_fail(err, CKPT_E_NOMEM, "out of memory reading a layer list");
        goto done;
    }
    CKPT_CHECK(
        ckpt_field_put(canon, "pattern", ckpt_json_new_string((const char *)pattern.data), err));
    if (x->mtp > 0) {
        CKPT_CHECK(ckpt_field_put(canon, "mtp_layers", ckpt_json_new_int(x->mtp), err));
        CKPT_CHECK(ckpt_field_put(canon, "mtp_blocks", ckpt_json_new_int(2 * x->mtp), err));
    }
done:
    ckpt_buf_release(&pattern);
    return status;
}

void ckpt_hf_layers_release(ckpt_hf_layers *x)
{
    ckpt_arena_free(&x->arena);
    *x = (ckpt_hf_layers){.n = 0};
}

ckpt_status ckpt_hf_layers_close(ckpt_hf_layers *x, ckpt_status status, ckpt_json *canon,
                                 ckpt_err *err)
{
    if (status == CKPT_OK)
        status = put_pattern(x, canon, err);
    ckpt_hf_layers_release(x);
    return status;
}

ckpt_status ckpt_hf_types_read(const ckpt_json *stored, const ckpt_hf_types *types, char *kinds,
                               int64_t layers, bool *seen, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_get(stored, types->path);
    int64_t i = 0;
    if (list == NULL || ckpt_json_is_null(list))
        return CKPT_OK;
    if (!ckpt_json_is_array(list) || ckpt_json_size(list) != layers)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': %d entries, expected a list of %lld",
                         types->path, ckpt_json_size(list), (long long)layers);
    *seen = true;
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c), i++) {
        const char *s = ckpt_json_string(c);
        int which = s == NULL                         ? -1
                    : strcmp(s, types->names[0]) == 0 ? 0
                    : strcmp(s, types->names[1]) == 0 ? 1
                                                      : -1;
        if (which < 0)
            return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': layer %lld is neither %s nor %s",
                             types->path, (long long)i + 1, types->names[0], types->names[1]);
        if (kinds[i] != '\0' && kinds[i] != types->letters[which])
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "field '%s': layer %lld is %s, which contradicts the layer lists",
                             types->path, (long long)i + 1, s);
        kinds[i] = types->letters[which];
    }
    return CKPT_OK;
}

static const char *pattern_of(const ckpt_field_write *w)
{
    return ckpt_json_string(ckpt_json_get(w->canon, "pattern"));
}

ckpt_status ckpt_hf_types_write(const ckpt_field_write *w, const ckpt_hf_types *types, int offset,
                                int64_t layers, ckpt_err *err)
{
    const char *pattern = pattern_of(w);
    ckpt_json *list = NULL;
    if (!ckpt_json_is_array(ckpt_json_get(w->out, types->path)) ||
        !ckpt_field_changed(w, "pattern"))
        return CKPT_OK;
    list = ckpt_json_new_array();
    for (int64_t i = 0; list != NULL && i < layers; i++) {
        const char *name = types->names[pattern[2 * i + offset] == types->letters[0] ? 0 : 1];
        if (!ckpt_json_push(list, ckpt_json_new_string(name))) {
            ckpt_json_free(list);
            list = NULL;
        }
    }
    return ckpt_field_put(w->out, types->path, list, err);
}

ckpt_status ckpt_hf_dense_first_read(const ckpt_json *stored, int64_t absent, ckpt_hf_layers *x,
                                     ckpt_err *err)
{
    int64_t dense = 0;
    ckpt_status status;
    const ckpt_json *j = ckpt_json_get(stored, "first_k_dense_replace");
    CKPT_CHECK(ckpt_field_size(stored, "first_k_dense_replace", true, &dense, err));
    if (j == NULL || ckpt_json_is_null(j))
        dense = absent;
    for (int64_t i = 0; i < x->n + x->mtp; i++)
        if (x->mlps[i] == '\0')
            x->mlps[i] = i < dense ? '-' : 'E';
done:
    return status;
}

ckpt_status ckpt_hf_dense_first_write(const ckpt_field_write *w, ckpt_err *err)
{
    const char *pattern = pattern_of(w);
    int64_t dense = 0, layers = (int64_t)(strlen(pattern) / 2);
    if (!ckpt_field_changed(w, "pattern"))
        return CKPT_OK;
    while (dense < layers && pattern[2 * dense + 1] == '-')
        dense++;
    for (int64_t i = dense; i < layers; i++)
        if (pattern[2 * i + 1] == '-')
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "field 'first_k_dense_replace' cannot say a dense layer %lld after "
                             "MoE layer %lld (layers count from 1)",
                             (long long)i + 1, (long long)dense + 1);
    return ckpt_field_put(w->out, "first_k_dense_replace", ckpt_json_new_int(dense), err);
}

/* A layer is MoE if its 1-based number is a multiple of the step and the list does not except it. */
ckpt_status ckpt_hf_sparse_step_read(const ckpt_json *stored, ckpt_hf_layers *x, ckpt_err *err)
{
    const ckpt_json *list = ckpt_json_get(stored, "mlp_only_layers");
    int64_t step = 1, experts = 0;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "num_experts|num_local_experts", true, &experts, err));
    CKPT_CHECK(ckpt_field_size(stored, "decoder_sparse_step", false, &step, err));
    step = step == 0 ? 1 : step;
    for (int64_t i = 0; i < x->n + x->mtp; i++)
        x->mlps[i] = experts > 0 && (i >= x->n || (i + 1) % step == 0) ? 'E' : '-';
    if (list != NULL && !ckpt_json_is_null(list) && !ckpt_json_is_array(list))
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'mlp_only_layers': expected a list");
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c)) {
        int64_t layer = 0;
        if (!ckpt_json_int(c, &layer) || layer < 0 || layer >= x->n) {
            char text[64];
            ckpt_field_text(c, text, sizeof text);
            return ckpt_fail(err, CKPT_E_FORMAT,
                             "field 'mlp_only_layers': found layer %s, expected 0 to %lld", text,
                             (long long)x->n - 1);
        }
        x->mlps[layer] = '-';
    }
done:
    return status;
}

ckpt_status ckpt_hf_sparse_step_write(const ckpt_field_write *w, int64_t layers, ckpt_err *err)
{
    const char *pattern = pattern_of(w);
    ckpt_status status;
    if (!ckpt_field_changed(w, "pattern"))
        return CKPT_OK;
    ckpt_json *list = ckpt_json_new_array();
    CKPT_CHECK(ckpt_field_put(w->out, "mlp_only_layers", list, err));
    for (int64_t i = 0; i < layers; i++)
        if (pattern[2 * i + 1] == '-' && !ckpt_json_push(list, ckpt_json_new_int(i)))
            return ckpt_fail(err, CKPT_E_NOMEM, "out of memory in a configuration");
    status = ckpt_field_put(w->out, "decoder_sparse_step", ckpt_json_new_int(1), err);
done:
    return status;
}

ckpt_status ckpt_hf_no_window(const ckpt_json *stored, int64_t layers, ckpt_err *err)
{
    bool window = false;
    ckpt_status status;
    const ckpt_json *list = ckpt_json_get(stored, "layer_types");
    int64_t i = 0;
    CKPT_CHECK(ckpt_field_bool(stored, "use_sliding_window", false, &window, err));
    if (window)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'use_sliding_window': found true, but attention within a window "
                         "has no block here");
    if (list == NULL || ckpt_json_is_null(list))
        return CKPT_OK;
    if (!ckpt_json_is_array(list) || ckpt_json_size(list) != layers)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'layer_types': %d entries, expected a list of %lld",
                         ckpt_json_size(list), (long long)layers);
    for (const ckpt_json *c = ckpt_json_child(list); c != NULL; c = ckpt_json_next(c), i++) {
        char text[64];
        const char *s = ckpt_json_string(c);
        ckpt_field_text(c, text, sizeof text);
        if (s == NULL || strcmp(s, "full_attention") != 0)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "field 'layer_types': layer %lld is %s, supported is "
                             "\"full_attention\"",
                             (long long)i + 1, text);
    }
done:
    return status;
}

ckpt_status ckpt_hf_dense_pattern(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err)
{
    ckpt_hf_layers x;
    ckpt_status status = ckpt_hf_layers_open(&x, stored, NULL, err);
    if (status == CKPT_OK)
        status = ckpt_hf_no_window(stored, x.n, err);
    for (int64_t i = 0; status == CKPT_OK && i < x.n; i++) {
        x.mixers[i] = '*';
        x.mlps[i] = '-';
    }
    return ckpt_hf_layers_close(&x, status, canon, err);
}

ckpt_status ckpt_hf_layers_write(const ckpt_field_write *w, const ckpt_hf_stack *stack,
                                 int64_t *layers, ckpt_err *err)
{
    ckpt_status status;
    const char *pattern = pattern_of(w);
    int64_t depths = ckpt_canon_int(w->canon, "mtp_layers");
    int64_t blocks = ckpt_canon_int(w->canon, "mtp_blocks");
    *layers = 0;
    if (pattern == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "pattern is not known");
    CKPT_CHECK(
        ckpt_hybrid_layers(stack->dialect, pattern, stack->mixers, stack->mlps, layers, err));
    if (depths > 0 && stack->mtp_path == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s has no multi-token prediction (mtp_layers)",
                         stack->dialect);
    if (depths > 0 && blocks != 2 * depths)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "mtp_blocks: %lld blocks for %lld depths, but a layer of %s is two blocks",
                         (long long)blocks, (long long)depths, stack->dialect);
    *layers -= depths;
    if (!ckpt_field_changed(w, "pattern,mtp_layers"))
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(w->out, "num_hidden_layers", ckpt_json_new_int(*layers), err));
    if (stack->mtp_path != NULL)
        status = ckpt_hf_put_first(w, stack->mtp_path, ckpt_json_new_int(depths), err);
done:
    return status;
}

/* ---- attention -------------------------------------------------------------------------------- */

ckpt_status ckpt_hf_attention_read(ckpt_json *canon, ckpt_err *err)
{
    int64_t heads = ckpt_canon_int(canon, "heads"), hidden = ckpt_canon_int(canon, "hidden_size");
    ckpt_status status = CKPT_OK;
    if (heads == 0)
        return CKPT_OK;
    if (ckpt_json_get(canon, "kv_heads") == NULL)
        CKPT_CHECK(ckpt_field_put(canon, "kv_heads", ckpt_json_new_int(heads), err));
    if (ckpt_json_get(canon, "head_dim") != NULL || hidden == 0)
        return CKPT_OK;
    if (hidden % heads != 0)
        return ckpt_fail(
            err, CKPT_E_FORMAT,
            "field 'hidden_size': found %lld, no multiple of num_attention_heads %lld, "
            "and 'head_dim' is missing",
            (long long)hidden, (long long)heads);
    status = ckpt_field_put(canon, "head_dim", ckpt_json_new_int(hidden / heads), err);
done:
    return status;
}

ckpt_status ckpt_hf_mla_read(const ckpt_json *stored, const ckpt_json *canon, ckpt_err *err)
{
    int64_t groups = 0, heads = ckpt_canon_int(canon, "heads");
    ckpt_status status = ckpt_field_size(stored, "num_key_value_heads", false, &groups, err);
    if (status == CKPT_OK && groups != 0 && heads != 0 && groups != heads)
        status = ckpt_fail(err, CKPT_E_UNSUPPORTED,
                           "field 'num_key_value_heads': found %lld, MLA has as many as "
                           "num_attention_heads %lld",
                           (long long)groups, (long long)heads);
    return status;
}

ckpt_status ckpt_hf_mla_write(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    int64_t heads = ckpt_canon_int(w->canon, "heads");
    int64_t dq = ckpt_canon_int(w->canon, "qk_nope_dim") + ckpt_canon_int(w->canon, "qk_rope_dim");
    if (ckpt_field_changed(w, "heads"))
        CKPT_CHECK(ckpt_field_put(w->out, "num_key_value_heads", ckpt_json_new_int(heads), err));
    if (ckpt_json_get(w->out, "qk_head_dim") != NULL &&
        ckpt_field_changed(w, "qk_nope_dim,qk_rope_dim"))
        CKPT_CHECK(ckpt_field_put(w->out, "qk_head_dim", ckpt_json_new_int(dq), err));
done:
    return status;
}

/* ---- mixture of experts ----------------------------------------------------------------------- */

ckpt_status ckpt_hf_groups_read(const ckpt_json *stored, const ckpt_hf_groups *paths,
                                ckpt_json *canon, ckpt_err *err)
{
    int64_t groups, limit;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, paths->groups_path, false, &groups, err));
    CKPT_CHECK(ckpt_field_size(stored, paths->limit_path, false, &limit, err));
    groups = groups == 0 ? paths->groups : groups;
    limit = limit == 0 ? paths->limit : limit;
    if (limit > groups)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': found %lld of %lld groups",
                         paths->limit_path, (long long)limit, (long long)groups);
    if (groups == 1)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(canon, "router_groups", ckpt_json_new_int(groups), err));
    CKPT_CHECK(ckpt_field_put(canon, "router_group_topk", ckpt_json_new_int(limit), err));
done:
    return status;
}

ckpt_status ckpt_hf_group_best_write(const ckpt_field_write *w, const char *path, ckpt_err *err)
{
    int64_t best = ckpt_canon_int(w->canon, "router_group_best");
    if (best == 0)
        return CKPT_OK;
    return ckpt_fail(
        err, CKPT_E_UNSUPPORTED,
        "field '%.*s': %s scores a group by its best 2 experts, this model by its best "
        "%lld: other experts would be chosen; --approximate permits it",
        (int)strcspn(path, "|"), path, w->name, (long long)best);
}

ckpt_status ckpt_hf_groups_write(const ckpt_field_write *w, const ckpt_hf_groups *paths,
                                 ckpt_err *err)
{
    ckpt_status status;
    int64_t groups = ckpt_canon_int(w->canon, "router_groups");
    int64_t limit = ckpt_canon_int(w->canon, "router_group_topk");
    CKPT_CHECK(ckpt_hf_group_best_write(w, paths->limit_path, err));
    if (!ckpt_field_changed(w, "router_groups,router_group_topk"))
        return CKPT_OK;
    CKPT_CHECK(
        ckpt_hf_put_first(w, paths->groups_path, ckpt_json_new_int(groups > 1 ? groups : 1), err));
    CKPT_CHECK(
        ckpt_hf_put_first(w, paths->limit_path, ckpt_json_new_int(groups > 1 ? limit : 1), err));
done:
    return status;
}

static bool is_missing(const ckpt_json *stored, const char *path)
{
    const ckpt_json *j = NULL;
    return ckpt_field_find(stored, path, &j, NULL) == CKPT_OK && j == NULL;
}

ckpt_status ckpt_hf_shared_read(const ckpt_json *stored, const char *path, int64_t absent,
                                ckpt_json *canon, ckpt_err *err)
{
    int64_t count, width = ckpt_canon_int(canon, "expert_ffn_size");
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, path, true, &count, err));
    if (is_missing(stored, path))
        count = absent;
    if (count == 0 || width == 0)
        return CKPT_OK;
    if (!ckpt_mul_i64(count, width, &width))
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s' is too large", path);
    status = ckpt_field_put(canon, "shared_ffn_size", ckpt_json_new_int(width), err);
done:
    return status;
}

ckpt_status ckpt_hf_shared_write(const ckpt_field_write *w, const char *dialect, const char *path,
                                 ckpt_err *err)
{
    int64_t shared = ckpt_canon_int(w->canon, "shared_ffn_size");
    int64_t width = ckpt_canon_int(w->canon, "expert_ffn_size");
    if (ckpt_canon_bool(w->canon, "shared_gate"))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s has no gate on shared experts (shared_gate)",
                         dialect);
    if (width == 0 || shared % width != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field '%.*s' cannot say a shared width of %lld: it is no multiple of "
                         "moe_intermediate_size %lld",
                         (int)strcspn(path, "|"), path, (long long)shared, (long long)width);
    if (!ckpt_field_changed(w, "shared_ffn_size,expert_ffn_size"))
        return CKPT_OK;
    return ckpt_hf_put_first(w, path, ckpt_json_new_int(shared / width), err);
}

/* ---- writing ---------------------------------------------------------------------------------- */

ckpt_status ckpt_hf_put_first(const ckpt_field_write *w, const char *path, ckpt_json *value,
                              ckpt_err *err)
{
    char one[128];
    ckpt_status status = CKPT_OK;
    bool put = false;
    if (value == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory in a configuration");
    for (const char *p = path; *p != '\0' && status == CKPT_OK;) {
        size_t n = strcspn(p, "|");
        if (n < sizeof one) {
            memcpy(one, p, n);
            one[n] = '\0';
            if (ckpt_json_path(w->out, one) != NULL) {
                status = ckpt_field_put(w->out, one, ckpt_json_dup(value), err);
                put = true;
            }
        }
        p += n + (p[n] == '|');
    }
    if (!put && status == CKPT_OK) {
        size_t n = strcspn(path, "|");
        memcpy(one, path, n < sizeof one ? n : 0);
        one[n < sizeof one ? n : 0] = '\0';
        status = ckpt_field_put(w->out, one, ckpt_json_dup(value), err);
    }
    ckpt_json_free(value);
    return status;
}

ckpt_status ckpt_hf_finish_write(const ckpt_field_write *w, const char *architecture, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json_delete(w->out, "quantization_config");
    if (w->foreign != NULL)
        return CKPT_OK;
    ckpt_json *list = ckpt_json_new_array();
    if (list == NULL || !ckpt_json_push(list, ckpt_json_new_string(architecture))) {
        ckpt_json_free(list);
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory in a configuration");
    }
    CKPT_CHECK(ckpt_field_put(w->out, "architectures", list, err));
    /* The class defaults are token numbers of a large vocabulary, which a small one rejects. */
    CKPT_CHECK(ckpt_field_put_text(w->out, "bos_token_id", "null", err));
    CKPT_CHECK(ckpt_field_put_text(w->out, "eos_token_id", "null", err));
    CKPT_CHECK(ckpt_field_put_text(w->out, "pad_token_id", "null", err));
done:
    return status;
}
