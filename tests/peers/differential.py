#!/usr/bin/env python3
"""Our verdict on mutated files against the real safetensors parser and torch.load(weights_only=True).

usage: differential.py VERDICTS WORKDIR COUNT [SEED]

VERDICTS is the program of verdicts.c. COUNT files are mutated, half of each kind, from small files that
the peers wrote. Where both accept a safetensors file, names, types and shapes must agree as well. Every
disagreement must fall into one of the classes below, each with its reason; one that does not is printed
with the file's name in WORKDIR, and fails the run. The table of classes is printed at the end.
"""

import collections
import io
import os
import pickle
import random
import re
import resource
import struct
import subprocess
import sys
import warnings
import zipfile

import safetensors
import torch
from safetensors.torch import save

# (kind, who accepts: "peer" or "we", pattern of the other's words, reason)
CLASSES = [
    ("safetensors", "peer", r"occurs twice|duplicate|repeat", "a name twice: the peer takes the last and hides the first"),
    ("safetensors", "peer", r"NUL character", "NUL in a name: no file system or C reader can have it"),
    ("safetensors", "peer", r"limit of 16", "more than 16 dimensions: a limit of ours, exit 4"),
    ("safetensors", "peer", r"metadata", "__metadata__ given twice or with a name twice: the peer takes the last"),
    ("safetensors", "peer", r"Git LFS|HTML", "text that is no model"),
    ("safetensors", "peer", r"unknown (member|key|field)", "a member that no version of the format has"),
    ("torch", "peer", r"CRC-32", "a record whose checksum is wrong: PyTorch's reader does not look"),
    ("torch", "peer", r"zip: ", "records and directory of the archive contradict each other: PyTorch believes the directory alone"),
    ("torch", "peer", r"pickle opcode|pickle:|memo|unpickl|data\.pkl", "a pickle that PyTorch's reduced unpickler runs on without complaint, and we refuse as malformed"),
    ("torch", "peer", r"tensor|storage|stride|offset|record|shape|dtype", "a tensor that lies outside its storage, overlaps itself or has another size than its record: PyTorch allocates or clips"),
    ("torch", "peer", r"refer to each other|nested|twice|name|dict|key", "names that are no names of tensors, or twice"),
    ("torch", "peer", r"version|byteorder|expected a safetensors", "an archive whose version or first bytes are damaged, which PyTorch does not read"),
    ("torch", "peer", r"unknown global", "a global that only PyTorch's list has"),
    ("torch", "we", r"weights_only|Unsupported|WeightsUnpickler|GLOBAL|global", "data we carry without running it; PyTorch's allow-list is shorter"),
    ("torch", "we", r"PytorchStreamReader|archive|zip|file in archive", "a record that PyTorch looks for and we do not need (byteorder, .data, alignment)"),
    ("torch", "we", r"Couldn't parse the version", "a record whose attributes call it a directory: PyTorch reads nothing of it"),
    ("torch", "we", r"record size", "a record longer than its storage: what is beyond is read by nobody"),
    ("torch", "we", r"UnicodeDecodeError", "text that is not UTF-8: we show its bytes"),
    ("torch", "we", r"^(Type|Value|Attribute|Index|Key|Assertion|Overflow|Memory)Error|requires_grad must|can require gradients|must be a tuple",
     "a call that PyTorch's own constructor refuses: we run none, and describe it"),
]


def seeds_safetensors():
    a = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b.c": torch.ones(4, dtype=torch.bfloat16)}
    yield save(a)
    yield save({**a, "scalar": torch.tensor(1), "empty": torch.zeros(0, 3)}, {"format": "pt", "note": "x"})
    yield save({f"layers.{i}.w": torch.zeros(2, dtype=torch.int8) for i in range(8)})


def seeds_torch():
    shared = torch.zeros(8)
    for value in (
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        {"model": {"w": shared[2:6], "v": shared.view(2, 4).t()}, "iteration": 3, "names": ["x", ("y", 1.5)]},
        collections.OrderedDict(p=torch.nn.Parameter(torch.zeros(2, 2)), q=torch.zeros(3, dtype=torch.int64)),
    ):
        out = io.BytesIO()
        torch.save(value, out)
        yield out.getvalue()


JSON_TOKENS = [b"0", b"1", b"-1", b"4294967296", b"9007199254740993", b"18446744073709551616", b"1e3", b"1.0", b"[", b"]", b"{", b"}",
               b",", b":", b'"', b"null", b"true", b"NaN", b'"a"', b'"dtype"', b'"F32"', b'"BF16"', b'"shape"', b'"data_offsets"', b" ", b"\n",
               b'"__metadata__"', b"\\u0000", b"\\ud800", b"\xff", b"\xc3\xa9"]
OPCODES = [b"K\1", b"N", b"(", b"t", b"\x85", b"\x86", b"}", b"]", b"s", b"u", b"a", b"e", b"q\0", b"h\0", b"R", b"b", b"Q", b"2", b"0", b"1",
           b"\x8a\1\1", b"X\1\0\0\0a", b"cos\nsystem\n", b"ctorch\nFloatStorage\n", b"J\xff\xff\xff\xff", b".", b"\x94", b"\x93", b"\x8b\xff\xff\xff\x7f"]


