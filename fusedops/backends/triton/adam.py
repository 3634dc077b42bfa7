"""Adam on Triton: one plan for the tensors of a device, kept across steps, and passes over lists of gradients.

A step is a prologue launch (steps, bias corrections, clip coefficient, for every tensor at once) and one launch for
all tensors and groups that share their dtypes. Nothing waits for the device and gradients are never written.

Numerics: scalars in fp64, rounded once; elements in fp32, each state, master and parameter rounded once; divisions and
square roots correctly rounded; deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...errors import UnsupportedError
from ..memory import laid_out, lies_like, memory_layout
from . import adam_kernels as kernels
from .launch import Launch, ceil_div, compile_ahead, launch
from .tables import CHUNK, Chunks, address, capturing, current_stream, make_chunks, upload

_TL = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class ChunkConfig(NamedTuple):
    """How a program walks its chunk: `block` elements at a time."""

    block: int
    warps: int


UPDATE = ChunkConfig(block=1024, warps=4)
NORM = ChunkConfig(block=4096, warps=8)
SCALE = ChunkConfig(block=2048, warps=4)
FINISH = ChunkConfig(block=4096, warps=16)
PROLOGUE = ChunkConfig(block=128, warps=4)

# What a launch is compiled for: dtype of gradient, parameter, exp_avg, exp_avg_sq, max_exp_avg_sq; the rounding.
Mix = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype | None, int]


class _Member(NamedTuple):
    """What the kernel reads and writes for one parameter; all but step lie like the parameter."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    master: Tensor | None
    compensation: Tensor | None
    step: Tensor


class _Tables(NamedTuple):
    """What does not change from step to step, as long as no tensor moves and the stream stays the same."""

    addresses: Tensor  # [5, tensors]
    steps: Tensor  # [tensors]
    numel: Tensor  # [tensors]
    group: Tensor  # [tensors]


