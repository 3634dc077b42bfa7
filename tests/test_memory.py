"""What the ops keep and allocate: the input and the statistics of its rows for backward, nothing without a graph."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from op_helpers import as_function, make_leaves, small_case, total
from torch import Tensor

import fusedops
from fusedops import backends, testing
from fusedops.registry import OPS, OpSpec

F32, BF16 = torch.float32, torch.bfloat16
ROWS, HIDDEN = 4096, 1024
NORMS = [spec for spec in OPS.values() if spec.family == "norm"]
SPECS = pytest.mark.parametrize("spec", NORMS, ids=[spec.name for spec in NORMS])
ADDS = pytest.mark.parametrize(
    "spec", [spec for spec in NORMS if "residual" in spec.grads], ids=[s.name for s in NORMS if "residual" in s.grads]
)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["native", "triton"])
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    if reason := backends.get(request.param).unavailable(torch.device(device).type):
        if request.param in request.config.getoption("--require").split(","):
            pytest.fail(f"--require {request.param}: {reason}", pytrace=False)
        pytest.skip(reason)
    with fusedops.use_backend(request.param):
        yield request.param


def statistics(spec: OpSpec) -> int:
    """Return the bytes a row that backward needs beside the arguments: mean and rstd, RMSNorm's rstd alone."""
    return 4 if spec.name.endswith("rms_norm") else 8


