/* The library's commands (ckpt.h): the program's own, run in this process without its output. */
#include "command.h"

#include <stdlib.h>
#include <string.h>

static void ready(ckpt_tool *tool, const void *opts)
{
    (void)opts;
    tool->progress = tool->color = false; /* and signals stay the host's */
}

/* The command with its operands after "--", so that a path may begin with a dash. */
static ckpt_status run_in(ckpt_tool *tool, ckpt_strings *argv, const char *const *operands,
                          const char *const *options, ckpt_err *err)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; options != NULL && options[i] != NULL; i++) {
        if (strcmp(options[i], "--") == 0 || strcmp(options[i], "--help") == 0)
            return ckpt_fail(err, CKPT_E_USAGE, "'%s' is no option of a library call", options[i]);
        CKPT_CHECK(ckpt_strings_push(argv, options[i], err));
    }
    CKPT_CHECK(ckpt_strings_push(argv, "--", err));
    for (size_t i = 0; operands[i] != NULL; i++)
        CKPT_CHECK(ckpt_strings_push(argv, operands[i], err));
    status = ckpt_command_run(tool, (int)argv->n, (char **)(uintptr_t)argv->items, ready, err);
done:
    return status;
}

static ckpt_status call(const ckpt_command *command, const char *const *operands,
                        const char *const *options, char **json, ckpt_err *err)
{
    ckpt_tool tool = {
        .command = command, .g = {.json = true, .quiet = true, .memory = (uint64_t)1 << 30}
    };
    ckpt_strings argv = {0};
    ckpt_err why = {0};
    ckpt_status status = run_in(&tool, &argv, operands, options, &why);
    if (json != NULL) {
        ckpt_command_end_json(&tool, status, &why);
        *json = tool.json.buf.failed ? NULL : (char *)tool.json.buf.data;
        if (*json != NULL)
            tool.json.buf = (ckpt_buf){0};
    }
    if (status == CKPT_E_MISMATCH && why.text[0] == '\0')
        (void)ckpt_fail(&why, status, "differs");
    if (status != CKPT_OK)
        ckpt_err_frame(&why, "%s", command->name);
    if (err != NULL)
        *err = why;
    ckpt_strings_release(&argv);
    ckpt_strings_release(&tool.operands);
    ckpt_buf_release(&tool.json.buf);
    ckpt_arena_free(&tool.arena);
    return status;
}

ckpt_status ckpt_convert(const char *source, const char *destination, const char *const *options,
                         char **json, ckpt_err *err)
{
    const char *const operands[] = {source, destination, NULL};
    return call(&ckpt_cmd_convert, operands, options, json, err);
}

ckpt_status ckpt_verify(const char *path, const char *const *options, char **json, ckpt_err *err)
{
    const char *const operands[] = {path, NULL};
    return call(&ckpt_cmd_verify, operands, options, json, err);
}

ckpt_status ckpt_diff(const char *a, const char *b, const char *const *options, char **json,
                      ckpt_err *err)
{
    const char *const operands[] = {a, b, NULL};
    return call(&ckpt_cmd_diff, operands, options, json, err);
}

void ckpt_free(void *p)
{
    free(p);
}
