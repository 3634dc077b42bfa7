"""Reads the machine code of the CUDA kernels: rows move 16 bytes at a time, and nothing is kept in local memory.

nvcc compiles a few kernels for one architecture; a disassembler (of the toolkit, or the one that comes with Triton)
lists their instructions. Row data is told from parameters and statistics by how it is accessed: it is loaded with a
hint that its neighbours follow, or copied to shared memory, and stored in vectors.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machine_code import instructions, tool, widths

ROOT = Path(__file__).resolve().parent.parent

NORMS = """
#include "cuda/norm_bwd.cuh"
#include "cuda/norm_fwd.cuh"
namespace fusedops::cuda {
using bf16 = __nv_bfloat16;
template __global__ void norm_fwd_kernel<InputRow<float, float>, false, 4>(FwdParams);
template __global__ void norm_fwd_kernel<InputRow<float, float>, true, 6>(FwdParams);
template __global__ void norm_fwd_kernel<InputRow<bf16, bf16>, false, 4>(FwdParams);
template __global__ void norm_fwd_kernel<InputRow<bf16, float>, true, 2>(FwdParams);
template __global__ void norm_fwd_wide_kernel<InputRow<bf16, bf16>, false>(FwdParams);
template __global__ void norm_fwd_wide_kernel<InputRow<float, bf16>, true>(FwdParams);
template __global__ void norm_bwd_kernel<bf16, bf16, false, false, 8, 2>(BwdParams);
template __global__ void norm_bwd_kernel<float, float, true, false, 16, 1>(BwdParams);
template __global__ void norm_bwd_kernel<float, bf16, false, false, 16, 1>(BwdParams);
template __global__ void norm_bwd_wide_kernel<bf16, bf16, false>(BwdParams);
template __global__ void norm_bwd_wide_kernel<float, float, true>(BwdParams);
template __global__ void norm_fwd_kernel<SumRow<bf16, bf16, bf16, false>, false, 2>(FwdParams);
template __global__ void norm_fwd_kernel<SumRow<bf16, float, bf16, true>, true, 4>(FwdParams);
template __global__ void norm_bwd_kernel<bf16, bf16, false, true, 8, 2>(BwdParams);
template __global__ void norm_bwd_columns_kernel<float, float, false>(BwdParams);
template __global__ void norm_fwd_kernel<ShiftedRow<bf16, bf16>, false, 4>(FwdParams);
template __global__ void norm_fwd_kernel<ShiftedRow<float, float>, true, 4>(FwdParams);
template __global__ void norm_bwd_kernel<bf16, bf16, false, false, 16, 1, true>(BwdParams);
template __global__ void norm_bwd_kernel<float, float, true, false, 16, 1, true>(BwdParams);
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """Accesses by kernel, under names as `norm_fwd_kernel<InputRow<bf16, float>, true, 2>`."""
    compiler = tool("nvcc")
    if compiler is None:
        pytest.skip("no nvcc")
    if "sm_90" not in subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True).stdout:
        pytest.skip("this nvcc does not know sm_90")
    folder = tmp_path_factory.mktemp("sass")
    norms = folder / "norms.cu"
    norms.write_text(NORMS)
    sources = [norms, *(ROOT / "csrc/cuda" / name for name in ("adam.cu", "grad_norm.cu", "cross_entropy.cu"))]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.cubin"
        flags = ["-arch=sm_90", "-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", "-cubin"]
        subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        cubins = list(pool.map(compile_one, sources))
    return {name: found for cubin in cubins for name, found in instructions(cubin).items()}


def test_nothing_lies_in_local_memory(kernels):
    for name, accesses in kernels.items():
        assert not [mnemonic for mnemonic in accesses if re.match(r"(LDL|STL)\b", mnemonic)], name


# Bits of a vector of x and of y, and vectors a thread: 16 bytes of the wider dtype, as many elements of the other.
FORWARD = {
    "norm_fwd_kernel<InputRow<float, float>, false, 4>": (128, 128, 4),
    "norm_fwd_kernel<InputRow<float, float>, true, 6>": (128, 128, 6),
    "norm_fwd_kernel<InputRow<bf16, bf16>, false, 4>": (128, 128, 4),
    "norm_fwd_kernel<InputRow<bf16, float>, true, 2>": (64, 128, 2),
}


@pytest.mark.parametrize("kernel", FORWARD)
def test_forward_reads_and_writes_rows_in_whole_vectors(kernels, kernel):
    x, y, vectors = FORWARD[kernel]
    accesses = kernels[kernel]
    bodies = 6  # for weights of three dtypes, with and without a test for the row's end
    assert widths(accesses, "stream") == {x: bodies * vectors}
    stores = widths(accesses, "store")
    del stores[32]  # mean and rstd
    assert stores == {y: bodies * vectors}


# Bits of a copy of x and of dy, vectors of dx that a tile of a thread has, and those of its sums of dweight and dbias.
BACKWARD = {
    "norm_bwd_kernel<bf16, bf16, false, false, 8, 2, false>": (128, 128, 2, 4),
    "norm_bwd_kernel<float, float, true, false, 16, 1, false>": (128, 128, 4, 8),
    "norm_bwd_kernel<float, bf16, false, false, 16, 1, false>": (128, 64, 4, 8),
}


@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward_copies_and_writes_rows_in_whole_vectors(kernels, kernel):
    x, dy, vectors, partial = BACKWARD[kernel]
    accesses = kernels[kernel]
    copies = widths(accesses, "copy")
    copies[64] -= 1  # the one that brings the weight
    assert set(+copies) == {x, dy}
    assert len(set((+copies).values())) == 1, "a copy of dy for each of x"
    stores = widths(accesses, "store")
    assert stores.pop(32) <= 4  # partial sums of dweight and dbias, where a block's groups are added up
    assert stores == {128: vectors + partial}
    assert not widths(accesses, "stream"), "rows are read once, by the copies"


