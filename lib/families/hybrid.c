/* Canonical schema of the hybrid family. Shapes use the symbols of config.h; GM is the number of
 * rows of the MLA output gate (N when it is one a head, N*DV when elementwise).
 *
 * `what` says how tensor parallelism treats the tensor, which is also what the table in the README
 * shows: vocab (rows of the padded vocabulary), column (output rows are cut), row (input columns
 * are cut), head (one entry or group of entries a head, cut by heads), copy (replicated). */
#include "hybrid.h"

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
};
/* clang-format on */

ckpt_status ckpt_hybrid_layers(const char *dialect, const char *pattern, int64_t *layers,
                               ckpt_err *err)
{
    size_t n = strlen(pattern);
    for (size_t i = 0; i < n; i++) {
        bool mixer = i % 2 == 0;
        if (!strchr(mixer ? "K+" : "-E", pattern[i]))
            return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                             "pattern: block %zu is '%c', but layer %zu of %s has %s here", i,
                             pattern[i], i / 2, dialect, mixer ? "'K' or '+'" : "'-' or 'E'");
    }
    if (n == 0 || n % 2 != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED,
                         "pattern: %zu blocks, but layers of %s are pairs of blocks", n, dialect);
    *layers = (int64_t)(n / 2);
    return CKPT_OK;
}
