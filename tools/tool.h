/* What every command shares: its row in the table, the global options and the result document.
 *
 * A command returns CKPT_OK, CKPT_E_MISMATCH with an empty error text when its own output already
 * says what differs, or a failure whose text becomes the one error line
 * `ckpt: COMMAND: PATH: ...`. In --json mode it adds members to tool->json, which main() opens with
 * command, version and path, and closes with ok (and error). */
#ifndef CKPT_TOOL_H
#define CKPT_TOOL_H

#include "manifest.h"
#include "opts.h"
#include "render.h"

typedef struct ckpt_globals {
    bool json, quiet, verbose, help, no_sandbox;
    int64_t threads;
    uint64_t memory;
    int color; /* 0 auto, 1 always, 2 never */
} ckpt_globals;

typedef struct ckpt_command ckpt_command;

typedef struct ckpt_ranks ckpt_ranks; /* ranks.h */

typedef struct ckpt_tool {
    const ckpt_command *command;
    ckpt_globals g;
    ckpt_strings operands;
    bool *given;   /* per row of command->opts: it was on the command line */
    bool color;    /* on stdout */
    bool progress; /* a bar may be drawn on stderr */
    /* A manifest that is damaged, or contradicts what is bound, is told, once a source: by commands that do
     * without it. Without a look at data: its layout, sizes of files, tensors. */
    bool tells_manifest;
    const ckpt_source *manifest_told;
    ckpt_jw json;
    ckpt_arena arena;               /* texts that live as long as the run */
    ckpt_ranks *ranks;              /* NULL: one process */
    struct ckpt_eng_device *device; /* NULL: the CPU */
    const struct ckpt_share *share; /* of the ranks, where they divide the work; or NULL */
} ckpt_tool;

struct ckpt_command {
    const char *name;
    const char *synopsis; /* operands */
    const char *what;     /* one line */
    const ckpt_opt *opts; /* NULL: not built yet */
    size_t opts_size;
    size_t min_operands, max_operands;
    bool divides; /* its work between ranks that mpirun started; others are refused there */
    bool writes;  /* SIGINT must unwind so that half-written output is removed */
    /* With these options it only reads, and runs in the sandbox (sandbox.h); NULL: it writes. */
    bool (*only_reads)(const void *opts);
    void (*defaults)(void *opts);
    ckpt_status (*run)(ckpt_tool *tool, void *opts, ckpt_err *err);
    const char *notes;    /* after the options in --help; may be NULL */
    const char *examples; /* lines after that, each of two blanks and a command; may be NULL */
};

/* Those that others run; command.c lists all. */
extern const ckpt_command ckpt_cmd_convert, ckpt_cmd_verify, ckpt_cmd_diff, ckpt_cmd_train;

/* ---- signals ------------------------------------------------------------------------------------ */

/* A command that has something to finish when it is asked to end: from CKPT_ENDS_LATER on the first signal
 * sets `asked` alone, and the next one ckpt_interrupted. */
enum { CKPT_ENDS_AT_ONCE, CKPT_ENDS_LATER };
extern volatile int ckpt_tool_ending; /* one of these */
extern volatile int ckpt_tool_asked;

/* ---- input ----------------------------------------------------------------------------------- */

/* Put `path` in front of an error unless the message starts with it. */
void ckpt_tool_frame(ckpt_err *err, const char *path);
/* Open a source; its error names the path. Warnings are left in src. */
ckpt_status ckpt_tool_open(ckpt_tool *tool, ckpt_source *src, const char *path, int64_t iteration,
                           ckpt_err *err) CKPT_MUST_USE;
/* What is odd about the layout that a manifest names for a model. NULL: nothing, or no memory to say it. */
const char *ckpt_tool_odd_layout(ckpt_arena *arena, const ckpt_model *model,
                                 const ckpt_manifest *m);
ckpt_status ckpt_tool_bind(ckpt_tool *tool, ckpt_model *model, ckpt_source *src,
                           const ckpt_model_opts *opts, ckpt_err *err) CKPT_MUST_USE;
/* The same; but a source that states no configuration and fits no layout by itself, or several, is
 * read as `like` is, if it can be. *as_like tells so. */
ckpt_status ckpt_tool_bind_like(ckpt_tool *tool, ckpt_model *model, ckpt_source *src,
                                const ckpt_model_opts *opts, const ckpt_model *like, bool *as_like,
                                ckpt_err *err) CKPT_MUST_USE;
/* Refuse objects that import anything outside the allow-list (CKPT_E_UNSUPPORTED, all named). */
ckpt_status ckpt_tool_check_objects(const ckpt_source *src, ckpt_err *err) CKPT_MUST_USE;
/* Executor options from the global ones; bar may be NULL. */
ckpt_stream_opts ckpt_tool_stream(const ckpt_tool *tool, const ckpt_bar *bar);

/* inspect_flops.c: floating-point operations of one pass over a sequence of `tokens`, to stdout or
 * the document. */
ckpt_status ckpt_inspect_flops(ckpt_tool *tool, const ckpt_model *model, int64_t tokens,
                               ckpt_err *err) CKPT_MUST_USE;

/* ---- options that would do nothing (effects.c) ------------------------------------------------- */

/* An option that was given and asks for something that cannot be done here is an error, so that
 * nobody believes it was: why_not(context) tells why, or NULL if it has an effect or what it asks
 * for is so already. Permissions (--force, --allow-..., --approximate) are no such requests. */
