"""The library by ctypes, on the host: python3 abi.py liblowtide_c.so

With the word `torch` PyTorch is given it as well. That needs no GPU, but a runtime of CUDA that knows
the current device:

    cc -shared -fPIC -o cudart.so ../c/cudart.c
    LD_PRELOAD=./cudart.so python3 abi.py liblowtide_c.so torch
"""

import ctypes
import os
import sys
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_ssize_t, c_uint32, c_uint64, c_void_p, sizeof


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_uint32),
        ("reserved", c_uint32),
        ("name", c_char_p),
        ("limit_bytes", c_uint64),
        ("reserve_bytes", c_uint64),
        ("decay_ms", c_uint64),
    ]


STATISTICS = (
    "requested live pending idle committed committed_peak limit live_blocks allocs_total frees_total"
    " alloc_failures_total failed_calls_total"
).split()


class Statistics(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t)] + [(name, c_uint64) for name in STATISTICS]


lib = ctypes.CDLL(os.path.abspath(sys.argv[1]))
lib.lowtide_last_error.restype = c_char_p
lib.lowtide_open.argtypes = [POINTER(Options), POINTER(c_uint64)]
lib.lowtide_close.argtypes = [c_uint64]
lib.lowtide_set_default.argtypes = [c_uint64]
lib.lowtide_alloc.argtypes = [c_uint64, c_int, c_size_t, c_size_t, c_void_p, POINTER(c_void_p)]
lib.lowtide_free.argtypes = [c_uint64, c_int, c_void_p, c_void_p]
lib.lowtide_get_statistics.argtypes = [c_uint64, c_int, POINTER(Statistics)]
lib.lowtide_torch_alloc.argtypes = [c_ssize_t, c_int, c_void_p]
lib.lowtide_torch_alloc.restype = c_void_p
lib.lowtide_torch_free.argtypes = [c_void_p, c_ssize_t, c_int, c_void_p]
for name in ("open", "close", "set_default", "alloc", "free", "get_statistics"):
    getattr(lib, "lowtide_" + name).restype = c_int32


def check(status):
    assert status == 0, lib.lowtide_last_error()


def statistics(allocator):
    figures = Statistics(struct_size=sizeof(Statistics))
    check(lib.lowtide_get_statistics(allocator, -1, byref(figures)))
    return figures


allocator = c_uint64()
options = Options(struct_size=sizeof(Options), backend=1, name=b"python", decay_ms=100)
check(lib.lowtide_open(byref(options), byref(allocator)))
block = c_void_p()
check(lib.lowtide_alloc(allocator, 0, 16 << 20, 0, None, byref(block)))
ctypes.memset(block, 7, 16 << 20)
assert statistics(allocator).live == 16 << 20
check(lib.lowtide_free(allocator, 0, block, None))
assert lib.lowtide_free(allocator, 0, block, None) == 8
assert b"no live raw block" in lib.lowtide_last_error()

# The library releases idle memory by itself.
end = time.monotonic() + 30
while statistics(allocator).committed and time.monotonic() < end:
    time.sleep(0.05)
assert statistics(allocator).committed == 0

check(lib.lowtide_set_default(allocator))
tensor = lib.lowtide_torch_alloc(1000, 0, None)
assert tensor and statistics(allocator).requested == 1000
lib.lowtide_torch_free(tensor, 1000, 0, None)
assert statistics(allocator).live == 0


def with_torch():
    """PyTorch takes the functions, and calls them with its sizes, devices and streams."""
    import torch

    pluggable = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[1], "lowtide_torch_alloc", "lowtide_torch_free")
    for setter, function in [
        ("set_record_stream_fn", "lowtide_torch_record_stream"),
        ("set_reset_fn", "lowtide_torch_empty_cache"),
        ("set_base_alloc_fn", "lowtide_torch_base_alloc"),
        ("set_memory_fraction_fn", "lowtide_torch_memory_fraction"),
    ]:
        address = ctypes.cast(getattr(lib, function), c_void_p).value
        getattr(pluggable.allocator(), setter)(address)
    torch.cuda.memory.change_current_allocator(pluggable)
    try:
        # 777 stands for a stream: the host has none.
        raw = torch._C._cuda_cudaCachingAllocator_raw_alloc(1000, 777)
    except RuntimeError as error:
        print("skipped: an allocation of PyTorch's:", str(error).splitlines()[0])
    else:
        assert statistics(allocator).requested == 1000, lib.lowtide_last_error()
        torch._C._cuda_cudaCachingAllocator_raw_delete(raw)
        assert statistics(allocator).live_blocks == 0, lib.lowtide_last_error()
    print("PyTorch", torch.__version__)
    print("figure engines.torch.accepted 1 boolean")


if "torch" in sys.argv:
    with_torch()
else:
    check(lib.lowtide_close(allocator))
    print("held")