class AdamPlan:
    """Adam for the tensors of one device.

    Args:
        params: parameters: fp32 | fp16 | bf16.
        exp_avg: first moments, shaped like the parameters; any of these dtypes.
        exp_avg_sq: second moments, likewise.
        max_exp_avg_sq: running maxima for amsgrad; empty, or None where a group has none.
        master: fp32 master weights, or None where a parameter has none.
        compensation: what the parameter's rounding lost, in its dtype, or None where that is not kept.
        step: 0-dim fp32 counters on the parameters' device.
        group: index of each parameter's group into the per-group lists of `prepare`.
        index: of each parameter in its optimizer.

    Raises:
        ValueError: a tensor of the wrong shape, dtype or device.
        UnsupportedError: fp64 tensors.
    """

    def __init__(
        self,
        params: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
        max_exp_avg_sq: list[Tensor | None],
        master: list[Tensor | None],
        compensation: list[Tensor | None],
        step: list[Tensor],
        group: list[int],
        index: list[int],
    ) -> None:
        maxima = max_exp_avg_sq or [None] * len(params)
        self._given = list(map(_Member, params, exp_avg, exp_avg_sq, maxima, master, compensation, step))
        for number, member in enumerate(self._given):
            _check_member(number, member, params[0].device)
        self._device = params[0].device if params else torch.device("cpu")
        self._numels = [p.numel() for p in params]
        self._group = group
        self._index = index
        self._prepared: _Prepared | None = None
        # Launches whose kernels are known to compile, and which arguments of the prologue were None.
        self._compiled: tuple[list[tuple[Mix, Chunks]], tuple[bool, ...]] | None = None
        self._cache = _Cache(self._device)
        self._bind()

    def _bind(self) -> None:
        """Note where the tensors lie; those that don't lie like their parameter get buffers, copied in each step."""
        self._places = self._find()
        self._strides = [memory_layout(member.param) for member in self._given]
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._members = [
            _Member(*(self._in_place(t, strides) for t in member[:-1]), member.step)  # type: ignore[arg-type, call-arg]
            for member, strides in zip(self._given, self._strides, strict=True)
        ]

    def _find(self) -> list[Any]:
        addresses = [tensor.data_ptr() for member in self._given for tensor in member if tensor is not None]
        return [addresses, [member.param.stride() for member in self._given]]

    def _in_place(self, tensor: Tensor | None, strides: tuple[int, ...]) -> Tensor | None:
        if tensor is None or lies_like(tensor, strides):
            return tensor
        buffer = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        self._staged.append((tensor, buffer))
        return buffer

    @torch.no_grad()
    def prepare(
        self,
        lr: Sequence[float | Tensor],
        beta1: Sequence[float | Tensor],
        beta2: Sequence[float | Tensor],
        eps: Sequence[float],
        weight_decay: Sequence[float],
        decoupled: Sequence[bool],
        amsgrad: Sequence[bool],
        maximize: Sequence[bool],
        seed: Sequence[int | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_grad_norm: float | None,
    ) -> None:
        """Check a step of every parameter that has a gradient now and make what it needs; nothing given is written.

        Args:
            lr: learning rate per group, as are the lists after it; a device tensor is read on the device.
            beta1: decay of the first moment; likewise.
            beta2: decay of the second moment; likewise.
            eps: added to the denominator.
            weight_decay: decay of the weights.
            decoupled: AdamW's decay instead of Adam's L2 term.
            amsgrad: divide by the running maximum of the second moment, where there is one.
            maximize: step along the gradient.
            seed: of the stochastic rounding of bf16 parameters without master and compensation; None: to nearest.
            grad_scale: 1-element fp32 that gradients are divided by.
            found_inf: 1-element fp32; where non-zero nothing changes.
            grad_norm: 1-element norm of the unscaled gradients.
            max_grad_norm: gradients are scaled down so that their norm is at most this.

        Raises:
            ValueError: a gradient that does not fit its parameter.
        """
        self._prepared = None
        if not self._given:
            return
        grads = [member.param.grad for member in self._given]
        for number, (member, grad) in enumerate(zip(self._given, grads, strict=True)):
            _check_gradient(number, member.param, grad)
        if self._places != self._find():  # p.data = … gave a tensor other memory or strides
            self._cache.clear()
            self._bind()
        self._cache.enter_stream()
        laid = [None if g is None else laid_out(g, s) for g, s in zip(grads, self._strides, strict=True)]
        for tensor, buffer in self._staged:
            buffer.copy_(tensor)

        tables: _Tables = self._cache.get("tables", None, self._make_tables)
        grad_table = self._cache.get("grads", tuple(address(g) for g in laid), self._upload)
        scalars = torch.empty((11, len(self._given)), dtype=torch.float32, device=self._device)
        prologue = self._prologue_arguments(
            tables, grad_table, scalars, lr, beta1, beta2, (eps, weight_decay, decoupled, maximize),
            grad_scale, found_inf, grad_norm if max_grad_norm is not None else None, max_grad_norm or 0.0,
        )  # fmt: skip
        dither = grad_table  # stands in where nothing is rounded at random
        if any(s is not None for s in seed):
            dither = self._cache.get("dither", tuple(seed), self._make_dither)
        mixes = tuple(
            _mix(member, grad, amsgrad[group], seed[group])
            for member, grad, group in zip(self._members, laid, self._group, strict=True)
        )
        launches: list[tuple[Mix, Chunks]] = self._cache.get("launches", mixes, self._make_launches)
        step = _Prepared((laid, lr, beta1, beta2), prologue, launches, tables, grad_table, scalars, dither)
        absent = tuple(argument is None for argument in prologue)
        if self._compiled is None or self._compiled[0] is not launches or self._compiled[1] != absent:
            self._run(compile_ahead, step)
            self._compiled = launches, absent
        self._prepared = step

    def grad_norm(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor | None:
        """Return `grad_norm` of the parameters' gradients, None where there is none."""
        grads = [grad for member in self._given if (grad := member.param.grad) is not None]
        return grad_norm(grads, grad_scale, found_inf) if grads else None

    @torch.no_grad()
    def launch(self) -> None:
        """Take the step that was prepared last, once."""
        if self._prepared is None:
            return
        step, self._prepared = self._prepared, None
        self._run(launch, step)
        written = [m.param for m, grad in zip(self._given, step.kept[0], strict=True) if grad is not None]
        torch.autograd.graph.increment_version(written)
        for tensor, buffer in self._staged:
            tensor.copy_(buffer)

    def _make_tables(self, _: None) -> _Tables:
        rows = [[address(t) for t in kind] for kind in list(zip(*self._members, strict=True))[:4]]
        companions = [address(m.compensation if m.master is None else m.master) for m in self._members]
        steps = [address(member.step) for member in self._members]
        table = upload([*rows, companions, steps, self._numels, self._group], self._device)
        return _Tables(table[:5], table[5], table[6], table[7])

    def _make_dither(self, seed: tuple[int | None, ...]) -> Tensor:
        seeds = [seed[group] or 0 for group in self._group]
        return self._upload([[s & 0xFFFFFFFF for s in seeds], [s >> 32 for s in seeds], self._index])

    def _make_launches(self, dtypes: tuple[Mix, ...]) -> list[tuple[Mix, Chunks]]:
        members: dict[Mix, list[int]] = {}
        for i, mix in enumerate(dtypes):
            if self._numels[i]:
                members.setdefault(mix, []).append(i)
        return [(mix, make_chunks(self._numels, chosen, self._device)) for mix, chosen in members.items()]

    def _upload_doubles(self, values: Sequence[Any]) -> Tensor:
        return self._upload(torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.int64))

    def _upload(self, values: Any) -> Tensor:
        return upload(values, self._device)

    def _prologue_arguments(
        self,
        tables: _Tables,
        grad_table: Tensor,
        scalars: Tensor,
        lr: Sequence[float | Tensor],
        beta1: Sequence[float | Tensor],
        beta2: Sequence[float | Tensor],
        others: tuple[Sequence[float], ...],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        grad_norm: Tensor | None,
        max_grad_norm: float,
    ) -> tuple[Any, ...]:
        # A number on the device stands as 0 in the table of numbers and by its address in the other.
        rows: list[tuple[float, ...]] = []
        places: list[tuple[int, ...]] = []
        for row in (lr, beta1, beta2):
            there = [n if isinstance(n, Tensor) and n.device == self._device else None for n in row]
            rows.append(tuple(float(n) if t is None else 0.0 for n, t in zip(row, there, strict=True)))
            places += [tuple(map(address, there)), tuple(0 if t is None else t.element_size() for t in there)]
        number_table = self._cache.get("numbers", tuple(places), self._upload)
        *plain, maximize = others
        hyper = (*rows, *(tuple(map(float, row)) for row in plain), tuple(-1.0 if m else 1.0 for m in maximize))
        hyper_table = self._cache.get("hyper", hyper, self._upload_doubles)
        return (
            hyper_table.view(torch.float64), number_table, tables.group, tables.steps, grad_table, scalars,
            grad_scale, found_inf, grad_norm, float(max_grad_norm), len(lr), len(self._given),
        )  # fmt: skip

    def _run(self, run: Launch, step: _Prepared) -> None:
        """Run, or compile, the kernels of a step."""
        grid, meta = (ceil_div(len(self._given), PROLOGUE.block),), {"BLOCK": PROLOGUE.block}
        run(kernels.adam_prologue_kernel, grid, self._device, step.prologue, meta, PROLOGUE.warps)
        for mix, chunks in step.launches:
            self._update(run, mix, chunks, step)

    def _update(self, run: Launch, mix: Mix, chunks: Chunks, step: _Prepared) -> None:
        grad, param, exp_avg, exp_avg_sq, maximum, rounding = mix
        meta = {
            "GRAD": _TL[grad], "PARAM": _TL[param], "EXP_AVG": _TL[exp_avg], "EXP_AVG_SQ": _TL[exp_avg_sq],
            "AMSGRAD": None if maximum is None else _TL[maximum], "ROUNDING": rounding,
            "CHUNK": CHUNK, "BLOCK": UPDATE.block,
        }  # fmt: skip
        args = (
            chunks.owner, chunks.first, step.tables.numel, step.tables.addresses, step.grads, step.scalars,
            step.dither, len(self._given),
        )  # fmt: skip
        run(kernels.adam_kernel, (chunks.programs,), self._device, args, meta, UPDATE.warps)


class _Prepared(NamedTuple):
    """A step that was prepared, with what its pointers point to."""

    kept: tuple[Any, ...]  # what tables know by its address only
    prologue: tuple[Any, ...]
    launches: list[tuple[Mix, Chunks]]
    tables: _Tables
    grads: Tensor  # [tensors]
    scalars: Tensor  # [11, tensors]
    dither: Tensor  # [3, tensors]


class _Cache:
    """The plan's device tables by name, each with the key it was made for; remade when the key or the stream changes.

    Tables that a CUDA graph may have recorded are kept for as long as the plan lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = 0
        self._entries: dict[str, tuple[Any, Any]] = {}
        self._recorded: list[Any] = []

    def clear(self) -> None:
        self._entries.clear()

    def enter_stream(self) -> None:
        stream = current_stream(self._device)
        if stream != self._stream:
            # While capturing, the tables of the warm-up are complete: capture begins with a synchronisation.
            if not capturing(self._device):
                self.clear()
            self._stream = stream

    def get(self, name: str, key: Any, make: Callable[[Any], Any]) -> Any:
        entry = self._entries.get(name)
        recording = capturing(self._device)
        if entry is None or entry[0] != key:
            value = make(key)
            if recording:
                self._recorded.append(value)
                return value  # it holds its values only once the graph has run
            self._entries[name] = entry = (key, value)
        elif recording:
            self._recorded.append(entry[1])
        return entry[1]


def _mix(member: _Member, grad: Tensor | None, amsgrad: bool, seed: int | None) -> Mix:
    maximum = member.max_exp_avg_sq if amsgrad else None
    if member.master is not None:
        rounding = kernels.MASTER
    elif member.compensation is not None:
        rounding = kernels.KAHAN
    else:
        at_random = seed is not None and member.param.dtype is torch.bfloat16
        rounding = kernels.STOCHASTIC if at_random else kernels.NEAREST
    return (
        member.param.dtype if grad is None else grad.dtype,
        member.param.dtype,
        member.exp_avg.dtype,
        member.exp_avg_sq.dtype,
        None if maximum is None else maximum.dtype,
        rounding.value,
    )


def _check_member(number: int, member: _Member, device: torch.device) -> None:
    for name, tensor in zip(_Member._fields, member, strict=True):
        if tensor is None:
            continue
        shape = member.param.shape if name != "step" else torch.Size(())
        if tensor.shape != shape or tensor.device != device:
            raise ValueError(
                f"adam_plan: {name} {number}: expected shape {tuple(shape)} on {device}, got {tuple(tensor.shape)} on "
                f"{tensor.device}"
            )
        if name in ("step", "master") and tensor.dtype is not torch.float32:
            raise ValueError(f"adam_plan: {name} {number}: expected torch.float32, got {tensor.dtype}")
        if name == "compensation" and tensor.dtype is not member.param.dtype:
            raise ValueError(f"adam_plan: {name} {number}: expected {member.param.dtype}, got {tensor.dtype}")
        _check_dtype("adam_plan", name, number, tensor)


def _check_gradient(number: int, param: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        return
    if grad.layout is not torch.strided or grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"step: gradient {number}: expected a dense tensor of shape {tuple(param.shape)} on {param.device}, got "
            f"{grad.layout} of shape {tuple(grad.shape)} on {grad.device}"
        )
    _check_dtype("step", "gradient", number, grad)


def _check_dtype(where: str, name: str, number: int, tensor: Tensor) -> None:
    if tensor.dtype not in _TL:
        raise UnsupportedError(
            f"{where}: {name} {number}: the Triton kernels take fp32, fp16 and bf16, got {tensor.dtype}"
        )


adam_plan = AdamPlan


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    """Return the 2-norm of all gradients of one device, divided by `grad_scale`, from one read of them.

    Args:
        grads: fp32 | fp16 | bf16, of any shapes.
        grad_scale: 1-element fp32, or None.
        found_inf: 1-element fp32; set to 1 where any gradient holds an inf or NaN, else left alone.

    Returns:
        1-element fp32.

    Raises:
        ValueError: no gradients.
        UnsupportedError: fp64 gradients.
    """
    if not grads:
        raise ValueError("grad_norm: grads: expected at least one tensor, got none")
    device = grads[0].device
    laid = [laid_out(g, memory_layout(g)) for g in grads]
    launches = _gradient_launches("grad_norm", laid)
    partial = torch.empty(sum(chunks.programs for _, chunks, _ in launches), dtype=torch.float32, device=device)
    done = 0
    for dtype, chunks, table in launches:
        args = (chunks.owner, chunks.first, table[0], table[1], partial[done:], grad_scale, found_inf)
        meta = {"GRAD": _TL[dtype], "CHUNK": CHUNK, "BLOCK": NORM.block}
        launch(kernels.grad_norm_kernel, (chunks.programs,), device, args, meta, NORM.warps)
        done += chunks.programs
    norm = torch.empty(1, dtype=torch.float32, device=device)
    launch(kernels.grad_norm_finish_kernel, (1,), device, (partial, norm, done), {"BLOCK": FINISH.block}, FINISH.warps)
    return norm


@torch.no_grad()
def grad_scale_(grads: Sequence[Tensor], coef: Tensor) -> None:
    """Multiply every gradient of one device by `coef` (1 element, on that device), in place; 1 touches nothing.

    Args:
        grads: fp32 | fp16 | bf16, of any shapes.
        coef: 1-element tensor.

    Raises:
        UnsupportedError: fp64 gradients.
    """
    grads = [g for g in grads if not g._is_zerotensor()]  # zeros without memory stay zeros
    flat = [g for g in grads if lies_like(g, memory_layout(g))]
    launches = _gradient_launches("grad_scale_", flat)
    for run in (compile_ahead, launch) if len(launches) > 1 else (launch,):  # all are scaled, or none
        for dtype, chunks, table in launches:
            args = (chunks.owner, chunks.first, table[0], table[1], coef)
            meta = {"GRAD": _TL[dtype], "CHUNK": CHUNK, "BLOCK": SCALE.block}
            run(kernels.scale_kernel, (chunks.programs,), flat[0].device, args, meta, SCALE.warps)
    for g in grads:
        if not lies_like(g, memory_layout(g)):
            g.mul_(coef.reshape(()))


_GradientLaunch = tuple[torch.dtype, Chunks, Tensor]
# Tables of the last lists of gradients. They hold nothing but their key, so an equal key may have them again.
_recent: dict[Any, list[_GradientLaunch]] = {}
_RECENT = 16


def _gradient_launches(where: str, grads: Sequence[Tensor]) -> list[_GradientLaunch]:
    """One launch a dtype: its chunks, and a table of lengths and addresses of all gradients."""
    for number, grad in enumerate(grads):
        _check_dtype(where, "gradient", number, grad)
    if not grads:
        return []
    device = grads[0].device
    if capturing(device):
        return _make_gradient_launches(grads, device)
    key = (device, current_stream(device), tuple((g.dtype, g.numel(), address(g)) for g in grads))
    launches = _recent.get(key)
    if launches is None:
        launches = _make_gradient_launches(grads, device)
        if len(_recent) >= _RECENT:
            _recent.clear()
        _recent[key] = launches
    return launches


def _make_gradient_launches(grads: Sequence[Tensor], device: torch.device) -> list[_GradientLaunch]:
    numels = [g.numel() for g in grads]
    table = upload([numels, [address(g) for g in grads]], device)
    members: dict[torch.dtype, list[int]] = {}
    for i, grad in enumerate(grads):
        if numels[i]:
            members.setdefault(grad.dtype, []).append(i)
    return [(dtype, make_chunks(numels, chosen, device), table) for dtype, chosen in members.items()]
