/* Data-only pickle reader (protocols 0-5) and a protocol-2 writer.
 *
 * Nothing named in a pickle is ever imported or called: REDUCE, NEWOBJ, INST, OBJ and BUILD create
 * and fill inert nodes. Graphs may be shared and cyclic; walkers must be iterative or depth-capped.
 * Byte layout: torch-formats.md section 4. */
#ifndef CKPT_PICKLE_H
#define CKPT_PICKLE_H

#include "arena.h"
#include "json.h"

typedef enum ckpt_pkl_kind {
    CKPT_PKL_NONE,
    CKPT_PKL_BOOL,
    CKPT_PKL_INT,    /* fits int64 */
    CKPT_PKL_BIGINT, /* two's complement little-endian bytes in str/len */
    CKPT_PKL_FLOAT,
    CKPT_PKL_STR, /* UTF-8 (surrogates allowed as WTF-8) */
    CKPT_PKL_BYTES,
    CKPT_PKL_LIST,
    CKPT_PKL_TUPLE,
    CKPT_PKL_DICT,   /* items: key, value, key, value ... in insertion order, duplicates kept */
    CKPT_PKL_SET,    /* set and frozenset made by protocol-4 opcodes */
    CKPT_PKL_GLOBAL, /* module in str, name in name */
    CKPT_PKL_OBJECT, /* callable(args) with state, appended items, set items */
    CKPT_PKL_PERSID, /* items[0] = the id */
    CKPT_PKL_TAKEN   /* an object that a ckpt_pkl_taker took: i = its number; no other member */
} ckpt_pkl_kind;

typedef struct ckpt_pkl ckpt_pkl;
/* A .metadata of a million entries makes tens of millions of nodes, so the members below the line
 * exist only in GLOBAL and OBJECT nodes: test `kind` before touching them. */
struct ckpt_pkl {
    ckpt_pkl_kind kind;
    uint32_t id; /* dense 0-based node number, for visited marks */
    union {
        bool b;    /* BOOL; BYTES: a bytearray; SET: a frozenset; OBJECT: made by NEWOBJ(_EX) */
        int64_t i; /* INT; 0 or 1 for BOOL */
        double f;  /* FLOAT */
    };
    const char *str;  /* STR, BYTES, BIGINT, GLOBAL module; NUL-terminated. Else private */
    size_t len;       /* of str. Else private */
    ckpt_pkl **items; /* LIST, TUPLE, DICT, SET, PERSID; OBJECT: appended items */
    size_t n_items;
    /* ---- GLOBAL and OBJECT only ---- */
    union {
        const char *name;   /* GLOBAL */
        ckpt_pkl *callable; /* OBJECT */
    };
    ckpt_pkl *args, *kwargs, *state; /* OBJECT */
    ckpt_pkl **pairs;                /* OBJECT: SETITEM(S) targets, key, value, ... */
    size_t n_pairs;
};

typedef struct ckpt_pkl_limits {
    size_t max_nodes; /* 0: default (input bytes, at least 1 Mi) */
    size_t max_depth; /* of the value stack and marks; 0: default 1 Mi */
} ckpt_pkl_limits;

/* Parse one pickle starting at p. Nodes live in `arena`. *used (may be NULL) receives the bytes
 * consumed including STOP. Errors: CKPT_E_FORMAT with offset and opcode. */
ckpt_status ckpt_pkl_parse(const uint8_t *p, size_t n, ckpt_arena *arena,
                           const ckpt_pkl_limits *limits, ckpt_pkl **out, size_t *used,
                           uint32_t *n_nodes, ckpt_err *err) CKPT_MUST_USE;

/* Takes the contents of objects while the pickle is read, so that a table of a million of them needs
 * neither the memory of their nodes nor the time to make them. */
typedef enum ckpt_pkl_field_kind {
    CKPT_PKL_FIELD_NONE,
    CKPT_PKL_FIELD_INT,
    CKPT_PKL_FIELD_NODE,  /* a value of the graph: a string, or what was made before */
    CKPT_PKL_FIELD_SIZE,  /* torch.Size */
    CKPT_PKL_FIELD_STATE, /* an object with a tuple as its state, of which node is the first */
    CKPT_PKL_FIELD_TAKEN /* a list of n objects that were taken one after the other, the last as i */
} ckpt_pkl_field_kind;
typedef struct ckpt_pkl_field {
    const ckpt_pkl *key; /* a string */
    ckpt_pkl *node;
    int64_t i;
    size_t n;
    int64_t dims[8];
    int rank;
    ckpt_pkl_field_kind kind;
} ckpt_pkl_field;
typedef struct ckpt_pkl_taker {
    /* Number of a class, by name alone; 0: not one of those to take. */
    int64_t (*wants)(const char *name);
    /* An object of a class with a dict as its state. *number is kept in its place. False: it is made of
     * nodes after all. A taken part of an object may be offered again if the whole is not taken. */
    bool (*take)(void *self, int64_t class_number, const ckpt_pkl_field *fields, size_t n,
                 int64_t *number);
    void *self;
} ckpt_pkl_taker;
/* ckpt_pkl_parse with objects taken out. It fails if a part of what was taken is referred to later: on
 * any error parse again without a taker. */
