"""Every Triton kernel compiled ahead of time for every supported architecture, without a GPU.

The launch code itself picks kernels and configurations; a launcher that compiles instead of running stands in. Read
from the results: no spilled registers, shared memory within the device's, 16-byte accesses where addresses allow, in
the machine code.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from machine_code import instructions, widths

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

import fusedops.backends.triton  # noqa: E402
from fusedops.backends.triton import adam, add_norm, cross_entropy, norm, tables  # noqa: E402
from fusedops.backends.triton import adam_kernels as kernels  # noqa: E402
from fusedops.backends.triton.launch import DeviceLimits  # noqa: E402

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Shared memory a program may ask for, in KiB, by architecture.
ARCHITECTURES = {75: 64, 80: 163, 90: 227, 100: 227, 120: 99}
WIDTHS = (64, 256, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384, 32768, 50257)
# A 32,768-wide fp32 row on 1,024 threads is one register short, which costs less than reading the row twice.
ONE_REGISTER = 8  # bytes, stored and loaded
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
# Bytes, stored and loaded, that kernels of rows so wide spill at most: a few of the 128 registers of a thread (forward:
# 64), which costs less than reading the row twice (bf16 LayerNorm backward of 12,288 columns on an H200: 71 % of a
# copy's speed, in blocks 40 %).
SPILLS = {
    ("norm_fwd_kernel", 8192): 32,
    ("norm_bwd_kernel", 8192): 44,
    ("norm_bwd_kernel", 12288): 64,
    ("norm_bwd_wide_kernel", 50257): 16,  # of an add + norm, for 8.0, as the next
    ("norm_bwd_wide_means_kernel", 50257): 16,  # of post-norm mode
}
# Of an add + norm, by architecture too; 536 is 10.0's in post-norm mode.
SUM_SPILLS = {("norm_bwd_kernel", a, 12288): 224 if a == 90 else 536 for a in ARCHITECTURES}
# Bytes that the assemblers of Triton 3.6 spill, by kernel, architecture and width; those of 3.7 spill none of it.
OLD_SPILLS: dict[tuple[str, int, int | None], int] = {
    ("adam_kernel", 120, None): 32,  # with fp32 state
    ("norm_bwd_kernel", 90, 2048): 24,  # of an add + LayerNorm in post-norm mode
    ("norm_fwd_kernel", 90, 32768): 16,  # two registers of the 64 that 1,024 threads have
}
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


PLAIN_LOSS = (-100, "mean", 0.0, 0.0, None)
ALL_OF_LOSS = (-100, "none", 0.1, 1e-4, 30.0)


class Kernel(NamedTuple):
    """What the compiler made of one launch."""

    name: str
    ptx: str
    cubin: Path
    shared: int
    registers: int
    spilled: int
    may_spill: int


class FakeDriver:
    """Names a target to the compiler. Devices are numbered by architecture, out of the way of real ones."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 1000 + self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Return a function that compiles all launches of a call for an architecture."""

    def compile_call(architecture: int, call: Any) -> list[Kernel]:
        made = []

        def compile_only(kernel, grid, device, args, meta, warps):
            args = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
            compiled = kernel.warmup(*args, **meta, grid=grid, num_warps=warps)
            named = dict(zip(kernel.arg_names, args, strict=False))
            hidden = named.get("hidden")
            may_spill = max(ONE_REGISTER, SPILLS.get((kernel.__name__, hidden), 0))
            if any(named.get(name) is not None for name in ("dsum_ptr", "dinput_ptr", "more_dy_ptr")):
                may_spill = max(may_spill, SUM_SPILLS.get((kernel.__name__, architecture, hidden), 0))
            if OLD:
                may_spill = max(may_spill, OLD_SPILLS.get((kernel.__name__, architecture, hidden), 0))
            made.append(read(compiled, architecture, tmp_path, may_spill))

        monkeypatch.setattr(driver, "_active", FakeDriver(architecture))
        limits = DeviceLimits(multiprocessors=132, shared_bytes=ARCHITECTURES[architecture] * 1024)
        for module in (norm, add_norm, cross_entropy, adam, tables):
            monkeypatch.setattr(module, "launch", compile_only)
        monkeypatch.setattr(adam, "compile_ahead", lambda *_: None)
        monkeypatch.setattr(norm, "device_limits", lambda _: limits)
        call()
        for kernel in made:
            assert kernel.spilled <= kernel.may_spill, (kernel.name, kernel.registers, kernel.spilled)
            assert kernel.shared <= limits.shared_bytes, kernel.name
        return made

    return compile_call


