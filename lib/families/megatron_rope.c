/* Rotary embedding in Megatron-Core's arguments.
 *
 * MLA: rope_type, rotary_base and YaRN's numbers; NoPE is no_rope_freq with a 1 for every layer, which
 * pull 6877 honours in MLA (ordinary Megatron MLA ignores it and would rotate), together with
 * position_embedding_type "none", which keeps the decoder from building rotary tables; only
 * no_rope_freq is read back. Ordinary attention: position_embedding_type rope or none, rotary_base,
 * rotary_percent, and use_rope_scaling, which is the llama3 rule with all numbers but the factor
 * built in. A list that skips some layers and not others has no canonical form and is refused. */
#include "megatron.h"

#include <stdio.h>
#include <string.h>

/* Does no_rope_freq leave 0-based layer i unrotated? An integer N means every N-th layer, a list one
 * entry a layer. */
static ckpt_status unrotated(const ckpt_json *freq, const ckpt_json *entry, int64_t i, bool *out,
                             ckpt_err *err)
{
    int64_t n = 0;
    bool b = false;
    *out = false;
    if (freq == NULL)
        return CKPT_OK;
    if (!ckpt_json_is_array(freq)) {
        *out = ckpt_json_int(freq, &n) && n > 0 && (i + 1) % n == 0;
        return CKPT_OK;
    }
    if (ckpt_json_bool(entry, &b)) {
        *out = b;
        return CKPT_OK;
    }
    if (!ckpt_json_int(entry, &n) || n < 0 || n > 1)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'no_rope_freq': entry %lld is neither 0 nor 1",
                         (long long)i);
    *out = n == 1;
    return CKPT_OK;
}

/* Length of the stack in Megatron's layers. */
static int64_t layers_of(const ckpt_json *canon, int a_layer)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    int64_t blocks = pattern != NULL ? (int64_t)strlen(pattern) : 0;
    return (blocks - ckpt_canon_int(canon, "mtp_blocks")) / a_layer;
}

static ckpt_status check_freq(const ckpt_json *freq, int64_t layers, ckpt_err *err)
{
    int64_t n = 0;
    if (freq != NULL && ckpt_json_is_array(freq) && ckpt_json_size(freq) != layers)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'no_rope_freq': %d entries for %lld layers",
                         ckpt_json_size(freq), (long long)layers);
    if (freq != NULL && !ckpt_json_is_array(freq) &&
        (!ckpt_json_int(freq, &n) || n < 0 || (n > 0 && layers % n != 0)))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'no_rope_freq': expected a list or a divisor of %lld layers",
                         (long long)layers);
    return CKPT_OK;
}

/* Whether the layers of this kind ('+' or '*') are all unrotated, or none is. */
static ckpt_status read_nope(const ckpt_json *stored, const ckpt_json *canon, char kind,
                             int a_layer, bool *nope, ckpt_err *err)
{
    const char *pattern = ckpt_json_string(ckpt_json_get(canon, "pattern"));
    int64_t layers = layers_of(canon, a_layer), first = -1;
    const ckpt_json *freq;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_find(stored, "no_rope_freq", &freq, err));
    if (ckpt_json_is_array(freq) && ckpt_json_child(freq) == NULL)
        freq = NULL; /* as Megatron, which tests for an empty value */
    CKPT_CHECK(check_freq(freq, layers, err));
    const ckpt_json *entry = ckpt_json_child(freq);
    *nope = false;
    for (int64_t i = 0; i < layers; i++, entry = ckpt_json_next(entry)) {
        bool skip;
        CKPT_CHECK(unrotated(freq, entry, i, &skip, err));
        if (pattern[i * a_layer] != kind)
            continue;
        if (first >= 0 && skip != *nope)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "field 'no_rope_freq': %s layers %lld and %lld differ",
                             kind == '+' ? "MLA" : "attention", (long long)first, (long long)i);
        *nope = skip;
        first = i;
    }
done:
    return status;
}

/* YaRN parameters: canonical name inside rope_scaling, argument, Megatron's default. */
static const struct {
    const char *key, *arg;
    double absent;
} yarn[] = {
    {"factor",                           "rotary_scaling_factor",            1   },
    {"original_max_position_embeddings", "original_max_position_embeddings", 4096},
    {"beta_fast",                        "beta_fast",                        32  },
    {"beta_slow",                        "beta_slow",                        1   },
    {"mscale",                           "mscale",                           1   },
    {"mscale_all_dim",                   "mscale_all_dim",                   0   },
};
#define N_YARN (sizeof yarn / sizeof yarn[0])

static ckpt_status read_number(const ckpt_json *stored, const char *path, double absent,
                               double *out, ckpt_err *err)
{
    const ckpt_json *j;
    ckpt_status status = ckpt_field_find(stored, path, &j, err);
    *out = absent;
    if (status == CKPT_OK && j != NULL && !ckpt_json_double(j, out))
        status = ckpt_fail(err, CKPT_E_FORMAT, "field '%s': expected a number", path);
    return status;
}

