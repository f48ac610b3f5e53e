"""Modules that a machine without a GPU lacks, replaced by what the peers need of them there."""
import sys
import types


def module(name, **members):
    sys.modules[name] = made = types.ModuleType(name)
    vars(made).update(members)
    return made


def unified_memory():
    """Megatron-Core before 0.16 compiles this helper with nvcc when it is imported."""
    module("megatron.core.inference.unified_memory", create_unified_mempool=lambda: None,
           has_unified_memory=lambda: None)
