/* Rotary embedding of the Hugging Face dialects.
 *
 * transformers 4 and published files: rope_theta, and rope_scaling (null, or an object with
 * rope_type or type). transformers 5: one object rope_parameters. Both may be there and must agree.
 *
 * YaRN: cos and sin are multiplied by ms(f, mscale) / ms(f, mscale_all_dim) where both are given,
 * else by ms(f, 1), with ms(f, m) = 0.1 m ln f + 1 (f > 1). A missing pair is therefore mscale 1 and
 * mscale_all_dim 0; one without the other has no canonical form unless it is mscale 1. With factor
 * 1 YaRN is plain rotation. Source: transformers modeling_rope_utils.py. */
#include "hf_common.h"

#include <math.h>
#include <string.h>

#define THETA "rope_theta|rope_parameters.rope_theta|rope_scaling.rope_theta"
#define PERCENT                                                                                    \
    "partial_rotary_factor|rope_parameters.partial_rotary_factor|rope_scaling.partial_rotary_"     \
    "factor"

typedef struct number_row {
    const char *key;
    double absent; /* NaN: must be given */
} number_row;

static const number_row yarn[] = {
    {"factor",                           NAN},
    {"original_max_position_embeddings", 0  },
    {"beta_fast",                        32 },
    {"beta_slow",                        1  },
    {"mscale",                           0  },
    {"mscale_all_dim",                   0  },
};
static const number_row llama3[] = {
    {"factor",                           NAN},
    {"original_max_position_embeddings", 0  },
    {"low_freq_factor",                  NAN},
    {"high_freq_factor",                 NAN},
};
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

/* Fields of the object that say nothing else than what is read here, or nothing for text. */
static const char *const known[] = {
    "rope_type", "type",      "rope_theta",    "partial_rotary_factor", "attention_factor",
    "truncate",  "finetuned", "mrope_section", "mrope_interleaved"};

static bool is_known(const char *key, const number_row *rows, size_t n)
{
    for (size_t i = 0; i < COUNT(known); i++)
        if (strcmp(known[i], key) == 0)
            return true;
    for (size_t i = 0; i < n; i++)
        if (strcmp(rows[i].key, key) == 0)
            return true;
    return false;
}

static ckpt_status check_object(const ckpt_json *object, const char *path, const number_row *rows,
                                size_t n, ckpt_err *err)
{
    bool truncate = true;
    const ckpt_json *factor = ckpt_json_get(object, "attention_factor");
    for (const ckpt_json *c = ckpt_json_child(object); c != NULL; c = ckpt_json_next(c))
        if (!ckpt_json_is_null(c) && !is_known(ckpt_json_key(c), rows, n))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED, "field '%s.%s' is not known", path,
                             ckpt_json_key(c));
    if (factor != NULL && !ckpt_json_is_null(factor))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field '%s.attention_factor': only the factor that follows from mscale is "
                         "supported",
                         path);
    if (ckpt_json_get(object, "truncate") != NULL &&
        (!ckpt_json_bool(ckpt_json_get(object, "truncate"), &truncate) || !truncate))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "field '%s.truncate': supported is true", path);
    return CKPT_OK;
}

static ckpt_status read_number(const ckpt_json *object, const char *path, const number_row *row,
                               double *out, ckpt_err *err)
{
    const ckpt_json *j = ckpt_json_get(object, row->key);
    *out = row->absent;
    if (j != NULL && !ckpt_json_is_null(j) && !ckpt_json_double(j, out))
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s.%s': expected a number", path, row->key);
    if (isnan(*out))
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s.%s' is missing", path, row->key);
    return CKPT_OK;
}

/* The pair as the canonical configuration says it. */
static ckpt_status settle_mscale(double *mscale, double *all, const char *path, ckpt_err *err)
{
    if (*mscale == 0 && *all == 0)
        *mscale = 1;
    if ((*mscale != 0) == (*all != 0) || (*all == 0 && *mscale == 1))
        return CKPT_OK;
    return ckpt_fail(
        err, CKPT_E_UNSUPPORTED, "field '%s.%s': implementations disagree on it without '%s'", path,
        *all != 0 ? "mscale_all_dim" : "mscale", *all != 0 ? "mscale" : "mscale_all_dim");
}

