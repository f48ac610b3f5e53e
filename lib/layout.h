/* Layout tables: which stored tensors a dialect has and which box of each is which canonical tensor.
 *
 * The canonical schema names every tensor of a model once, free of any layout:
 *   embed.weight  head.weight  final_norm.weight  blocks.{b}.KIND.…  with KIND one of
 *   kda mla attn gdn mlp moe. A block is one residual sub-layer: Hugging Face layer i is blocks 2i
 *   (token mixer) and 2i+1 (channel mixer); a Megatron hybrid pattern letter is one block.
 *
 * A row says: canonical tensor = reshape(box of view(stored tensor)). View text, dimensions
 * separated by '|', factors of a dimension by blanks, outermost first, then perhaps a shift:
 *
 *   factor := EXPR                whole axis of that size
 *           | EXPR=I              index I of it: a number, `e` for the row's {e}, `l` for its {l}
 *           | EXPR[A:B]           the half-open range A..B of it
 *           | EXPR<EXPR2          the first EXPR of EXPR2 (padding; zero-filled when written)
 *           each followed by @tp @head @group @etp @ep @pp or @unit: how a sharded container cuts
 *           that axis (shard.h)
 *   `@tp` alone in a dimension    cuts the whole dimension contiguously
 *   EXPR   := terms of symbols and integers with + and *, no blanks: R+2, 2*FE
 *   shift  := '; -1' | '; +1'     stored value = canonical value - 1 (zero-centred norms)
 *
 * Examples: "NK@head A | H" (heads over TP), "2=0@unit F@tp | H" (gate half of fc1),
 * "E=e@ep | 2=1@unit FE@etp | H" (up part of expert e), "V<VP@tp | H" (padded vocabulary).
 * All rows of one stored tensor must agree in axis sizes and cuts; only the boxes differ.
 *
 * Names: {l}, {j} and {e} match decimal indices. A canonical index may be an expression of the
 * stored ones: terms joined by '+', each a number, a symbol, or an index with a factor before it:
 *   "blocks.{2l}.kda.q.weight"  "blocks.{2l+1}.mlp.up.weight"  "mtp.{2l+P}.norm.weight"
 *   "blocks.{P+Q*l+j}.…"        j runs below the factor of l
 *   "blocks.{2l<P}.…"           when writing, only for blocks before P
 * A row whose stored name has no {l} while its view has "L=l" holds all layers of the stack; "E=e"
 * does the same for experts. Both at once are allowed; L shares its dimension with nothing.
 * Rows are read in both directions. Several rows may share a stored name (fused tensors, or the
 * same name in different kinds of block: the kind is decided per block by the unambiguous rows).
 * Several rows may share a canonical name (spellings): all are read; when writing the first whose
 * tag is NULL or chosen wins. A row whose tag contradicts what follows from the configuration
 * (choices, below) does not exist, in either direction.
 * A canonical name "mtp.{2l}.embed=embed.weight" is no tensor but a copy: the stored tensor repeats
 * embed.weight (alternatives after '|': the first that is there). Copies are checked, not converted,
 * and written once a depth of multi-token prediction where the tag is explicitly chosen. */
#ifndef CKPT_LAYOUT_H
#define CKPT_LAYOUT_H

#include "json.h"
#include "shard.h"

typedef struct ckpt_row {
    const char *canon;
    const char *stored;
    const char *view;
    /* "group=choice", e.g. "kda=fused", "latent_norms=separate"; several, separated by blanks, must
     * all be chosen; NULL or "" = always. */
    const char *tag;
} ckpt_row;

enum {
    CKPT_SCHEMA_KEEP_F32 = 1, /* --dtype leaves it alone unless forced: A_log, dt_bias, router … */
    CKPT_SCHEMA_NO_DECAY = 2  /* no weight decay in training */
};

typedef struct ckpt_schema_row {
    const char *canon; /* {b}, {e} */
    const char *dims;  /* expressions separated by commas: "NK*A,H" */
    unsigned flags;
    const char *what; /* one word for the table in README and --json: "column" "row" ... derived */
} ckpt_schema_row;

/* Named sizes. Names are short identifiers; a size is > 0 when bound. */
typedef struct ckpt_symbol {
    const char *name;
    int64_t value; /* 0 = unbound */
} ckpt_symbol;

