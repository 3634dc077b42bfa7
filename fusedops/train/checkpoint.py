"""Checkpoints: one folder a step, holding tensors (safetensors) and everything else (JSON). No pickle.

A folder is written under a temporary name, flushed to disk, then renamed: it exists whole or not at all. The JSON
holds the SHA-256 of the tensor file, so a torn or edited pair is noticed. Loading checks everything before the first
copy, and takes the files for hostile: a refused checkpoint leaves the run as it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .._files import new_folder, read_json, remove, write_text

FORMAT = "fusedops-train-checkpoint"
VERSION = 1
TENSORS, META = "tensors.safetensors", "checkpoint.json"


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message names the file and what was wrong."""


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: dict[str, Any],
) -> Path:
    """Write `folder`/step-<step> atomically, then remove the older ones.

    Args:
        folder: where the checkpoints of this run live.
        step: number of steps done.
        model: saved with the random states of the CPU and of the GPU it is on.
        optimizer: its state dict is saved.
        scaler: its state dict is saved.
        identity: JSON values that must be the same when loading (configuration, data fingerprint).

    Returns:
        The folder written.

    Raises:
        OSError: it cannot be written; the older ones stay.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"rng.{name}": state for name, state in _rng_states(model).items()}
    scalars: dict[str, dict[str, Any]] = {}
    state = optimizer.state_dict()
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                scalars.setdefault(str(index), {})[key] = value

    target = folder / f"step-{step:08d}"
    with new_folder(target) as temporary:
        _save_tensors({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, temporary / TENSORS)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "identity": identity,
            "optimizer": {"param_groups": state["param_groups"], "scalars": scalars},
            "scaler": scaler.state_dict(),
            "tensors_sha256": _sha256(temporary / TENSORS),
        }
        write_text(temporary / META, json.dumps(meta, indent=1))
    remove_all(folder, but=target)
    return target


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # what the system said is in its text
        full = "(os error 28)" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, f"cannot be written ({error})", str(file)) from error


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None."""
    return max(_all(folder), default=None)


def remove_all(folder: Path, but: Path | None = None) -> None:
    """Delete the checkpoints under `folder`; where that is a link they may be somebody else's, and stay: it warns."""
    others = [path for path in _all(folder) if path != but]
    if others and folder.is_symlink():
        warnings.warn(f"{folder} is a link: what is there is kept, older checkpoints too", UserWarning, stacklevel=2)
        return
    for path in others:
        remove(path)


def _all(folder: Path) -> list[Path]:
    """Folders that `save` has made; what is named alike, links among them, is none of them."""
    return [
        p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name) and p.is_dir() and not p.is_symlink()
    ]


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: dict[str, Any],
) -> int:
    """Check the checkpoint at `path` against this run, then copy it in.

    Returns:
        The number of steps done.

    Raises:
        CheckpointError: a file is missing, truncated, changed, foreign, or belongs to another run.
    """
    meta = _read_meta(path)
    for name, expected in identity.items():
        found = meta["identity"].get(name)
        if found != expected:
            raise CheckpointError(f"{path}: belongs to another run: {name} is {found!r}, expected {expected!r}")
    tensors = _read_tensors(path, meta)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "rng": {}}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise CheckpointError(f"{path / TENSORS}: unexpected tensor {name!r}")
        parts[part][rest] = value
    _check_same(path, "model", parts["model"], model.state_dict())
    _check_same(path, "rng", parts["rng"], _rng_states(model))
    _check_rng(path, parts["rng"])
    optimizer_state = _optimizer_state(path, meta, parts["optimizer"], optimizer)
    scaler_state = _scaler_state(path / META, meta["scaler"], scaler.state_dict())

    try:  # the first to be changed, as it alone has checks of its own, which come before it changes anything
        optimizer.load_state_dict(optimizer_state)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: optimizer: {error}") from error
    scaler.load_state_dict(scaler_state)
    model.load_state_dict(parts["model"])
    torch.set_rng_state(parts["rng"].pop("cpu"))
    for device, rng in parts["rng"].items():
        torch.cuda.set_rng_state(rng, device)
    return int(meta["step"])


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / META
    try:
        meta = read_json(file)
    except OSError as error:
        raise CheckpointError(f"{file}: no checkpoint to be read here ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{error}; the file is damaged") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(f"{file}: not a checkpoint of `fusedops train` (no format: {FORMAT!r})")
    if meta.get("version") != VERSION:
        raise CheckpointError(f"{file}: checkpoint version {meta.get('version')!r}, expected {VERSION}")
    missing = {"step", "identity", "optimizer", "scaler", "tensors_sha256"} - meta.keys()
    if missing:
        raise CheckpointError(f"{file}: damaged, {', '.join(sorted(missing))} missing")
    optimizer = meta["optimizer"]
    sound = {
        "step": type(meta["step"]) is int and meta["step"] >= 0,
        "identity": isinstance(meta["identity"], dict),
        "optimizer": isinstance(optimizer, dict)
        and isinstance(optimizer.get("param_groups"), list)
        and all(isinstance(group, dict) for group in optimizer["param_groups"])
        and isinstance(optimizer.get("scalars"), dict)
        and all(isinstance(values, dict) for values in optimizer["scalars"].values()),
        "scaler": isinstance(meta["scaler"], dict),
    }
    if odd := [name for name, good in sound.items() if not good]:
        raise CheckpointError(f"{file}: damaged, {', '.join(odd)} is not what `fusedops train` writes")
    return meta