/* The numbers of one scaled type, into rope_scaling. *scaled: false if they scale nothing. */
static ckpt_status read_scaling(const ckpt_json *stored, const ckpt_json *object, const char *path,
                                bool is_yarn, ckpt_json *canon, bool *scaled, ckpt_err *err)
{
    const number_row *rows = is_yarn ? yarn : llama3;
    size_t n = is_yarn ? COUNT(yarn) : COUNT(llama3);
    double v[COUNT(yarn)] = {0};
    ckpt_status status;
    CKPT_CHECK(check_object(object, path, rows, n, err));
    for (size_t i = 0; i < n; i++)
        CKPT_CHECK(read_number(object, path, &rows[i], &v[i], err));
    if (v[1] == 0) { /* transformers then takes the present length */
        int64_t length = 0;
        CKPT_CHECK(ckpt_field_size(stored, "max_position_embeddings", false, &length, err));
        v[1] = (double)length;
    }
    if (!(v[0] >= 1) || v[0] > 1e6 || !(v[1] >= 1))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field '%s': factor %g of a length of %g, expected at least 1", path, v[0],
                         v[1]);
    if (is_yarn)
        CKPT_CHECK(settle_mscale(&v[4], &v[5], path, err));
    *scaled = !(is_yarn && v[0] == 1);
    if (!*scaled)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_put(canon, "rope_scaling", ckpt_json_new_object(), err));
    ckpt_json *scaling = ckpt_json_get(canon, "rope_scaling");
    for (size_t i = 0; i < n; i++)
        CKPT_CHECK(ckpt_field_put(scaling, rows[i].key, ckpt_field_number(v[i]), err));
done:
    return status;
}

/* The object that holds a type, or NULL. */
static ckpt_status find_object(const ckpt_json *stored, const ckpt_json **object, const char **path,
                               ckpt_err *err)
{
    static const char *const paths[] = {"rope_scaling", "rope_parameters"};
    *object = NULL;
    *path = paths[1];
    for (int i = 0; i < 2; i++) {
        const ckpt_json *j = ckpt_json_get(stored, paths[i]);
        if (j == NULL || ckpt_json_is_null(j))
            continue;
        if (!ckpt_json_is_object(j))
            return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': expected an object", paths[i]);
        for (const ckpt_json *c = ckpt_json_child(j); c != NULL; c = ckpt_json_next(c))
            if (ckpt_json_is_object(c))
                return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                                 "field '%s.%s': one rotation for every kind of layer is not "
                                 "supported",
                                 paths[i], ckpt_json_key(c));
        if (ckpt_json_child(j) == NULL)
            continue;
        /* where both are given, transformers takes the older one */
        if (*object == NULL) {
            *object = j;
            *path = paths[i];
        }
    }
    return CKPT_OK;
}

static ckpt_status read_percent(const ckpt_json *stored, const ckpt_hf_rope *how, ckpt_json *canon,
                                ckpt_err *err)
{
    const ckpt_json *j;
    double percent = how->percent == 0 ? 1 : how->percent;
    ckpt_status status;
    if (how->ignores_percent)
        return CKPT_OK;
    CKPT_CHECK(ckpt_field_find(stored, PERCENT, &j, err));
    if (j != NULL && (!ckpt_json_double(j, &percent) || !(percent > 0 && percent <= 1)))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'partial_rotary_factor': expected a number, above 0, at most 1");
    if (percent == 1)
        return CKPT_OK;
    if (how->percent == 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field 'partial_rotary_factor': found %g, supported is 1", percent);
    status = ckpt_field_put(canon, "rope_percent", ckpt_field_number(percent), err);
done:
    return status;
}

ckpt_status ckpt_hf_rope_read(const ckpt_json *stored, const ckpt_hf_rope *how, ckpt_json *canon,
                              ckpt_err *err)
{
    const ckpt_json *object, *j;
    const char *path, *type = "default";
    double theta = how->theta;
    bool scaled = false;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_find(stored, THETA, &j, err));
    if (j != NULL && (!ckpt_json_double(j, &theta) || !(theta > 0)))
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'rope_theta': expected a number > 0");
    CKPT_CHECK(find_object(stored, &object, &path, err));
    CKPT_TRY(ckpt_field_find(object, "rope_type|type", &j, err), "field '%s'", path);
    if (j != NULL && (type = ckpt_json_string(j)) == NULL)
        return ckpt_fail(err, CKPT_E_FORMAT, "field '%s.rope_type': expected a string", path);
    bool is_yarn = strcmp(type, "yarn") == 0, is_llama3 = strcmp(type, "llama3") == 0;
    if (is_yarn || (is_llama3 && how->llama3))
        CKPT_CHECK(read_scaling(stored, object, path, is_yarn, canon, &scaled, err));
    else if (strcmp(type, "default") != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "field '%s.rope_type': found \"%.40s\", supported are default%s and yarn",
                         path, type, how->llama3 ? ", llama3" : "");
    CKPT_CHECK(read_percent(stored, how, canon, err));
    CKPT_CHECK(ckpt_field_put(canon, "rope_theta", ckpt_field_number(theta), err));
    CKPT_CHECK(
        ckpt_field_put(canon, "rope_type", ckpt_json_new_string(scaled ? type : "rope"), err));
done:
    return status;
}