typedef struct ckpt_symtab {
    ckpt_symbol s[64];
    int n;
} ckpt_symtab;

int64_t ckpt_sym_get(const ckpt_symtab *t, const char *name, size_t n); /* 0 if unbound */
bool ckpt_sym_set(ckpt_symtab *t, const char *name, int64_t value);     /* false: table full */
/* Evaluate EXPR (n bytes); false if a symbol is unbound or the result overflows. */
bool ckpt_expr_eval(const ckpt_symtab *t, const char *expr, size_t n, int64_t *out);

typedef struct ckpt_layout {
    const char *name;   /* "hf:kimi_linear", "megatron:hybrid", "fla:kda" */
    const char *group;  /* what --layout says: "hf", "megatron", "fla" */
    const char *family; /* schema the canonical names belong to: "hybrid" */
    const ckpt_schema_row *schema;
    size_t n_schema;
    const ckpt_row *rows;
    size_t n_rows;
    /* Stored names that are no weights and are left out without complaint (patterns with one '*'),
     * e.g. rotary inv_freq; NULL-terminated. */
    const char *const *ignored;
    /* What a complete block of each kind must have: "kda: norm.weight f.weight/f_a.weight+f_b.weight
     * ...; moe: ...; top: embed.weight". '/' separates alternatives, '+' joins what goes together;
     * {e} expands over E. NULL = no completeness check. */
    const char *required;
    ckpt_config_kind config_kind;
    const char *default_tags; /* comma-separated choices when nothing else decides */
    int blocks_per_layer;     /* what a pipeline stage cannot divide; 0 = 1 */
    /* Append comma-separated choices that follow from the canonical configuration ("mlp=gated",
     * "norms=plain"): they beat everything else, reading and writing. NULL = none. */
    void (*choices)(const ckpt_json *canon, ckpt_buf *out);
    /* The same of the stored configuration that is being written ("layers=stacked"): they beat
     * only default_tags. NULL = none. */
    void (*choices_written)(const ckpt_json *stored, ckpt_buf *out);
    /* Whether models like this are usually stored in this layout: where several layouts of a group
     * can hold one, such a layout is taken. NULL = yes. */
    bool (*usual)(const ckpt_json *canon);
    /* 1 if this stored configuration certainly belongs to the layout (architectures, model_type,
     * args), 0 unknown, -1 certainly not. config may be NULL (0). */
    int (*claims)(const ckpt_json *config);
    /* Stored configuration -> canonical configuration (sorted flat keys, config.h). Errors name
     * the field: CKPT_E_FORMAT (bad value), CKPT_E_UNSUPPORTED (cannot be represented). */
    ckpt_status (*config_read)(const ckpt_json *stored, ckpt_json *canon, ckpt_err *err);
    /* Canonical -> stored. `foreign`: an earlier configuration of this same kind whose unrelated
     * fields are kept (may be NULL). Refuses (CKPT_E_UNSUPPORTED, field named) what the dialect
     * cannot say. *out is new. */
    ckpt_status (*config_write)(const ckpt_json *canon, const ckpt_json *foreign,
                                const ckpt_mesh *mesh, ckpt_json **out, ckpt_err *err);
} ckpt_layout;

/* Every known layout, NULL-terminated (families/families.c). */
extern const ckpt_layout *const ckpt_layouts[];

/* ---- pattern.c: names ------------------------------------------------------------------------ */

/* Values of a row's indices; -1: it has none. */
typedef struct ckpt_index {
    int64_t l, j, e;
} ckpt_index;
#define CKPT_NO_INDEX ((ckpt_index){-1, -1, -1})

/* Match a name against a pattern and solve for the indices. A hole with an unbound symbol matches
 * nothing; an unbound limit is none. syms may be NULL. */
bool ckpt_pattern_match(const char *pattern, const char *name, const ckpt_symtab *syms,
                        ckpt_index *at);
/* Instantiate a pattern. Holes that cannot be computed stay as they are. NULL: out of memory. */
char *ckpt_pattern_format(ckpt_arena *arena, const char *pattern, const ckpt_symtab *syms,
                          const ckpt_index *at);