def mutate_bytes(rng, b, tokens):
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(b) + 1)
        what = rng.randrange(6)
        if what == 0 and at < len(b):
            b[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(b):
            b[at] = rng.randrange(256)
        elif what == 2:
            del b[at:at + rng.randint(1, 4)]
        elif what == 3:
            b[at:at] = rng.choice(tokens)
        elif what == 4:
            word = rng.choice(tokens)
            b[at:at + len(word)] = word
        elif rng.randrange(8) == 0:
            del b[at:]
    return b


def mutate_safetensors(rng, data):
    if rng.randrange(4) == 0:
        return bytes(mutate_bytes(rng, bytearray(data), JSON_TOKENS))
    n = struct.unpack("<Q", data[:8])[0]
    header = mutate_bytes(rng, bytearray(data[8:8 + n]), JSON_TOKENS)
    return struct.pack("<Q", len(header)) + bytes(header) + data[8 + n:]


def mutate_torch(rng, data):
    if rng.randrange(3) == 0:
        return bytes(mutate_bytes(rng, bytearray(data), [b"PK\3\4", b"PK\1\2", b"PK\5\6", b"\xff\xff", b"\0\0\0\0"]))
    old, out = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    chosen = rng.choice(["data.pkl"] * 6 + ["version", "byteorder", "/data/0"])
    with zipfile.ZipFile(out, "w") as z:
        for name in old.namelist():
            body = bytearray(old.read(name))
            if name.endswith(chosen):
                body = mutate_bytes(rng, body, OPCODES)
            z.writestr(zipfile.ZipInfo(name), bytes(body))
    return out.getvalue()


def peer_safetensors(data):
    try:
        parsed = safetensors.deserialize(data)
    except Exception as e:  # the class differs between versions
        return None, f"{type(e).__name__}: {e}"
    names = sorted((name.encode(), t["dtype"], t["shape"]) for name, t in parsed)
    return " ".join(f"{n.decode()} {d}[{','.join(map(str, s))}]" for n, d, s in names), ""


def peer_torch(data):
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (Exception, pickle.UnpicklingError) as e:
        return None, f"{type(e).__name__}: {e}"
    return "", ""


def printable(text):
    return "".join("?" if ord(c) < 32 or ord(c) == 127 else c for c in text)


def reason(kind, who, words):
    return next((c for c in CLASSES if c[0] == kind and c[1] == who and re.search(c[2], words)), None)


def main():
    verdicts, work, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rng = random.Random(int(sys.argv[4]) if len(sys.argv) > 4 else 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    os.makedirs(work, exist_ok=True)
    ours = subprocess.Popen([verdicts], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    kinds = (("safetensors", list(seeds_safetensors()), mutate_safetensors, peer_safetensors),
             ("torch", list(seeds_torch()), mutate_torch, peer_torch))
    table, agreed, example, bad = collections.Counter(), collections.Counter(), {}, 0
    for i in range(count):
        kind, seeds, mutate, peer = kinds[i % 2]
        data = mutate(rng, rng.choice(seeds))
        path = os.path.join(work, "input." + ("safetensors" if kind == "safetensors" else "pt"))
        with open(path, "wb") as f:
            f.write(data)
        ours.stdin.write(path.encode() + b"\n")
        ours.stdin.flush()
        theirs, words = peer(data)
        line = ours.stdout.readline().decode(errors="replace").rstrip("\n")
        if "\t" not in line:
            sys.exit(f"file {i}: the program ended, with {ours.wait()}; its input is {path}")
        code, text = line.split("\t", 1)
        found = None
        if code == "0" and theirs is not None:
            if kind == "safetensors" and text != printable(theirs):
                found = f"other tensors: {text} / {theirs}"
        elif (code == "0") != (theirs is not None):
            who, why = ("peer", text) if code != "0" else ("we", words)
            known = reason(kind, who, why)
            if known is None:
                found = f"accepted by {who} alone: {why}"
            else:
                table[known[0], known[1], known[3]] += 1
                example.setdefault((known[0], known[1], known[3]), printable(why)[-150:])
                continue
        if found is None:
            agreed[kind, "both accept" if code == "0" else "both refuse"] += 1
            continue
        bad += 1
        keep = os.path.join(work, f"disagreement-{i}.{kind}")
        os.replace(path, keep)
        if bad <= 20:
            print(f"{keep}: {found[:400]}")
    for (kind, what), n in sorted(agreed.items()):
        print(f"| {kind} | {what} | {n} |")
    for (kind, who, why), n in sorted(table.items()):
        print(f"| {kind} | {'only the peer accepts' if who == 'peer' else 'only we accept'}: {why}; as \"{example[kind, who, why]}\" | {n} |")
    print(f"{count} files, {sum(table.values())} explained disagreements, {bad} unexplained")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
