/* Products through cuBLASLt, loaded when the first ckpt_cuda_gemm is opened, so that a program without the
 * library starts and says so.
 *
 * cuBLASLt is column-major: a row-major C [m, n] = op(A) op(B) is its C^T [n, m] = op(B)^T op(A)^T, whose
 * operands are the stored arrays themselves, B first. Its bias then runs along C's columns, as ours.
 * An entry of the cache is one shape: descriptors and the first algorithm that the heuristics name with a
 * fixed workspace. Only reductions in f32 in the workspace are allowed, whose order is fixed.
 * The bias of a bf16 C is bf16: the library answers CUBLAS_STATUS_INVALID_VALUE to an f32 one. It is
 * rounded into the end of the workspace beforehand.
 * Whatever the library does not name an algorithm for, or refuses before it starts, is left to others.
 * Source: cuBLAS documentation, cublasLtMatmul (its table of types, column "Bias type") and
 * cublasLtMatmulAlgoGetHeuristic. */
#include "gemm_internal.cuh"

#include <new>
#include <stdio.h>

#if !defined(CKPT_CUDA_EMULATE) && __has_include(<cublasLt.h>)

#include <cublasLt.h>
#include <dlfcn.h>
#include <string.h>

using kda::bf16;
using kda::ceil_div;
using kda::THREADS;

