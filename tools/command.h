/* The table of commands, and running one of them. */
#ifndef CKPT_COMMAND_H
#define CKPT_COMMAND_H

#include "tool.h"

extern const ckpt_command *const ckpt_commands[]; /* ends with NULL; run NULL: not built yet */
extern const ckpt_opt ckpt_global_opts[];         /* of every command */

/* By name. NULL: CKPT_E_USAGE with the nearest name in err. */
const ckpt_command *ckpt_command_find(const char *name, ckpt_err *err);
/* Usage, options and notes, from the tables, filled to that width; where not all of it fits into the rows,
 * the first options are explained and the rest are named. */
void ckpt_command_help(const ckpt_command *command, int columns, int rows, ckpt_buf *out);
/* Whether a command takes these words, which must be options: CKPT_E_USAGE as its command line has it. */
ckpt_status ckpt_command_check(const ckpt_command *command, const ckpt_strings *words,
                               ckpt_err *err) CKPT_MUST_USE;
/* Parse what follows the name of tool->command, call ready with the options once they are known to be right,
 * and run.
 * With --help nothing runs, and tool->g.help tells so. */
ckpt_status ckpt_command_run(ckpt_tool *tool, int argc, char **argv,
                             void (*ready)(ckpt_tool *tool, const void *opts),
                             ckpt_err *err) CKPT_MUST_USE;
/* The result document: its first members, and its last ones. If the command left it unfinished it is
 * begun anew. It is then in tool->json.buf, with a line end. */
void ckpt_command_begin_json(ckpt_tool *tool);
void ckpt_command_end_json(ckpt_tool *tool, ckpt_status status, const ckpt_err *err);

#endif
