/* Runs one command again and again, each time with another call of the C library failing
 * (tests/fault/shim.c), and checks what product specification section 5 promises:
 *
 *   a fault that is reported      exit 5 (or 4 where memory is short), one error line, output absent
 *                                 or as it was before, temporaries removed or named
 *   a fault that can be mended    exit 0 (EINTR, short transfers): output as without the fault
 *   SIGKILL, power loss           output absent, as before, or whole
 *   always                        the source was not written to, no signal, no hang
 *
 *   sweep --shim SO --source PATH --output PATH [--mode io|oom|kill|power] [--lose WHAT]
 *         [--kinds eio,enospc,eintr,short] [--sticky] [--old PATH] [--resume] [--stride N]
 *         [--phase N] [--skip TEXT] -- COMMAND...
 *
 * Run in an empty directory that holds the source. --old PATH: the output exists before, as a copy
 * of PATH, and must then be unchanged or new. --resume: after SIGKILL the command is run once more
 * and must give the output of an undisturbed run. --stride N tests every N-th call only. --skip TEXT
 * leaves out calls with TEXT in their names; an allocation has its library in it: OpenSSL 3.0 itself
 * crashes when memory ends while it loads its providers. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TIME_LIMIT 20 /* seconds a run */
#define MAX_REPORTS 30

typedef struct options {
    const char *shim, *source, *output, *mode, *lose, *kinds, *old, *skip;
    bool sticky, resume;
    long stride, phase;
    char **command;
} options;

typedef struct fault {
    long at;
    char name[32];
} fault;

static long runs, reported, failures, mended, killed;

/* ---- trees -------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, const void *p, size_t n)
{
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ b[i]) * 1099511628211u;
    return hash;
}

static uint64_t mix_contents(uint64_t hash, const char *path)
{
    static uint8_t buf[1 << 16];
    int fd = open(path, O_RDONLY);
    ssize_t n;
    while (fd >= 0 && (n = read(fd, buf, sizeof buf)) > 0) {
        /* Whole words: a tree is read after every run. */
        size_t words = (size_t)n / 8 * 8;
        for (size_t i = 0; i < words; i += 8) {
            uint64_t w;
            memcpy(&w, buf + i, 8);
            hash = (hash ^ w) * 1099511628211u;
            hash ^= hash >> 29;
        }
        hash = mix(hash, buf + words, (size_t)n - words);
    }
    if (fd >= 0)
        close(fd);
    return hash;
}

/* What a run may add beside the source; looked at separately. */
static bool is_temporary(const char *name)
{
    return strstr(name, ".ckpt-tmp.") != NULL || strstr(name, ".ckpt-old.") != NULL;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* Names and bytes, or with `contents` false names and times of change, which no write escapes. */
static uint64_t tree_hash(uint64_t hash, const char *path, bool contents)
{
    struct stat st;
    struct dirent **list;
    if (lstat(path, &st) != 0)
        return mix(hash, "absent", 6);
    if (!S_ISDIR(st.st_mode)) {
        hash = mix(hash, &st.st_size, sizeof st.st_size);
        if (contents)
            return mix_contents(hash, path);
        hash = mix(hash, &st.st_ino, sizeof st.st_ino);
        return mix(hash, &st.st_ctim, sizeof st.st_ctim);
    }
    int n = scandir(path, &list, NULL, by_name);
    for (int i = 0; i < n; i++) {
        const char *name = list[i]->d_name;
        char child[PATH_MAX];
        /* `verify --write` adds the manifest to what is otherwise its source. */
        bool skip = strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
                    (!contents && (is_temporary(name) || strstr(name, "ckpt.manifest") != NULL));
        if (!skip && snprintf(child, sizeof child, "%s/%s", path, name) < (int)sizeof child)
            hash = tree_hash(mix(hash, name, strlen(name) + 1), child, contents);
        free(list[i]);
    }
    if (n >= 0)
        free(list);
    return hash;
}

static void remove_tree(const char *path)
{
    struct dirent **list;
    if (unlink(path) == 0 || (errno != EISDIR && errno != EPERM))
        return;
    int n = scandir(path, &list, NULL, NULL);
    for (int i = 0; i < n; i++) {
        char child[PATH_MAX];
        const char *name = list[i]->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
            snprintf(child, sizeof child, "%s/%s", path, name) < (int)sizeof child)
            remove_tree(child);
        free(list[i]);
    }
    if (n >= 0)
        free(list);
    rmdir(path);
}

