/* One error type: a status and one line of context, outermost frame first.
 *
 * Calling sequence: the function that detects the fault returns ckpt_fail(err, code, "...");
 * every caller that can name an object adds a frame with CKPT_TRY(call, "tensor '%s'", name).
 * The resulting line reads `outer: inner: message`. Text taken from input is sanitised: control
 * characters and invalid UTF-8 become \xNN, so a message is always one printable line. */
#ifndef CKPT_ERR_H
#define CKPT_ERR_H

#include "ckpt.h"

#include <stdbool.h>
#include <stddef.h>

#if defined(__GNUC__)
#define CKPT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define CKPT_MUST_USE __attribute__((warn_unused_result))
#else
#define CKPT_PRINTF(fmt, args)
#define CKPT_MUST_USE
#endif

/* Record a fault and return `code`. A second call replaces the first. err may be NULL. */
ckpt_status ckpt_fail(ckpt_err *err, ckpt_status code, const char *fmt, ...) CKPT_PRINTF(3, 4);
/* As ckpt_fail with CKPT_E_IO, appending ": " and strerror(errnum). Leaves errno at errnum. */
ckpt_status ckpt_fail_errno(ckpt_err *err, int errnum, const char *fmt, ...) CKPT_PRINTF(3, 4);
/* Prepend a frame: "frame: old text". */
void ckpt_err_frame(ckpt_err *err, const char *fmt, ...) CKPT_PRINTF(2, 3);

/* Bytes (1-4) of the well-formed UTF-8 sequence at s, of which n are available, or 0 if there is
 * none: overlong forms, surrogates and values beyond U+10FFFF are refused. NUL is one byte. */
size_t ckpt_utf8_len(const void *s, size_t n);

int ckpt_exit_code(ckpt_status status);

/* Run a fallible call inside a function that has `ckpt_status status`, `ckpt_err *err` and a
 * `done:` label. CKPT_TRY adds a frame; CKPT_CHECK does not. */
#define CKPT_TRY(call, ...)                                                                        \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != CKPT_OK) {                                                                   \
            ckpt_err_frame(err, __VA_ARGS__);                                                      \
            goto done;                                                                             \
        }                                                                                          \
    } while (0)
#define CKPT_CHECK(call)                                                                           \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != CKPT_OK)                                                                     \
            goto done;                                                                             \
    } while (0)

#endif