# Kernels that also take rows element by element, where they are misaligned: bits of a vector loaded and of one stored,
# and the widths of single elements and statistics stored.
WIDE = {
    "norm_fwd_wide_kernel<InputRow<bf16, bf16>, false>": (128, 128, {16, 32}),
    "norm_fwd_wide_kernel<InputRow<float, bf16>, true>": (128, 64, {16, 32}),
    # The gradients of an add + norm are stored in any dtype.
    "norm_bwd_wide_kernel<bf16, bf16, false>": (128, 128, {16, 32}),
    "norm_bwd_wide_kernel<float, float, true>": (128, 128, {16, 32, 64}),
}


@pytest.mark.parametrize("kernel", WIDE)
def test_wide_rows_have_a_path_of_whole_vectors(kernels, kernel):
    load, store, single = WIDE[kernel]
    assert set(widths(kernels[kernel], "stream")) == {load}
    assert set(widths(kernels[kernel], "store")) == {store, *single}


@pytest.mark.parametrize(("dtype", "element"), [("bf16", 16), ("float", 32)])
def test_shifted_rows_are_read_and_written_in_whole_vectors(kernels, dtype, element):
    rms = "true" if dtype == "float" else "false"
    forward = kernels[f"norm_fwd_kernel<ShiftedRow<{dtype}, {dtype}>, {rms}, 4>"]
    bodies, vectors = 3, 4  # for weights of three dtypes
    assert widths(forward, "stream") == {128: bodies * vectors * 2}, "two vectors of memory for each of columns"
    stores = widths(forward, "store")
    # One more vector where a warp's columns end, and single elements at the ends.
    assert stores[128] == bodies * (vectors + 1)
    assert set(stores) == {128, element, 32}
    backward = kernels[f"norm_bwd_kernel<{dtype}, {dtype}, {rms}, false, 16, 1, true>"]
    assert set(widths(backward, "copy")) == {128, 64}  # 64: of the weight
    assert widths(backward, "store")[128] == 16 * element // 128 + 1
    assert not widths(backward, "stream")


# Bits of a vector of input, residual, sum and y.
SUMS = {
    "norm_fwd_kernel<SumRow<bf16, bf16, bf16, false>, false, 2>": ({128}, {128}),
    "norm_fwd_kernel<SumRow<bf16, float, bf16, true>, true, 4>": ({64, 128}, {64, 128}),
}


@pytest.mark.parametrize("kernel", SUMS)
def test_sums_are_read_and_written_in_whole_vectors(kernels, kernel):
    loads, stores = SUMS[kernel]
    assert set(widths(kernels[kernel], "stream")) == loads
    assert set(widths(kernels[kernel], "store")) == {32, *stores}


def test_the_gradient_of_a_sum_is_copied_and_written_in_whole_vectors(kernels):
    accesses = kernels["norm_bwd_kernel<bf16, bf16, false, true, 8, 2, false>"]
    assert set(widths(accesses, "copy")) == {64, 128}  # 64: of the weight
    assert set(widths(accesses, "store")) == {32, 128}


def test_column_sums_read_rows_in_whole_vectors(kernels):
    assert set(widths(kernels["norm_bwd_columns_kernel<float, float, false>"], "stream")) == {128}


def only(kernels: dict[str, Counter[str]], name: str) -> Counter[str]:
    """The kernel of that name, or name and first arguments, whatever else it is instantiated with."""
    (found,) = (accesses for kernel, accesses in kernels.items() if re.match(rf"{name}[<,]", kernel))
    return found


@pytest.mark.parametrize("roundings", ["false", "true"], ids=["the usual", "all roundings"])
def test_adam_moves_whole_vectors(kernels, roundings):
    accesses = only(kernels, f"adam_kernel<{roundings}")
    loads, stores = widths(accesses, "stream"), widths(accesses, "store")
    assert set(loads) == set(stores) == {128, 64}
    # 16 bytes of what is as wide as the state; 8 bytes of 16-bit parameters and gradients beside fp32 state.
    assert loads[128] > 2 * loads[64]
    assert stores[128] > 2 * stores[64]


def test_passes_over_gradients_move_whole_vectors(kernels):
    assert set(widths(only(kernels, "sum_squares_kernel"), "stream")) == {128}
    scale = only(kernels, "grad_scale_kernel")
    assert set(widths(scale, "stream")) == set(widths(scale, "store")) == {128}


@pytest.mark.parametrize("dtype", ["float", "bf16", "__half", "double"])
@pytest.mark.parametrize("extras", ["false", "true"], ids=["plain", "capped or smoothed"])
def test_logits_are_read_and_gradients_written_in_whole_vectors(kernels, dtype, extras):
    element = {"float": 32, "bf16": 16, "__half": 16, "double": 64}[dtype]
    under_way = {"false": 4, "true": 2}[extras]
    forward = kernels[f"cross_entropy_fwd_kernel<{dtype}, {extras}>"]
    assert widths(forward, "stream") == {128: under_way}
    backward = kernels[f"cross_entropy_bwd_kernel<{dtype}, {extras}>"]
    assert widths(backward, "stream") == {128: under_way}
    stores = widths(backward, "store")
    assert stores[128] >= under_way
    assert set(stores) == {128, element}, "whole vectors, and what stands before and behind them"