/* Temporaries in the directory of the output; removed if `text` is NULL, else each must be named
 * in it. */
static const char *check_temporaries(const char *output, const char *text)
{
    static char found[PATH_MAX];
    char dir[PATH_MAX];
    const char *slash = strrchr(output, '/');
    struct dirent **list;
    snprintf(dir, sizeof dir, "%.*s", slash == NULL ? 1 : (int)(slash - output),
             slash == NULL ? "." : output);
    int n = scandir(dir, &list, NULL, NULL);
    const char *bad = NULL;
    for (int i = 0; i < n; i++) {
        const char *name = list[i]->d_name;
        if (is_temporary(name) && (text == NULL || strstr(text, name) == NULL)) {
            if (snprintf(found, sizeof found, "%s/%s", dir, name) >= (int)sizeof found)
                continue;
            if (text == NULL)
                remove_tree(found);
            else
                bad = found;
        }
        free(list[i]);
    }
    if (n >= 0)
        free(list);
    return bad;
}

/* ---- runs --------------------------------------------------------------------------------------- */

static void put_env(const char *name, const char *fmt, ...)
{
    char text[PATH_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    setenv(name, text, 1);
}

static int wait_for(pid_t pid)
{
    int status;
    struct timespec nap = {0, 1000000};
    time_t start = time(NULL);
    for (;;) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status;
        if (time(NULL) - start > TIME_LIMIT) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        nanosleep(&nap, NULL);
    }
}

/* Wait status, or -1 for a run that had to be stopped. at < 0: no fault, log to "calls". */
static int run(const options *o, const char *mode, long at, const char *name, const char *kind)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int out = open("out.txt", O_WRONLY | O_CREAT | O_TRUNC, 0644);
        int err = open("err.txt", O_WRONLY | O_CREAT | O_TRUNC, 0644);
        if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
            _exit(99);
        if (mode != NULL) {
            setenv("LD_PRELOAD", o->shim, 1);
            setenv("FAULT_MODE", mode, 1);
            if (at >= 0) {
                put_env("FAULT_AT", "%ld", at);
                setenv("FAULT_NAME", name, 1);
            } else {
                setenv("FAULT_LOG", "calls", 1);
            }
            setenv("FAULT_KIND", kind, 1);
            setenv("FAULT_ROOT", ".", 1);
            if (o->sticky)
                setenv("FAULT_STICKY", "1", 1);
            if (o->lose != NULL)
                setenv("FAULT_LOSE", o->lose, 1);
        }
        execvp(o->command[0], o->command);
        _exit(99);
    }
    return pid < 0 ? -1 : wait_for(pid);
}

static void slurp(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY);
    ssize_t n = fd >= 0 ? read(fd, text, size - 1) : 0;
    text[n > 0 ? n : 0] = '\0';
    if (fd >= 0)
        close(fd);
}

typedef struct state {
    uint64_t source, old, fresh;
} state;

static void prepare(const options *o)
{
    char manifest[PATH_MAX];
    snprintf(manifest, sizeof manifest, "%s.ckpt.manifest.json", o->output);
    remove_tree(manifest);
    remove_tree(o->output);
    (void)check_temporaries(o->output, NULL);
    if (o->old != NULL) {
        char text[2 * PATH_MAX + 32];
        snprintf(text, sizeof text, "cp -a '%s' '%s'", o->old, o->output);
        if (system(text) != 0)
            exit(2);
    }
}

static void report(const options *o, const fault *f, const char *kind, const char *why,
                   const char *text)
{
    failures++;
    if (failures <= MAX_REPORTS)
        printf("sweep: %s: call %ld (%s) as %s: %s\n    %s%s", o->mode, f->at, f->name, kind, why,
               text, text[0] == '\0' || text[strlen(text) - 1] != '\n' ? "\n" : "");
}

