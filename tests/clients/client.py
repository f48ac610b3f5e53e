"""libckpt from Python by ctypes alone: opens a checkpoint, lists it, reads a tensor, prints the root.

usage: client.py LIBRARY CHECKPOINT
"""
import ctypes as C
import sys


class Err(C.Structure):
    _fields_ = [("code", C.c_int), ("text", C.c_char * 2048)]


class Info(C.Structure):
    _fields_ = [("name", C.c_char_p), ("stored", C.c_char_p), ("dtype", C.c_char_p),
                ("shape", C.POINTER(C.c_int64)), ("bytes", C.c_uint64), ("rank", C.c_int32),
                ("optimizer", C.c_int32)]


lib = C.CDLL(sys.argv[1])
lib.ckpt_version.restype = C.c_char_p
lib.ckpt_tensor_count.restype = C.c_size_t
lib.ckpt_tensor_find.restype = C.c_int64
err, handle = Err(), C.c_void_p()


def check(status):
    if status:
        raise SystemExit(err.text.decode())


check(lib.ckpt_open(sys.argv[2].encode(), None, C.byref(handle), C.byref(err)))
total = 0
for i in range(lib.ckpt_tensor_count(handle)):
    t = Info()
    lib.ckpt_tensor_at(handle, C.c_size_t(i), C.byref(t))
    data = (C.c_uint8 * t.bytes)()
    check(lib.ckpt_read_part(handle, C.c_size_t(i), None, None, data, C.c_size_t(t.bytes), C.byref(err)))
    assert lib.ckpt_tensor_find(handle, t.name) == i
    total += len(bytes(data))
root = (C.c_uint8 * 32)()
check(lib.ckpt_digest(handle, root, C.byref(err)))
print(f"{lib.ckpt_version().decode()}: {total} bytes, root {bytes(root).hex()}")
lib.ckpt_close(handle)
assert lib.ckpt_open(b"/nowhere", None, C.byref(handle), C.byref(err)) == err.code != 0 and not handle
