"""Loading a checkpoint into a card's memory: load_gpu beside safetensors, fastsafetensors and PyTorch's
distributed checkpoint, in turns (load.sh).

    load_rivals.py LOAD_GPU SAFETENSORS_DIR TORCH_DIST_DIR ROUNDS SECONDS

Prints method | median s | GB/s | ratio; a method's rounds end early when SECONDS are over. The ratio is the
median time over that of ckpt's first row of the same source. Exit 1 when a method of ckpt's failed, or one
that is installed did.
"""
import glob
import statistics
import subprocess
import sys
import time

program, flat, cut, rounds, limit = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
start = time.perf_counter()
file = glob.glob(flat + "/*.safetensors")[0]
iteration = glob.glob(cut + "/*/.metadata")[0].removesuffix("/.metadata")
server = subprocess.Popen([program, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(server.stdout.readline().strip())
failed = []
sizes = {}  # bytes as stored


def ours(method, path, threads=0, piece=0):
    def go():
        server.stdin.write(f"{method} {path} {threads} {piece}\n")
        server.stdin.flush()
        answer = server.stdout.readline().strip()
        if answer.startswith("failed") or not answer:
            raise RuntimeError(answer or "load_gpu ended")
        seconds, sizes[path] = answer.split()
        return float(seconds), -1

    return go


def timed(load, end=lambda kept: None):
    """`load` to tensors that are there; `end` gives back what need not count."""

    def go():
        torch.cuda.synchronize()
        t = time.perf_counter()
        kept, tensors = load()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - t
        count = len(tensors)
        del tensors
        end(kept)
        return seconds, count

    return go


def rivals():
    from safetensors.torch import load_file

    yield "safetensors load_file(device='cuda')", "file", timed(lambda: (None, load_file(file, device="cuda")))

    def wide():
        return None, {k: v.float() for k, v in load_file(file, device="cuda").items()}

    yield "safetensors load_file, then .float()", "wide", timed(wide)
    try:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup, fastsafe_open
    except ImportError:
        print("(no fastsafetensors)")
    else:

        def fresh():
            opened = fastsafe_open(file, nogds=True, device="cuda:0")
            return opened, {k: opened.get_tensor(k) for k in opened.keys()}

        yield "fastsafetensors fastsafe_open(nogds)", "file", timed(fresh, lambda o: o.__exit__(None, None, None))
        loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=True)

        def again():
            loader.reset()
            loader.add_filenames({0: [file]})
            buffers = loader.copy_files_to_device()
            return buffers, {k: buffers.get_tensor(k) for k in loader.get_keys()}

        yield "fastsafetensors, its buffers kept", "file", timed(again, lambda b: b.close())

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def distributed():
        found = dcp.FileSystemReader(iteration).read_metadata().state_dict_metadata
        state = {
            k: torch.empty(m.size, dtype=m.properties.dtype, device="cuda")
            for k, m in found.items()
            if isinstance(m, TensorStorageMetadata)
        }
        dcp.load(state, storage_reader=dcp.FileSystemReader(iteration), no_dist=True)
        return None, state

    yield "torch.distributed.checkpoint.load", "cut", timed(distributed)


methods = [
    ("ckpt: safetensors, as stored", "file", ours("stored", flat)),
    ("ckpt: the same, digests compared", "file", ours("digests", flat)),
    ("ckpt: safetensors, widened to f32", "wide", ours("wide", flat)),
    ("ckpt: a network (f32 + bf16 weights)", "wide", ours("network", flat)),
    ("ckpt: torch_dist TP 4, as stored", "cut", ours("stored", cut)),
    ("ckpt: the same, digests compared", "cut", ours("digests", cut)),
    ("limit: bus, from one pinned buffer", "file", ours("bus", flat)),
    ("limit: page cache, all threads", "file", ours("file", flat)),
]
try:
    import torch

    torch.zeros(1, device="cuda")
    methods += list(rivals())
except ImportError as why:
    print(f"(no rivals: {why})")

times = [[] for _ in methods]
counts = [0] * len(methods)  # tensors that a rival loaded
for r in range(rounds + 1):  # the first warms the page cache, the card and allocators
    for i, (name, _, go) in enumerate(methods):
        enough = name.startswith("torch.dist") and r > 2
        if enough or (r > 1 and time.perf_counter() - start > limit) or name in failed:
            continue
        try:
            seconds, counts[i] = go()
        except Exception as why:
            print(f"FAILED: {name}: {why}")
            failed.append(name)
            continue
        if r > 0:
            times[i].append(seconds)

print(f"{'method':<40} | {'median s':>8} | {'GB/s':>6} | {'ratio':>5} | rounds, best s")
first = {}
for (name, source, _), t, count in zip(methods, times, counts):
    if not t:
        continue
    size = int(sizes.get(cut if source == "cut" else flat, 0))  # 0: nothing of ckpt's was loaded
    median = statistics.median(t)
    first.setdefault(source, median)
    print(f"{name:<40} | {median:8.4f} | {size / median / 1e9:6.2f} | {median / first[source]:5.2f} | {len(t)}, {min(t):.4f}{f', {count} tensors' if count >= 0 else ''}")

print("as stored, by threads and pinned piece (best of two, s); pinning alone:")
for piece in (1, 2, 4, 8, 16):
    cells = []
    for threads in (4, 8, 16):
        if time.perf_counter() - start > limit + 15:
            break
        best = min(ours("stored", flat, threads, piece)()[0] for _ in range(2))
        pin = ours("pin", "-", threads, piece)()[0]
        cells.append(f"{threads:2d} threads {best:.4f} ({pin:.4f})")
    print(f"  {piece:2d} MiB: " + "  ".join(cells))
server.stdin.close()
sys.exit(1 if failed or server.wait() else 0)