/* The error line is the last one, notes may come before it. */
static bool is_message(const char *text)
{
    size_t n = strlen(text);
    if (n < 8 || text[n - 1] != '\n')
        return false;
    const char *last = text + n - 1;
    while (last > text && last[-1] != '\n')
        last--;
    return strncmp(last, "ckpt: ", 6) == 0;
}

static void check_exit(const options *o, const fault *f, const char *kind, const state *s, int code,
                       const char *text)
{
    bool oom = strcmp(o->mode, "oom") == 0;
    uint64_t now = tree_hash(1, o->output, true);
    const char *left = check_temporaries(o->output, text);
    char why[PATH_MAX + 64];
    if (code == 0) {
        mended++;
        if (now != s->fresh)
            report(o, f, kind, "exit 0, but the output differs", text);
    } else if (code == 5 || (oom && code == 4)) {
        reported++;
        if (strcmp(kind, "short") == 0 || strcmp(kind, "4") == 0)
            report(o, f, kind, "could have been mended", text);
        else if (!is_message(text))
            report(o, f, kind, "no error line", text);
        /* After the rename the new output is there, and only its durability is in doubt. */
        if (now != s->old && now != s->fresh)
            report(o, f, kind, "an output that is neither old nor new", text);
    } else {
        snprintf(why, sizeof why, "exit %d", code);
        report(o, f, kind, why, text);
    }
    if (left != NULL) {
        snprintf(why, sizeof why, "%s is left and not named", left);
        report(o, f, kind, why, text);
    }
}

static void check_killed(const options *o, const fault *f, const char *kind, const state *s)
{
    uint64_t now = tree_hash(1, o->output, true);
    killed++;
    if (now != s->old && now != s->fresh)
        report(o, f, kind, "an output that is neither old nor new", "");
    if (!o->resume || now == s->fresh)
        return;
    int status = run(o, NULL, 0, "", kind);
    if (status != 0 || tree_hash(1, o->output, true) != s->fresh) {
        char text[4096];
        slurp("err.txt", text, sizeof text);
        report(o, f, kind, "the next run does not give the same output", text);
    }
}