namespace
{

constexpr size_t WORKSPACE = (size_t)64 << 20; /* bytes */
constexpr int64_t BIAS = (int64_t)1 << 18;     /* elements of a bf16 bias at most, behind it */
constexpr int SHAPES = 2048;                   /* kept at most */

#define LT_FUNCTIONS(X)                                                                            \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)

struct functions {
#define X(name) decltype(&::name) name;
    LT_FUNCTIONS(X)
#undef X
};

/* What an algorithm depends on. Pointers count by their alignment, up to 256 bytes. */
struct shape {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t ta, tb, add, bias, a_type, b_type, c_type;
    uint32_t a_align, b_align, c_align;
};

struct entry {
    shape key;
    bool able;
    cublasLtMatmulDesc_t what;
    cublasLtMatrixLayout_t a, b, c; /* a: the library's first, our B */
    cublasLtMatmulAlgo_t algo;
    entry *next;
};

uint32_t alignment(const void *p)
{
    const uintptr_t at = (uintptr_t)p | 256;
    return (uint32_t)(at & (~at + 1));
}
shape shape_of(const ckpt_cuda_product *p)
{
    shape s;
    memset(&s, 0, sizeof s); /* keys are compared as bytes */
    s.m = p->m, s.n = p->n, s.k = p->k, s.lda = p->lda, s.ldb = p->ldb, s.ldc = p->ldc;
    s.ta = p->ta, s.tb = p->tb, s.add = p->add, s.bias = p->bias != NULL;
    s.a_type = p->a_type, s.b_type = p->b_type, s.c_type = p->c_type;
    s.a_align = alignment(p->a), s.b_align = alignment(p->b), s.c_align = alignment(p->c);
    return s;
}
cudaDataType_t data_type(ckpt_cuda_type t)
{
    return t == CKPT_CUDA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

} // namespace

struct ckpt_cuda_lt {
    functions f;
    void *library, *workspace;
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    entry *entries; /* the last used first */
    int count;
};

namespace
{

KERNEL(THREADS, 1) round_bias(const float *bias, int64_t n, bf16 *out)
{
    const int64_t i = kda::index_of();
    if (i < n)
        out[i] = kda::cast<bf16>(bias[i]);
}
/* What the library reads of p's bias, on the device. */
const void *bias_of(const ckpt_cuda_lt *lt, const ckpt_cuda_product *p)
{
    return p->c_type == CKPT_CUDA_BF16 ? (const char *)lt->workspace + WORKSPACE
                                       : (const void *)p->bias;
}

void drop(ckpt_cuda_lt *lt, entry *e)
{
    if (e->a)
        lt->f.cublasLtMatrixLayoutDestroy(e->a);
    if (e->b)
        lt->f.cublasLtMatrixLayoutDestroy(e->b);
    if (e->c)
        lt->f.cublasLtMatrixLayoutDestroy(e->c);
    if (e->what)
        lt->f.cublasLtMatmulDescDestroy(e->what);
    delete e;
}

ckpt_status failed(const char *what, int code, ckpt_err *err)
{
    return ckpt_fail(err, CKPT_E_IO, "cuBLASLt: %s: status %d", what, code);
}

/* Descriptors of a product. Stored arrays: A [m, k] or [k, m], seen by the library transposed. */
cublasStatus_t describe(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, entry *e)
{
    const functions &f = lt->f;
    const cublasOperation_t first = p->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = p->ta ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t s = f.cublasLtMatmulDescCreate(&e->what, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = f.cublasLtMatmulDescSetAttribute(e->what, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                             sizeof first);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = f.cublasLtMatmulDescSetAttribute(e->what, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                             sizeof second);
    if (s == CUBLAS_STATUS_SUCCESS && p->bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        const cudaDataType_t type = data_type(p->c_type);
        s = f.cublasLtMatmulDescSetAttribute(e->what, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                             sizeof epilogue);
        if (s == CUBLAS_STATUS_SUCCESS)
            s = f.cublasLtMatmulDescSetAttribute(e->what, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                                 &type, sizeof type);
    }
    if (s == CUBLAS_STATUS_SUCCESS)
        s = f.cublasLtMatrixLayoutCreate(&e->a, data_type(p->b_type),
                                         (uint64_t)(p->tb ? p->k : p->n),
                                         (uint64_t)(p->tb ? p->n : p->k), p->ldb);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = f.cublasLtMatrixLayoutCreate(&e->b, data_type(p->a_type),
                                         (uint64_t)(p->ta ? p->m : p->k),
                                         (uint64_t)(p->ta ? p->k : p->m), p->lda);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = f.cublasLtMatrixLayoutCreate(&e->c, data_type(p->c_type), (uint64_t)p->n,
                                         (uint64_t)p->m, p->ldc);
    return s;
}

/* The heuristics' first algorithm; e->able tells whether there is one. */
void choose(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, entry *e)
{
    const functions &f = lt->f;
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    const struct {
        cublasLtMatmulPreferenceAttributes_t which;
        const uint32_t *bytes;
    } aligned[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &e->key.b_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &e->key.a_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &e->key.c_align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &e->key.c_align}
    };
    if (p->bias && p->c_type == CKPT_CUDA_BF16 && p->n > BIAS)
        return;
    cublasStatus_t s = describe(lt, p, e);
    for (const auto &a : aligned)
        if (s == CUBLAS_STATUS_SUCCESS)
            s = f.cublasLtMatmulPreferenceSetAttribute(lt->preference, a.which, a.bytes,
                                                       sizeof *a.bytes);
    if (s == CUBLAS_STATUS_SUCCESS && p->bias) {
        const void *bias = bias_of(lt, p);
        s = f.cublasLtMatmulDescSetAttribute(e->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                             sizeof bias);
    }
    if (s == CUBLAS_STATUS_SUCCESS)
        s = f.cublasLtMatmulAlgoGetHeuristic(lt->handle, e->what, e->a, e->b, e->c, e->c,
                                             lt->preference, 1, &best, &found);
    e->able = s == CUBLAS_STATUS_SUCCESS && found > 0 && best.state == CUBLAS_STATUS_SUCCESS;
    if (e->able)
        e->algo = best.algo;
}
/* Refused before anything ran, by a check of the library. */
bool refused(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE ||
           s == CUBLAS_STATUS_ARCH_MISMATCH;
}

/* The entry of a product, moved to the front; NULL if it is not known. */
entry *known(ckpt_cuda_lt *lt, const shape &key)
{
    for (entry **at = &lt->entries; *at; at = &(*at)->next)
        if (memcmp(&(*at)->key, &key, sizeof key) == 0) {
            entry *e = *at;
            *at = e->next;
            e->next = lt->entries;
            lt->entries = e;
            return e;
        }
    return NULL;
}
/* Room for one more: without the entry that was used longest ago. */
void make_room(ckpt_cuda_lt *lt)
{
    entry **at = &lt->entries;
    if (lt->count < SHAPES)
        return;
    while ((*at)->next)
        at = &(*at)->next;
    drop(lt, *at);
    *at = NULL;
    lt->count--;
}

bool load(ckpt_cuda_lt *lt)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
    for (const char *name : names)
        if (!lt->library)
            lt->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!lt->library)
        return false;
#define X(name)                                                                                    \
    lt->f.name = (decltype(&::name))dlsym(lt->library, #name);                                     \
    if (!lt->f.name)                                                                               \
        return false;
    LT_FUNCTIONS(X)
#undef X
    return lt->f.cublasLtGetVersion() / 10000 >= 12; /* what the names and types above are of */
}

ckpt_status start(ckpt_cuda_lt *lt, ckpt_err *err)
{
    const uint64_t bytes = WORKSPACE;
    const uint32_t reductions =
        CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t s = lt->f.cublasLtCreate(&lt->handle);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt->f.cublasLtMatmulPreferenceCreate(&lt->preference);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt->f.cublasLtMatmulPreferenceSetAttribute(
            lt->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt->f.cublasLtMatmulPreferenceSetAttribute(lt->preference,
                                                       CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                       &reductions, sizeof reductions);
    if (s != CUBLAS_STATUS_SUCCESS)
        return failed("starting", (int)s, err);
    const cudaError_t e = cudaMalloc(&lt->workspace, WORKSPACE + (size_t)BIAS * sizeof(bf16));
    if (e != cudaSuccess)
        return ckpt_fail(err, CKPT_E_NOMEM, "cuBLASLt: workspace of %zu bytes: %s", WORKSPACE,
                         cudaGetErrorString(e));
    return CKPT_OK;
}

} // namespace

void kda::lt_close(ckpt_cuda_lt *lt)
{
    if (!lt)
        return;
    while (lt->entries) {
        entry *next = lt->entries->next;
        drop(lt, lt->entries);
        lt->entries = next;
    }
    if (lt->preference)
        lt->f.cublasLtMatmulPreferenceDestroy(lt->preference);
    if (lt->handle)
        lt->f.cublasLtDestroy(lt->handle);
    (void)cudaFree(lt->workspace);
    if (lt->library)
        dlclose(lt->library);
    delete lt;
}

ckpt_status kda::lt_open(ckpt_cuda_lt **to, char *name, size_t size, ckpt_err *err)
{
    *to = NULL;
    ckpt_cuda_lt *lt = new (std::nothrow) ckpt_cuda_lt();
    if (!lt)
        return ckpt_fail(err, CKPT_E_NOMEM, "cuBLASLt: no memory");
    if (!load(lt)) {
        lt_close(lt);
        return CKPT_OK;
    }
    const ckpt_status status = start(lt, err);
    if (status != CKPT_OK) {
        lt_close(lt);
        return status;
    }
    (void)snprintf(name, size, "cuBLASLt %zu", lt->f.cublasLtGetVersion());
    *to = lt;
    return CKPT_OK;
}

ckpt_status kda::lt_plan(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, bool *able, ckpt_err *err)
{
    const shape key = shape_of(p);
    entry *e = known(lt, key);
    if (!e) {
        make_room(lt);
        e = new (std::nothrow) entry();
        if (!e)
            return ckpt_fail(err, CKPT_E_NOMEM, "cuBLASLt: no memory");
        e->key = key;
        choose(lt, p, e);
        e->next = lt->entries;
        lt->entries = e;
        lt->count++;
    }
    *able = e->able;
    return CKPT_OK;
}

ckpt_status kda::lt_run(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, kda::device_stream stream,
                        bool *done, ckpt_err *err)
{
    const float one = 1, beta = p->add ? 1 : 0;
    entry *e = known(lt, shape_of(p));
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    *done = false;
    if (!e || !e->able)
        return CKPT_OK;
    if (p->bias) {
        const void *bias = bias_of(lt, p);
        s = lt->f.cublasLtMatmulDescSetAttribute(e->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
                                                 sizeof bias);
        if (bias != p->bias)
            LAUNCH(round_bias, ceil_div(p->n, THREADS), THREADS, 0, stream, p->bias, p->n,
                   (bf16 *)bias);
        const ckpt_status status = kda::launched("bias", err);
        if (status != CKPT_OK)
            return status;
    }
    if (s == CUBLAS_STATUS_SUCCESS)
        s = lt->f.cublasLtMatmul(lt->handle, e->what, &one, p->b, e->a, p->a, e->b, &beta, p->c,
                                 e->c, p->c, e->c, &e->algo, lt->workspace, WORKSPACE, stream);
    *done = s == CUBLAS_STATUS_SUCCESS;
    if (refused(s))
        e->able = false;
    return *done || refused(s) ? CKPT_OK : failed("a product", (int)s, err);
}

#elif defined(CKPT_CUDA_EMULATE)

/* In the library's place, on the CPU: its rules as far as the choice in gemm.cu turns on them, so that
 * every branch of it runs. Widths that are no multiples of 8 have no algorithm with a bias; odd ones
 * have none; of 24 columns it refuses only when it should run. */
struct ckpt_cuda_lt {
    int unused;
};
ckpt_status kda::lt_open(ckpt_cuda_lt **lt, char *name, size_t size, ckpt_err *err)
{
    *lt = new (std::nothrow) ckpt_cuda_lt();
    (void)snprintf(name, size, "rules of cuBLASLt");
    return *lt ? CKPT_OK : ckpt_fail(err, CKPT_E_NOMEM, "cuBLASLt: no memory");
}
void kda::lt_close(ckpt_cuda_lt *lt)
{
    delete lt;
}
ckpt_status kda::lt_plan(ckpt_cuda_lt *, const ckpt_cuda_product *p, bool *able, ckpt_err *)
{
    const bool types = p->a_type == CKPT_CUDA_BF16 || p->c_type == CKPT_CUDA_F32;
    *able = types && p->n % 2 == 0 && (!p->bias || p->n % 8 == 0);
    return CKPT_OK;
}
ckpt_status kda::lt_run(ckpt_cuda_lt *lt, const ckpt_cuda_product *p, kda::device_stream,
                        bool *done, ckpt_err *err)
{
    const ckpt_status status = lt_plan(lt, p, done, err);
    *done = *done && p->n != 24;
    const ckpt_cuda_product own = *p;
    if (*done)
        emu::perform([=] { plain_loops(&own); });
    return status;
}

#else /* built without cuBLASLt's header */

struct ckpt_cuda_lt {
    int unused;
};
ckpt_status kda::lt_open(ckpt_cuda_lt **lt, char *, size_t, ckpt_err *)
{
    *lt = NULL;
    return CKPT_OK;
}
void kda::lt_close(ckpt_cuda_lt *)
{
}
ckpt_status kda::lt_plan(ckpt_cuda_lt *, const ckpt_cuda_product *, bool *able, ckpt_err *)
{
    *able = false;
    return CKPT_OK;
}
ckpt_status kda::lt_run(ckpt_cuda_lt *, const ckpt_cuda_product *, kda::device_stream, bool *done,
                        ckpt_err *)
{
    *done = false;
    return CKPT_OK;
}

#endif
