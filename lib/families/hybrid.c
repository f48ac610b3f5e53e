/* Canonical schema of the hybrid family. Shapes use the symbols of config.h; GM is the number of
 * rows of the MLA output gate (N when it is one a head, N*DV when elementwise).
 *
 * Multi-token prediction: the blocks of depth d follow those of the main stack, so a layer L+d of
 * Hugging Face is blocks 2(L+d) and 2(L+d)+1. mtp.{b}.* are what joins a depth to the stack, b being
 * its first block; eh_proj takes [embedding | hidden]. An MLP without gate.weight is not gated.
 *
 * `what` says how tensor parallelism treats the tensor, which is also what the table in the README
 * shows: vocab (rows of the padded vocabulary), column (output rows are cut), row (input columns
 * are cut), head (one entry or group of entries a head, cut by heads), copy (replicated). */
#include "hybrid.h"

#include <stdio.h>
#include <string.h>

#define KEEP CKPT_SCHEMA_KEEP_F32
#define PLAIN CKPT_SCHEMA_NO_DECAY

/* clang-format off */
const ckpt_schema_row ckpt_hybrid_schema[CKPT_HYBRID_SCHEMA_LEN] = {
    {"embed.weight",                            "V,H",           0,            "vocab"},
    {"head.weight",                             "V,H",           0,            "vocab"},
    {"final_norm.weight",                       "H",             PLAIN,        "copy"},

    {"blocks.{b}.kda.norm.weight",              "H",             PLAIN,        "copy"},
    {"blocks.{b}.kda.q.weight",                 "NK*A,H",        0,            "column"},
    {"blocks.{b}.kda.k.weight",                 "NK*A,H",        0,            "column"},
    {"blocks.{b}.kda.v.weight",                 "NK*B,H",        0,            "column"},
    {"blocks.{b}.kda.conv_q.weight",            "NK*A,1,W",      0,            "head"},
    {"blocks.{b}.kda.conv_k.weight",            "NK*A,1,W",      0,            "head"},
    {"blocks.{b}.kda.conv_v.weight",            "NK*B,1,W",      0,            "head"},
    {"blocks.{b}.kda.f.weight",                 "NK*A,H",        0,            "column"},
    {"blocks.{b}.kda.f_a.weight",               "RF,H",          0,            "copy"},
    {"blocks.{b}.kda.f_b.weight",               "NK*A,RF",       0,            "column"},
    {"blocks.{b}.kda.g.weight",                 "NK*B,H",        0,            "column"},
    {"blocks.{b}.kda.g_a.weight",               "RG,H",          0,            "copy"},
    {"blocks.{b}.kda.g_b.weight",               "NK*B,RG",       0,            "column"},
    {"blocks.{b}.kda.g_b.bias",                 "NK*B",          PLAIN,        "head"},
    {"blocks.{b}.kda.beta.weight",              "NK,H",          0,            "column"},
    {"blocks.{b}.kda.A_log",                    "NK",            KEEP | PLAIN, "head"},
    {"blocks.{b}.kda.dt_bias",                  "NK*A",          KEEP | PLAIN, "head"},
    {"blocks.{b}.kda.o_norm.weight",            "B",             KEEP | PLAIN, "copy"},
    {"blocks.{b}.kda.o.weight",                 "H,NK*B",        0,            "row"},

    {"blocks.{b}.mla.norm.weight",              "H",             PLAIN,        "copy"},
    {"blocks.{b}.mla.q.weight",                 "N*DN+N*DR,H",   0,            "column"},
    {"blocks.{b}.mla.q_a.weight",               "RQ,H",          0,            "copy"},
    {"blocks.{b}.mla.q_a_norm.weight",          "RQ",            PLAIN,        "copy"},
    {"blocks.{b}.mla.q_b.weight",               "N*DN+N*DR,RQ",  0,            "column"},
    {"blocks.{b}.mla.kv_a.weight",              "RK+DR,H",       0,            "copy"},
    {"blocks.{b}.mla.kv_a_norm.weight",         "RK",            PLAIN,        "copy"},
    {"blocks.{b}.mla.kv_b.weight",              "N*DN+N*DV,RK",  0,            "column"},
    {"blocks.{b}.mla.gate.weight",              "GM,H",          0,            "column"},
    {"blocks.{b}.mla.o.weight",                 "H,N*DV",        0,            "row"},

    {"blocks.{b}.mlp.norm.weight",              "H",             PLAIN,        "copy"},
    {"blocks.{b}.mlp.gate.weight",              "F,H",           0,            "column"},
    {"blocks.{b}.mlp.up.weight",                "F,H",           0,            "column"},
    {"blocks.{b}.mlp.down.weight",              "H,F",           0,            "row"},

    {"blocks.{b}.moe.norm.weight",              "H",             PLAIN,        "copy"},
    {"blocks.{b}.moe.router.weight",            "E,H",           0,            "copy"},
    {"blocks.{b}.moe.router.bias",              "E",             KEEP | PLAIN, "copy"},
    {"blocks.{b}.moe.experts.{e}.gate.weight",  "FE,H",          0,            "column"},
    {"blocks.{b}.moe.experts.{e}.up.weight",    "FE,H",          0,            "column"},
    {"blocks.{b}.moe.experts.{e}.down.weight",  "H,FE",          0,            "row"},
    {"blocks.{b}.moe.shared.gate.weight",       "FS,H",          0,            "column"},
    {"blocks.{b}.moe.shared.up.weight",         "FS,H",          0,            "column"},
    {"blocks.{b}.moe.shared.down.weight",       "H,FS",          0,            "row"},
    {"blocks.{b}.moe.shared_gate.weight",       "1,H",           0,            "copy"},
    {"mtp.{b}.enorm.weight",                    "H",             PLAIN,        "copy"},
    {"mtp.{b}.hnorm.weight",                    "H",             PLAIN,        "copy"},
    {"mtp.{b}.eh_proj.weight",                  "H,2*H",         0,            "column"},
    {"mtp.{b}.norm.weight",                     "H",             PLAIN,        "copy"},

    {"blocks.{b}.attn.norm.weight",             "H",             PLAIN,        "copy"},
    {"blocks.{b}.attn.q.weight",                "N*D,H",         0,            "column"},
    {"blocks.{b}.attn.q.bias",                  "N*D",           PLAIN,        "head"},
    {"blocks.{b}.attn.gate.weight",             "N*D,H",         0,            "column"},
    {"blocks.{b}.attn.k.weight",                "G*D,H",         0,            "column"},
    {"blocks.{b}.attn.k.bias",                  "G*D",           PLAIN,        "head"},
    {"blocks.{b}.attn.v.weight",                "G*D,H",         0,            "column"},
    {"blocks.{b}.attn.v.bias",                  "G*D",           PLAIN,        "head"},
    {"blocks.{b}.attn.q_norm.weight",           "D",             PLAIN,        "copy"},
    {"blocks.{b}.attn.k_norm.weight",           "D",             PLAIN,        "copy"},
    {"blocks.{b}.attn.o.weight",                "H,N*D",         0,            "row"},

    {"blocks.{b}.gdn.norm.weight",              "H",             PLAIN,        "copy"},
    {"blocks.{b}.gdn.q.weight",                 "GK*GA,H",       0,            "column"},
    {"blocks.{b}.gdn.k.weight",                 "GK*GA,H",       0,            "column"},
    {"blocks.{b}.gdn.v.weight",                 "GV*GB,H",       0,            "column"},
    {"blocks.{b}.gdn.z.weight",                 "GV*GB,H",       0,            "column"},
    {"blocks.{b}.gdn.beta.weight",              "GV,H",          0,            "column"},
    {"blocks.{b}.gdn.alpha.weight",             "GV,H",          0,            "column"},
    {"blocks.{b}.gdn.conv_q.weight",            "GK*GA,1,GW",    0,            "head"},
    {"blocks.{b}.gdn.conv_k.weight",            "GK*GA,1,GW",    0,            "head"},
    {"blocks.{b}.gdn.conv_v.weight",            "GV*GB,1,GW",    0,            "head"},
    {"blocks.{b}.gdn.A_log",                    "GV",            KEEP | PLAIN, "head"},
    {"blocks.{b}.gdn.dt_bias",                  "GV",            KEEP | PLAIN, "head"},
    {"blocks.{b}.gdn.o_norm.weight",            "GB",            KEEP | PLAIN, "copy"},
    {"blocks.{b}.gdn.o.weight",                 "H,GV*GB",       0,            "row"},

    {"blocks.{b}.gdn2.norm.weight",             "H",             PLAIN,        "copy"},
    {"blocks.{b}.gdn2.q.weight",                "GK*GA,H",       0,            "column"},
    {"blocks.{b}.gdn2.k.weight",                "GK*GA,H",       0,            "column"},
    {"blocks.{b}.gdn2.v.weight",                "GV*GB,H",       0,            "column"},
    {"blocks.{b}.gdn2.z.weight",                "GV*GB,H",       0,            "column"},
    {"blocks.{b}.gdn2.f.weight",                "GK*GA,H",       0,            "column"},
    {"blocks.{b}.gdn2.b.weight",                "GK*GA,H",       0,            "column"},
    {"blocks.{b}.gdn2.w.weight",                "GV*GB,H",       0,            "column"},
    {"blocks.{b}.gdn2.conv_q.weight",           "GK*GA,1,GW",    0,            "head"},
    {"blocks.{b}.gdn2.conv_k.weight",           "GK*GA,1,GW",    0,            "head"},
    {"blocks.{b}.gdn2.conv_v.weight",           "GV*GB,1,GW",    0,            "head"},
    {"blocks.{b}.gdn2.A_log",                   "GK",            KEEP | PLAIN, "head"},
    {"blocks.{b}.gdn2.dt_bias",                 "GK*GA",         KEEP | PLAIN, "head"},
    {"blocks.{b}.gdn2.o_norm.weight",           "GB",            KEEP | PLAIN, "copy"},
    {"blocks.{b}.gdn2.o.weight",                "H,GV*GB",       0,            "row"},

    {"blocks.{b}.mamba.norm.weight",            "H",             PLAIN,        "copy"},
    {"blocks.{b}.mamba.z.weight",               "MN*MD,H",       0,            "column"},
    {"blocks.{b}.mamba.x.weight",               "MN*MD,H",       0,            "column"},
    {"blocks.{b}.mamba.B.weight",               "MG*MT,H",       0,            "column"},
    {"blocks.{b}.mamba.C.weight",               "MG*MT,H",       0,            "column"},
    {"blocks.{b}.mamba.dt.weight",              "MN,H",          0,            "column"},
    {"blocks.{b}.mamba.conv_x.weight",          "MN*MD,1,MW",    0,            "head"},
    {"blocks.{b}.mamba.conv_B.weight",          "MG*MT,1,MW",    0,            "head"},
    {"blocks.{b}.mamba.conv_C.weight",          "MG*MT,1,MW",    0,            "head"},
    {"blocks.{b}.mamba.conv_x.bias",            "MN*MD",         PLAIN,        "head"},
    {"blocks.{b}.mamba.conv_B.bias",            "MG*MT",         PLAIN,        "head"},
    {"blocks.{b}.mamba.conv_C.bias",            "MG*MT",         PLAIN,        "head"},
    {"blocks.{b}.mamba.A_log",                  "MN",            KEEP | PLAIN, "head"},
    {"blocks.{b}.mamba.dt_bias",                "MN",            KEEP | PLAIN, "head"},
    {"blocks.{b}.mamba.D",                      "MN",            KEEP | PLAIN, "head"},
    {"blocks.{b}.mamba.o_norm.weight",          "MN*MD",         KEEP | PLAIN, "head"},
    {"blocks.{b}.mamba.o.weight",               "H,MN*MD",       0,            "row"},
};
/* clang-format on */

/* "'K' or '+'" */
static void name_letters(const char *letters, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = '\0';
    for (const char *p = letters; *p != '\0' && n + 9 < cap; p++)
        n += (size_t)snprintf(out + n, cap - n, "%s'%c'", p == letters ? "" : " or ", *p);
}

ckpt_status ckpt_hybrid_layers(const char *dialect, const char *pattern, const char *mixers,
                               const char *mlps, int64_t *layers, ckpt_err *err)
{
    size_t n = strlen(pattern);
    for (size_t i = 0; i < n; i++) {
        char known[80];
        const char *letters = i % 2 == 0 ? mixers : mlps;
        if (strchr(letters, pattern[i]) != NULL)
            continue;
        name_letters(letters, known, sizeof known);
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "pattern: block %zu is '%c', but layer %zu of %s has %s here", i,
                         pattern[i], i / 2, dialect, known);
    }
    if (n == 0 || n % 2 != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "pattern: %zu blocks, but layers of %s are pairs of blocks", n, dialect);
    *layers = (int64_t)(n / 2);
    return CKPT_OK;
}