def storages(tensors: list[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.fixture
def saved() -> Iterator[list[Tensor]]:
    """Every tensor that autograd keeps, as it is kept."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@SPECS
@pytest.mark.parametrize("dtypes", [(F32,), (BF16, F32), (BF16,)], ids=str)
def test_backward_keeps_the_input_and_its_statistics(
    spec: OpSpec, dtypes: tuple[torch.dtype, ...], backend: str, device: str, saved: list[Tensor]
) -> None:
    leaves = make_leaves(spec, small_case(spec, *dtypes, shape=(3, 5, 64)), device)
    outputs = as_function(spec, small_case(spec, *dtypes))(*leaves)
    known = storages([*leaves, *outputs])
    own = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert sum(t.nbytes for t in own) == 15 * statistics(spec)
    assert sum(t.numel() == 15 * 64 for t in saved) == 1, "one tensor of the input's size"


@ADDS
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_post_norm_call_keeps_the_sum(spec: OpSpec, p: float, backend: str, device: str, saved: list[Tensor]) -> None:
    """Beside its two results there is nothing of the input's size but the sum, in the residual's dtype."""
    leaves = make_leaves(spec, small_case(spec, BF16, F32, shape=(3, 5, 64)), device)
    op = as_function(spec, small_case(spec), post_norm=True, dropout_p=p)
    outputs = op(*leaves)
    known = storages([*leaves, *outputs])
    own = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert sum(t.nbytes for t in own) == 15 * 64 * 4 + 15 * statistics(spec) + (16 if p else 0)
    saved.clear()
    with torch.no_grad():
        op(*leaves)
    assert not saved


@SPECS
def test_frozen_parameters_keep_no_more(spec: OpSpec, backend: str, device: str, saved: list[Tensor]) -> None:
    leaves = [leaf.requires_grad_(i == 0) for i, leaf in enumerate(make_leaves(spec, small_case(spec), device))]
    outputs = as_function(spec, small_case(spec))(*leaves)
    own = [t for t in saved if t.untyped_storage().data_ptr() not in storages([*leaves, *outputs])]
    assert sum(t.nbytes for t in own) == 4 * statistics(spec)


@SPECS
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_nothing_is_kept(
    spec: OpSpec, guard: Callable[[], torch.no_grad], backend: str, device: str, saved: list[Tensor]
) -> None:
    leaves = make_leaves(spec, small_case(spec), device)
    with guard():
        outputs = as_function(spec, small_case(spec))(*leaves)
    assert not saved
    assert all(out.grad_fn is None for out in outputs)
    given = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    assert not any(ref() for ref in given)


@SPECS
def test_a_graph_frees_what_it_kept(spec: OpSpec, backend: str, device: str) -> None:
    op = as_function(spec, small_case(spec))
    for backward in (True, False):
        leaves = make_leaves(spec, small_case(spec), device)
        first = leaves[0] * 1
        outputs, kept = op(first, *leaves[1:]), weakref.ref(first)
        del first
        if backward:
            total(outputs).backward()
        del outputs
        assert kept() is None


def bytes_in_use(device: str) -> int:
    """Return what the GPU's allocator was asked for and has not got back; on the CPU what the process occupies."""
    if device != "cpu":
        return requested("current")
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@SPECS
@pytest.mark.parametrize("grad", [False, True])
def test_ten_thousand_calls_do_not_grow(spec: OpSpec, grad: bool, backend: str, device: str) -> None:
    if device == "cpu" and (backend == "triton" or not Path("/proc/self/statm").exists()):
        pytest.skip("interpreted kernels are too slow" if backend == "triton" else "no /proc")
    leaves = make_leaves(spec, small_case(spec), device)
    op = as_function(spec, small_case(spec))

    def bytes_after(calls: int) -> int:
        for _ in range(calls):
            with torch.set_grad_enabled(grad):
                outputs = op(*leaves)
            if grad:
                torch.autograd.grad(outputs, leaves, outputs)
        del outputs
        gc.collect()
        return bytes_in_use(device)

    before = bytes_after(1000)
    grown = bytes_after(10_000) - before
    # On the CPU two hundred bytes a call. On a GPU one, where the least that can leak, a tensor, is more: autograd's
    # thread may still hold one.
    assert grown < (2**21 if device == "cpu" else 10_000)


# ---------------------------------------------------------------- the GPU's memory, by what was asked of the allocator


def requested(what: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


@on_a_gpu
@SPECS
@pytest.mark.parametrize("dtypes", [(F32,), (BF16, F32)], ids=str)
def test_forward_allocates_its_results_and_statistics(
    spec: OpSpec, dtypes: tuple[torch.dtype, ...], backend: str, device: str
) -> None:
    case = small_case(spec, *dtypes, shape=(ROWS, HIDDEN))
    leaves, op = make_leaves(spec, case, device), as_function(spec, case)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            del_me = op(*leaves)  # loads kernels
            del del_me
            before = requested("current")
            torch.cuda.reset_peak_memory_stats()
            outputs = op(*leaves)
        results = sum(out.nbytes for out in outputs)
        kept = ROWS * statistics(spec)
        assert requested("current") - before == results + (kept if grad else 0)
        assert requested("peak") - before <= results + kept  # a backend may need them within the call
        del outputs
        assert requested("current") == before


@on_a_gpu
@ADDS
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_post_norm_call_allocates_the_sum_only_for_backward(
    spec: OpSpec, p: float, backend: str, device: str
) -> None:
    case = small_case(spec, BF16, F32, shape=(ROWS, HIDDEN))
    leaves, op = make_leaves(spec, case, device), as_function(spec, case, post_norm=True, dropout_p=p)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            del_me = op(*leaves)  # loads kernels
            del del_me
            before = requested("current")
            torch.cuda.reset_peak_memory_stats()
            outputs = op(*leaves)
        results, beside = sum(out.nbytes for out in outputs), ROWS * statistics(spec) + (16 if p else 0)
        if grad:
            beside += outputs[1].nbytes
        assert requested("current") - before == results + (beside if grad else 0)
        assert requested("peak") - before <= results + beside
        del outputs


def most_partial_rows(rows: int, hidden: int, multiprocessors: int) -> int:
    """Return the most fp32 rows of partial sums that any backend makes for a parameter's gradient."""
    at_once = next((n for most, n in ((512, 8), (2048, 4), (4096, 2)) if hidden <= most), 1)
    added_up = next((n for most, n in ((512, 192), (1024, 96)) if hidden <= most), 48)
    return multiprocessors * at_once + rows // added_up


@pytest.mark.parametrize("multiprocessors", [1, 20, 132])
def test_partial_sums_of_triton(multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They obey the bound, and no program adds up too many rows one after another."""
    pytest.importorskip("triton")
    from fusedops.backends.triton import norm
    from fusedops.backends.triton.launch import DeviceLimits

    monkeypatch.setattr(norm, "device_limits", lambda _: DeviceLimits(multiprocessors, 1 << 17))
    for hidden in (1, 256, 512, 513, 768, 769, 1024, 1536, 2048, 2049, 3072, 4096, 6144, 8192, 12288, 50257):
        config = norm.row_config(norm.BACKWARD, hidden)
        for rows in (1, 7, 500, 4096, 12673, 16384, 100_003, 1 << 20):
            made = int(norm._bwd_programs(config, rows, hidden, torch.device("cpu")))
            assert made <= min(rows, most_partial_rows(rows, hidden, multiprocessors))
            at_a_time = (config or norm.BACKWARD_WIDE).rows
            assert -(-rows // at_a_time) <= made * norm.MOST_ADDITIONS


@on_a_gpu
@SPECS
@pytest.mark.parametrize("dtypes", [(F32,), (BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(4 * ROWS, HIDDEN), (4 * ROWS, 4096)], ids=["one round", "several"])
def test_peak_of_backward(
    spec: OpSpec, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int], backend: str, device: str
) -> None:
    """The gradients, and of each parameter's the partial sums, also where many rows take further rounds of blocks."""
    case = small_case(spec, *dtypes, shape=shape)
    leaves, op = make_leaves(spec, case, device), as_function(spec, case)
    for attempt in range(2):  # the first one loads kernels
        outputs = op(*leaves)
        gradients = [testing.make_grad(case, out) for out in outputs]
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        found = torch.autograd.grad(outputs, leaves, gradients)
        peak = requested("peak") - before
        if attempt:
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            parameters = sum(leaf.dim() == 1 for leaf in leaves)
            workspace = parameters * most_partial_rows(*shape, multiprocessors) * shape[1] * 4
            assert peak <= sum(t.nbytes for t in found) + workspace
        del outputs, gradients, found
