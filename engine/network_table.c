/* The functions of network.h behind the table of device.h, once for every build. */
#include "network_internal.h"

#include "device.h"

static ckpt_status open_any(void *net, const ckpt_eng *e, const void *model, const void *opts,
                            bool gradients, ckpt_err *err)
{
    return ENG(network_open)(net, e, model, opts, gradients, err);
}

static void close_any(void *net)
{
    ENG(network_close)(net);
}

static ckpt_status run_any(ckpt_eng *e, const void *net, const void *batch, void *run,
                           ckpt_err *err)
{
    return ENG(network_run)(e, net, batch, run, err);
}

static ckpt_status zero_any(void *net, ckpt_err *err)
{
    return ENG(network_zero_grads)(net, err);
}

static ckpt_status refresh_any(const ckpt_eng *e, void *net, ckpt_err *err)
{
    return ENG(network_refresh)(e, net, err);
}

static ckpt_status sum_any(ckpt_eng *e, void *net, ckpt_err *err)
{
    return ENG(network_sum_grads)(e, net, err);
}

static ckpt_status gather_any(ckpt_eng *e, void *net, const void *model, size_t i, const void *from,
                              void *to, ckpt_err *err)
{
    ENG(network) *m = net;
    return ENG(network_gather)(e, m, model, &m->params[i], from, to, err);
}

const ckpt_eng_networks ENG(networks) = {
    .network_size = sizeof(ENG(network)),
    .param_size = sizeof(ENG(param)),
    .bf16 = sizeof(real) != sizeof(wreal),
    .open = open_any,
    .close = close_any,
    .run = run_any,
    .zero_grads = zero_any,
    .refresh = refresh_any,
    .sum_grads = sum_any,
    .gather = gather_any,
};