/* Value of the first hole: the block of "blocks.{…}." or "mtp.{…}.". */
bool ckpt_pattern_first(const char *pattern, const ckpt_symtab *syms, const ckpt_index *at,
                        int64_t *out);
/* True if some hole has one of these indices. */
bool ckpt_pattern_has(const char *pattern, const char *vars);
bool ckpt_pattern_parses(const char *pattern);
/* Equal for a pattern and every name it matches: holes and runs of digits count as one character. */
uint32_t ckpt_pattern_hash(const char *s);

/* Rows by ckpt_pattern_hash of their stored or canonical names, in table order. Zero-initialise. */
#define CKPT_ROW_BUCKETS 1024
typedef struct ckpt_row_index {
    int32_t head[CKPT_ROW_BUCKETS]; /* row, or -1 */
    int32_t *next;                  /* row, or -1 */
} ckpt_row_index;
ckpt_status ckpt_row_index_build(ckpt_row_index *x, const ckpt_layout *layout, bool canon,
                                 ckpt_err *err) CKPT_MUST_USE;
/* First row that a name may match, or -1; the others follow through next. */
int32_t ckpt_row_index_first(const ckpt_row_index *x, const char *name);
void ckpt_row_index_free(ckpt_row_index *x);

/* Does a comma-separated list of choices decide a row's tag? -1 it does not say, 0 other choices,
 * 1 chosen (every group that the tag names is mentioned and agrees). */
int ckpt_tag_verdict(const char *choices, const char *tag);
/* The same of a row's whole tag, whose choices each go by the first of n words that decides about them:
 * 0 as soon as one choice is against the row, -1 if one is left open, else 1. */
int ckpt_tags_decide(const char *const *words, size_t n, const char *tag);

/* ---- layout.c: views ------------------------------------------------------------------------- */

/* What ckpt_view_build is given. */
typedef struct ckpt_view_in {
    const char *view;
    int64_t e;           /* value of `e` in the view, -1 if the row has none */
    int64_t l;           /* value of `l` in the view, if it has one */
    int rank;            /* of dims or hint */
    const int64_t *dims; /* reading: the stored shape. The product of every dimension is checked; a
                            symbol that a dimension determines alone is bound; several unbound whole
                            factors of one dimension merge into one axis. NULL when writing */
    const int64_t *hint; /* writing: the canonical shape, used where a dimension has unbound whole
                            factors (a checkpoint without configuration); may be NULL */
    ckpt_symtab *syms;
    bool bind_only; /* only bind what can be bound: never fails on unbound symbols, no map */
} ckpt_view_in;

typedef struct ckpt_view_out {
    ckpt_map map;
    int rank;
    int64_t dims[CKPT_MAX_RANK];
    bool complete; /* bind_only: every symbol was bound */
} ckpt_view_out;

/* Build the axes of a view. Errors: CKPT_E_FORMAT shape contradicts the view (dimension, found,
 * expected with symbol values); CKPT_E_UNSUPPORTED a size is not determined. */
ckpt_status ckpt_view_build(const ckpt_view_in *in, ckpt_arena *arena, ckpt_view_out *out,
                            ckpt_err *err) CKPT_MUST_USE;
/* Number of dimensions a view text has. */
int ckpt_view_rank(const char *view);
/* What the stored value is above the canonical one: -1, 0 or 1. */
int ckpt_view_shift(const char *view);
/* True if the row's box is one index per `var` ('e': "E=e", 'l': "L=l"): the row expands over all
 * experts or layers of one stored tensor; *symbol and *len name the size to expand over. */
bool ckpt_view_expands(const char *view, char var, const char **symbol, size_t *len);
/* The dimension that is the stack of layers ("L=l" alone in it), or -1. */
int ckpt_view_stack(const char *view);

/* True if the stored name or the view has the index 'l', 'j' or 'e'. */
bool ckpt_row_has_index(const ckpt_row *row, char var);
/* What a row that holds a copy repeats ("head.weight|embed.weight"), NULL for other rows. */
const char *ckpt_row_copy_of(const ckpt_row *row);

/* Check every table: patterns parse, every canonical name is in the schema, views parse, tags are
 * well formed, applying a rename twice equals once. For tests and user tables. */
ckpt_status ckpt_layout_check(const ckpt_layout *layout, ckpt_err *err) CKPT_MUST_USE;

#endif
