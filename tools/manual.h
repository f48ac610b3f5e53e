/* Completion scripts and manual pages, made from the option tables. */
#ifndef CKPT_MANUAL_H
#define CKPT_MANUAL_H

#include "command.h"

/* what: bash, zsh, fish, man (the page ckpt.1), man:COMMAND (ckpt-COMMAND.1). Errors: CKPT_E_USAGE. */
ckpt_status ckpt_manual(const char *what, ckpt_buf *out, ckpt_err *err) CKPT_MUST_USE;

#endif
