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
    bool source_changed; /* between two readings: nothing of the output is worth keeping */
    double seconds;
} conversion;

/* convert_source.c; every rank calls both. */
/* Nothing unless the source is one file that the manifest of its directory lists (part.h), or with --force:
 * digest those of its tensors that are converted. Errors: CKPT_E_MISMATCH naming the first that the manifest
 * contradicts; those of reading the manifest and the file. */
ckpt_status ckpt_convert_check_part(conversion *c, ckpt_err *err) CKPT_MUST_USE;
/* Once the data is written: digest the source by a reading of its own. CKPT_E_IO if its root is another than
 * that of what was read for the output; where tensors were left out or folded, if one that went through
 * unchanged is another. A writer through mmap need not move a file's times. */
ckpt_status ckpt_convert_read_again(conversion *c, ckpt_err *err) CKPT_MUST_USE;

/* The lines after a conversion, and its members of the JSON document (--dry-run: with the plan). */
void ckpt_convert_summary(conversion *c);
void ckpt_convert_json(conversion *c);

#endif
