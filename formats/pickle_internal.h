/* Shared by the files that read torch pickles; not part of the interface to others. */
#ifndef CKPT_PICKLE_INTERNAL_H
#define CKPT_PICKLE_INTERNAL_H

#include "dtype.h"
#include "pickle.h"

#include <stdio.h>

/* Is module.name one of the inert classes that checkpoints are made of? */
bool ckpt_pkl_global_known(const char *module, const char *name);

/* The private meaning of str and len. In the node that ckpt_pkl_parse returned, str is "module.name"
 * of the first unknown global of the stream, "" if there is none; text kinds have no room for it.
 * len of an OBJECT is 1 if its items came by ADDITEMS. */
static inline bool ckpt_pkl_is_text(const ckpt_pkl *p)
{
    return p->kind == CKPT_PKL_STR || p->kind == CKPT_PKL_BYTES || p->kind == CKPT_PKL_BIGINT ||
           p->kind == CKPT_PKL_GLOBAL;
}

/* Visit every node reachable from root once, in no particular order, without recursion. The walk
 * ends at the first status other than CKPT_OK. Errors: CKPT_E_NOMEM. */
typedef ckpt_status (*ckpt_pkl_visitor)(void *context, const ckpt_pkl *p);
ckpt_status ckpt_pkl_walk(const ckpt_pkl *root, uint32_t n_nodes, ckpt_pkl_visitor visit,
                          void *context, ckpt_err *err) CKPT_MUST_USE;

/* Text of a dictionary key: a string as it is (cut at 4096 bytes), 5 as "5", (1, 'a') as "(1, a)". */
void ckpt_pkl_key_text(const ckpt_pkl *p, ckpt_buf *out);

/* Argument i of a call, or of a tuple or list; NULL if there is none. */
const ckpt_pkl *ckpt_pkl_arg(const ckpt_pkl *p, size_t i);
/* The bytes behind a BYTES node or the protocol-2 spelling _codecs.encode(text, 'latin1') and
 * bytes(). Copies at most cap bytes; *n is the full count. False: not bytes. */
bool ckpt_pkl_bytes(const ckpt_pkl *p, uint8_t *out, size_t cap, size_t *n);

/* A torch tensor as the pickle spells it, before anything is validated. */
typedef struct ckpt_pkl_tensor {
    const char *what;        /* NULL: strided, decodable; else the kind that is not decoded */
    const ckpt_pkl *storage; /* PERSID ('storage', class, key, location, numel[, view]) */
    const ckpt_pkl *offset, *size, *stride;
    ckpt_dtype dtype;
} ckpt_pkl_tensor;

/* Is p a torch tensor of any kind? Parameters and attributed plain tensors are unwrapped. */
bool ckpt_pkl_tensor_like(const ckpt_pkl *p, ckpt_pkl_tensor *out);

#endif
