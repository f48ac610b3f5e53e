/* A quantisation policy (policy.h) in containers that are pickles and have no metadata of their own: two string
 * attributes of the object at the root, kda_quant_policy and kda_quant_policy_sha256.
 *
 *   torch.save  the state dict is an OrderedDict, as torch's own are, whose __dict__ holds them: it has no other
 *               items than tensors, and weights_only loaders restore the attributes
 *   plain DCP   attributes of Metadata, which readers leave alone
 *
 * Without a policy nothing of this is written. */
#ifndef CKPT_PICKLE_POLICY_H
#define CKPT_PICKLE_POLICY_H

#include "pickle.h"

/* Whether metadata (NULL: no) has a policy. */
bool ckpt_pkl_has_policy(const ckpt_json *metadata);
/* Its keys and values, for a SETITEMS after a mark. */
void ckpt_pkl_put_policy(ckpt_buf *b, const ckpt_json *metadata);
/* Put the root's policy, if it has one, into *metadata, which is made when it is NULL. Errors: CKPT_E_FORMAT
 * another policy is there already, of another file. */
ckpt_status ckpt_pkl_take_policy(const ckpt_pkl *root, ckpt_json **metadata,
                                 ckpt_err *err) CKPT_MUST_USE;

#endif
