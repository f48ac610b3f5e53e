/* Tensors on a device (load.h, emulated): every byte and leaf hash, of containers, cuts and types, in pieces
 * smaller than tensors; what fails names the tensor. */
#include <check.h>
#include <unistd.h>

#include "gpu/load_case.h"

static ckpt_eng_device device;
static ckpt_err error;
static char path[] = "/tmp/ckpt_load_XXXXXX.safetensors";

#define OK(call) ck_assert_msg((call) == CKPT_OK, "%s", error.text)

/* Every bf16 number 24 times and three more; floats over two pieces; what is small, and nothing. */
enum { BF16 = 24 * 65536 + 3, F32 = 700001, F16 = 65536, I32 = 5 };
static const size_t bytes_of[] = {
    2 * (size_t)BF16, 4 * (size_t)F32, 2 * (size_t)F16, 4 * (size_t)I32, 0, 2};

static void write_file(void)
{
    char header[1024];
    size_t at[7] = {0};
    for (int i = 0; i < 6; i++)
        at[i + 1] = at[i] + bytes_of[i];
    int n = snprintf(header, sizeof header,
                     "{\"a\":{\"dtype\":\"BF16\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]},"
                     "\"b\":{\"dtype\":\"F32\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]},"
                     "\"c\":{\"dtype\":\"F16\",\"shape\":[256,256],\"data_offsets\":[%zu,%zu]},"
                     "\"d\":{\"dtype\":\"I32\",\"shape\":[%d],\"data_offsets\":[%zu,%zu]},"
                     "\"e\":{\"dtype\":\"BF16\",\"shape\":[3,0],\"data_offsets\":[%zu,%zu]},"
                     "\"f\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[%zu,%zu]}}",
                     BF16, at[0], at[1], F32, at[1], at[2], at[2], at[3], I32, at[3], at[4], at[4],
                     at[5], at[5], at[6]);
    uint8_t length[8] = {(uint8_t)(n & 255), (uint8_t)(n >> 8)};
    int fd = mkstemps(path, 12);
    FILE *f = fdopen(fd, "wb");
    ck_assert_ptr_nonnull(f);
    fwrite(length, 1, 8, f);
    fwrite(header, 1, (size_t)n, f);
    for (uint32_t i = 0; i < at[6] / 2; i++) { /* the first tensor's counts, the others' is mixed */
        uint32_t v = i < BF16 ? i : i * 2654435761U >> 13;
        fputc((int)(v & 255), f);
        fputc((int)(v >> 8 & 255), f);
    }
    ck_assert_int_eq(fclose(f), 0);
}

static void set_up(void)
{
    write_file();
    OK(ckpt_eng_device_open(&device, &ckpt_cuda_plugin_v1, 0, &error));
}

static void tear_down(void)
{
    ckpt_eng_device_close(&device);
    unlink(path);
    memcpy(strrchr(path, '_') + 1, "XXXXXX", 6);
}

typedef struct way {
    load_form form;
    bool digests;
    int threads;
    size_t piece;
} way;
static const way ways[] = {
    {LOAD_STORED, true,  3, 1 << 20},
    {LOAD_STORED, false, 1, 0      },
    {LOAD_WIDE,   true,  2, 2 << 20},
    {LOAD_WIDE,   false, 4, 0      },
};

START_TEST(load_cuda_pieces_of_tensors_are_what_is_stored)
{
    const way *w = &ways[_i];
    size_t n = 0;
    OK(load_check(&device, w->threads, path, w->form, w->digests, w->piece, &n, &error));
    ck_assert_uint_eq(n, 6);
}
END_TEST

static const char *const checkpoints[] = {
    "hf/kimi_linear_tiny", "mcore/legacy_tp2",  "hf/deepseek_fp8_tiny", "hf/llama_tiny_tied_tp4",
    "torch/mcore_zarr",    "mcore/mp_gpt_bf16", "torch/dcp_fsdp2",      "mcore/gpt_gdn_tp2",
};

START_TEST(load_cuda_containers_are_what_is_stored)
{
    char where[256];
    size_t n = 0;
    snprintf(where, sizeof where, CKPT_FIXTURES "/%s", checkpoints[_i]);
    OK(load_check(&device, 2, where, LOAD_STORED, true, 0, &n, &error));
    ck_assert_uint_gt(n, 4);
    OK(load_check(&device, 2, where, LOAD_WIDE, false, 0, &n, &error));
}
END_TEST

/* A file that is cut after it was opened. */
START_TEST(load_cuda_lost_bytes_name_the_tensor)
{
    load_case c;
    OK(load_open(&c, &device, 2, path, LOAD_STORED, false, &error));
    ck_assert_int_eq(truncate(path, (off_t)(2 * (size_t)BF16 + 4096)), 0);
    ck_assert_int_ne(ckpt_eng_load(&c.e, &c.src, c.items, c.n, NULL, &error), CKPT_OK);
    ck_assert_msg(strstr(error.text, "tensor b") != NULL, "%s", error.text);
    const ckpt_eng_load_opts small = {.piece = 4096};
    ck_assert_int_eq(ckpt_eng_load(&c.e, &c.src, c.items, c.n, &small, &error), CKPT_E_USAGE);
    load_close(&c);
}
END_TEST

START_TEST(load_cuda_digests_without_a_manifest_are_an_error)
{
    load_case c;
    OK(load_open(&c, &device, 2, CKPT_FIXTURES "/hf/kimi_linear_tiny", LOAD_STORED, true, &error));
    OK(ckpt_eng_load(&c.e, &c.src, c.items, c.n, NULL, &error));
    ck_assert_int_eq(load_digests(&c, &error), CKPT_E_FORMAT); /* it has no manifest */
    load_close(&c);
}
END_TEST

Suite *suite_load_cuda(void);
Suite *suite_load_cuda(void)
{
    Suite *s = suite_create("load_cuda");
    TCase *t = tcase_create("load");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, set_up, tear_down);
    tcase_add_loop_test(t, load_cuda_pieces_of_tensors_are_what_is_stored, 0,
                        (int)(sizeof ways / sizeof *ways));
    tcase_add_loop_test(t, load_cuda_containers_are_what_is_stored, 0,
                        (int)(sizeof checkpoints / sizeof *checkpoints));
    tcase_add_test(t, load_cuda_lost_bytes_name_the_tensor);
    tcase_add_test(t, load_cuda_digests_without_a_manifest_are_an_error);
    suite_add_tcase(s, t);
    return s;
}
