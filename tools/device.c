/* What the engine of a command runs on, and the parts of the program that are loaded when asked for. */
#include "device.h"
#include "ranks.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PART "libckpt_cuda.so"

char *ckpt_tool_part(ckpt_arena *arena, const char *name)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0)
        return ckpt_arena_strdup(arena, name);
    self[n] = '\0';
    char *slash = strrchr(self, '/');
    if (slash != NULL)
        *slash = '\0';
    char *beside = ckpt_arena_printf(arena, "%s/%s", self, name);
    char *installed = ckpt_arena_printf(arena, "%s/../lib/ckpt/%s", self, name);
    return beside != NULL && installed != NULL && access(beside, F_OK) != 0 ? installed : beside;
}

ckpt_status ckpt_tool_device(ckpt_tool *tool, int device, ckpt_err *err)
{
    if (device <= 0)
        return CKPT_OK;
    char *path = ckpt_tool_part(&tool->arena, PART);
    ckpt_eng_device *d = calloc(1, sizeof *d);
    if (path == NULL || d == NULL) {
        free(d);
        return ckpt_tool_no_memory(err);
    }
    ckpt_status status =
        ckpt_eng_device_load(d, path, tool->ranks != NULL ? tool->ranks->local : 0, err);
    if (status != CKPT_OK) {
        free(d);
        ckpt_err_frame(err, "--device cuda");
        return status;
    }
    tool->device = d;
    if (tool->g.verbose)
        ckpt_tool_note(tool, "device: %s, products by %s", d->name,
                       d->api->gemm_name(d->card.gemm));
    return CKPT_OK;
}

void ckpt_tool_leave_device(ckpt_tool *tool)
{
    if (tool->device != NULL)
        ckpt_eng_device_close(tool->device);
    free(tool->device);
    tool->device = NULL;
}