def _read_tensors(path: Path, meta: dict[str, Any]) -> dict[str, Tensor]:
    file = path / TENSORS
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file}: expected a regular file")
    try:
        if _sha256(file) != meta["tensors_sha256"]:
            raise CheckpointError(f"{file}: truncated or changed, its SHA-256 is not the one in {META}")
        return load_file(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from error


def _check_same(path: Path, part: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, shapes and dtypes must be equal."""
    odd = sorted(found.keys() ^ expected.keys())
    if odd:
        raise CheckpointError(f"{path}: {part} tensors do not match this run: {', '.join(odd[:3])} on one side only")
    for name, value in expected.items():
        got = found[name]
        if got.shape != value.shape or got.dtype != value.dtype:
            is_, expected_ = (f"{tuple(t.shape)} {t.dtype}" for t in (got, value))
            raise CheckpointError(f"{path}: {part} tensor {name} is {is_}, expected {expected_}")


def _check_rng(path: Path, states: dict[str, Tensor]) -> None:
    """Not all bytes are a random state: let generators that nobody uses take them."""
    for device, state in states.items():
        try:
            torch.Generator(device).set_state(state)
        except RuntimeError as error:
            raise CheckpointError(f"{path / TENSORS}: rng.{device} is no random state ({error})") from error


def _scaler_state(file: Path, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The scaler's state dict: numbers that fp32 and int32 tensors hold, which GradScaler would find out too late."""
    _check_alike(file, "scaler", found, expected)
    state = {}
    for name, value in expected.items():
        number, kind = found[name], type(value)
        most = 2**31 - 1 if kind is int else torch.finfo(torch.float32).max
        if not 0 <= number <= most or (kind is int and type(number) is not int):
            raise CheckpointError(f"{file}: damaged, scaler.{name} is {number!r:.60}, expected one like {value!r}")
        state[name] = kind(number)
    return state


def _check_alike(file: Path, what: str, found: Any, expected: Any) -> None:
    """Values may differ, what they are may not: the same keys, lengths and kinds all the way down, finite numbers."""
    kinds = ((bool,), (int, float), (str,), (type(None),), (list, tuple), (dict,))
    kind = next((kind for kind in kinds if isinstance(expected, kind)), (type(expected),))
    same = isinstance(found, kind) and isinstance(found, bool) == isinstance(expected, bool)
    if same and isinstance(expected, dict):
        if odd := sorted(found.keys() ^ expected.keys()):
            told = f"{', '.join(odd)} on one side only"
            raise CheckpointError(f"{file}: {what} is damaged or of another version of torch or fusedops: {told}")
    elif same and isinstance(expected, list | tuple):
        same = len(found) == len(expected)
    elif same and isinstance(expected, int | float):
        same = abs(found) <= sys.float_info.max
    if not same:
        raise CheckpointError(
            f"{file}: damaged, {what} is {str(found)[:60]!r}, expected one like {str(expected)[:60]!r}"
        )
    if isinstance(expected, dict | list | tuple):
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            _check_alike(file, f"{what}.{key}", found[key], expected[key])


def _optimizer_state(
    path: Path, meta: dict[str, Any], tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The optimizer's state dict, checked against its parameters."""
    groups = meta["optimizer"]["param_groups"]
    params = {str(i): p for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    own_groups = optimizer.state_dict()["param_groups"]
    if [group.get("params") for group in groups] != [group["params"] for group in own_groups]:
        raise CheckpointError(f"{path}: the optimizer's parameter groups do not match this run's")
    _check_alike(path / META, "optimizer.param_groups", groups, own_groups)
    for group in groups:
        group["betas"] = tuple(group["betas"])  # JSON has no tuples

    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        param = params.get(index)
        expected = () if param is None or key == "step" else param.shape
        if param is None or value.shape != expected or not value.is_floating_point():
            is_ = f"{name} {tuple(value.shape)} {value.dtype}"
            raise CheckpointError(f"{path}: optimizer tensor {is_} fits no parameter of this run")
        state.setdefault(int(index), {})[key] = value
    for index, values in meta["optimizer"]["scalars"].items():
        taken = values.keys() & state.get(int(index), {}).keys() if index in params else set()
        if index not in params or taken or not all(type(value) in (int, float) for value in values.values()):
            raise CheckpointError(f"{path / META}: damaged, optimizer.scalars.{index} fits no parameter of this run")
        state.setdefault(int(index), {}).update(values)
    for number in range(len(params)):
        missing = {"step", "exp_avg", "exp_avg_sq"} - state.get(number, {}).keys()
        if missing:
            raise CheckpointError(f"{path}: optimizer state of parameter {number} lacks {', '.join(sorted(missing))}")
    return {"state": state, "param_groups": groups}


def _rng_states(model: nn.Module) -> dict[str, Tensor]:
    """Random states by device name, of the CPU and of the GPU that the model is on."""
    states = {"cpu": torch.get_rng_state()}
    device = next(model.parameters()).device
    if device.type == "cuda":
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
