/* The allow-list: globals that checkpoints of PyTorch, DCP and Megatron consist of, all of them
 * plain data classes or reconstruction functions that the readers here imitate. Nothing on the
 * list is ever called either; being listed only means that `verify` and `convert` need not refuse
 * the file. Sources: torch-formats.md sections 1-4, megatron/core/safe_globals.py. */
#include "pickle_internal.h"

#include <stdlib.h>
#include <string.h>

#include "dtype.h"

typedef struct allow_row {
    const char *module; /* a trailing '.' matches every module below */
    const char *names;  /* space-separated; a leading "*": also any name starting in upper case */
} allow_row;

#define CLASSES "*"

/* clang-format off */
static const allow_row allow[] = {
    {"argparse", "Namespace"},
    {"types", "SimpleNamespace"},
    {"collections", "OrderedDict defaultdict Counter deque UserDict UserList"},
    {"pathlib", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"},
    {"pathlib._local", "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"},
    {"builtins", "list dict set frozenset tuple int float complex str bytes bytearray bool object range slice getattr"},
    {"__builtin__", "list dict set frozenset tuple int long float complex str unicode bytes bytearray bool object xrange slice getattr"},
    {"copyreg", "_reconstructor __newobj__ __newobj_ex__"},
    {"copy_reg", "_reconstructor __newobj__ __newobj_ex__"},
    {"datetime", "datetime date time timedelta timezone"},
    {"_codecs", "encode"},
    {"_io", "BytesIO StringIO"},
    {"io", "BytesIO StringIO"},
    {"functools", "partial"},
    {"signal", "Signals"},
    {"decimal", "Decimal"},
    {"fractions", "Fraction"},
    {"uuid", "UUID SafeUUID"},
    {"numpy", "ndarray dtype bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 longlong ulonglong intc uintc str_ bytes_ void datetime64 timedelta64"},
    {"numpy.core.multiarray", "_reconstruct scalar"},
    {"numpy._core.multiarray", "_reconstruct scalar"},
    {"numpy.core.numeric", "_frombuffer"},
    {"numpy._core.numeric", "_frombuffer"},
    {"numpy.dtypes", CLASSES},
    {"numpy.random._pickle", "__randomstate_ctor __bit_generator_ctor __generator_ctor"},
    {"numpy.random._mt19937", "MT19937"},
    {"numpy.random._pcg64", "PCG64 PCG64DXSM"},
    {"numpy.random._philox", "Philox"},
    {"numpy.random._sfc64", "SFC64"},
    {"numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"},
    {"torch", "Size Tensor device dtype Generator layout memory_format qscheme strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc "
              "jagged _mkldnn per_tensor_affine per_channel_affine per_tensor_symmetric per_channel_symmetric per_channel_affine_float_qparams "
              "contiguous_format channels_last channels_last_3d preserve_format "
              "qint8 quint8 qint32 quint4x2 quint2x4 half bfloat16 float float16 float32 float64 double int long short uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
              "int1 int2 int3 int4 int5 int6 int7 bits8 bits16 bits1x8 bits2x4 bits4x2 complex32 chalf cfloat cdouble"},
    {"torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter _rebuild_parameter_with_state "
                     "_rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_qtensor _rebuild_meta_tensor_no_storage "
                     "_rebuild_nested_tensor _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy "
                     "_rebuild_device_tensor_from_cpu_tensor _rebuild_xla_tensor torch"},
    {"torch._tensor", "Tensor _rebuild_from_type_v2 _rebuild_from_type"},
    {"torch.tensor", "Tensor _rebuild_from_type"},
    {"torch.storage", "UntypedStorage TypedStorage _UntypedStorage _TypedStorage"},
    {"torch.serialization", "_get_layout"},
    {"torch.torch_version", "TorchVersion"},
    {"torch.nn.parameter", "Parameter Buffer UninitializedParameter UninitializedBuffer"},
    {"torch.nn.modules.", CLASSES},
    {"torch.optim.", CLASSES},
    {"torch.amp.grad_scaler", "GradScaler OptState _refresh_per_optimizer_state"},
    {"torch.cuda.amp.grad_scaler", "GradScaler OptState _refresh_per_optimizer_state"},
    {"torch.distributed.tensor", "DTensor Shard Replicate Partial"},
    {"torch.distributed.tensor._api", "DTensor"},
    {"torch.distributed.tensor.placement_types", "Placement Shard _StridedShard Replicate Partial _Partial"},
    {"torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta ShardOrderEntry"},
    {"torch.distributed._tensor.api", "DTensor"},
    {"torch.distributed._tensor.placement_types", "Placement Shard Replicate _Partial Partial DTensorSpec TensorMeta"},
    {"torch.distributed.device_mesh", "DeviceMesh"},
    {"torch.distributed._mesh_layout", "_MeshLayout"},
    {"torch.distributed._shard.sharded_tensor.api", "ShardedTensor"},
    {"torch.distributed._shard.sharded_tensor.shard", "Shard"},
    {"torch.distributed._shard.sharded_tensor.metadata", "TensorProperties ShardedTensorMetadata MEM_FORMAT_ENCODING"},
    {"torch.distributed._shard.metadata", "ShardMetadata"},
    {"torch.distributed._shard.sharding_spec.api", CLASSES},
    {"torch.distributed._shard.sharding_spec.chunk_sharding_spec", CLASSES},
    {"torch.distributed.remote_device", "_remote_device"},
    {"torch.distributed.checkpoint.metadata", CLASSES " _MEM_FORMAT_ENCODING"},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix SerializationFormat"},
    {"torch.distributed.checkpoint._hf_utils", "_HFStorageInfo"},
    {"torch.distributed.checkpoint.planner", CLASSES},
    {"torch.distributed.checkpoint.default_planner", "_EmptyStateDictLoadPlanner DefaultSavePlanner DefaultLoadPlanner"},
    {"torch.distributed.checkpoint.storage", "WriteResult"},
    {"megatron.core.enums", CLASSES},
    {"megatron.core.transformer.enums", CLASSES},
    {"megatron.core.transformer.cuda_graphs", CLASSES},
    {"megatron.core.transformer.transformer_config", CLASSES},
    {"megatron.core.transformer.heterogeneous.heterogeneous_config", CLASSES},
    {"megatron.core.model_parallel_config", CLASSES},
    {"megatron.core.process_groups_config", CLASSES},
    {"megatron.core.optimizer.optimizer_config", CLASSES},
    {"megatron.core.optimizer", "OptimizerConfig"},
    {"megatron.core.distributed.distributed_data_parallel_config", CLASSES},
    {"megatron.core.rerun_state_machine", CLASSES},
    {"megatron.core.quantization.quant_config", CLASSES},
    {"megatron.core.hyper_comm_grid", CLASSES},
    {"megatron.core.inference.config", CLASSES},
    {"megatron.core.datasets.", CLASSES},
    {"megatron.core.dist_checkpointing.mapping", CLASSES},
    {"megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"},
    {"megatron.core.dist_checkpointing.strategies.checkpointable", CLASSES},
    {"megatron.training.config", CLASSES},
    {"megatron.training.config.", CLASSES},
    {"megatron.training.tokenizer.multimodal_tokenizer", CLASSES},
    {"megatron.training.utils", CLASSES},
    {"megatron.training.training_config", CLASSES},
    {"megatron.model.enums", CLASSES},
};
/* clang-format on */

static bool listed(const char *names, const char *name)
{
    size_t n = strlen(name);
    if (names[0] == '*') {
        if (name[0] >= 'A' && name[0] <= 'Z' && !strchr(name, '.'))
            return true;
        names++;
    }
    for (const char *p = names; (p = strstr(p, name)) != NULL; p += n)
        if ((p == names || p[-1] == ' ') && (p[n] == ' ' || p[n] == 0))
            return true;
    return false;
}

static bool module_matches(const char *row, const char *module)
{
    /* One pass: every item of a checkpoint asks this of all rows. */
    size_t n = 0;
    while (row[n] && row[n] == module[n])
        n++;
    return row[n] == 0 && (module[n] == 0 || row[n - 1] == '.');
}

bool ckpt_pkl_global_known(const char *module, const char *name)
{
    ckpt_dtype dtype;
    if (strchr(name, ' '))
        return false;
    for (size_t i = 0; i < sizeof allow / sizeof *allow; i++)
        if (module_matches(allow[i].module, module) && listed(allow[i].names, name))
            return true;
    size_t n = strlen(name);
    if (strcmp(module, "torch") == 0 || strcmp(module, "torch.cuda") == 0)
        return ckpt_dtype_from_torch(name, &dtype) ||
               (n > 7 && !strchr(name, '.') && strcmp(name + n - 7, "Storage") == 0);
    return false;
}

/* ---- search of a graph ------------------------------------------------------------------------ */

typedef struct walk {
    const ckpt_pkl **stack;
    size_t n, cap;
    uint8_t *seen; /* by node id */
    uint32_t n_nodes;
    ckpt_err *err;
} walk;

static ckpt_status enqueue(walk *w, const ckpt_pkl *p)
{
    if (!p || p->kind == CKPT_PKL_TAKEN || p->id >= w->n_nodes || w->seen[p->id])
        return CKPT_OK;
    w->seen[p->id] = 1;
    ckpt_status status = ckpt_grow((void **)&w->stack, &w->cap, w->n + 1, sizeof *w->stack, w->err);
    if (status == CKPT_OK)
        w->stack[w->n++] = p;
    return status;
}

static ckpt_status enqueue_children(walk *w, const ckpt_pkl *p)
{
    ckpt_status status = CKPT_OK;
    for (size_t i = 0; status == CKPT_OK && i < p->n_items; i++)
        status = enqueue(w, p->items[i]);
    if (p->kind != CKPT_PKL_OBJECT)
        return status;
    for (size_t i = 0; status == CKPT_OK && i < p->n_pairs; i++)
        status = enqueue(w, p->pairs[i]);
    const ckpt_pkl *rest[] = {p->state, p->kwargs, p->args, p->callable};
    for (size_t i = 0; status == CKPT_OK && i < sizeof rest / sizeof *rest; i++)
        status = enqueue(w, rest[i]);
    return status;
}

ckpt_status ckpt_pkl_walk(const ckpt_pkl *root, uint32_t n_nodes, ckpt_pkl_visitor visit,
                          void *context, ckpt_err *err)
{
    walk w = {.n_nodes = n_nodes, .seen = calloc((size_t)n_nodes + 1, 1), .err = err};
    ckpt_status status = w.seen
                             ? enqueue(&w, root)
                             : ckpt_fail(err, CKPT_E_NOMEM, "out of memory for %u nodes", n_nodes);
    while (status == CKPT_OK && w.n) {
        const ckpt_pkl *p = w.stack[--w.n];
        status = visit(context, p);
        if (status == CKPT_OK)
            status = enqueue_children(&w, p);
    }
    free(w.stack);
    free(w.seen);
    return status;
}

typedef struct search {
    ckpt_arena *arena;
    const char *found;
} search;

static ckpt_status check_global(void *context, const ckpt_pkl *p)
{
    search *s = context;
    if (p->kind != CKPT_PKL_GLOBAL || ckpt_pkl_global_known(p->str, p->name))
        return CKPT_OK;
    s->found = ckpt_arena_printf(s->arena, "%s.%s", p->str, p->name);
    return CKPT_E_UNSUPPORTED;
}

const char *ckpt_pkl_unknown_global(const ckpt_pkl *p, uint32_t n_nodes, ckpt_arena *arena,
                                    ckpt_err *err)
{
    search s = {.arena = arena};
    if (!p || (!ckpt_pkl_is_text(p) && p->str))
        return p && p->str[0] ? p->str : NULL;
    if (ckpt_pkl_walk(p, n_nodes, check_global, &s, err) == CKPT_OK)
        return NULL;
    /* Out of memory must not read as "nothing unknown". */
    return s.found ? s.found : "(out of memory)";
}