static ckpt_status read_mla(const ckpt_json *stored, ckpt_json *canon, int a_layer, ckpt_err *err)
{
    ckpt_status status;
    bool nope = false, scaled;
    double theta, factor, v;
    CKPT_CHECK(read_nope(stored, canon, '+', a_layer, &nope, err));
    CKPT_CHECK(ckpt_field_put(canon, "mla_nope", ckpt_json_new_bool(nope), err));
    if (nope)
        return CKPT_OK;
    const ckpt_json *j = ckpt_json_get(stored, "rope_type");
    const char *type = j == NULL || ckpt_json_is_null(j) ? "yarn" : ckpt_json_string(j);
    if (type == NULL || (strcmp(type, "rope") != 0 && strcmp(type, "yarn") != 0))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'rope_type': found %s, supported are rope "
                         "and yarn",
                         type != NULL ? type : "no string");
    CKPT_CHECK(read_number(stored, "rotary_base", 10000, &theta, err));
    CKPT_CHECK(read_number(stored, "rotary_scaling_factor", 1, &factor, err));
    /* With factor 1 YaRN is plain rotation: same frequencies, attention scale 1. */
    scaled = strcmp(type, "yarn") == 0 && factor != 1;
    CKPT_CHECK(ckpt_field_put(canon, "rope_theta", ckpt_field_number(theta), err));
    CKPT_CHECK(
        ckpt_field_put(canon, "rope_type", ckpt_json_new_string(scaled ? "yarn" : "rope"), err));
    if (!scaled)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(canon, "rope_scaling", ckpt_json_new_object(), err));
    ckpt_json *scaling = ckpt_json_get(canon, "rope_scaling");
    for (size_t i = 0; i < N_YARN; i++) {
        CKPT_CHECK(read_number(stored, yarn[i].arg, yarn[i].absent, &v, err));
        CKPT_CHECK(ckpt_field_put(scaling, yarn[i].key, ckpt_field_number(v), err));
    }
done:
    return status;
}

#define LLAMA3_FACTOR 8 /* rope_scaling_factor where nothing is said */

/* The llama3 rule; the other numbers are constants of Megatron-Core's rotary embedding. */
static const struct {
    const char *key;
    double value;
} llama3[] = {
    {"high_freq_factor",                 4   },
    {"low_freq_factor",                  1   },
    {"original_max_position_embeddings", 8192},
};

static ckpt_status read_attention(const ckpt_json *stored, ckpt_json *canon, int a_layer,
                                  ckpt_err *err)
{
    ckpt_status status;
    bool nope = false, scaled;
    double theta, percent, factor;
    const char *kind = ckpt_json_string(ckpt_json_get(stored, "position_embedding_type"));
    CKPT_CHECK(read_nope(stored, canon, '*', a_layer, &nope, err));
    if (nope || (kind != NULL && strcmp(kind, "none") == 0))
        return ckpt_field_put(canon, "attn_nope", ckpt_json_new_bool(true), err);
    CKPT_CHECK(read_number(stored, "rotary_base", 10000, &theta, err));
    CKPT_CHECK(read_number(stored, "rotary_percent", 1, &percent, err));
    CKPT_CHECK(ckpt_field_bool(stored, "use_rope_scaling", false, &scaled, err));
    CKPT_CHECK(read_number(stored, "rope_scaling_factor", LLAMA3_FACTOR, &factor, err));
    CKPT_CHECK(ckpt_field_put(canon, "rope_theta", ckpt_field_number(theta), err));
    if (percent != 1)
        CKPT_CHECK(ckpt_field_put(canon, "rope_percent", ckpt_field_number(percent), err));
    CKPT_CHECK(
        ckpt_field_put(canon, "rope_type", ckpt_json_new_string(scaled ? "llama3" : "rope"), err));
    if (!scaled)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(canon, "rope_scaling", ckpt_json_new_object(), err));
    ckpt_json *scaling = ckpt_json_get(canon, "rope_scaling");
    CKPT_CHECK(ckpt_field_put(scaling, "factor", ckpt_field_number(factor), err));
    for (size_t i = 0; i < sizeof llama3 / sizeof llama3[0]; i++)
        CKPT_CHECK(ckpt_field_put(scaling, llama3[i].key, ckpt_field_number(llama3[i].value), err));
done:
    return status;
}

ckpt_status ckpt_megatron_rope_read(const ckpt_json *stored, ckpt_json *canon, int a_layer,
                                    ckpt_err *err)
{
    return ckpt_field_applies(canon, "+") ? read_mla(stored, canon, a_layer, err)
                                          : read_attention(stored, canon, a_layer, err);
}

static ckpt_json *ones(size_t n)
{
    ckpt_json *list = ckpt_json_new_array();
    for (size_t i = 0; list != NULL && i < n; i++)
        if (!ckpt_json_push(list, ckpt_json_new_int(1))) {
            ckpt_json_free(list);
            list = NULL;
        }
    return list;
}

