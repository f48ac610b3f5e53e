/* Completion scripts and manual pages, from the same tables that parse and print the help. */
#include "manual.h"

#include <string.h>

/* ---- shells ---------------------------------------------------------------------------------- */

static const char *const file_args[] = {"PATH", "FILE", "DIR", "CONFIG", "KEY", "MANIFEST|PATH"};

static bool takes_file(const ckpt_opt *o)
{
    for (size_t i = 0; o->arg != NULL && i < sizeof file_args / sizeof file_args[0]; i++)
        if (strcmp(o->arg, file_args[i]) == 0)
            return true;
    return false;
}

static void words(ckpt_buf *out, const char *choices)
{
    for (; *choices != '\0'; choices++)
        ckpt_buf_putc(out, *choices == '|' ? ' ' : *choices);
}

static void option_names(ckpt_buf *out, const ckpt_opt *rows)
{
    for (const ckpt_opt *o = rows; o != NULL && o->name != NULL; o++)
        ckpt_buf_printf(out, " --%s", o->name);
}

/* One branch of a case over what stands before the cursor. */
static void bash_values(ckpt_buf *out, const char *command, const ckpt_opt *rows)
{
    for (const ckpt_opt *o = rows; o != NULL && o->name != NULL; o++) {
        if (o->kind == CKPT_OPT_FLAG)
            continue;
        ckpt_buf_printf(out, "    %s:--%s) ", command, o->name);
        if (o->kind == CKPT_OPT_CHOICE) {
            ckpt_buf_puts(out, "COMPREPLY=($(compgen -W '");
            words(out, o->arg);
            ckpt_buf_puts(out, "' -- \"$cur\")); return ;;\n");
        } else if (takes_file(o))
            ckpt_buf_puts(out, "COMPREPLY=($(compgen -f -- \"$cur\")); return ;;\n");
        else
            ckpt_buf_puts(out, "return ;;\n");
    }
}

#define SHELLS "bash zsh fish man" /* operands of completion */

static void bash(ckpt_buf *out)
{
    ckpt_buf_puts(out, "# bash completion for ckpt\n_ckpt()\n{\n"
                       "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
                       "    local command=${COMP_WORDS[1]} options=\n"
                       /* --to=VALUE comes as three words */
                       "    [ \"$cur\" != = ] || cur=\n"
                       "    [ \"$prev\" != = ] || prev=${COMP_WORDS[COMP_CWORD-2]}\n"
                       "    COMPREPLY=()\n"
                       "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
                       "        COMPREPLY=($(compgen -W 'help --version --help");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++)
        ckpt_buf_printf(out, " %s", ckpt_commands[i]->name);
    ckpt_buf_puts(out, "' -- \"$cur\"))\n        return\n    fi\n    case $command:$prev in\n");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++)
        bash_values(out, ckpt_commands[i]->name, ckpt_commands[i]->opts);
    bash_values(out, "*", ckpt_global_opts);
    ckpt_buf_puts(out, "    esac\n    case $command in\n    help) options='");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++)
        ckpt_buf_printf(out, "%s ", ckpt_commands[i]->name);
    ckpt_buf_puts(out, "' ;;\n");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        ckpt_buf_printf(out, "    %s) options='", ckpt_commands[i]->name);
        option_names(out, ckpt_commands[i]->opts);
        option_names(out, ckpt_global_opts);
        ckpt_buf_puts(out, "' ;;\n");
    }
    ckpt_buf_puts(out, "    esac\n    case $command:$cur in\n"
                       "    help:* | *:-*) COMPREPLY=($(compgen -W \"$options\" -- \"$cur\")) ;;\n"
                       "    completion:*) COMPREPLY=($(compgen -W '" SHELLS "' -- \"$cur\")) ;;\n"
                       "    *) COMPREPLY=($(compgen -f -- \"$cur\")) ;;\n    esac\n}\n"
                       "complete -o filenames -o bashdefault -F _ckpt ckpt\n");
}

/* Text inside single quotes of fish, and of zsh's specifications, whose ':' and brackets count. */
static void quoted(ckpt_buf *out, const char *s, bool zsh)
{
    for (; *s != '\0'; s++) {
        if (*s == '\'')
            ckpt_buf_puts(out, zsh ? "'\\''" : "\\'");
        else if (zsh && strchr(":[]\\", *s) != NULL)
            ckpt_buf_printf(out, "\\%c", *s);
        else if (!zsh && *s == '\\')
            ckpt_buf_puts(out, "\\\\");
        else
            ckpt_buf_putc(out, *s);
    }
}

