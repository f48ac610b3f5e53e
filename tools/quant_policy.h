/* The quantisation policy that a checkpoint carries, whatever its container. */
#ifndef CKPT_QUANT_POLICY_H
#define CKPT_QUANT_POLICY_H

#include "policy.h"
#include "tool.h"

/* Its text, in m (may be NULL) or the source, or NULL. Errors: CKPT_E_FORMAT another digest than the one
 * stored beside it, no string, or two places that differ. */
ckpt_status ckpt_policy_stored(const ckpt_source *src, const ckpt_manifest *m, const char **text,
                               ckpt_err *err) CKPT_MUST_USE;
/* The policy to run a bound model with: path's rules if path is not NULL, else what the checkpoint
 * carries, else everything disabled. */
typedef struct ckpt_policy_choice {
    bool stored;  /* the checkpoint carries one, perhaps with everything disabled */
    bool differs; /* what runs is another than the checkpoint's, or than none */
} ckpt_policy_choice;
ckpt_status ckpt_policy_choose(ckpt_policy *p, const ckpt_model *model, const ckpt_manifest *m,
                               const char *path, ckpt_policy_choice *choice,
                               ckpt_err *err) CKPT_MUST_USE;
/* "quantisation, sha256 0123…" of what the container itself carries, or NULL. */
const char *ckpt_policy_shown(ckpt_arena *arena, const ckpt_source *src);
/* "0123456789ab… on 3 of 3 KDA modules" */
const char *ckpt_policy_summary(ckpt_arena *arena, const ckpt_policy *p);
/* Members "quant_policy": {digest, modules, enabled} of a document. */
void ckpt_policy_json(ckpt_jw *w, const ckpt_policy *p);
/* A warning if a policy that the user gave emulates nothing: that of an empty file, say. */
void ckpt_policy_hint(ckpt_tool *tool, const ckpt_policy *p, const char *path);

#endif
