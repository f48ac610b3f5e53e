/* What Megatron refuses to train with, read from its arguments: rules over several fields, each an
 * error that names the field to change. Rules over one field are the table's (megatron.c); of the decay
 * gate's bound, config.c's. Source: megatron-dist-ckpt.md section 6.
 *
 *   linear heads     nk and nv are divided over TP * CP when linear_cp_mode is headwise (over TP alone: the
 *                    plan's cuts say so, shard.h)
 *   FP8              rows of in_proj and the ranks of KDA are multiples of 32 (mxfp8) or 16
 *   latent cache     cache_mla_latents keeps rotated keys: not with layers that no_rope_freq leaves
 *   gate of MLA      attention_output_gate has no place in a fused down projection */
#include "megatron.h"

#include <string.h>

static ckpt_status divide(const char *field, int64_t heads, int64_t by, const char *what,
                          ckpt_err *err)
{
    if (heads == 0 || heads % by == 0)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': found %lld, expected a multiple of %s %lld",
                     field, (long long)heads, what, (long long)by);
}

static ckpt_status check_heads(const ckpt_json *stored, ckpt_err *err)
{
    int64_t key, value, tp, cp;
    const ckpt_json *mode;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_size(stored, "linear_num_key_heads", false, &key, err));
    CKPT_CHECK(ckpt_field_size(stored, "linear_num_value_heads", false, &value, err));
    CKPT_CHECK(ckpt_field_size(stored, "tensor_model_parallel_size", false, &tp, err));
    CKPT_CHECK(ckpt_field_size(stored, "context_parallel_size", false, &cp, err));
    CKPT_CHECK(ckpt_field_find(stored, "linear_cp_mode", &mode, err));
    const char *text = ckpt_json_string(mode);
    const bool headwise = text != NULL && strcmp(text, "headwise") == 0;
    tp = tp > 0 ? tp : 1;
    if (!headwise || cp <= 1)
        return CKPT_OK;
    if (cp > INT64_MAX / tp)
        return ckpt_fail(err, CKPT_E_FORMAT, "field 'context_parallel_size': found %lld",
                         (long long)cp);
    static const char what[] = "tensor_model_parallel_size * context_parallel_size";
    CKPT_CHECK(divide("linear_num_key_heads", key, tp * cp, what, err));
    CKPT_CHECK(divide("linear_num_value_heads", value, tp * cp, what, err));
done:
    return status;
}

/* ---- FP8 ------------------------------------------------------------------------------------- */

/* 0: the run computes in a wider type. */
static ckpt_status fp8_align(const ckpt_json *stored, int64_t *align, ckpt_err *err)
{
    const ckpt_json *format, *recipe;
    ckpt_status status;
    bool on = false;
    *align = 0;
    CKPT_CHECK(ckpt_field_find(stored, "fp8", &format, err));
    CKPT_CHECK(ckpt_field_find(stored, "fp8_recipe", &recipe, err));
    if (format == NULL || (ckpt_json_bool(format, &on) && !on))
        return CKPT_OK;
    const char *name = ckpt_json_string(recipe);
    *align = name != NULL && strcmp(name, "mxfp8") == 0 ? 32 : 16;
done:
    return status;
}

static ckpt_status aligned(const char *field, int64_t found, const char *what, int64_t align,
                           ckpt_err *err)
{
    if (found % align == 0)
        return CKPT_OK;
    return ckpt_fail(err, CKPT_E_FORMAT,
                     "field '%s': %s %lld, under FP8 expected a multiple of %lld", field, what,
                     (long long)found, (long long)align);
}

/* Sizes are capped so that no sum of a few products overflows; larger ones are no model. */
#define MOST ((int64_t)1 << 28)

static ckpt_status check_fp8(const ckpt_json *stored, const ckpt_json *canon, ckpt_err *err)
{
    static const char *const names[] = {"linear_num_key_heads", "linear_key_head_dim",
                                        "linear_num_value_heads", "linear_value_head_dim"};
    int64_t align, v[4];
    ckpt_status status;
    CKPT_CHECK(fp8_align(stored, &align, err));
    if (align == 0)
        return CKPT_OK;
    for (int i = 0; i < 4; i++) {
        CKPT_CHECK(ckpt_field_size(stored, names[i], false, &v[i], err));
        if (v[i] == 0) /* other checks say so where it is needed */
            return CKPT_OK;
        if (v[i] > MOST)
            return ckpt_fail(err, CKPT_E_FORMAT, "field '%s': found %lld, expected at most %lld",
                             names[i], (long long)v[i], (long long)MOST);
    }
    const int64_t qk = v[0] * v[1], vd = v[2] * v[3];
    if (ckpt_field_applies(canon, "K")) {
        const int64_t f = ckpt_canon_int(canon, "kda_f_rank"),
                      g = ckpt_canon_int(canon, "kda_gate_rank");
        CKPT_CHECK(aligned("kda_f_lora_rank", f, "found", align, err));
        CKPT_CHECK(aligned("kda_gate_lora_rank", g, "found", align, err));
        CKPT_CHECK(aligned("linear_key_head_dim", f + g == 0 ? 3 * qk + 2 * vd : 2 * qk + vd,
                           "KDA's in_proj has rows", align, err));
    }
    if (ckpt_field_applies(canon, "G"))
        CKPT_CHECK(aligned("linear_key_head_dim", 2 * qk + 2 * vd + 2 * v[2],
                           "GDN's in_proj has rows", align, err));
    if (ckpt_field_applies(canon, "g"))
        CKPT_CHECK(
            aligned("linear_key_head_dim", 4 * qk + 3 * vd, "GDN2's in_proj has rows", align, err));
done:
    return status;
}

/* ---- MLA ------------------------------------------------------------------------------------- */

static ckpt_status check_mla(const ckpt_json *stored, const ckpt_json *canon, ckpt_err *err)
{
    bool cached, fused, gate;
    ckpt_status status;
    CKPT_CHECK(ckpt_field_bool(stored, "cache_mla_latents", false, &cached, err));
    CKPT_CHECK(ckpt_field_bool(stored, "mla_down_proj_fusion", false, &fused, err));
    CKPT_CHECK(ckpt_field_bool(stored, "attention_output_gate", false, &gate, err));
    if (cached && ckpt_canon_bool(canon, "mla_nope"))
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'cache_mla_latents': true, but no_rope_freq leaves MLA layers "
                         "unrotated: cached latents hold rotated keys");
    if (fused && gate)
        return ckpt_fail(err, CKPT_E_FORMAT,
                         "field 'mla_down_proj_fusion': true, but attention_output_gate has no "
                         "place in a fused projection");
done:
    return status;
}

ckpt_status ckpt_megatron_rules(const ckpt_json *stored, const ckpt_json *canon, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    if (ckpt_field_applies(canon, "KGg")) {
        CKPT_CHECK(check_heads(stored, err));
        CKPT_CHECK(check_fp8(stored, canon, err));
    }
    if (ckpt_field_applies(canon, "+"))
        CKPT_CHECK(check_mla(stored, canon, err));
done:
    return status;
}