static void zsh_options(ckpt_buf *out, const ckpt_opt *rows)
{
    for (const ckpt_opt *o = rows; o != NULL && o->name != NULL; o++) {
        ckpt_buf_printf(out, "            '%s--%s%s[", o->kind == CKPT_OPT_LIST ? "*" : "", o->name,
                        o->kind == CKPT_OPT_FLAG ? "" : "=");
        quoted(out, o->help, true);
        ckpt_buf_putc(out, ']');
        if (o->kind != CKPT_OPT_FLAG) {
            ckpt_buf_puts(out, ":value:");
            if (o->kind == CKPT_OPT_CHOICE) {
                ckpt_buf_putc(out, '(');
                words(out, o->arg);
                ckpt_buf_putc(out, ')');
            } else if (takes_file(o))
                ckpt_buf_puts(out, "_files");
        }
        ckpt_buf_puts(out, "' \\\n");
    }
}

static void zsh(ckpt_buf *out)
{
    ckpt_buf_puts(out, "#compdef ckpt\n_ckpt()\n{\n    local -a commands\n    commands=(\n"
                       "        'help:options of a command'\n");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        ckpt_buf_printf(out, "        '%s:", ckpt_commands[i]->name);
        quoted(out, ckpt_commands[i]->what, true);
        ckpt_buf_puts(out, "'\n");
    }
    ckpt_buf_puts(out, "    )\n    if ((CURRENT == 2)); then\n"
                       "        _describe -t commands command commands\n        return\n    fi\n"
                       "    local command=$words[2]\n    shift words\n    ((CURRENT--))\n"
                       "    case $command in\n"
                       "    help)\n        _describe -t commands command commands\n        ;;\n");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        ckpt_buf_printf(out, "    %s)\n        _arguments \\\n", ckpt_commands[i]->name);
        zsh_options(out, ckpt_commands[i]->opts);
        zsh_options(out, ckpt_global_opts);
        ckpt_buf_puts(out, "            '*:file:_files'\n        ;;\n");
    }
    ckpt_buf_puts(out, "    esac\n}\nif [ \"$funcstack[1]\" = _ckpt ]; then\n    _ckpt \"$@\"\n"
                       "else\n    compdef _ckpt ckpt\nfi\n");
}

static void fish_options(ckpt_buf *out, const char *condition, const ckpt_opt *rows)
{
    for (const ckpt_opt *o = rows; o != NULL && o->name != NULL; o++) {
        ckpt_buf_printf(out, "complete -c ckpt -n '%s' -l %s", condition, o->name);
        if (o->kind == CKPT_OPT_CHOICE) {
            ckpt_buf_puts(out, " -x -a '");
            words(out, o->arg);
            ckpt_buf_putc(out, '\'');
        } else if (o->kind != CKPT_OPT_FLAG)
            ckpt_buf_puts(out, takes_file(o) ? " -r" : " -x");
        ckpt_buf_puts(out, " -d '");
        quoted(out, o->help, false);
        ckpt_buf_puts(out, "'\n");
    }
}

static void fish(ckpt_buf *out)
{
    ckpt_buf_puts(out, "# fish completion for ckpt\n");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        ckpt_buf_printf(out, "complete -c ckpt -n '__fish_use_subcommand' -f -a %s -d '",
                        ckpt_commands[i]->name);
        quoted(out, ckpt_commands[i]->what, false);
        ckpt_buf_puts(out, "'\n");
    }
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        char condition[96];
        snprintf(condition, sizeof condition, "__fish_seen_subcommand_from %s",
                 ckpt_commands[i]->name);
        fish_options(out, condition, ckpt_commands[i]->opts);
    }
    fish_options(out, "not __fish_use_subcommand", ckpt_global_opts);
}

/* ---- manual pages (man(7)) ------------------------------------------------------------------- */

/* A dash in an option is a minus sign; a line must not begin with a control character. */
static void roff(ckpt_buf *out, const char *s)
{
    bool begins = out->len == 0 || out->data[out->len - 1] == '\n';
    for (; *s != '\0'; s++) {
        if (begins && (*s == '.' || *s == '\''))
            ckpt_buf_puts(out, "\\&");
        if (*s == '\\')
            ckpt_buf_puts(out, "\\e");
        else if (*s == '-')
            ckpt_buf_puts(out, "\\-");
        else
            ckpt_buf_putc(out, *s);
        begins = *s == '\n';
    }
}

static void roff_options(ckpt_buf *out, const ckpt_opt *rows)
{
    for (const ckpt_opt *o = rows; o != NULL && o->name != NULL; o++) {
        ckpt_buf_puts(out, ".TP\n.B \\-\\-");
        roff(out, o->name);
        if (o->arg != NULL) {
            ckpt_buf_puts(out, " \\fI");
            roff(out, o->arg);
            ckpt_buf_puts(out, "\\fR");
        }
        ckpt_buf_putc(out, '\n');
        roff(out, o->help);
        ckpt_buf_putc(out, '\n');
    }
}

