"""Write an HDF5 file with h5py in every form that ckpt reads, and the same tensors as safetensors.

    hdf5_make.py OUT.h5 OUT.safetensors earliest|v110
"""

import json
import struct
import sys

import h5py
import numpy as np

rng = np.random.default_rng(7)
ST = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip


def some(shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype.newbyteorder("="), endpoint=True)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


out = {}


def add(group, name, data, key=None, st=None, **how):
    dtype = how.pop("dtype", None)
    d = group.create_dataset(name, data=data, dtype=dtype, **how)
    out[key or (group.name + "/" + name).lstrip("/")] = (st or ST[data.dtype.name], data)
    return d


with h5py.File(sys.argv[1], "w", libver=(sys.argv[3], "v110")) as f:
    g = f.create_group("model").create_group("layers").create_group("0")
    for t in ST:
        add(f, "plain." + t, some((5, 7), t))
        add(f, "gzip." + t, some((33, 17), t), compression="gzip", shuffle=True, fletcher32=True)
    for t in ("float32", "float64", "float16", "int16", "int64", "uint32", "complex64"):
        big = np.dtype(t).newbyteorder(">")
        add(f, "big." + t, some((6, 5), t), dtype=big)
        add(f, "bigz." + t, some((60, 50), t), dtype=big, chunks=(13, 50), compression=9)
    add(g, "tiles", some((50, 70, 3), "float32"), chunks=(16, 32, 2), shuffle=True)
    add(g, "rows", some((1000, 70), "float32"), chunks=(300, 70), fletcher32=True)
    add(g, "columns", some((100, 700), "float32"), chunks=(1, 300), compression=1)
    add(g, "raw_tiles", some((50, 70), "float64"), chunks=(16, 32))
    add(g, "grown", some((50, 70), "int32"), chunks=(16, 70), maxshape=(None, 70), compression=4)
    add(g, "grown2", some((50, 70), "int32"), chunks=(16, 9), maxshape=(None, None), shuffle=True)
    add(g, "one_chunk", some((50, 70), "int32"), chunks=(50, 70), compression=4)
    add(g, "empty", some((0, 4), "float32"))
    add(g, "empty_grows", some((0, 4), "float32"), maxshape=(None, 4), compression=4)
    add(g, "scalar", some((), "float32"))
    add(g, "bytes", some((999,), "uint8"), compression=4, shuffle=True)
    add(g, "noise", some((4096,), "uint64"), compression=4, shuffle=True, chunks=(1000,))
    bits = some((9, 8), "uint16")
    add(g, "bf16", bits, st="BF16").attrs["dtype"] = "bfloat16"
    bits = some((9, 8), "uint8")
    add(g, "f8", bits, st="F8_E4M3", compression=1).attrs["dtype"] = "F8_E4M3"
    # floats that numpy does not have
    for name, st, size, form, bias in (
        ("native_bf16", "BF16", 2, (15, 7, 8, 0, 7), 127),
        ("native_e4m3", "F8_E4M3", 1, (7, 3, 4, 0, 3), 7),
        ("native_e5m2", "F8_E5M2", 1, (7, 2, 5, 0, 2), 15),
    ):
        tid = h5py.h5t.IEEE_F32LE.copy()
        tid.set_fields(*form)
        tid.set_size(size)
        tid.set_ebias(bias)
        data = some((4, 6), f"uint{8 * size}")
        space = h5py.h5s.create_simple(data.shape)
        d = h5py.h5d.create(g.id, name.encode(), tid, space)
        d.write(space, space, data, mtype=tid)
        out[f"model/layers/0/{name}"] = (st, data)
    # compact storage
    data = some((10,), "float32")
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(data.shape)
    h5py.h5d.create(g.id, b"compact", h5py.h5t.IEEE_F32LE, space, plist).write(space, space, data)
    out["model/layers/0/compact"] = ("F32", data)
    # other names of a dataset
    f["hard"] = g["rows"]
    out["hard"] = out["model/layers/0/rows"]
    f["soft"] = h5py.SoftLink("/model/layers/0/tiles")
    out["soft"] = out["model/layers/0/tiles"]
    g["near"] = h5py.SoftLink("rows")
    out["model/layers/0/near"] = out["model/layers/0/rows"]
    # what is left out, with a warning
    f["strings"] = ["a", "b"]
    f.attrs["note"] = "hello"
    f.attrs["count"] = 3

header, data, at = {}, [], 0
for key, (st, value) in sorted(out.items()):
    raw = np.ascontiguousarray(value).tobytes()
    header[key] = {"dtype": st, "shape": value.shape, "data_offsets": [at, at + len(raw)]}
    data.append(raw)
    at += len(raw)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(sys.argv[2], "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + b"".join(data))
print(len(out), "tensors")
