/* ckpt gate: a declared matrix of sources, targets and checks. The parts of the command.
 *
 * The file is one JSON object. Paths in it are relative to the directory it lies in.
 *
 *   {"gate": 1,
 *    "sources":  {NAME: {"path": P, "root": HEX, "iteration": N, "reference": FILE,
 *                        "latent_eps": X, "allow_unknown": true}},
 *    "targets":  {NAME: {"to": C, "layout": L, "mesh": {"tp": 4} or [{..}, ..], "options": [..]}},
 *    "commands": {NAME: ["program", "argument", "{path}"]},
 *    "cases":   [{"source": NAME or [..] or "*", "target": NAME or [..],
 *                 "checks": ["structure", "hash", "roundtrip", "forward", "gradients"],
 *                 "rtol": X, "grad_rtol": X, "root": HEX, "strict": true,
 *                 "resume": {"data": FILE, "steps": [K, N], "start": S, "options": [..]},
 *                 "load": NAME or [..], "timeout": SECONDS,
 *                 "refuse": {"exit": N, "message": TEXT}}]}
 *
 * Every pair of source and target (and mesh) of a case is one unit of work; without "target" the
 * source itself is checked. Each step is this program run anew, so that a crash, a hang or a lack of
 * memory in one fails that step alone.
 *
 * structure: `verify`. hash: `verify --hash`; the root is the pinned one (a target's: that of its
 * source, unless the case pins another). roundtrip: converted back to the source's container, layout
 * and mesh, `diff` finds nothing. forward, gradients: `verify --forward` against the source, or of a
 * source against its "reference". resume: N steps equal K steps, a save, and N - K steps. load: a
 * command that ends with 0; {path}, {source} and {dir} in its words are replaced, {{ is a brace.
 * refuse: the conversion (or `verify`) must fail so. */
#ifndef CKPT_GATE_H
#define CKPT_GATE_H

#include "tool.h"

#include <stdatomic.h>

typedef enum gate_check {
    GATE_CONVERT,
    GATE_STRUCTURE,
    GATE_HASH,
    GATE_ROUNDTRIP,
    GATE_FORWARD,
    GATE_GRADIENTS,
    GATE_RESUME,
    GATE_LOAD,
    GATE_REFUSE,
    GATE_N_CHECKS
} gate_check;

extern const char *const ckpt_gate_check_names[GATE_N_CHECKS];

typedef struct gate_source {
    const char *name, *path;
    const char *root;      /* pinned, 64 hex digits, or NULL */
    const char *reference; /* or NULL */
    int64_t iteration;     /* -1: the newest */
    double latent_eps;     /* 0: the model's */
    bool allow_unknown;
    int line; /* in the gate file, from 1 */
    /* what the first look found, in the arena of the thread that looked: */
    ckpt_arena arena;
    const char *found_root, *container, *layout;
    ckpt_mesh mesh;
    const char *key;     /* digest of every byte that was read, hex */
    const char *problem; /* why no case can use it, or NULL */
    double seconds;
} gate_source;

typedef struct gate_target {
    const char *name, *to, *layout; /* to, layout: as the options of convert, or NULL */
    ckpt_mesh *meshes;              /* sizes that are not given are 0 */
    size_t n_meshes;                /* at least 1 */
    ckpt_strings options;
} gate_target;

typedef struct gate_command {
    const char *name;
    ckpt_strings argv;
} gate_command;

/* What the units of one row of "cases" share. */
typedef struct gate_row {
    bool want[GATE_N_CHECKS];
    double rtol, grad_rtol; /* below 0: the default of verify */
    const char *root;
    bool strict;
    const char *data; /* resume */
    int64_t steps[2], start;
    ckpt_strings train;
    const gate_command **loads;
    size_t n_loads;
    int64_t timeout; /* seconds */
    int64_t refuse_exit;
    const char *refuse_message;
    int line;
} gate_row;

typedef struct gate_result {
    gate_check check;
    const gate_command *load; /* of GATE_LOAD */
    bool ok, cached;
    double seconds;
    const char *message; /* why not; NULL if ok */
    const char *kept;    /* its file in the cache, or NULL: it is not kept */
} gate_result;

