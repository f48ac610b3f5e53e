/* Between policy.c (rules, modules) and policy_fields.c (what a field may say, and how it is written). */
#ifndef CKPT_POLICY_INTERNAL_H
#define CKPT_POLICY_INTERNAL_H

#include "policy.h"

/* j is an object with these members and no others; `known` ends with NULL. */
ckpt_status ckpt_policy_fields(const ckpt_json *j, const char *const *known,
                               ckpt_err *err) CKPT_MUST_USE;
/* Of a name among n, or -1. */
int ckpt_policy_index(const char *const *names, int n, const char *name);
/* Known attributes of a quantiser, of the right types. */
ckpt_status ckpt_policy_attributes(const ckpt_json *cfg, ckpt_err *err) CKPT_MUST_USE;
/* What the attributes (NULL: all defaults) ask of a handle, or why that is refused. */
ckpt_status ckpt_policy_classify(int handle, const ckpt_json *cfg, ckpt_quant_kind *kind,
                                 ckpt_err *err) CKPT_MUST_USE;
/* Execution of a module into q; NULL: all defaults. */
ckpt_status ckpt_policy_execution(const ckpt_json *cfg, ckpt_quant *q, ckpt_err *err) CKPT_MUST_USE;
/* p->text and p->digest of its modules. */
ckpt_status ckpt_policy_print(ckpt_policy *p, ckpt_err *err) CKPT_MUST_USE;

#endif