typedef struct ckpt_effect {
    const char *option;
    const char *(*why_not)(const void *context);
} ckpt_effect;
/* CKPT_E_USAGE naming the first such option. rows end with option NULL. */
ckpt_status ckpt_tool_effects(const ckpt_tool *tool, const ckpt_effect *rows, const void *context,
                              ckpt_err *err) CKPT_MUST_USE;
/* Value of ckpt_command.only_reads: whatever the options say. */
bool ckpt_tool_only_reads(const void *opts);
/* Whether an option of the command was given. */
bool ckpt_tool_given(const ckpt_tool *tool, const char *option);
/* Why --iteration N does nothing for an opened source, or NULL. */
const char *ckpt_no_iteration(const ckpt_source *src, int64_t iteration);

/* ---- output ---------------------------------------------------------------------------------- */

/* A line on stderr, unless --quiet: "ckpt: COMMAND: warning: ...". */
void ckpt_tool_warn(ckpt_tool *tool, const char *fmt, ...) CKPT_PRINTF(2, 3);
/* A line on stderr without "warning". */
void ckpt_tool_note(ckpt_tool *tool, const char *fmt, ...) CKPT_PRINTF(2, 3);
/* True if results go to stdout as text. */
bool ckpt_tool_text(const ckpt_tool *tool);
void ckpt_tool_warnings(ckpt_tool *tool, const ckpt_source *src);
const char *ckpt_tool_clean(ckpt_tool *tool, const char *s);

/* ---- small things ---------------------------------------------------------------------------- */

/* Shell pattern; '*' also matches '.' and '/'. */
bool ckpt_glob(const char *pattern, const char *name);
bool ckpt_glob_any(const ckpt_strings *patterns, const char *name);
/* True if a manifest was made over F8 weights as they are stored beside their scales. */
bool ckpt_tool_is_fp8(const ckpt_manifest *m);
/* Patterns given by the user against a canonical tensor: either name may match. An empty include
 * list selects everything. */
bool ckpt_tool_selected(const ckpt_model *model, size_t tensor, const ckpt_strings *include,
                        const ckpt_strings *exclude);
/* Whether a key of a canonical configuration that no stored one states says no more than which
 * tensors are stored: a head that is stored does not tell that it repeats the embedding. */
bool ckpt_tool_key_is_guess(const char *key);
/* The module that a tensor of this name is counted under. */
const char *ckpt_tool_module(ckpt_arena *arena, const char *name, bool canonical);
/* The next number after *state, the same on every machine: splitmix64. */
uint64_t ckpt_tool_draw(uint64_t *state);
/* "; did you mean 'NAME'?" for the first of patterns that is near to one, or "". */
const char *ckpt_tool_meant(ckpt_tool *tool, const ckpt_model *model, const ckpt_strings *patterns);
/* "OPTION'PATTERN' matches no tensor", and which canonical or stored name is meant where one is near
 * and the pattern has no wildcards. NULL: no memory. */
const char *ckpt_tool_no_match(ckpt_tool *tool, const ckpt_model *model, const char *option,
                               const char *pattern);
/* A character that XML and HTML give a meaning, escaped; false: it is none, and nothing was written. */
bool ckpt_tool_markup(ckpt_buf *out, unsigned char c);
/* "s" unless n is 1. */
const char *ckpt_tool_plural(uint64_t n);
/* "tp 2, ep 2" without the sizes that are 1; "1" if all are. */
const char *ckpt_tool_mesh(ckpt_arena *arena, const ckpt_mesh *mesh);
void ckpt_tool_json_mesh(ckpt_jw *w, const ckpt_mesh *mesh);
ckpt_status ckpt_tool_no_memory(ckpt_err *err);
/* Open what the engine runs on, tool->device. device: index in "cpu|cuda"; below 0 = cpu, which is NULL.
 * Errors: CKPT_E_UNSUPPORTED no plug-in or no card. */
ckpt_status ckpt_tool_device(ckpt_tool *tool, int device, ckpt_err *err) CKPT_MUST_USE;
void ckpt_tool_leave_device(ckpt_tool *tool);
/* Path of a shared object that is loaded on demand: beside the program, or where `make install` puts it.
 * NULL: out of memory. */
char *ckpt_tool_part(ckpt_arena *arena, const char *name);
/* Write a whole small file atomically beside what is there. */
ckpt_status ckpt_tool_write_file(const char *path, const void *p, size_t n,
                                 ckpt_err *err) CKPT_MUST_USE;
/* The same where nothing may be replaced, not even what appears meanwhile. Errors: CKPT_E_USAGE there
 * is something; CKPT_E_IO. */
ckpt_status ckpt_tool_create_file(const char *path, const void *p, size_t n,
                                  ckpt_err *err) CKPT_MUST_USE;
/* SHA-256 and size of a file. */
ckpt_status ckpt_tool_file_digest(const char *path, uint8_t out[CKPT_SHA256_LEN], uint64_t *size,
                                  ckpt_err *err) CKPT_MUST_USE;
/* Multi-index of a flat element number, as "[1, 0, 5]". */
const char *ckpt_tool_index(ckpt_arena *arena, int rank, const int64_t *dims, int64_t flat);
bool ckpt_tool_packed(ckpt_dtype dtype); /* several elements share a byte */

#endif
