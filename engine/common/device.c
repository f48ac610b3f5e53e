/* Loading and leaving a device (device.h). */
#include "device.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checked.h"

ckpt_status ckpt_eng_device_open(ckpt_eng_device *d, const ckpt_cuda_plugin *api, int number,
                                 ckpt_err *err)
{
    *d = (ckpt_eng_device){.api = api, .number = number};
    return api->open(&d->card, number, d->name, sizeof d->name, err);
}

ckpt_status ckpt_eng_device_load(ckpt_eng_device *d, const char *path, int number, ckpt_err *err)
{
    *d = (ckpt_eng_device){0};
    if (access(path, F_OK) != 0)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "no CUDA part: %s does not exist (make cuda)",
                         path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "the CUDA part does not load: %s", dlerror());
    const ckpt_cuda_plugin *api = dlsym(library, "ckpt_cuda_plugin_v1");
    if (api == NULL || api->version != CKPT_CUDA_PLUGIN_VERSION) {
        dlclose(library);
        return ckpt_fail(err, CKPT_E_UNSUPPORTED, "%s is not a CUDA part of this version", path);
    }
    int cards = 0;
    ckpt_status status = api->cards(&cards, err);
    if (status == CKPT_OK)
        status = ckpt_eng_device_open(d, api, cards > 0 ? number % cards : number, err);
    if (status != CKPT_OK)
        ckpt_eng_device_close(d);
    return status;
}

void ckpt_eng_device_close(ckpt_eng_device *d)
{
    if (d->api != NULL)
        d->api->close(&d->card);
    /* The library stays: its runtime has handlers that run when the process ends. */
    *d = (ckpt_eng_device){0};
}

/* ---- memory ---------------------------------------------------------------------------------- */

ckpt_status ckpt_eng_memory_new(const ckpt_eng *e, int64_t count, size_t size, void **out,
                                ckpt_err *err)
{
    size_t bytes;
    *out = NULL;
    if (count < 0 || !ckpt_mul_size((size_t)count, size, &bytes) || bytes > SIZE_MAX / 2)
        return ckpt_fail(err, CKPT_E_NOMEM, "engine: cannot allocate %lld elements",
                         (long long)count);
    if (e->device == NULL) {
        *out = calloc(bytes + 1, 1);
        return *out != NULL
                   ? CKPT_OK
                   : ckpt_fail(err, CKPT_E_NOMEM, "engine: cannot allocate %zu bytes", bytes);
    }
    const ckpt_cuda_plugin *api = e->device->api;
    ckpt_status status = api->alloc(bytes, out, err);
    if (status == CKPT_OK)
        status = api->zero(&e->device->card, *out, bytes, err);
    return status;
}

void ckpt_eng_memory_free(const ckpt_eng *e, void *p)
{
    if (e->device == NULL)
        free(p);
    else
        e->device->api->free(p);
}

ckpt_status ckpt_eng_put(const ckpt_eng *e, void *to, const void *from, size_t bytes, ckpt_err *err)
{
    if (e->device != NULL)
        return e->device->api->put(&e->device->card, to, from, bytes, err);
    if (bytes > 0)
        memcpy(to, from, bytes);
    return CKPT_OK;
}

ckpt_status ckpt_eng_get(const ckpt_eng *e, void *to, const void *from, size_t bytes, ckpt_err *err)
{
    if (e->device != NULL)
        return e->device->api->get(&e->device->card, to, from, bytes, err);
    if (bytes > 0)
        memcpy(to, from, bytes);
    return CKPT_OK;
}

ckpt_status ckpt_eng_move(const ckpt_eng *e, void *to, const void *from, size_t bytes,
                          ckpt_err *err)
{
    if (e->device != NULL)
        return e->device->api->copy(&e->device->card, to, from, bytes, err);
    if (bytes > 0)
        memmove(to, from, bytes);
    return CKPT_OK;
}

ckpt_status ckpt_eng_clear(const ckpt_eng *e, void *p, size_t bytes, ckpt_err *err)
{
    if (e->device != NULL)
        return e->device->api->zero(&e->device->card, p, bytes, err);
    if (bytes > 0)
        memset(p, 0, bytes);
    return CKPT_OK;
}
