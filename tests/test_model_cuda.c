/* Whole models on a device against the CPU: the device builds of the network sources on the emulated
 * kernels (gpu/emulate.h), losses, logits and gradients of every family's fixture. */
#define CKPT_REAL 32
#include "engine_model.h"

#include "device.h"
#include "train/train.h"

typedef struct device_run {
    ckpt_eng_device device;
    ckpt_eng e;
    ENG(network) net; /* in the form of the f32 build's: device.h */
    ENG(run) run;
    float *logits, *grads; /* in this process's memory */
} device_run;

static void device_open(device_run *d, const model_run *m, const ckpt_eng_networks *networks,
                        double latent_eps)
{
    const ckpt_eng_spec_opts opts = {.latent_eps = latent_eps};
    *d = (device_run){0};
    OK(ckpt_eng_device_open(&d->device, &ckpt_cuda_plugin_v1, 0, &error));
    ckpt_eng_init(&d->e, 2);
    d->e.device = &d->device;
    ck_assert_uint_eq(networks->network_size, sizeof d->net);
    ck_assert_uint_eq(networks->param_size, sizeof *d->net.params);
    OK(networks->open(&d->net, &d->e, &m->model, &opts, true, &error));
}

static void device_pass(device_run *d, const ckpt_eng_networks *networks, const ENG(batch) * batch)
{
    const size_t bytes = (size_t)d->net.n_elements * sizeof(float);
    if (d->logits == NULL) {
        d->logits = zeros(ckpt_eng_tokens(batch->seq) * d->net.spec.V);
        d->grads = zeros(d->net.n_elements);
    }
    d->run.logits = d->logits;
    OK(networks->zero_grads(&d->net, &error));
    if (d->e.dry) {
        OK(networks->run(&d->e, &d->net, batch, &d->run, &error));
        OK(ckpt_eng_reserve(&d->e, d->e.peak, &error));
    }
    OK(networks->run(&d->e, &d->net, batch, &d->run, &error));
    OK(ckpt_eng_get(&d->e, d->grads, d->net.grads, bytes, &error));
}

static void device_close(device_run *d, const ckpt_eng_networks *networks)
{
    networks->close(&d->net);
    ckpt_eng_release(&d->e);
    ckpt_eng_device_close(&d->device);
}

static double relative_rms(const float *a, const float *b, int64_t n)
{
    double diff = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return diff == 0 ? 0 : size > 0 ? sqrt(diff / size) : INFINITY;
}

typedef struct fixture {
    const char *path;
    int64_t B, S;
    double latent_eps;
    bool recompute;
} fixture;

static const fixture fixtures[] = {
    {"hf/kimi_linear_tiny", 1, 70, 0,    false},
    {"hf/deepseek_v3_tiny", 2, 9,  1e-6, true },
    {"hf/qwen3_next_tiny",  2, 13, 0,    false},
    {"hf/llama_tiny_tied",  3, 7,  0,    false},
    {"mcore/legacy_tp2",    2, 11, 0,    true },
    {"mcore/gpt_mla_mtp",   2, 10, 0,    false},
    {"fla/kda_trained",     2, 9,  0,    true }, /* heads of 64: convolution and norm in one kernel */
};

/* f32: products and sums are of the same numbers in another order, so what separates the two is rounding:
 * 2^-24 a sum, some thousand of them from tokens to gradients. bf16: 2^-9 each. */
#define LOGITS_F32 2e-5
#define GRADS_F32 2e-4
/* Of a GDN head's one decay: on a device a sum over as many channels as the key has, of either sign. */
#define DECAY_F32 1e-3

static double allowed(const char *name, double grads)
{
    const bool decay = strstr(name, ".gdn.A_log") != NULL || strstr(name, ".gdn.dt_bias") != NULL;
    return decay && grads < DECAY_F32 ? DECAY_F32 : grads;
}

static void run_both(int i, const ckpt_eng_networks *networks, double logits, double grads)
{
    const fixture *f = &fixtures[i];
    char path[256];
    model_run m;
    device_run d;
    snprintf(path, sizeof path, CKPT_FIXTURES "/%s", f->path);
    model_open(&m, path, f->latent_eps);
    const model_tokens t = model_random_tokens(f->B, f->S, m.net.spec.V);
    const ENG(batch) batch = {&t.seq, t.ids, t.labels};
    m.run = (ENG(run)){.backward = true, .recompute = f->recompute, .mtp_coef = 0.1};
    model_pass(&m, &batch);
    device_open(&d, &m, networks, f->latent_eps);
    d.run = m.run;
    device_pass(&d, networks, &batch);
    double far = relative_rms(d.logits, m.logits, m.T * m.net.spec.V);
    ck_assert_msg(far <= logits, "%s: logits %g", f->path, far);
    ck_assert_double_eq_tol(d.run.loss, m.run.loss, logits * 10);
    ck_assert_double_eq_tol(d.run.mtp_loss, m.run.mtp_loss, logits * 10);
    for (size_t k = 0; k < m.net.n_params; k++) {
        const ENG(param) *p = &m.net.params[k], *q = &d.net.params[k];
        if (p->grad == NULL)
            continue;
        far = relative_rms(d.grads + q->at, p->grad, p->n);
        ck_assert_msg(far <= allowed(p->name, grads), "%s: gradient of %s: %g", f->path, p->name,
                      far);
    }
    device_close(&d, networks);
    model_close(&m);
}

START_TEST(model_cuda_f32_matches_cpu)
{
    run_both(_i, &ckpt_eng_networks_d32, LOGITS_F32, GRADS_F32);
}
END_TEST

Suite *suite_model_cuda(void);
Suite *suite_model_cuda(void)
{
    Suite *s = suite_create("model_cuda");
    TCase *t = tcase_create("model");
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, model_cuda_f32_matches_cpu, 0,
                        (int)(sizeof fixtures / sizeof *fixtures));
    suite_add_tcase(s, t);
    return s;
}
