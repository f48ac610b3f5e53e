#include "quant_policy.h"

#include <string.h>

static ckpt_status string_at(const ckpt_json *j, const char *key, const char **out, ckpt_err *err)
{
    const ckpt_json *at = ckpt_json_get(j, key);
    *out = ckpt_json_string(at);
    if (at != NULL && *out == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s' is no string", key);
    return CKPT_OK;
}

/* Of one place; a digest beside it must be its. */
static ckpt_status take(const ckpt_json *place, const char **text, ckpt_err *err)
{
    const char *found = NULL, *digest = NULL;
    char hex[65];
    ckpt_status status;
    CKPT_CHECK(string_at(place, CKPT_POLICY_KEY, &found, err));
    CKPT_CHECK(string_at(place, CKPT_POLICY_DIGEST_KEY, &digest, err));
    if (found == NULL)
        goto done;
    ckpt_policy_digest(found, hex);
    if (digest != NULL && strcmp(digest, hex) != 0)
        return ckpt_fail(err, CKPT_E_FORMAT, "'%s': its SHA-256 is %s, '%s' says %.80s",
                         CKPT_POLICY_KEY, hex, CKPT_POLICY_DIGEST_KEY, digest);
    if (*text != NULL && strcmp(*text, found) != 0)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "'%s': the policy in the container is not the one in the manifest",
                         CKPT_POLICY_KEY);
    *text = found;
done:
    return status;
}

ckpt_status ckpt_policy_stored(const ckpt_source *src, const ckpt_manifest *m, const char **text,
                               ckpt_err *err)
{
    *text = m != NULL ? m->quant_policy : NULL;
    ckpt_status status = take(src->metadata, text, err);
    if (status == CKPT_OK)
        status = take(src->common, text, err);
    if (status != CKPT_OK)
        ckpt_tool_frame(err, src->path);
    return status;
}

ckpt_status ckpt_policy_choose(ckpt_policy *p, const ckpt_model *model, const ckpt_manifest *m,
                               const char *path, ckpt_policy_choice *choice, ckpt_err *err)
{
    const char *text = NULL;
    char before[65];
    ckpt_status status;
    *choice = (ckpt_policy_choice){.stored = false};
    CKPT_CHECK(ckpt_policy_stored(model->src, m, &text, err));
    CKPT_CHECK(ckpt_policy_open(p, model, err));
    if (text != NULL) {
        status = ckpt_policy_restore(p, text, NULL, err);
        if (status != CKPT_OK) {
            ckpt_tool_frame(err, model->src->path);
            return status;
        }
    }
    choice->stored = text != NULL;
    memcpy(before, p->digest, sizeof before); /* without a text: of everything disabled */
    if (path == NULL)
        goto done;
    ckpt_policy_release(p);
    CKPT_CHECK(ckpt_policy_open(p, model, err));
    CKPT_CHECK(ckpt_policy_load(p, path, err));
    choice->differs = strcmp(before, p->digest) != 0 && (choice->stored || p->enabled);
done:
    return status;
}

void ckpt_policy_hint(ckpt_tool *tool, const ckpt_policy *p, const char *path)
{
    if (path != NULL && !p->enabled)
        ckpt_tool_warn(tool, "%s: enables no quantiser of this model: nothing is emulated", path);
}

const char *ckpt_policy_shown(ckpt_arena *arena, const ckpt_source *src)
{
    const char *text = NULL;
    char hex[65];
    ckpt_err why = {0};
    if (ckpt_policy_stored(src, NULL, &text, &why) != CKPT_OK)
        return "quantisation, damaged";
    if (text == NULL)
        return NULL;
    ckpt_policy_digest(text, hex);
    return ckpt_arena_printf(arena, "quantisation, sha256 %s", hex);
}

static size_t emulated(const ckpt_policy *p)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n; i++)
        n += p->modules[i].q.enabled;
    return n;
}

const char *ckpt_policy_summary(ckpt_arena *arena, const ckpt_policy *p)
{
    const char *s = ckpt_arena_printf(arena, "%.12s… on %zu of %zu KDA module%s", p->digest,
                                      emulated(p), p->n, ckpt_tool_plural(p->n));
    return s != NULL ? s : p->digest;
}

void ckpt_policy_json(ckpt_jw *w, const ckpt_policy *p)
{
    ckpt_jw_open(w, "quant_policy", '{');
    ckpt_jw_string(w, "digest", p->digest);
    ckpt_jw_int(w, "modules", (int64_t)p->n);
    ckpt_jw_int(w, "enabled", (int64_t)emulated(p));
    ckpt_jw_close(w, '}');
}
