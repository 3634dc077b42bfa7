"""Launches one small faulty kernel, named on the command line: proof that compute-sanitizer would report such a fault.

PTX text through the driver's own library: needs neither a compiler nor torch, so it starts at once.
"""

from __future__ import annotations

import ctypes
import sys

THREADS, CELLS = 64, 64  # of 4 bytes, in each of two buffers

# Every kernel takes the addresses of an input and an output buffer, neither of them written to before.
PTX = """
.version 7.5
.target sm_75
.address_size 64

.visible .entry plant_overrun_kernel(.param .u64 input, .param .u64 output)
{
    .reg .b32 %r<4>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [output];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %d1, %d2;
    st.global.u32 [%d3 + 16], %r1;
    ret;
}

.visible .entry plant_uninitialised_kernel(.param .u64 input, .param .u64 output)
{
    .reg .b32 %r<4>;
    .reg .b64 %d<8>;
    ld.param.u64 %d1, [input];
    ld.param.u64 %d2, [output];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 4;
    add.u64 %d4, %d1, %d3;
    add.u64 %d5, %d2, %d3;
    ld.global.u32 %r2, [%d4];
    st.global.u32 [%d5], %r2;
    ret;
}

.visible .entry plant_race_kernel(.param .u64 input, .param .u64 output)
{
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    .shared .align 4 .b8 cells[256];
    ld.param.u64 %d1, [output];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, cells;
    shl.b32 %r3, %r1, 2;
    add.u32 %r4, %r2, %r3;
    st.volatile.shared.u32 [%r4], %r1;
    xor.b32 %r3, %r3, 252;
    add.u32 %r5, %r2, %r3;
    ld.volatile.shared.u32 %r6, [%r5];
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %d1, %d2;
    st.global.u32 [%d3], %r6;
    ret;
}

.visible .entry plant_barrier_kernel(.param .u64 input, .param .u64 output)
{
    .reg .b32 %r<4>;
    .reg .b64 %d<4>;
    .reg .pred %p<2>;
    ld.param.u64 %d1, [output];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 48;
    @%p1 bar.sync 0;
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %d1, %d2;
    st.global.u32 [%d3], %r1;
    ret;
}
"""


class Driver:
    """The CUDA driver's library; a call that fails ends the process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            sys.exit(f"{name}: error {status}")

    def try_call(self, name: str, *arguments: object) -> int:
        """Return the status of a call that may report the planted fault."""
        return int(getattr(self._library, name)(*arguments))


def main(fault: str) -> None:
    cuda = Driver()
    device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuInit", 0)
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cuda("cuCtxSetCurrent", context)
    cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.encode()))
    cuda("cuModuleGetFunction", ctypes.byref(kernel), module, f"plant_{fault}_kernel".encode())
    buffers = [ctypes.c_uint64(), ctypes.c_uint64()]
    for buffer in buffers:
        cuda("cuMemAlloc_v2", ctypes.byref(buffer), ctypes.c_size_t(4 * CELLS))
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(buffer) for buffer in buffers))
    cuda("cuLaunchKernel", kernel, 1, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
    cuda.try_call("cuCtxSynchronize")


if __name__ == "__main__":
    main(sys.argv[1])
