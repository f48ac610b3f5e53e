/* Parts of `ckpt convert` that stand by themselves. */
#ifndef CKPT_CONVERT_H
#define CKPT_CONVERT_H

#include "journal.h"
#include "tool.h"
#include "wquant.h"

/* "151 tensors stored as 81", or "151 tensors" if that is the same. */
const char *ckpt_convert_counts(ckpt_arena *arena, const ckpt_plan *plan);
/* Print a plan: every output file, what it holds and where each part comes from. */
void ckpt_convert_show(ckpt_tool *tool, const ckpt_plan *plan);
void ckpt_convert_show_json(ckpt_tool *tool, const ckpt_plan *plan);
/* Errors of quantised weights: the worst, a line a class of names, with --verbose one line each; all in --json. */
void ckpt_convert_quantised(ckpt_tool *tool, const ckpt_wquant *q);
void ckpt_convert_quantised_json(ckpt_tool *tool, const ckpt_wquant *q);

/* What a conversion tells the user. Texts live as long as the run. */
typedef struct ckpt_report {
    ckpt_strings dropped, kept, warnings, lossy; /* a line each */
    size_t undecoded; /* tensors that the source's container cannot decode */
} ckpt_report;

/* One more line of one of the lists. */
ckpt_status ckpt_report_add(ckpt_tool *tool, ckpt_strings *list, ckpt_err *err, const char *fmt,
                            ...) CKPT_PRINTF(4, 5);

/* Warnings of an opened source (said at once) and what cannot be taken over from it at all. */
ckpt_status ckpt_report_source(ckpt_tool *tool, ckpt_report *r, const ckpt_source *src,
                               ckpt_err *err) CKPT_MUST_USE;
/* What the plan drops, approximates and warns of (said at once). target: a name for what has no
 * place for some objects; kept: those that the manifest takes, by name, or NULL. */
ckpt_status ckpt_report_plan(ckpt_tool *tool, ckpt_report *r, const ckpt_plan *plan,
                             const ckpt_json *kept, const char *target,
                             ckpt_err *err) CKPT_MUST_USE;
/* The lists on stderr; what was not cast in one line a reason unless --verbose. */
void ckpt_report_show(ckpt_tool *tool, const ckpt_report *r, const ckpt_plan *plan);
/* A warning for every pattern of --include, --exclude and --rename that matches nothing. removed:
 * stored names that were taken out before binding. same_names: target names are the source's but for
 * --rename. */
ckpt_status ckpt_report_patterns(ckpt_tool *tool, ckpt_report *r, const ckpt_plan *plan,
                                 const ckpt_convert_opts *opts, const ckpt_strings *removed,
                                 bool same_names, ckpt_err *err) CKPT_MUST_USE;
/* A warning, said at once and kept for --json. */
ckpt_status ckpt_report_warn(ckpt_tool *tool, ckpt_report *r, ckpt_err *err, const char *fmt, ...)
    CKPT_PRINTF(4, 5) CKPT_MUST_USE;
void ckpt_report_release(ckpt_report *r);

/* Open what was just written and compare names, dtypes, shapes and objects with the plan: headers
 * only. container: the target's. */
ckpt_status ckpt_convert_reopen(ckpt_tool *tool, const ckpt_plan *plan,
                                const ckpt_container *container, const char *path,
                                ckpt_err *err) CKPT_MUST_USE;
/* List in the manifest what a reader of the output at path will see, and under which root, when
 * that is not what was planned: --rename may take tensors out of the layout. renamed: it was so.
 * Warns of output that its layout no longer accepts. */
