/* Fuzz inputs that are directories: frames of (name, contents), see mutate.h. Names come from a fixed
 * table, so no input writes outside its directory. */
#include "mutate.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int tree_next(const uint8_t *p, size_t n, tree_frame *frame)
{
    size_t at = frame->at + frame->head + frame->len;
    if (n < 3 || at > n - 3)
        return 0;
    size_t len = (size_t)p[at + 1] | (size_t)p[at + 2] << 8, left = n - at - 3;
    *frame = (tree_frame){.at = at, .head = 3, .len = len < left ? len : left, .name = p[at]};
    return 1;
}

static void path_of(const char *const *names, const char *dir, size_t name, char *path, size_t size)
{
    size_t n = 0;
    while (names[n] != NULL)
        n++;
    if ((size_t)snprintf(path, size, "%s/%s", dir, names[name % n]) >= size)
        abort();
}

/* Makes, or with rmdir removes, the one directory that may be between. */
static void between(const char *dir, char *path, int (*what)(const char *))
{
    char *slash = strrchr(path, '/');
    if ((size_t)(slash - path) == strlen(dir))
        return;
    *slash = '\0';
    (void)what(path);
    *slash = '/';
}

void tree_put(const char *path, const void *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, p, n) != (ssize_t)n)
        abort();
    close(fd);
}

static int make(const char *path)
{
    return mkdir(path, 0700);
}

void tree_write(const char *const *names, const char *dir, const uint8_t *p, size_t n)
{
    tree_frame f = {0};
    char path[512];
    if (mkdir(dir, 0700) != 0)
        abort();
    while (tree_next(p, n, &f)) {
        path_of(names, dir, f.name, path, sizeof path);
        between(dir, path, make);
        tree_put(path, p + f.at + f.head, f.len);
    }
}

void tree_remove(const char *const *names, const char *dir)
{
    char path[512];
    for (size_t i = 0; names[i] != NULL; i++) {
        path_of(names, dir, i, path, sizeof path);
        unlink(path);
        between(dir, path, rmdir);
    }
    if (rmdir(dir) != 0)
        abort();
}
