/* Models on several devices against one: the emulator's kernels, ranks that are processes, NCCL's place
 * taken by tests/gpu/fake_nccl.c, or pinned memory where ranks share a card. */
#include "gpu/ranks_case.h"

#include "gpu/fake_nccl.h"

#include <check.h>

typedef struct mesh_case {
    const char *path;
    ranks_mesh mesh;
    bool bf16, share;
} mesh_case;

#define KIMI CKPT_FIXTURES "/hf/kimi_linear_tiny"
#define KDA CKPT_FIXTURES "/mcore/legacy_tp2"
#define LLAMA CKPT_FIXTURES "/hf/llama_tiny_tied"

/* clang-format off */
static const mesh_case cases[] = {
    {KIMI,  {"tp 2", 2, 1, 1, 1, CKPT_ENG_CP_HEADS},       false, false},
    {KIMI,  {"cp 2", 1, 2, 1, 1, CKPT_ENG_CP_HEADS},       false, false},
    {KIMI,  {"dp 2", 1, 1, 2, 1, CKPT_ENG_CP_HEADS},       false, true },
    {LLAMA, {"tp 2 cp 2", 2, 2, 1, 1, CKPT_ENG_CP_HEADS},  false, false},
    {LLAMA, {"cp 2, bf16", 1, 2, 1, 1, CKPT_ENG_CP_HEADS}, true,  false},
    {KDA,   {"tp 2, bf16", 2, 1, 1, 1, CKPT_ENG_CP_HEADS}, true,  false},
};
/* clang-format on */

/* Partial sums of ranks are added in another order, and in bf16 rounded where one device does not (models
 * with routers would choose other experts there). */
static double limit(const mesh_case *c)
{
    return c->bf16 ? 0.1 : 1e-4;
}

START_TEST(ranks_cuda_mesh_equals_one_device)
{
    const mesh_case *c = &cases[_i];
    ranks_job j = {
        .path = c->path,
        .B = 2,
        .S = 21,
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
    ck_assert_msg(fabs(all->loss - one->loss) <= limit(c) * one->loss, "%s: loss %g, %g",
                  c->mesh.name, all->loss, one->loss);
    ck_assert_msg(ranks_far(all, one) <= limit(c), "%s: gradients differ by %g", c->mesh.name,
                  ranks_far(all, one));
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