ckpt_status ckpt_convert_renamed(ckpt_tool *tool, ckpt_report *r, ckpt_manifest *m,
                                 const ckpt_plan *plan, const ckpt_convert_result *result,
                                 const ckpt_container *container, const char *path, bool *renamed,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Read everything back: file digests against the manifest (whose names are relative to path/dir,
 * or which describes the one file at path when dir is NULL), and tensor digests through the target
 * layout. filtered: renamed or partial output, which no layout has to recognise. */
ckpt_status ckpt_convert_reread(ckpt_tool *tool, const ckpt_manifest *m,
                                const ckpt_container *container, const ckpt_layout *layout,
                                const char *path, const char *dir, bool filtered,
                                ckpt_err *err) CKPT_MUST_USE;

/* Compute what must be known before it can be reported and written. */
ckpt_status ckpt_convert_factors(ckpt_tool *tool, ckpt_plan *plan, const char *src, const char *dst,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Begin the journal of a directory output, and say what earlier runs left and what is taken over.
 * An inactive one, of a single file: refuse another run for it, name what a killed one left. */
ckpt_status ckpt_convert_journal(ckpt_tool *tool, ckpt_journal *j, ckpt_commit *commit, bool resume,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Put the manifest, without the digest of the file itself, into a container that holds it; the file's
 * digests, which only then exist, go into the result and the manifest. Does nothing for others. */
ckpt_status ckpt_convert_seal(ckpt_plan *plan, ckpt_manifest *m, ckpt_convert_result *result,
                              const char *path, ckpt_err *err) CKPT_MUST_USE;
/* After a run with --resume: if it was interrupted or failed on I/O, its finished files stay. */
void ckpt_convert_keep(ckpt_tool *tool, const ckpt_journal *j, ckpt_commit *commit,
                       ckpt_status status);

/* Refuse (CKPT_E_USAGE) a destination that is the source, lies in it or contains it, however it is
 * spelled: symbolic and hard links included. */
ckpt_status ckpt_convert_apart(const char *src, const char *dst, ckpt_err *err) CKPT_MUST_USE;
/* The same for the files an opened source really reads. */
ckpt_status ckpt_convert_apart_files(const ckpt_source *src, const char *dst,
                                     ckpt_err *err) CKPT_MUST_USE;

/* CKPT_E_USAGE unless rule is FROM=TO with names on both sides, and at most one '*' on each. */
ckpt_status ckpt_convert_check_rename(const char *rule, ckpt_err *err) CKPT_MUST_USE;
/* Refuse what the end of a conversion would refuse: a destination that exists (unless force), or
 * whose parent cannot be written. */
ckpt_status ckpt_convert_target(const char *dst, bool force, ckpt_err *err) CKPT_MUST_USE;
/* The container whose single files are named like DST, or NULL. */
const char *ckpt_convert_named(const char *dst);
/* --compress: none, or shuffle-deflate with an optional level, which only HDF5 has. text may be
 * NULL. level: 0 for none. */
ckpt_status ckpt_convert_compression(const char *text, const ckpt_container *container, int *level,
                                     ckpt_err *err) CKPT_MUST_USE;
/* CKPT_E_MISMATCH if ranks of a per-rank source that should hold the same values do not: which of them
 * would be right? Unless force. */
ckpt_status ckpt_convert_check_replicas(ckpt_source *src, bool force, ckpt_err *err) CKPT_MUST_USE;
/* CKPT_E_MISMATCH if the configuration that an opened source stores contradicts its manifest. */
ckpt_status ckpt_convert_check_config(const ckpt_model *model, const ckpt_manifest *old,
                                      ckpt_err *err) CKPT_MUST_USE;

/* convert_effects.c */
typedef struct ckpt_convert_facts {
    const ckpt_source *src;
    const ckpt_model *model;
    const ckpt_container *container; /* of the target */
    const ckpt_layout *layout;       /* of the target, or NULL */
    int64_t iteration, ep, etp, cp;  /* as given; 0 (iteration: -1) not */
    bool single_file, casts, dry_run;
} ckpt_convert_facts;
/* Refuse (CKPT_E_USAGE) options that would do nothing. */
ckpt_status ckpt_convert_effects(const ckpt_tool *tool, const ckpt_convert_facts *facts,
                                 ckpt_err *err) CKPT_MUST_USE;

/* convert_objects.c: objects of a DCP directory (param_groups, schedulers, random states, Megatron's
 * common state) that a target has no place for travel in the manifest, as its member
 *   foreign.objects = {kind: of the configuration, mesh: {tp, pp, ep, cp}, iteration,
 *                      optimizer: whether states of an optimizer travel beside, items: {name: base64}}
 * and go back into a DCP directory of the same kind. */
typedef struct ckpt_objects {
    ckpt_json *kept; /* the member to write, or NULL */
    bool restored;   /* what the source's manifest held is in the plan now */
} ckpt_objects;
/* Before the files of a plan are laid out: put back what the source's manifest holds, as far as the
 * mesh allows; what does not go back is said in r->dropped. common: bytes of a rewritten common state,
 * if there is none yet. */
ckpt_status ckpt_objects_restore(ckpt_tool *tool, ckpt_objects *o, ckpt_report *r, ckpt_plan *plan,
                                 const ckpt_container *to, const ckpt_manifest *old,
                                 ckpt_buf *common, ckpt_err *err) CKPT_MUST_USE;
/* Collect what the plan has no place for. whole: no optimizer state was left out. */
ckpt_status ckpt_objects_keep(ckpt_objects *o, const ckpt_plan *plan, const ckpt_container *to,
                              bool whole, ckpt_err *err) CKPT_MUST_USE;
/* Members for a manifest whose foreign member is complete otherwise; takes o->kept. */
ckpt_status ckpt_objects_store(ckpt_objects *o, ckpt_manifest *m, ckpt_err *err) CKPT_MUST_USE;
/* Whether a manifest holds a common state, from which Megatron-Core takes step and param_groups. */
bool ckpt_objects_have_common(const ckpt_manifest *old);
void ckpt_objects_release(ckpt_objects *o);

/* With --optimizer drop, what belongs to an optimizer is taken out of the source's tables before
 * anything looks at it. removed: names of the tensors. */
ckpt_status ckpt_convert_drop_optimizer(ckpt_tool *tool, ckpt_source *src, ckpt_strings *removed,
                                        ckpt_err *err) CKPT_MUST_USE;

/* convert_common.c */
/* The source's common state as an object's payload: args replaced unless NULL, and what belongs to
 * flat buckets that became states of parameters. */
ckpt_status ckpt_convert_common_bytes(ckpt_source *src, const ckpt_json *args, ckpt_buf *out,
                                      ckpt_err *err) CKPT_MUST_USE;
/* Whether a container holds Megatron's common state. */
bool ckpt_has_common(const ckpt_container *container);
/* An object of the output by name, or NULL. */
ckpt_out_object *ckpt_convert_find_object(const ckpt_plan *plan, const char *name);
/* One more object of the output; NULL: out of memory. */
ckpt_out_object *ckpt_convert_add_object(ckpt_plan *plan, const char *name);
/* The output's common state, in the place of one that is carried; the plan borrows the bytes. */
ckpt_status ckpt_convert_set_common(ckpt_plan *plan, const ckpt_buf *common,
                                    ckpt_err *err) CKPT_MUST_USE;
/* A Megatron target keeps what else the source's common state holds (schedulers, RNG, versions) and
 * gets the new args, and, where flat buckets became states of parameters, what belongs to those: the
 * object that says so is made or replaced, its bytes go to `common`. */
ckpt_status ckpt_convert_common(ckpt_source *src, const ckpt_container *to, ckpt_plan *plan,
                                ckpt_buf *common, ckpt_err *err) CKPT_MUST_USE;

/* A Megatron target's common state gets the quantisation policy that the source carries (NULL: none):
 * the object is made or replaced, its bytes go to `common`. After everything else that changes it. */
ckpt_status ckpt_convert_policy(const ckpt_container *to, ckpt_plan *plan, const char *text,
                                ckpt_buf *common, ckpt_err *err) CKPT_MUST_USE;

#endif
