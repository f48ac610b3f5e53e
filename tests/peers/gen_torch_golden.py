"""Prints tests/torch_golden.h: what PyTorch reads from the torch.save fixtures.

Run from the repository root: PYTHON tests/peers/gen_torch_golden.py > tests/torch_golden.h
The SHA-256 is over the row-major little-endian bytes of each decodable (strided) tensor.
"""
import hashlib

import torch

FILES = ["torch_save_zip.pt", "torch_save_legacy.pt", "torch_save_proto4.pt", "state_dict.bin",
         "dcp_full_expected.pt"]
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.uint16: "U16",
}


def walk(value, path):
    if isinstance(value, torch.Tensor):
        yield ".".join(path) or "tensor", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, path + [str(key)])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from walk(item, path + [str(index)])
    elif hasattr(value, "__dict__") and type(value).__module__ in ("argparse", "types"):
        yield from walk(vars(value), path)


def digest(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(raw).hexdigest()


def main():
    # torch 2.11 writes float8 into the legacy stream but fails to read it back for want of this.
    torch.UntypedStorage.dtype = torch.uint8
    print("/* Written by tests/peers/gen_torch_golden.py with PyTorch %s; do not edit. */"
          % torch.__version__)
    print("/* clang-format off */")
    print("static const golden_row golden[] = {")
    for name in FILES:
        root = torch.load("fixtures/torch/" + name, weights_only=False)
        rows = []
        for key, tensor in walk(root, []):
            if tensor.layout != torch.strided or tensor.is_quantized:
                continue
            dims, stride = list(tensor.shape), list(tensor.stride())
            rows.append((key, '    {"%s", "%s", "%s", %d, {%s}, {%s}, "%s"},' % (
                name, key, NAMES[tensor.dtype], len(dims), ", ".join(map(str, dims)) or "0",
                ", ".join(map(str, stride)) or "0", digest(tensor))))
        print("\n".join(text for _, text in sorted(rows)))
    print("};")
    print("/* clang-format on */")


if __name__ == "__main__":
    main()
