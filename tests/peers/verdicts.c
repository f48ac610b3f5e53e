/* Our verdict on each file whose path comes on standard input, one line a file: the exit code that
 * `ckpt verify` would end with, a tab, and the error or, if there is none, every tensor as NAME DTYPE[DIMS]
 * in bytewise order with one space between. One process for thousands of files (differential.py).
 *
 * A byte that would end the line, or is not printable, is a question mark. */
#include "source.h"

#include <stdio.h>
#include <string.h>

static void put(const char *text)
{
    for (; *text != '\0'; text++)
        putchar((unsigned char)*text < ' ' || *text == 0x7f ? '?' : *text);
}

static const char *unknown_global(const ckpt_source *src)
{
    for (size_t i = 0; i < src->n_objects; i++)
        if (src->objects[i].unknown_global != NULL)
            return src->objects[i].unknown_global;
    return NULL;
}

static void put_tensors(const ckpt_source *src)
{
    for (size_t i = 0; i < src->n_tensors; i++) {
        const ckpt_tensor *t = &src->tensors[i];
        printf(i > 0 ? " " : "");
        put(t->name);
        printf(" %s[", ckpt_dtype_get(t->dtype)->name);
        for (int d = 0; d < t->rank; d++)
            printf("%s%lld", d > 0 ? "," : "", (long long)t->dims[d]);
        printf("]");
    }
}

int main(void)
{
    static char path[4096];
    while (fgets(path, sizeof path, stdin) != NULL) {
        const ckpt_open_opts opts = {.iteration = -1};
        ckpt_source src = {0};
        ckpt_err err = {0};
        path[strcspn(path, "\n")] = '\0';
        ckpt_status status = ckpt_source_open(&src, path, &opts, &err);
        const char *unknown = status == CKPT_OK ? unknown_global(&src) : NULL;
        if (unknown != NULL)
            status = ckpt_fail(&err, CKPT_E_UNSUPPORTED, "unknown global %s", unknown);
        printf("%d\t", ckpt_exit_code(status));
        if (status == CKPT_OK)
            put_tensors(&src);
        else
            put(err.text);
        printf("\n");
        fflush(stdout);
        ckpt_source_close(&src);
    }
    return 0;
}
