/* One run of `ckpt convert`: what was asked for and everything it makes, in the order in which it comes
 * to be. */
#ifndef CKPT_CONVERSION_H
#define CKPT_CONVERSION_H

#include "convert.h"
#include "sidecar.h"
#include "usermap.h"
#include "wquant.h"

typedef struct convert_opts {
    int to, layout, dtype, norms, optimizer; /* choices; see rows */
    int64_t tp, pp, ep, etp, cp, iteration, f_rank, g_rank;
    uint64_t max_shard;
    ckpt_strings include, exclude, rename;
    const char *map, *compress;
    bool dtype_force, dry_run, force, resume, verify, approximate, allow_unknown,
        allow_unknown_objects;
} convert_opts;

typedef struct conversion {
    ckpt_tool *tool;
    const convert_opts *o;
    const char *src_path, *dst_path;
    ckpt_source src;
    ckpt_model model;
    ckpt_manifest old; /* the source's */
    bool has_old;
    ckpt_usermap map;
    const ckpt_container *container; /* of the target */
    const ckpt_layout *layout;       /* of the target; NULL: none known */
    ckpt_convert_opts plan_opts;
    ckpt_plan plan;
    ckpt_plan base; /* the plan behind that, where weights are quantised */
    ckpt_wquant quant;
    ckpt_buf common;      /* rewritten Megatron common state */
    ckpt_objects objects; /* without a place in the target */
    ckpt_sidecars sidecars;
    ckpt_commit commit;
    ckpt_journal journal;
    ckpt_manifest manifest; /* of the target */
    ckpt_convert_result result;
    ckpt_buf text;        /* the manifest */
    ckpt_strings removed; /* stored names of optimizer tensors taken out before binding */
    bool renamed;         /* the output reads back under other canonical names */
    ckpt_report report;
    double seconds;
} conversion;

/* The lines after a conversion, and its members of the JSON document (--dry-run: with the plan). */
void ckpt_convert_summary(conversion *c);
void ckpt_convert_json(conversion *c);

#endif