static void one(const options *o, const fault *f, const char *kind, const state *s)
{
    char text[8192];
    bool kills = strcmp(o->mode, "kill") == 0 || strcmp(o->mode, "power") == 0;
    prepare(o);
    int status = run(o, o->mode, f->at, f->name, kind);
    runs++;
    slurp("err.txt", text, sizeof text);
    if (status == -1)
        report(o, f, kind, "no end", text);
    else if (kills && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        check_killed(o, f, kind, s);
    else if (WIFSIGNALED(status))
        report(o, f, kind, strsignal(WTERMSIG(status)), text);
    else
        check_exit(o, f, kind, s, WEXITSTATUS(status), text);
    if (tree_hash(1, o->source, false) != s->source)
        report(o, f, kind, "the source was written to", text);
}

/* ---- which calls, which kinds ------------------------------------------------------------------- */

/* For memory, the first call with each stack: every place that allocates fails once. */
static size_t read_calls(const char *path, bool distinct, fault **out)
{
    FILE *in = fopen(path, "r");
    size_t n = 0, cap = 1 << 16;
    fault *list = malloc(cap * sizeof *list), f;
    while (in != NULL && list != NULL && fscanf(in, "%ld %31s", &f.at, f.name) == 2) {
        bool seen = false;
        for (size_t i = 0; distinct && i < n && !seen; i++)
            seen = strcmp(list[i].name, f.name) == 0;
        if (!seen && n < cap)
            list[n++] = f;
    }
    if (in != NULL)
        fclose(in);
    *out = list;
    return n;
}

static bool listed(const char *kinds, const char *kind)
{
    size_t n = strlen(kind);
    for (const char *p = kinds; (p = strstr(p, kind)) != NULL; p += n)
        if ((p == kinds || p[-1] == ',') && (p[n] == '\0' || p[n] == ','))
            return true;
    return false;
}

/* Whether a call of this name can fail so. */
static bool applies(const char *kind, const char *call)
{
    if (strcmp(kind, "short") == 0)
        return strcmp(call, "read") == 0 || strcmp(call, "write") == 0;
    if (strcmp(kind, "eintr") == 0)
        return strcmp(call, "read") == 0 || strcmp(call, "write") == 0 ||
               strcmp(call, "fsync") == 0 || strcmp(call, "fallocate") == 0;
    if (strcmp(kind, "enospc") == 0)
        return strcmp(call, "write") == 0 || strcmp(call, "create") == 0 ||
               strcmp(call, "mkdir") == 0 || strcmp(call, "fallocate") == 0 ||
               strcmp(call, "fsync") == 0 || strcmp(call, "rename") == 0;
    return true;
}

static void sweep(const options *o, const fault *calls, size_t n, const state *s)
{
    static const struct {
        const char *name, *value;
    } kinds[] = {
        {"eio",    "5"    },
        {"enospc", "28"   },
        {"eintr",  "4"    },
        {"short",  "short"}
    };
    for (size_t i = (size_t)o->phase; i < n; i += (size_t)o->stride) {
        if (o->skip != NULL && strstr(calls[i].name, o->skip) != NULL)
            continue;
        if (strcmp(o->mode, "io") != 0) {
            one(o, &calls[i], "5", s);
            continue;
        }
        for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
            if (listed(o->kinds, kinds[k].name) && applies(kinds[k].name, calls[i].name))
                one(o, &calls[i], kinds[k].value, s);
    }
}

static bool parse(int argc, char **argv, options *o)
{
    struct {
        const char *name;
        const char **value;
    } texts[] = {
        {"--shim",   &o->shim  },
        {"--source", &o->source},
        {"--output", &o->output},
        {"--mode",   &o->mode  },
        {"--lose",   &o->lose  },
        {"--kinds",  &o->kinds },
        {"--old",    &o->old   },
        {"--skip",   &o->skip  }
    };
    for (int i = 1; i < argc; i++) {
        bool found = false;
        if (strcmp(argv[i], "--") == 0) {
            o->command = argv + i + 1;
            return o->shim != NULL && o->source != NULL && o->output != NULL && i + 1 < argc;
        }
        for (size_t t = 0; t < sizeof texts / sizeof texts[0] && i + 1 < argc; t++)
            if (strcmp(argv[i], texts[t].name) == 0) {
                *texts[t].value = argv[++i];
                found = true;
                break;
            }
        if (found)
            continue;
        if (strcmp(argv[i], "--sticky") == 0)
            o->sticky = true;
        else if (strcmp(argv[i], "--resume") == 0)
            o->resume = true;
        else if (strcmp(argv[i], "--stride") == 0 && i + 1 < argc)
            o->stride = strtol(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--phase") == 0 && i + 1 < argc)
            o->phase = strtol(argv[++i], NULL, 10);
        else
            return false;
    }
    return false;
}

int main(int argc, char **argv)
{
    options o = {.mode = "io", .kinds = "eio,enospc,eintr,short", .stride = 1};
    state s;
    fault *calls;
    char text[4096];
    if (!parse(argc, argv, &o) || o.stride < 1 || o.phase < 0) {
        fprintf(stderr, "usage: sweep --shim SO --source PATH --output PATH [...] -- COMMAND\n");
        return 2;
    }
    prepare(&o);
    s.old = tree_hash(1, o.output, true);
    s.source = tree_hash(1, o.source, false);
    int status = run(&o, o.mode, -1, "", "5");
    slurp("err.txt", text, sizeof text);
    if (status != 0) {
        printf("sweep: the command fails without a fault: %s\n", text);
        return 2;
    }
    s.fresh = tree_hash(1, o.output, true);
    size_t n = read_calls("calls", strcmp(o.mode, "oom") == 0, &calls);
    if (n == 0 || s.fresh == s.old || tree_hash(1, o.source, false) != s.source) {
        printf("sweep: no calls, no output or a changed source\n");
        return 2;
    }
    sweep(&o, calls, n, &s);
    free(calls);
    prepare(&o);
    remove_tree(o.output);
    printf("%s: %zu calls, %ld runs: %ld reported, %ld without effect, %ld killed; %ld failures\n",
           o.mode, n, runs, reported, mended, killed, failures);
    return failures == 0 && runs > 0 ? 0 : 1;
}
