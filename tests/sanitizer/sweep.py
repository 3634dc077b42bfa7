"""Runs every op and every optimizer of the registry on a GPU, for compute-sanitizer to watch.

sweep.py BACKENDS                   forward and backward, steps, clipping; says "swept" at the end
sweep.py BACKENDS --trace FILE      the same under the profiler, which lists the kernels that it launched
sweep.py BACKENDS --plant overread | unwritten     one faulty call instead
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from unittest import mock

import torch

import fusedops
from fusedops import testing
from fusedops.registry import OPS, OPTIMS, Case, OpSpec, OptimSpec

EVERY = 2  # of the cases: their dtypes take turns in threes, so each is met
SHAPES = ((), (1,), (7, 5), (0,), (1023,), (33, 129), (70_001,))
MIXES = [
    (torch.float32, {}),
    (torch.float64, {}),
    (torch.bfloat16, {}),
    (torch.float16, {"state_dtype": torch.float32}),
    (torch.bfloat16, {"state_dtype": torch.float32, "master_weights": True}),
    (torch.bfloat16, {"bf16_stochastic_round": True}),
    (torch.bfloat16, {"kahan_sum": True}),
]


def chosen(spec: OpSpec, full: bool) -> list[Case]:
    """Quick cases, and with each set of options the widest of all, which takes other kernels."""

    def width_and_smallness(case: Case) -> tuple[int, int]:
        return math.prod(case.shape[len(case.shape) - case.normalized :]), -math.prod(case.shape)

    quick = list(spec.cases("quick"))
    widest = {tuple(case.options): case for case in sorted(spec.cases("full"), key=width_and_smallness)}
    return [*quick[:: 1 if full else EVERY], *widest.values()]


def run_ops(backend: str, full: bool) -> int:
    """Call every op on its cases, forward and backward, and forward alone; returns how many were served."""
    served = 0
    for spec in OPS.values():
        for case in chosen(spec, full):
            if testing.refused(spec, case, backend, "cuda"):
                continue
            sample = testing.make_sample(spec, case, "cuda")
            for wanted in (sample.grads, ()):
                testing.run(
                    lambda spec=spec, **kwargs: spec.function(**kwargs, backend=backend),
                    sample,
                    lambda output, case=case: testing.make_grad(case, output),
                    wanted,
                )
            served += 1
    return served


def run_optimizers(backend: str) -> int:
    """Step every optimizer with every option: scaled, clipped, and with an inf; returns how many were served."""
    served = 0
    for spec in OPTIMS.values():
        for options in spec.options:
            for dtype, mix in MIXES:
                params = list(make_params(dtype))
                try:
                    optimizer = spec.optimizer(params, backend=backend, max_grad_norm=1.0, **options, **mix)
                except fusedops.UnsupportedError:
                    continue
                comes_and_goes = params[2]
                optimizer.grad_scale = torch.full((), 8.0, device="cuda")
                for inf in (0.0, 1.0, 0.0):
                    optimizer.found_inf = torch.full((), inf, device="cuda")
                    optimizer.step()
                    comes_and_goes.grad = torch.ones_like(comes_and_goes) if comes_and_goes.grad is None else None
                with fusedops.use_backend(backend):
                    fusedops.clip_grad_norm_(params, 0.01)
                served += 1
        if backend == "triton":
            step_as_if_captured(spec)
    return served


def step_as_if_captured(spec: OptimSpec) -> None:
    """Step as while a graph is captured, which needs the allocator's cache: Triton's tables then go as arguments."""
    optimizer = spec.optimizer(list(make_params(torch.float32)), backend="triton")
    with mock.patch("fusedops.backends.triton.tables.capturing", return_value=True):
        optimizer.step()


def make_params(dtype: torch.dtype) -> Iterator[torch.nn.Parameter]:
    """Parameters with gradients, one without, one in misaligned memory with a gradient in aligned memory."""
    for number, shape in enumerate(SHAPES):
        p = torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype))
        if number != 2:
            p.grad = torch.randn(shape, device="cuda").to(dtype)
        yield p
    view = torch.nn.Parameter(torch.randn(1001, device="cuda").to(dtype)[1:])
    view.grad = torch.randn(1000, device="cuda").to(dtype)
    yield view


def plant(backend: str, fault: str) -> None:
    """Give a kernel of ours less memory than the shape says, or memory that nobody wrote."""
    x = torch.empty(8, 1024, device="cuda")
    if fault == "overread":
        x.fill_(1.0)
        x.untyped_storage().resize_(x.nbytes // 2)
    fusedops.rms_norm(x, (1024,), backend=backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", type=lambda text: text.split(","))
    parser.add_argument("--full", action="store_true", help="every quick case")
    parser.add_argument("--trace", metavar="FILE")
    parser.add_argument("--plant", choices=("overread", "unwritten"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if args.plant:
        for backend in args.backends:
            plant(backend, args.plant)
        torch.cuda.synchronize()
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) if args.trace else nullcontext() as profile:
        for backend in args.backends:
            ops, optimizers = run_ops(backend, args.full), run_optimizers(backend)
            print(f"{backend}: {ops} calls of ops, {optimizers} optimizers")
        torch.cuda.synchronize()
    if profile is not None:
        profile.export_chrome_trace(args.trace)
    print("swept")


if __name__ == "__main__":
    main()
