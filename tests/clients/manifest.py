"""The digests of a manifest, computed again from README.md's description with nothing but the standard
library: usage: manifest.py DIR, a directory of safetensors files with ckpt.manifest.json."""
import hashlib
import json
import pathlib
import re
import struct
import sys


def sha(data):
    return hashlib.sha256(data).digest()


def tree(leaves):  # RFC 6962 section 2.1, over leaf hashes
    if not leaves:
        return sha(b"")
    if len(leaves) == 1:
        return leaves[0]
    k = 1 << (len(leaves) - 1).bit_length() - 1
    return sha(b"\1" + tree(leaves[:k]) + tree(leaves[k:]))


def tensor_digest(dtype, shape, data):
    leaves = [sha(b"\0" + data[i:i + (1 << 20)]) for i in range(0, len(data), 1 << 20)]
    return sha(b"ckpt.tensor.v1\0" + dtype.encode() + b"\0" + struct.pack("<I", len(shape)) +
               b"".join(struct.pack("<Q", n) for n in shape) + tree(leaves))


where = pathlib.Path(sys.argv[1])
text = (where / "ckpt.manifest.json").read_text()
manifest = json.loads(text)
if "config" in manifest:  # none without a known model
    config = re.search(r'^"config":(\{.*\}),$', text, re.M).group(1)
    assert hashlib.sha256(config.encode()).hexdigest() == manifest["config_digest"]

stored = {}  # data by (dtype, size)
for name, f in manifest["files"].items():
    data = (where / name).read_bytes()
    assert len(data) == f["size"] and hashlib.sha256(data).hexdigest() == f["sha256"], name
    rest = data
    if name.endswith(".safetensors"):
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for key, t in json.loads(data[8:start]).items():
            if key != "__metadata__":
                lo, hi = t["data_offsets"]
                stored.setdefault((t["dtype"], hi - lo), []).append(data[start + lo:start + hi])
        rest = data[:start]
    assert hashlib.sha256(rest).hexdigest() == f["rest"], name

leaves = []
for name, t in sorted(manifest["tensors"].items(), key=lambda item: item[0].encode()):
    want = bytes.fromhex(t["digest"])
    size = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8}[t["dtype"]]
    for n in t["shape"]:
        size *= n
    assert any(tensor_digest(t["dtype"], t["shape"], d) == want for d in stored[t["dtype"], size]), name
    leaves.append(sha(b"\0" + name.encode() + b"\0" + want))
assert tree(leaves).hex() == manifest["root"]
print(f"manifest: {len(leaves)} tensors, {len(manifest['files'])} files, root {manifest['root'][:8]} computed again")