static ckpt_status write_yarn(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    const ckpt_json *scaling = ckpt_json_get(w->canon, "rope_scaling");
    for (const ckpt_json *c = ckpt_json_child(scaling); c != NULL; c = ckpt_json_next(c)) {
        size_t i = 0;
        while (i < N_YARN && strcmp(yarn[i].key, ckpt_json_key(c)) != 0)
            i++;
        if (i == N_YARN)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s cannot say rope_scaling.%s", w->name,
                             ckpt_json_key(c));
        CKPT_CHECK(ckpt_field_put(w->out, yarn[i].arg, ckpt_json_dup(c), err));
    }
done:
    return status;
}

/* One of the two, for every layer. */
static ckpt_status write_nope(const ckpt_field_write *w, const char *key, bool nope, int a_layer,
                              ckpt_err *err)
{
    char keys[32];
    ckpt_status status = CKPT_OK;
    bool mla = strcmp(key, "mla_nope") == 0;
    snprintf(keys, sizeof keys, "%s,pattern", key);
    if (!ckpt_field_changed(w, keys))
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(w->out, "position_embedding_type",
                              ckpt_json_new_string(nope ? "none" : "rope"), err));
    if (mla)
        CKPT_CHECK(ckpt_field_put(
            w->out, "no_rope_freq",
            nope ? ones((size_t)layers_of(w->canon, a_layer)) : ckpt_json_new_null(), err));
    else if (ckpt_json_get(w->out, "no_rope_freq") != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, "no_rope_freq", ckpt_json_new_null(), err));
done:
    return status;
}

static ckpt_status write_mla(const ckpt_field_write *w, ckpt_err *err)
{
    ckpt_status status;
    CKPT_CHECK(ckpt_field_put(w->out, "rope_type",
                              ckpt_json_dup(ckpt_json_get(w->canon, "rope_type")), err));
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_percent", ckpt_json_new_double(1), err));
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_scaling_factor", ckpt_json_new_double(1), err));
    CKPT_CHECK(write_yarn(w, err));
done:
    return status;
}

static ckpt_status write_llama3(const ckpt_field_write *w, const ckpt_json *scaling, ckpt_err *err)
{
    for (size_t i = 0; i < sizeof llama3 / sizeof llama3[0]; i++) {
        double v = 0;
        if (!ckpt_json_double(ckpt_json_get(scaling, llama3[i].key), &v) || v != llama3[i].value)
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s cannot say rope_scaling.%s: always %g",
                             w->name, llama3[i].key, llama3[i].value);
    }
    return ckpt_field_put(w->out, "rope_scaling_factor",
                          ckpt_json_dup(ckpt_json_get(scaling, "factor")), err);
}

static ckpt_status write_attention(const ckpt_field_write *w, const char *type, ckpt_err *err)
{
    ckpt_status status;
    double percent = 1;
    bool scaled = strcmp(type, "llama3") == 0;
    if (!scaled && strcmp(type, "rope") != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "%s cannot say rope_type %s for ordinary attention", w->name, type);
    (void)ckpt_json_double(ckpt_json_get(w->canon, "rope_percent"), &percent);
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_percent", ckpt_json_new_double(percent), err));
    CKPT_CHECK(ckpt_field_put(w->out, "use_rope_scaling", ckpt_json_new_bool(scaled), err));
    if (scaled)
        CKPT_CHECK(write_llama3(w, ckpt_json_get(w->canon, "rope_scaling"), err));
done:
    return status;
}

ckpt_status ckpt_megatron_rope_write(const ckpt_field_write *w, int a_layer, ckpt_err *err)
{
    bool mla = ckpt_field_applies(w->canon, "+"), attention = ckpt_field_applies(w->canon, "*");
    const char *key = attention ? "attn_nope" : "mla_nope";
    bool nope = (!mla && !attention) || ckpt_canon_bool(w->canon, key);
    ckpt_status status = CKPT_OK;
    if (mla && ckpt_json_get(w->canon, key) == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "mla_nope is not known");
    if (mla || attention)
        CKPT_CHECK(write_nope(w, key, nope, a_layer, err));
    else if (ckpt_field_changed(w, "pattern"))
        CKPT_CHECK(
            ckpt_field_put(w->out, "position_embedding_type", ckpt_json_new_string("none"), err));
    if (nope ||
        !ckpt_field_changed(w, "mla_nope,attn_nope,rope_theta,rope_type,rope_scaling,rope_percent"))
        return CKPT_OK;
    const ckpt_json *theta = ckpt_json_get(w->canon, "rope_theta");
    const char *type = ckpt_json_string(ckpt_json_get(w->canon, "rope_type"));
    if (theta == NULL || type == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rope_theta or rope_type is not known");
    CKPT_CHECK(ckpt_field_put(w->out, "rotary_base", ckpt_json_dup(theta), err));
    status = mla ? write_mla(w, err) : write_attention(w, type, err);
done:
    return status;
}
