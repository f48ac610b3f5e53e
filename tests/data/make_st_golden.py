"""Write st_golden.safetensors with the reference serializer (safetensors 0.8.0).

usage: make_st_golden.py OUT

Two tensors of every dtype the Python binding can name, names that need escaping, a scalar and an
empty tensor, in an order that is not the serializer's.
"""

import ctypes
import random
import sys

from safetensors import TensorSpec, serialize

# dtype name of the binding, bytes of a [2, 4] tensor (logical elements)
DTYPES = {
    "bool": 8, "uint8": 8, "int8": 8, "float8_e5m2": 8, "float8_e4m3fn": 8, "float8_e8m0fnu": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "int16": 16, "uint16": 16, "float16": 16,
    "bfloat16": 16, "int32": 32, "uint32": 32, "float32": 32, "complex64": 64, "float64": 64,
    "int64": 64, "uint64": 64,
}
NAMES = ["layers.0.weight", "layers.10.weight", "Layers.2.weight", "\u00e9t\u00e9.\U0001f600", 'quo"te\\back/slash',
         "tab\tnewline\ncontrol\x01\x7f"]

rng = random.Random(1)
keep = []


def spec(dtype, shape, size):
    buffer = ctypes.create_string_buffer(bytes(rng.randrange(256) for _ in range(size)), max(size, 1))
    keep.append(buffer)
    return TensorSpec(dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffer), data_len=size)


tensors = {}
for i, (dtype, size) in enumerate(DTYPES.items()):
    tensors[f"{dtype}.b"] = spec(dtype, [2, 4], size)
    tensors[f"{dtype}.a"] = spec(dtype, [4, 2, 1], size)
for name in NAMES:
    tensors[name] = spec("float32", [3], 12)
tensors["scalar"] = spec("int64", [], 8)
tensors["empty"] = spec("float32", [0, 5], 0)
tensors["packed"] = spec("float4_e2m1fn_x2", [2, 3], 6)

with open(sys.argv[1], "wb") as out:
    out.write(serialize(tensors, {"format": "pt"}))
