"""Read what ckpt wrote with h5py and compare with safetensors files, bit for bit.

    hdf5_check.py FILE.h5 EXPECTED.safetensors|DIRECTORY
"""

import glob
import hashlib
import json
import os
import struct
import sys

import h5py


def safetensors(path):
    files = glob.glob(path + "/*.safetensors") if os.path.isdir(path) else [path]
    for name in files:
        with open(name, "rb") as f:
            data = f.read()
        (n,) = struct.unpack("<Q", data[:8])
        for key, t in json.loads(data[8 : 8 + n]).items():
            if key != "__metadata__":
                lo, hi = t["data_offsets"]
                yield key, t["dtype"], t["shape"], data[8 + n + lo : 8 + n + hi]


def datasets(file):
    found = {}
    file.visititems(lambda k, v: found.update({k: v}) if isinstance(v, h5py.Dataset) else None)
    return found


wrong = []
with h5py.File(sys.argv[1], "r") as file:
    left = datasets(file)
    total = len(left)
    for key, dtype, shape, data in safetensors(sys.argv[2]):
        d = left.pop(key, None)
        if d is None:
            wrong.append(f"{key}: absent")
            continue
        raw = d[()].tobytes()
        packed = dtype.startswith(("F4", "F6"))
        found = list(d.attrs["shape"]) if packed and "shape" in d.attrs else list(d.shape)
        if d.attrs["dtype"].decode() != dtype or found != shape:
            wrong.append(f"{key}: {d.attrs['dtype']} {found}, expected {dtype} {shape}")
        elif raw != data:
            wrong.append(f"{key}: values")
        elif d.attrs["sha256"].decode() != hashlib.sha256(raw).hexdigest():
            wrong.append(f"{key}: attribute sha256")
        elif d.chunks and not d.fletcher32:
            wrong.append(f"{key}: no Fletcher-32")
    wrong += [f"{key}: not expected" for key in left]
    manifest = json.loads(file.attrs["ckpt.manifest.json"])
    if manifest["root"] != file.attrs["ckpt.root"].decode():
        wrong.append("root")
sys.exit("\n".join(wrong[:10]) if wrong else print(f"{total} datasets equal"))