/* One source, one target at one mesh, or one source alone. */
typedef struct gate_unit {
    const char *name;
    gate_source *source;
    const gate_target *target; /* or NULL */
    const ckpt_mesh *mesh;     /* of the target, or NULL */
    const gate_row *row;
    gate_result *results;
    size_t n_results;
    double seconds;
    ckpt_arena arena; /* of the thread that runs it */
} gate_unit;

typedef struct gate {
    ckpt_tool *tool;
    const char *path, *dir; /* of the file, and where its paths start */
    ckpt_arena arena;
    gate_source *sources;
    size_t n_sources;
    gate_target *targets;
    size_t n_targets;
    gate_command *commands;
    size_t n_commands;
    gate_row *rows;
    size_t n_rows;
    gate_unit *units;
    size_t n_units;
    const char *cache; /* directory, or NULL */
    const char *work;  /* scratch directory */
    bool keep;         /* leave the output of units that failed */
    int jobs, threads; /* units at once; threads of each */
    uint64_t memory;   /* bytes of each */
    const char *build; /* digest of this program, hex */
    double seconds;
    atomic_size_t next, done;
    atomic_int serial; /* of scratch files */
} gate;

/* gate_file.c: read the file and lay out the units whose name matches `only` (empty: all).
 * Errors: CKPT_E_FORMAT naming the member; CKPT_E_IO. */
ckpt_status ckpt_gate_read(gate *g, const ckpt_strings *only, ckpt_err *err) CKPT_MUST_USE;
void ckpt_gate_release(gate *g);

/* gate_child.c: one run of a program. */
typedef struct gate_child {
    int exit;        /* status, or 128 + signal */
    bool timed_out;  /* and was killed */
    ckpt_json *doc;  /* its stdout, if that is JSON; owned */
    const char *why; /* one line for people: the error, the first problem, the last line */
} gate_child;

/* Run argv (NULL-terminated), with its stdin empty, and wait; at an interrupt or after timeout
 * seconds its process group is killed. Errors: it cannot be started, CKPT_E_INTERRUPTED. */
ckpt_status ckpt_gate_spawn(gate *g, ckpt_arena *arena, const char *const *argv, int64_t timeout,
                            gate_child *out, ckpt_err *err) CKPT_MUST_USE;
/* The same for a command of this program with --json, --threads and --memory. */
ckpt_status ckpt_gate_self(gate *g, ckpt_arena *arena, const ckpt_strings *args, int64_t timeout,
                           gate_child *out, ckpt_err *err) CKPT_MUST_USE;
void ckpt_gate_child_release(gate_child *child);

/* gate_check.c: look at a source once; run a unit. Failed checks are results, not errors. */
ckpt_status ckpt_gate_look(gate *g, gate_source *s, ckpt_err *err) CKPT_MUST_USE;
/* Whether `text` starts with a mark of a command's words: {path} (what is checked), {source}, {dir} (where
 * the case may write), whose values are given in this order, or {{ for a brace. The bytes it takes, or 0. */
size_t ckpt_gate_mark(const char *text, const char *const values[3], const char **value);
ckpt_status ckpt_gate_unit(gate *g, gate_unit *u, size_t number, ckpt_err *err) CKPT_MUST_USE;

/* gate_cache.c: results of earlier runs, one file a check in the cache directory. Only passes are
 * kept, and only for what the key covers: this very program, every byte of the source, the target,
 * the check and its numbers, and the bytes of the files it reads. */
bool ckpt_gate_cached(gate *g, gate_unit *u, gate_result *r); /* sets r->kept */
ckpt_status ckpt_gate_remember(const gate *g, const gate_unit *u, const gate_result *r,
                               ckpt_err *err) CKPT_MUST_USE;

/* gate_report.c: results as text, members of the JSON document, JUnit XML, SARIF 2.1.0 and GitHub's
 * workflow commands. */
bool ckpt_gate_passed(const gate_unit *u);
size_t ckpt_gate_failures(const gate *g);
void ckpt_gate_text(const gate *g);
void ckpt_gate_json(const gate *g);
void ckpt_gate_junit(const gate *g, ckpt_buf *out);
void ckpt_gate_sarif(const gate *g, ckpt_buf *out);
void ckpt_gate_github(const gate *g);
/* A table in Markdown, for GitHub's step summary. */
void ckpt_gate_markdown(const gate *g, ckpt_buf *out);

#endif