/* The new object, without rope_theta: type and numbers; empty when nothing scales. */
static ckpt_status build_object(const ckpt_field_write *w, ckpt_json *object, ckpt_err *err)
{
    const ckpt_json *scaling = ckpt_json_get(w->canon, "rope_scaling");
    const char *type = ckpt_json_string(ckpt_json_get(w->canon, "rope_type"));
    ckpt_status status;
    if (type == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rope_type is not known");
    if (strcmp(type, "rope") == 0)
        type = "default";
    CKPT_CHECK(ckpt_field_put(object, "rope_type", ckpt_json_new_string(type), err));
    if (strcmp(type, "default") != 0) /* remote code of transformers 4 */
        CKPT_CHECK(ckpt_field_put(object, "type", ckpt_json_new_string(type), err));
    for (const ckpt_json *c = ckpt_json_child(scaling); c != NULL; c = ckpt_json_next(c))
        CKPT_CHECK(ckpt_field_put(object, ckpt_json_key(c), ckpt_json_dup(c), err));
done:
    return status;
}

/* The length that a new configuration's rotation reaches. */
static ckpt_status write_length(const ckpt_field_write *w, ckpt_err *err)
{
    const ckpt_json *scaling = ckpt_json_get(w->canon, "rope_scaling");
    double factor = 0, length = 0;
    if (w->foreign != NULL || scaling == NULL ||
        !ckpt_json_double(ckpt_json_get(scaling, "factor"), &factor) ||
        !ckpt_json_double(ckpt_json_get(scaling, "original_max_position_embeddings"), &length) ||
        !(factor * length < 1e15))
        return CKPT_OK;
    return ckpt_field_put(w->out, "max_position_embeddings",
                          ckpt_field_number(floor(factor * length)), err);
}

/* Into the object that holds everything (`whole`) and wherever the number stands already. */
static ckpt_status put_number(const ckpt_field_write *w, ckpt_json *object, bool whole,
                              const char *key, double v, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (whole)
        CKPT_CHECK(ckpt_field_put(object, key, ckpt_json_new_double(v), err));
    if (!whole || ckpt_json_get(w->out, key) != NULL)
        CKPT_CHECK(ckpt_field_put(w->out, key, ckpt_json_new_double(v), err));
done:
    return status;
}

ckpt_status ckpt_hf_rope_write(const ckpt_field_write *w, const ckpt_hf_rope *how, ckpt_err *err)
{
    ckpt_status status;
    ckpt_json *object = NULL;
    bool whole = ckpt_json_is_object(ckpt_json_get(w->out, "rope_parameters"));
    bool plain = ckpt_json_get(w->canon, "rope_scaling") == NULL;
    if (!ckpt_field_changed(w, "rope_theta,rope_type,rope_scaling,rope_percent"))
        return CKPT_OK;
    double theta = 0, percent = 1;
    if (!ckpt_json_double(ckpt_json_get(w->canon, "rope_theta"), &theta))
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "rope_theta is not known");
    (void)ckpt_json_double(ckpt_json_get(w->canon, "rope_percent"), &percent);
    object = ckpt_json_new_object();
    if (object == NULL)
        return ckpt_fail(err, CKPT_E_NOMEM, "out of memory in a configuration");
    CKPT_CHECK(build_object(w, object, err));
    CKPT_CHECK(put_number(w, object, whole, "rope_theta", theta, err));
    if (how->percent != 0)
        CKPT_CHECK(put_number(w, object, whole, "partial_rotary_factor", percent, err));
    CKPT_CHECK(write_length(w, err));
    if (whole) {
        CKPT_CHECK(ckpt_field_put(w->out, "rope_parameters", ckpt_json_dup(object), err));
        ckpt_json_delete(w->out, "rope_scaling");
    } else if (plain) {
        CKPT_CHECK(ckpt_field_put(w->out, "rope_scaling", ckpt_json_new_null(), err));
    } else {
        CKPT_CHECK(ckpt_field_put(w->out, "rope_scaling", ckpt_json_dup(object), err));
    }
done:
    ckpt_json_free(object);
    return status;
}
