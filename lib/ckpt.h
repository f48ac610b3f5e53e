/* ckpt: public constants shared by the library and its programs. */
#ifndef CKPT_H
#define CKPT_H

#define CKPT_VERSION "0.1.0"

/* Status codes: every fallible function returns one. The second column is the
 * exit code of the command-line program (product contract: 0 success, 1 differs,
 * 2 usage, 3 malformed input, 4 unsupported or refused, 5 I/O, 130 interrupted). */
#define CKPT_STATUS_LIST(X)                                                                        \
    X(OK, 0, "ok")                                                                                 \
    X(E_MISMATCH, 1, "differs")                                                                    \
    X(E_USAGE, 2, "usage")                                                                         \
    X(E_FORMAT, 3, "malformed input")                                                              \
    X(E_UNSUPPORTED, 4, "unsupported or refused")                                                  \
    X(E_IO, 5, "input/output")                                                                     \
    X(E_NOMEM, 5, "out of memory")                                                                 \
    X(E_INTERRUPTED, 130, "interrupted")                                                           \
    X(E_INTERNAL, 70, "internal error")

typedef enum ckpt_status {
#define CKPT_STATUS_ENUM(name, exit_code, text) CKPT_##name,
    CKPT_STATUS_LIST(CKPT_STATUS_ENUM)
#undef CKPT_STATUS_ENUM
} ckpt_status;

#endif
