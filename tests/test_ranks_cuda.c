/* Models on several devices against one: the emulator's kernels, ranks that are processes, NCCL's place
 * taken by tests/gpu/fake_nccl.c, or pinned memory where ranks share a card. */
#include "gpu/ranks_case.h"

#include "gpu/fake_nccl.h"

#include <check.h>

typedef struct mesh_case {
    const char *path;
    int64_t B; /* sequences */
    ranks_mesh mesh;
    bool bf16, share;
} mesh_case;

#define KIMI CKPT_FIXTURES "/hf/kimi_linear_tiny"
#define KDA CKPT_FIXTURES "/mcore/legacy_tp2"
#define FLA CKPT_FIXTURES "/fla/kda_trained"
#define MTP CKPT_FIXTURES "/hf/deepseek_mtp_tiny"
#define QWEN CKPT_FIXTURES "/hf/qwen3_next_mtp_tiny"
#define ARCEE CKPT_FIXTURES "/hf/arcee_kda_tiny"
#define LLAMA CKPT_FIXTURES "/hf/llama_tiny_tied"

/* clang-format off */
static const mesh_case cases[] = {
    {KIMI,  2, {"tp 2", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},               false, false},
    {KIMI,  3, {"cp 2", 1, 2, 1, 1, CKPT_ENG_CP_HEADS},               false, false},
    {KIMI,  2, {"dp 2", 1, 1, 2, 1, CKPT_ENG_CP_HEADS},               false, true },
    {LLAMA, 2, {"tp 2 cp 2", 2, 2, 1, 1, CKPT_ENG_CP_HEADS},          false, false},
    {LLAMA, 2, {"cp 2, bf16", 1, 2, 1, 1, CKPT_ENG_CP_HEADS},         true,  false},
    {KDA,   2, {"tp 2, bf16", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},         true,  false},
    {KIMI,  3, {"cp 2 chunks", 1, 2, 1, 1, CKPT_ENG_CP_CHUNKS},       false, false},
    {LLAMA, 3, {"cp 2 chunks, bf16", 1, 2, 1, 1, CKPT_ENG_CP_CHUNKS}, true,  false},
    {ARCEE, 1, {"cp 2 chunks, bf16", 1, 2, 1, 1, CKPT_ENG_CP_CHUNKS}, true,  true },
    {KIMI,  2, {"ep 2", 1, 1, 2, 2, CKPT_ENG_CP_HEADS},               false, false},
    {KIMI,  1, {"cp 4 chunks ep 4", 1, 4, 1, 4, CKPT_ENG_CP_CHUNKS},  false, false},
    {MTP,   3, {"cp 2 chunks, mtp", 1, 2, 1, 2, CKPT_ENG_CP_CHUNKS},  false, false},
    {FLA,   1, {"cp 2 chunks, fla", 1, 2, 1, 1, CKPT_ENG_CP_CHUNKS},  false, false},
    {QWEN,  1, {"tp 2 cp 2 chunks", 2, 2, 1, 2, CKPT_ENG_CP_CHUNKS},  false, false},
};
/* clang-format on */

/* f32: partial sums of ranks are added in another order, and nothing else differs. */
#define LIMIT 1e-5

/* Relative RMS of all gradients together. */
static double distance(const ranks_out *a, const ranks_out *b)
{
    double diff = 0, size = 0;
    for (int64_t i = 0; i < b->n; i++) {
        double d = (double)a->grads[i] - (double)b->grads[i];
        diff += d * d;
        size += (double)b->grads[i] * (double)b->grads[i];
    }
    return sqrt(diff / size);
}

/* bf16: rounding falls elsewhere (chunks begin at other tokens), so a mesh is as good as one device when it
 * is as near to f32: what rounds as often has errors of one size, of which each is one draw. */
static void as_near_to_f32(const mesh_case *c, ranks_job j, const ranks_out *one,
                           const ranks_out *all)
{
    ranks_out *f32 = ranks_room(c->path);
    ck_assert(f32 != NULL);
    j.bf16 = false;
    j.mesh = (ranks_mesh){"one", 1, 1, 1, 1, CKPT_ENG_CP_HEADS};
    ranks_go(&j, f32);
    ck_assert_msg(f32->ok, "f32: %s", f32->said);
    double near = distance(one, f32), far = distance(all, f32);
    ck_assert_msg(far <= 1.5 * near, "%s: %g from f32, one device %g", c->mesh.name, far, near);
    ck_assert_msg(fabs(all->loss - f32->loss) <= 5e-3 * f32->loss, "%s: loss %g, f32 %g",
                  c->mesh.name, all->loss, f32->loss);
    munmap(f32, f32->bytes);
}

START_TEST(ranks_cuda_mesh_equals_one_device)
{
    const mesh_case *c = &cases[_i];
    ranks_job j = {
        .path = c->path,
        .B = c->B,
        .S = 42 / c->B,
        .mesh = {"one", 1, 1, 1, 1, CKPT_ENG_CP_HEADS},
        .bf16 = c->bf16,
        .share = c->share,
        .library = fake_nccl()
    };
    ranks_out *one = ranks_room(c->path), *all = ranks_room(c->path);
    ck_assert(one != NULL && all != NULL);
    ranks_go(&j, one);
    ck_assert_msg(one->ok, "one device: %s", one->said);
    j.mesh = c->mesh;
    ranks_go(&j, all);
    ck_assert_msg(all->ok, "%s: %s", c->mesh.name, all->said);
    ck_assert_msg(strstr(all->way, c->share ? "share a GPU" : "NCCL") != NULL, "%s", all->way);
    if (c->bf16) {
        as_near_to_f32(c, j, one, all);
    } else {
        ck_assert_msg(fabs(all->loss - one->loss) <= LIMIT * one->loss, "%s: loss %g, %g",
                      c->mesh.name, all->loss, one->loss);
        ck_assert_msg(ranks_far(all, one) <= LIMIT, "%s: gradients differ by %g", c->mesh.name,
                      ranks_far(all, one));
    }
    munmap(one, one->bytes);
    munmap(all, all->bytes);
}
END_TEST

Suite *suite_ranks_cuda(void);
Suite *suite_ranks_cuda(void)
{
    Suite *s = suite_create("ranks_cuda");
    TCase *t = tcase_create("ranks_cuda");
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, ranks_cuda_mesh_equals_one_device, 0,
                        (int)(sizeof cases / sizeof *cases));
    suite_add_tcase(s, t);
    return s;
}
