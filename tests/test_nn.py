"""Modules: torch's own constructors, state dicts and class tree, on our ops."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import fusedops
from fusedops.nn import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

F32, BF16 = torch.float32, torch.bfloat16
PAIRS = pytest.mark.parametrize(
    ("ours", "theirs"), [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)], ids=["LayerNorm", "RMSNorm"]
)
Module = type[torch.nn.Module]


IMPORTING = """
import sys
from types import FunctionType
import torch, torch.distributed.tensor, torch.fx
import torch._dynamo  # which replaces torch.manual_seed

def everything():
    spaces = {name: vars(module) for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"}
    spaces |= {f"{name}.{key}": vars(value) for name, space in spaces.items() for key, value in space.items()
               if isinstance(value, type)}
    kinds = type, FunctionType
    return {(name, key): value for name, space in spaces.items() for key, value in space.items()
            if isinstance(value, kinds)}

before, wrapped = everything(), len(torch.fx._symbolic_trace._wrapped_fns_to_patch)
import fusedops
after = everything()
replaced = [key for key, value in before.items() if after.get(key) is not value]
assert len(before) > 1000 and not replaced, replaced
added = [name for _, name in torch.fx._symbolic_trace._wrapped_fns_to_patch][wrapped:]
assert added == ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "cross_entropy"], added
"""


def test_importing_replaces_nothing_in_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@PAIRS
@pytest.mark.parametrize(
    "kwargs", [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": BF16}, {"normalized_shape": (4, 8)}], ids=str
)
def test_same_constructor_result_state_and_gradients(ours: Module, theirs: Module, kwargs: dict[str, Any]) -> None:
    kwargs = {"normalized_shape": 8, **kwargs}
    a, b = ours(**kwargs), theirs(**kwargs)
    assert isinstance(a, theirs)
    assert (a.normalized_shape, a.eps, a.elementwise_affine) == (b.normalized_shape, b.eps, b.elementwise_affine)
    assert list(a.state_dict()) == list(b.state_dict())
    for p in b.parameters():
        torch.nn.init.uniform_(p)
    a.load_state_dict(b.state_dict())
    x = torch.randn(3, 4, 8, dtype=kwargs.get("dtype", F32))
    torch.testing.assert_close(a(x), b(x))
    for module in (a, b):
        module(x.requires_grad_()).float().square().sum().backward()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_layer_norm_without_bias() -> None:
    module = LayerNorm(8, bias=False)
    assert list(module.state_dict()) == ["weight"]
    x = torch.randn(2, 8)
    torch.testing.assert_close(module(x), torch.nn.functional.layer_norm(x, (8,), module.weight))


@pytest.mark.parametrize("add", [False, True])
def test_weights_centred_on_zero(add: bool) -> None:
    """As Gemma's: a fresh module scales by one, in training and in TorchScript, and shows its offset."""
    module = AddRMSNorm(8, eps=1e-3, weight_offset=1.0) if add else RMSNorm(8, eps=1e-3, weight_offset=1.0)
    assert not module.weight.any()
    x = torch.randn(4, 8)
    given = (x, torch.zeros(4, 8)) if add else (x,)

    def norm(net: Module) -> torch.Tensor:
        return net(*given)[0] if add else net(*given)

    want = torch.nn.RMSNorm(8, eps=1e-3)
    torch.testing.assert_close(norm(module), want(x))
    torch.nn.init.uniform_(module.weight)
    want.weight = torch.nn.Parameter(module.weight.detach() + 1)
    torch.testing.assert_close(norm(module), want(x))
    assert "weight_offset=1.0" in repr(module)
    assert pickle.loads(pickle.dumps(module)).weight_offset == 1.0
    module.reset_parameters()
    assert not module.weight.any()
    with pytest.raises(ValueError, match="weight_offset"):
        norm(type(module)(8, elementwise_affine=False, weight_offset=1.0))


@PAIRS
def test_state_dicts_move_both_ways(ours: Module, theirs: Module) -> None:
    for source, target in ((ours(8), theirs(8)), (theirs(8), ours(8))):
        torch.nn.init.uniform_(source.weight)
        target.load_state_dict(source.state_dict())
        assert torch.equal(target.weight, source.weight)


@PAIRS
def test_repr_is_torchs(ours: Module, theirs: Module) -> None:
    assert repr(ours(8, eps=1e-3)) == repr(theirs(8, eps=1e-3))


@PAIRS
def test_copies(ours: Module, theirs: Module) -> None:
    module = ours(8, out_dtype=F32)
    x = torch.randn(2, 8).to(BF16)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert type(other) is ours
        assert other.out_dtype is F32
        assert torch.equal(other(x), module(x))
        assert other.weight.data_ptr() != module.weight.data_ptr()
    assert not any(isinstance(v, types.ModuleType | types.BuiltinFunctionType) for v in module.__dict__.values())


@PAIRS
def test_an_instance_pickled_before_out_dtype_existed_still_runs(ours: Module, theirs: Module) -> None:
    module = ours(8)
    del module.__dict__["out_dtype"]
    old = pickle.loads(pickle.dumps(module))
    assert old(torch.randn(2, 8)).dtype is F32


@pytest.mark.parametrize("ours", [AddLayerNorm, AddRMSNorm])
def test_an_instance_pickled_before_post_norm_existed_still_runs(ours: Module) -> None:
    module = ours(8)
    del module.__dict__["post_norm"]
    x = torch.randn(2, 8)
    old = pickle.loads(pickle.dumps(module))
    assert torch.equal(old(x, x)[1], x + x)
    assert "post_norm=False" in repr(old)


@PAIRS
def test_turned_into_ours_in_place(ours: Module, theirs: Module) -> None:
    module = theirs(8)
    module.__class__ = ours
    assert module(torch.randn(2, 8).to(BF16)).dtype is BF16


@PAIRS
def test_no_affine_gradient(ours: Module, theirs: Module) -> None:
    x = torch.randn(4, 7, requires_grad=True)
    a, b = ours(7, elementwise_affine=False), theirs(7, elementwise_affine=False)
    (got,) = torch.autograd.grad((a(x) * 2 + x).square().sum(), x)
    (want,) = torch.autograd.grad((b(x) * 2 + x).square().sum(), x)
    torch.testing.assert_close(got, want)


@PAIRS
def test_meta_device_and_to_empty(ours: Module, theirs: Module) -> None:
    with torch.device("meta"):
        module = ours(8)
    assert module(torch.empty(2, 8, device="meta")).shape == (2, 8)
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8))


def test_importing_changes_nothing_in_torch() -> None:
    assert fusedops.nn.LayerNorm is not torch.nn.LayerNorm
    assert torch.nn.LayerNorm.__module__.startswith("torch.")
    assert torch.nn.functional.layer_norm.__module__.startswith("torch.")