static void roff_title(ckpt_buf *out, const char *page, const char *what)
{
    ckpt_buf_puts(out, ".TH ");
    for (const char *s = page; *s != '\0'; s++)
        ckpt_buf_putc(out, *s >= 'a' && *s <= 'z' ? *s - 'a' + 'A' : *s);
    ckpt_buf_puts(out, " 1 \"\" \"ckpt " CKPT_VERSION "\" \"ckpt\"\n.SH NAME\n");
    roff(out, page);
    ckpt_buf_puts(out, " \\- ");
    roff(out, what);
    ckpt_buf_putc(out, '\n');
}

static void exit_codes(ckpt_buf *out)
{
    ckpt_buf_puts(out, ".SH EXIT STATUS\n0 success, 1 differs or failed verification, 2 usage, "
                       "3 malformed input, 4 unsupported or refused, 5 input or output, "
                       "130 interrupted.\n");
}

static void page_of(const ckpt_command *c, ckpt_buf *out)
{
    char name[64];
    snprintf(name, sizeof name, "ckpt-%s", c->name);
    roff_title(out, name, c->what);
    ckpt_buf_printf(out, ".SH SYNOPSIS\n.B ckpt %s\n[options] ", c->name);
    roff(out, c->synopsis != NULL ? c->synopsis : "");
    ckpt_buf_puts(out, "\n.SH OPTIONS\n");
    roff_options(out, c->opts);
    ckpt_buf_puts(out, ".SH OPTIONS OF EVERY COMMAND\n");
    roff_options(out, ckpt_global_opts);
    if (c->notes != NULL) {
        ckpt_buf_puts(out, ".SH NOTES\n.nf\n");
        roff(out, c->notes);
        ckpt_buf_puts(out, ".fi\n");
    }
    if (c->examples != NULL) {
        ckpt_buf_puts(out, ".SH EXAMPLES\n.nf\n");
        roff(out, c->examples);
        ckpt_buf_puts(out, ".fi\n");
    }
    exit_codes(out);
    ckpt_buf_puts(out, ".SH SEE ALSO\n.BR ckpt (1)\n");
}

static void main_page(ckpt_buf *out)
{
    roff_title(out, "ckpt", "read, convert, reshard, verify and run model checkpoints");
    ckpt_buf_puts(out, ".SH SYNOPSIS\n.B ckpt\nCOMMAND [options] ...\n.SH COMMANDS\n");
    for (size_t i = 0; ckpt_commands[i] != NULL; i++) {
        ckpt_buf_printf(out, ".TP\n.BR ckpt\\-%s (1)\n", ckpt_commands[i]->name);
        roff(out, ckpt_commands[i]->what);
        ckpt_buf_putc(out, '\n');
    }
    exit_codes(out);
    ckpt_buf_puts(out, ".SH ENVIRONMENT\nNO_COLOR: no colours. TMPDIR: where ckpt gate works.\n");
}

/* ---- the command ----------------------------------------------------------------------------- */

ckpt_status ckpt_manual(const char *what, ckpt_buf *out, ckpt_err *err)
{
    static const struct {
        const char *name;
        void (*print)(ckpt_buf *out);
    } kinds[] = {
        {"bash", bash     },
        {"zsh",  zsh      },
        {"fish", fish     },
        {"man",  main_page}
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strcmp(what, kinds[i].name) == 0) {
            kinds[i].print(out);
            return CKPT_OK;
        }
    }
    if (strncmp(what, "man:", 4) != 0)
        return ckpt_fail(err, CKPT_E_USAGE, "'%s' is not one of bash, zsh, fish, man, man:COMMAND",
                         what);
    const ckpt_command *command = ckpt_command_find(what + 4, err);
    if (command == NULL)
        return CKPT_E_USAGE;
    page_of(command, out);
    return CKPT_OK;
}

static const ckpt_opt rows[] = {
    {NULL, CKPT_OPT_FLAG, 0, NULL, NULL, 0, 0},
};

static ckpt_status run(ckpt_tool *tool, void *opts, ckpt_err *err)
{
    ckpt_buf out = {0};
    (void)opts;
    ckpt_status status = ckpt_manual(tool->operands.items[0], &out, err);
    if (status == CKPT_OK && out.failed)
        status = ckpt_tool_no_memory(err);
    if (status == CKPT_OK && tool->g.json)
        ckpt_jw_string(&tool->json, "text", (const char *)out.data);
    else if (status == CKPT_OK)
        fwrite(out.data, 1, out.len, stdout);
    ckpt_buf_release(&out);
    return status;
}

const ckpt_command ckpt_cmd_completion = {
    .name = "completion",
    .synopsis = "bash|zsh|fish|man|man:COMMAND",
    .what = "print a completion script or a manual page",
    .opts = rows,
    .opts_size = 1,
    .min_operands = 1,
    .max_operands = 1,
    .run = run,
    .notes = "`make install` puts all of them where shells and man look. By hand:\n"
             "  source <(ckpt completion bash)\n",
};
