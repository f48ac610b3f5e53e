/* Central differences against the backward of the operations at both ends of a model: loss, embedding,
 * rotation; f64. */
#define CKPT_REAL 64
#include "attn.h"
#include "engine_scene.h"
#include "moe.h"

#define ROWS 21
#define N 7

/* Weighted losses of tokens, one of them without a label. */
static const int32_t xent_labels[ROWS] = {1, 0, -1, 6, 3};

static void xent_forward(scene *s)
{
    OK(ENG(xent)(&engine, ROWS, N, s->in[0].x, xent_labels, s->d_out, s->out, NULL, &error));
}

static void xent_backward(scene *s)
{
    OK(ENG(xent)(&engine, ROWS, N, s->in[0].x, xent_labels, s->d_out, zeros(ROWS), s->in[0].grad,
                 &error));
}

static void make_xent(scene *s)
{
    add_input(s, "logits", ROWS * N, -3, 3);
    add_output(s, ROWS);
    s->forward = xent_forward;
    s->backward = xent_backward;
}

static const int32_t embed_ids[ROWS] = {4, 4, 0, 3, 1, 4, 2};

static void embed_forward(scene *s)
{
    OK(ENG(embed)(&engine, ROWS, 5, N, embed_ids, s->in[0].x, s->out, &error));
}

static void embed_backward(scene *s)
{
    OK(ENG(embed_bwd)(&engine, ROWS, 5, N, embed_ids, s->d_out, s->in[0].grad, &error));
}

static void make_embed(scene *s)
{
    add_input(s, "table", 5 * N, -1, 1);
    add_output(s, ROWS * N);
    s->forward = embed_forward;
    s->backward = embed_backward;
}

/* Interleaved, half-split, and YaRN with its factor; one channel of seven is not rotated. */
static void rope_run(const scene *s, const real *x, real *y, bool inverse)
{
    const ckpt_eng_rope r = {.kind = s->variant == 2 ? CKPT_ENG_ROPE_YARN : CKPT_ENG_ROPE_PLAIN,
                             .interleaved = s->variant != 1,
                             .dim = 6,
                             .base = 100,
                             .factor = 4,
                             .original_max = 8,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .mscale = 1,
                             .mscale_all_dim = 0.5};
    const int64_t cu[] = {0, 5, ROWS / 3};
    const ckpt_eng_seq seq = {2, cu};
    real *cos = zeros(ROWS), *sin = zeros(ROWS);
    OK(ENG(rope_table)(&engine, &r, &seq, NULL, cos, sin, &error));
    memcpy(y, x, sizeof(real) * ROWS * N);
    OK(ENG(rope)(&engine, &r, ROWS / 3, 3, y, 3 * N, N, cos, sin, inverse, &error));
}

static void rope_forward(scene *s)
{
    rope_run(s, s->in[0].x, s->out, false);
}

static void rope_backward(scene *s)
{
    rope_run(s, s->d_out, s->in[0].grad, true);
}

static void make_rope(scene *s, int variant)
{
    s->variant = variant;
    add_input(s, "x", ROWS * N, -1, 1); /* 7 tokens, 3 heads, 7 channels */
    add_output(s, ROWS * N);
    s->forward = rope_forward;
    s->backward = rope_backward;
}

START_TEST(xent_backward_is_the_derivative)
{
    scene s = {0};
    make_xent(&s);
    check_scene(&s);
}
END_TEST

START_TEST(embed_backward_is_the_derivative)
{
    scene s = {0};
    make_embed(&s);
    check_scene(&s);
}
END_TEST

START_TEST(rope_backward_is_the_derivative)
{
    scene s = {0};
    make_rope(&s, _i);
    check_scene(&s);
}
END_TEST

Suite *suite_engine_loss(void);
Suite *suite_engine_loss(void)
{
    Suite *s = suite_create("engine_loss");
    TCase *tc = tcase_create("all");
    tcase_add_checked_fixture(tc, set_up, tear_down);
    tcase_add_test(tc, xent_backward_is_the_derivative);
    tcase_add_test(tc, embed_backward_is_the_derivative);
    tcase_add_loop_test(tc, rope_backward_is_the_derivative, 0, 3);
    suite_add_tcase(s, tc);
    return s;
}