ckpt_status ckpt_pkl_parse_taking(const uint8_t *p, size_t n, ckpt_arena *arena,
                                  const ckpt_pkl_taker *taker, ckpt_pkl **out, uint32_t *n_nodes,
                                  ckpt_err *err) CKPT_MUST_USE;

/* Recognisers. All accept NULL. */
bool ckpt_pkl_is_global(const ckpt_pkl *p, const char *module, const char *name);
/* OBJECT whose callable is that global. module NULL matches any. */
bool ckpt_pkl_is_object(const ckpt_pkl *p, const char *module, const char *name);
/* Dict lookup by string key (the last duplicate wins); also looks in an OBJECT's dict state.
 * Linear: build an index for large dicts. */
ckpt_pkl *ckpt_pkl_get(const ckpt_pkl *p, const char *key);
const char *ckpt_pkl_str(const ckpt_pkl *p); /* NULL if not a STR */
bool ckpt_pkl_int(const ckpt_pkl *p, int64_t *out);
/* OrderedDict / dict / list unification: pairs of a DICT or of an OrderedDict-like OBJECT. */
bool ckpt_pkl_pairs(const ckpt_pkl *p, ckpt_pkl *const **pairs, size_t *n_pairs);

/* Convert to JSON for display and for configs. argparse.Namespace, SimpleNamespace and
 * OrderedDict become objects; torch dtypes become "torch.float32"; enums {"$enum":"mod.Class",
 * "value":v}; other objects {"$object":"mod.name", ...}; tensors {"$tensor":...}; bytes {"$bytes":
 * count}. Non-string keys are rendered as text. Depth, repeated visits and total size are capped:
 * beyond them {"$elided":...}. NULL on exhausted memory. */
ckpt_json *ckpt_pkl_to_json(const ckpt_pkl *p);

/* First global outside the allow-list of known inert classes ("module.name"), or NULL. The list is
 * torch/Megatron checkpoint metadata plus plain data classes (torch-formats.md section 4). Asked of
 * the node that ckpt_pkl_parse returned, it speaks of the whole stream, including globals that no
 * reachable node refers to: a real unpickler would have called those too. */
const char *ckpt_pkl_unknown_global(const ckpt_pkl *p, uint32_t n_nodes, ckpt_arena *arena,
                                    ckpt_err *err);

/* ---- writer: memo-free protocol 2, accepted by weights_only loaders ------------------------- */
void ckpt_pkl_begin(ckpt_buf *b); /* 80 02 */
void ckpt_pkl_end(ckpt_buf *b);   /* '.' */
void ckpt_pkl_put_none(ckpt_buf *b);
void ckpt_pkl_put_bool(ckpt_buf *b, bool v);
void ckpt_pkl_put_int(ckpt_buf *b, int64_t v);
void ckpt_pkl_put_float(ckpt_buf *b, double v);
void ckpt_pkl_put_str(ckpt_buf *b, const char *s);
void ckpt_pkl_put_global(ckpt_buf *b, const char *module, const char *name);
/* torch.Size of rank dims. */
void ckpt_pkl_put_size(ckpt_buf *b, int rank, const int64_t *dims);
/* JSON value as plain Python data; {"$torch":"float32"} becomes the global torch.float32, and an
 * integral number written with a fraction or exponent stays a float. */
void ckpt_pkl_put_json(ckpt_buf *b, const ckpt_json *j);
/* argparse.Namespace with the object's members. */
void ckpt_pkl_put_namespace(ckpt_buf *b, const ckpt_json *object);
/* Re-emit a parsed node graph (shared nodes through the memo, so cycles and identity survive). */
ckpt_status ckpt_pkl_put_node(ckpt_buf *b, const ckpt_pkl *p, uint32_t n_nodes,
                              ckpt_err *err) CKPT_MUST_USE;

#endif
