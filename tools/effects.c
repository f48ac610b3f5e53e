/* Options without an effect: `ckpt convert --max-shard-size` into a container of one file, for
 * example. The tables are the commands' own. */
#include "tool.h"

#include <string.h>

bool ckpt_tool_given(const ckpt_tool *tool, const char *option)
{
    const ckpt_opt *rows = tool->command->opts;
    for (size_t i = 0; rows[i].name != NULL; i++)
        if (strcmp(rows[i].name, option) == 0)
            return tool->given[i];
    return false;
}

ckpt_status ckpt_tool_effects(const ckpt_tool *tool, const ckpt_effect *rows, const void *context,
                              ckpt_err *err)
{
    for (const ckpt_effect *r = rows; r->option != NULL; r++) {
        const char *why = ckpt_tool_given(tool, r->option) ? r->why_not(context) : NULL;
        if (why != NULL)
            return ckpt_fail(err, CKPT_E_USAGE, "--%s has no effect: %s", r->option, why);
    }
    return CKPT_OK;
}

/* A save root leads to another directory; one iteration may still be the one that was meant. */
const char *ckpt_no_iteration(const ckpt_source *src, int64_t iteration)
{
    size_t n = strlen(src->path);
    while (n > 1 && src->path[n - 1] == '/')
        n--;
    bool below = src->root != NULL && strncmp(src->root, src->path, n) == 0 &&
                 src->root[n + strspn(src->root + n, "/")] != '\0';
    if (iteration < 0 || below || src->iteration == iteration)
        return NULL;
    return "the source is one checkpoint, not a save root with iterations";
}

bool ckpt_tool_only_reads(const void *opts)
{
    (void)opts;
    return true;
}