def read(compiled: Any, architecture: int, folder: Path, may_spill: int) -> Kernel:
    """Assemble the PTX once more with Triton's own assembler, which then tells registers and spills."""
    source = folder / f"{compiled.hash}.ptx"
    cubin = source.with_suffix(".cubin")
    source.write_text(compiled.asm["ptx"])
    target = re.search(r"\.target (\S+)", compiled.asm["ptx"]).group(1)
    assembler = BIN / ("ptxas-blackwell" if architecture >= 100 else "ptxas")
    command = [str(assembler), "-v", f"-arch={target}", str(source), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    name, shared = compiled.metadata.name, compiled.metadata.shared
    return Kernel(name, compiled.asm["ptx"], cubin, shared, registers, spilled, may_spill)


def norm_calls(hidden: int, dtype: torch.dtype, param: torch.dtype, rows: int = 4096) -> dict[str, Any]:
    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    weight = torch.empty(hidden, dtype=param, device="meta")
    stat = torch.empty(rows, device="meta")
    return {
        "layer_norm_fwd": lambda: norm.layer_norm_fwd(x, weight, weight, 1e-5, dtype),
        "layer_norm_bwd": lambda: norm.layer_norm_bwd(x, x, weight, stat, stat, (True, True, True), param),
        "rms_norm_fwd": lambda: norm.rms_norm_fwd(x, weight, 1e-6, 0.0, dtype),
        "rms_norm_bwd": lambda: norm.rms_norm_bwd(x, x, weight, stat, 0.0, (True, True)),
    }


def add_norm_calls(hidden: int, dtype: torch.dtype, stream: torch.dtype, rows: int = 4096) -> dict[str, Any]:
    """With dropout and a residual stream of its own dtype, and in post-norm mode; weights are fp32."""
    x, residual = (torch.empty(rows, hidden, dtype=kind, device="meta") for kind in (dtype, stream))
    weight, stat = torch.empty(hidden, device="meta"), torch.empty(rows, device="meta")
    seed = torch.empty(2, dtype=torch.int64, device="meta")
    saved = (x, residual, residual, weight, stat, stat, seed, 0.1)
    fwd, bwd = (x, residual, weight, weight, 1e-5, seed, 0.1), ((True,) * 4, dtype, stream, F32)
    return {
        "add_layer_norm_fwd": lambda: add_norm.add_layer_norm_fwd(*fwd, False, False, dtype, stream),
        "add_layer_norm_bwd": lambda: add_norm.add_layer_norm_bwd(*saved, False, *bwd),
        "add_rms_norm_fwd": lambda: add_norm.add_rms_norm_fwd(
            x, residual, weight, 1e-6, 1.0, None, 0.0, False, False, dtype, stream
        ),
        "add_rms_norm_bwd": lambda: add_norm.add_rms_norm_bwd(
            x, None, residual, weight, stat, 1.0, None, 0.0, False, (True,) * 3, dtype, stream
        ),
        "post_norm_fwd": lambda: add_norm.add_layer_norm_fwd(*fwd, True, True, dtype, stream),
        "post_norm_fwd, no gradient": lambda: add_norm.add_layer_norm_fwd(*fwd, True, False, dtype, stream),
        "post_norm_bwd": lambda: add_norm.add_layer_norm_bwd(*saved, True, *bwd),
    }


def loss_calls(
    classes: int, dtype: torch.dtype, options: tuple[Any, ...] = PLAIN_LOSS, rows: int = 64
) -> dict[str, Any]:
    x = torch.empty(rows, classes, dtype=dtype, device="meta")
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    weight = torch.empty(classes, device="meta") if options is not PLAIN_LOSS else None
    stats, one = torch.empty(rows, 2, device="meta"), torch.empty((), device="meta")
    named = dict(zip(cross_entropy.Options._fields, options, strict=True))
    dloss = one if named["reduction"] != "none" else stats[:, 0]
    return {
        "cross_entropy_fwd": lambda: cross_entropy.cross_entropy_fwd(x, target, weight, **named),
        "cross_entropy_bwd": lambda: cross_entropy.cross_entropy_bwd(dloss, x, target, weight, stats, one, **named),
    }


def cells(full: bool) -> list[tuple[int, int, torch.dtype, torch.dtype]]:
    """Quick: what amp gives, at every configuration's width on one architecture and at two widths on the others."""
    if full:
        mixes = ((BF16, F32), (F32, F32), (F16, F16))
        return [(arch, hidden, *mix) for arch in ARCHITECTURES for hidden in WIDTHS for mix in mixes]
    one = [(90, hidden, BF16, F32) for hidden in WIDTHS if hidden not in (64, 1000, 1536, 3072, 6144)]
    return one + [(arch, hidden, F32, F32) for arch in ARCHITECTURES for hidden in (768, 4096)]


def test_norms_compile_without_spills(compiler, pytestconfig):
    for architecture, hidden, dtype, param in cells(pytestconfig.getoption("--full")):
        for call in norm_calls(hidden, dtype, param).values():
            assert compiler(architecture, call)


def test_add_norms_compile_without_spills(compiler, pytestconfig):
    full = pytestconfig.getoption("--full")
    widths = WIDTHS if full else (768, 4096, 8192, 50257)
    for architecture in ARCHITECTURES if full else (80, 90):
        for hidden in widths:
            for dtype, stream in ((BF16, F32), (BF16, BF16), (F32, F32)) if full else ((BF16, F32),):
                for call in add_norm_calls(hidden, dtype, stream).values():
                    assert compiler(architecture, call)


@pytest.mark.parametrize("hidden", [560, 2048, 50257])  # two tiles, one, a walk over the row
@pytest.mark.parametrize(("dtype", "stream"), [(BF16, BF16), (F16, BF16), (BF16, F16)])
def test_a_sum_of_bf16_rounded_to_fp16_is_made_in_fp32(compiler, hidden, dtype, stream):
    """LLVM likes to round first and add then: 1e12 - 1e12 becomes inf - inf."""
    x, residual = (torch.empty(64, hidden, dtype=kind, device="meta") for kind in (dtype, stream))
    for post_norm in (False, True):
        options = (None, None, 1e-5, None, 0.0, post_norm, False, F32, F16)
        (kernel,) = compiler(90, lambda rest=options: add_norm.add_layer_norm_fwd(x, residual, *rest))
        assert not re.findall(r"\b(?:add|sub|fma)\S*f16\S*", kernel.ptx)
        assert re.search(r"\bcvt\.rn\.f16\S*f32", kernel.ptx)


def test_losses_compile_without_spills(compiler, pytestconfig):
    full = pytestconfig.getoption("--full")
    for architecture in ARCHITECTURES:
        for classes in (10, 1000, 8192, 50257, 128256) if full else (50257,):
            for dtype in (BF16, F32, F16) if full else (BF16, F32):
                for options in (PLAIN_LOSS, ALL_OF_LOSS):
                    for call in loss_calls(classes, dtype, options).values():
                        assert compiler(architecture, call)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("classes", [50257, 128256])
def test_logits_move_sixteen_bytes_at_a_time(compiler, classes, dtype):
    """Also where rows begin anywhere: all of a row's body does."""
    for name, call in loss_calls(classes, dtype).items():
        (kernel,) = compiler(90, call)
        accesses = machine_code(kernel)
        whole = 8192 // (
            kernel_threads(cross_entropy.BLOCKS[-1]) * (16 // dtype.itemsize)
        )  # vectors of a block a thread
        assert widths(accesses, "load")[128] == whole, accesses
        if name.endswith("bwd"):
            assert widths(accesses, "store")[128] >= whole, accesses


def kernel_threads(config: Any) -> int:
    return 32 * config.warps


def machine_code(kernel: Kernel) -> Counter[str]:
    """Mnemonics that access memory."""
    (accesses,) = instructions(kernel.cubin).values()
    local = [mnemonic for mnemonic in accesses if re.match(r"(LDL|STL)\b", mnemonic)]
    assert not local or 0 < kernel.spilled <= kernel.may_spill, kernel.name
    return accesses


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("hidden", [768, 4096, 5120])
def test_norms_move_sixteen_bytes_at_a_time(compiler, hidden, dtype):
    """Rows of one tile and of two."""
    calls = norm_calls(hidden, dtype, dtype)
    for direction, per_row in (("fwd", 2), ("bwd", 0)):  # mean and rstd are written one by one
        kernel = compiler(90, calls[f"layer_norm_{direction}"])[0]
        accesses = machine_code(kernel)
        assert set(widths(accesses, "load")) == {128}, accesses
        assert set(widths(accesses, "store") - Counter({32: per_row})) == {128}, accesses
        copies = widths(accesses, "copy")
        assert bool(copies) == (direction == "bwd"), "the rows to come are copied ahead in backward"
        if direction == "bwd":  # mean and rstd of each stage too
            copies -= Counter({32: 2 * norm.row_config(norm.BACKWARD, hidden).stages * (1 + OLD)})
            assert set(copies) == {128}, accesses


def test_misaligned_rows_compile_too(compiler):
    x = torch.empty(8, 1027, device="meta")[:, :1025]  # no stride or width that vectors would fit
    assert compiler(90, lambda: norm.layer_norm_fwd(x, None, None, 1e-5, F32))


def test_row_count_changes_compile_nothing(compiler):
    def hashes(rows: int) -> set[str]:
        return {kernel.ptx for call in norm_calls(768, BF16, F32, rows).values() for kernel in compiler(90, call)}

    assert hashes(1) == hashes(16) == hashes(17) == hashes(4096)


def adam_calls(param: torch.dtype, state: torch.dtype, kept: str, amsgrad: bool) -> dict[str, Any]:
    p, s = torch.zeros(64, dtype=param), torch.zeros(64, dtype=state)
    master, compensation = p.float() if kept == "master" else None, p.clone() if kept == "kahan" else None
    plan = adam.adam_plan([p], [s], [s], [s] if amsgrad else [], [master], [compensation], [torch.zeros(())], [0], [0])
    one = torch.ones(1)
    lists = ([1e-3], [0.9], [0.99], [1e-8], [0.1], [True], [amsgrad], [False], [7 if kept == "stochastic" else None])

    p.grad = p.clone()

    def step() -> None:
        plan.prepare(*lists, one, one, one, 1.0)
        plan.launch()

    return {
        "step": step,
        "grad_norm": lambda: adam.grad_norm([p], one, one),
        "grad_scale_": lambda: adam.grad_scale_([p], one),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("param", "state", "kept", "amsgrad"),
    [
        (F32, F32, "", False),
        (BF16, F32, "master", False),
        (BF16, BF16, "", False),
        (F32, F32, "", True),
        (BF16, BF16, "kahan", False),
        (F16, F32, "kahan", True),
        (BF16, BF16, "stochastic", False),
        (BF16, F32, "stochastic", False),
    ],
)
def test_adam_compiles_with_vectors(compiler, architecture, param, state, kept, amsgrad):
    for name, call in adam_calls(param, state, kept, amsgrad).items():
        made = {kernel.name: kernel for kernel in compiler(architecture, call)}
        if name == "step":
            tensors = 3 + amsgrad + (kept in ("master", "kahan"))  # parameter, both moments
            assert widths(machine_code(made["adam_kernel"]), "store")[128] >= tensors
        elif name == "grad_norm":
            assert widths(machine_code(made["grad_norm_kernel"]), "load")[128] > 0


def every_kernel() -> set[str]:
    """Names of all kernels of the package, helpers that they call apart."""
    package = fusedops.backends.triton
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    jitted = [value for module in modules for value in vars(module).values() if isinstance(value, triton.JITFunction)]
    return {kernel.__name__ for kernel in jitted if kernel.__name__.endswith("_kernel")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_compiled(compiler, architecture):
    """Of a kernel that no launch of these calls runs nobody knows whether it compiles."""
    args = (torch.empty(16, dtype=torch.int64), *range(16))
    calls = [
        *norm_calls(768, BF16, F32).values(),
        *norm_calls(50257, BF16, F32).values(),
        *add_norm_calls(768, BF16, F32).values(),
        *add_norm_calls(50257, BF16, F32).values(),
        *loss_calls(50257, BF16).values(),
        *adam_calls(F32, F32, "", False).values(),
        lambda: tables.launch(kernels.upload_kernel, (1,), torch.device("cpu"), args, {}, 1),
    ]
    assert {kernel.name for call in calls for kernel in compiler(architecture, call)} == every_kernel()


@pytest.mark.parametrize("wanted", [*itertools.product((False, True), repeat=3)])
def test_what_a_step_launches_has_been_compiled_ahead(monkeypatch, wanted):
    """Also where a later step comes with a scale, an inf check or a norm that the ones before did without."""
    ahead, launched = [], []
    monkeypatch.setattr(adam, "compile_ahead", lambda *run: ahead.append(specialised(*run)))
    monkeypatch.setattr(adam, "launch", lambda *run: launched.append(specialised(*run)))
    one = torch.ones(2)
    p, q = torch.zeros(64), torch.zeros(64, dtype=BF16)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    state = ([p + 0, q + 0], [p + 0, q + 0], [], [None] * 2, [None] * 2, [one[0], one[1]], [0, 0], [0, 1])
    plan = adam.adam_plan([p, q], *state)
    for scale, found_inf, clip in ((False,) * 3, wanted):
        lists = ([1e-3], [0.9], [0.99], [1e-8], [0.1], [True], [False], [False], [None])
        given = [one[:1] if want else None for want in (scale, found_inf, clip)]
        plan.prepare(*lists, *given, 1.0 if clip else None)
        plan.launch()
        assert {name for name, *_ in launched} == {"adam_prologue_kernel", "adam_kernel"}
        assert set(launched) <= set(ahead)
        launched.clear()


def specialised(kernel, grid, device, args, meta, warps) -> tuple[Any, ...]:
    """What a kernel is compiled for."""
    kinds = [arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args]
    return kernel.__name__, *kinds, *meta.items(), warps


def test_upload_kernel_compiles_once_for_all_values(compiler):
    def ptx(value: int) -> str:
        device, args = torch.device("cpu"), (torch.empty(16, dtype=torch.int64), *[value] * 16)
        (kernel,) = compiler(90, lambda: tables.launch(kernels.upload_kernel, (1,), device, args, {}, 1))
        return kernel.ptx

    assert ptx(1) == ptx(16) == ptx(2**40)
