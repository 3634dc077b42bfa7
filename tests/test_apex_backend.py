"""The Apex adapter without Apex: what it accepts as Apex, what it refuses, and how it calls the extensions.

The fakes keep the extensions' signatures and habits (contiguous inputs only, gradients scaled in place) in plain torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from fusedops.backends import apex
from fusedops.dispatch import Call

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def install(monkeypatch):
    """Put fake modules where imports find them, forget what was found before, and let the CPU pass for the GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    names = (*apex.EXTENSIONS, "apex")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    real = [p for p in sys.path if any(f.name.split(".")[0] in names for f in Path(p or ".").glob("*"))]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in real])
    importlib.invalidate_caches()
    apex.extension.cache_clear()

    def put(name, **functions):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        apex.extension.cache_clear()
        return module

    yield put
    apex.extension.cache_clear()


def layer_norm_call(input, weight=None, bias=None, output=None, **fields):
    given = {"input": input, "weight": weight, "bias": bias, "output": output or input}
    dtypes = tuple((name, dtype) for name, dtype in given.items() if dtype is not None)
    return Call("layer_norm", "cuda", 0, dtypes, **{"hidden": 64, "rows": 15, **fields})


def test_foreign_package_named_apex_is_not_apex(install):
    install("apex")
    reason = apex.unavailable("cuda")
    assert "PyPI's apex is not it" in reason
    assert "fused_layer_norm_cuda is not installed" in reason


def test_nothing_installed_and_other_devices(install):
    assert "extensions are not there" in apex.unavailable("cuda")
    assert "not for cpu" in apex.unavailable("cpu")


def test_one_part_is_enough_and_the_others_are_named(install):
    install("fast_layer_norm")
    assert apex.unavailable("cuda") is None
    assert apex.parts()["fast_layer_norm"] is None
    assert "not installed" in apex.parts()["fused_layer_norm_cuda"]
    assert apex.LIMITS["layer_norm"].refuse(layer_norm_call(F32)) == ["fused_layer_norm_cuda is not installed"]


def test_extension_of_another_torch_is_a_reason_not_a_traceback(install, tmp_path, monkeypatch):
    (tmp_path / "fast_layer_norm.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "must be rebuilt: undefined symbol" in apex.unavailable("cuda")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (layer_norm_call(F32, F32, F32), None),
        (layer_norm_call(BF16), None),
        (layer_norm_call(F16, F32, F32, F32), "one dtype throughout"),
        (layer_norm_call(BF16, BF16, BF16), "rounds three times"),
        (layer_norm_call(BF16, F32, F32, F32), "one dtype throughout"),
        (layer_norm_call(BF16, F32, F32, BF16), "one dtype throughout"),
        (layer_norm_call(F32, BF16, BF16, BF16), "one dtype throughout"),
        (layer_norm_call(BF16, None, None, F32), "one dtype throughout"),
        (layer_norm_call(F32, F32), "together or neither"),
        (layer_norm_call(torch.float64), "it takes torch.bfloat16"),
        (layer_norm_call(F32, rows=2**31 - 1), "elements"),
        (layer_norm_call(F32, hidden=2**14 + 1), "at most 16384 fits"),
        (layer_norm_call(F32, rows=2**17 + 1), None),
        (layer_norm_call(F32, F32, F32, F32, rows=2**17), None),
        (layer_norm_call(F32, F32, F32, F32, rows=2**17 + 1), "one after another"),
        (layer_norm_call(F32, compiling=True), "torch.compile"),
    ],
)
def test_norm_limits(install, call, reason):
    install("fused_layer_norm_cuda")
    reasons = apex.LIMITS["layer_norm"].refuse(call)
    assert (reasons == []) if reason is None else (reason in "; ".join(reasons))


def test_adam_is_refused(install):
    reasons = apex.LIMITS["adamw"].refuse(Call("adamw", "cuda", 0, (("param", F32),)))
    assert len(reasons) == 1
    assert "1 - beta2" in reasons[0]


def fake_norms():
    """``fused_layer_norm_cuda`` in plain torch."""

    def forward(x, shape, weight, bias, eps, centred, out):
        assert x.is_contiguous()
        wide = x.float()
        mean = wide.mean(1) if centred else torch.zeros(len(x))
        rstd = ((wide - mean[:, None]).square().mean(1) + eps).rsqrt()
        y = (wide - mean[:, None]) * rstd[:, None]
        if weight is not None:
            y = y * weight.float() + (0 if bias is None else bias.float())
        return y.to(out), mean, rstd

    def backward(dy, mean, rstd, x, weight, centred):
        assert dy.is_contiguous()
        assert x.is_contiguous()
        xhat = (x.float() - mean[:, None]) * rstd[:, None]
        g = dy.float() * (1 if weight is None else weight.float())
        dx = g - xhat * (g * xhat).mean(1, keepdim=True) - (g.mean(1, keepdim=True) if centred else 0)
        sums = (dy.float() * xhat).sum(0), dy.float().sum(0)
        return (dx * rstd[:, None]).to(x.dtype), *(s.to(x.dtype if weight is None else weight.dtype) for s in sums)

    zero = torch.zeros(())
    return {
        "forward": lambda x, shape, eps: forward(x, shape, None, None, eps, True, x.dtype),
        "forward_affine": lambda x, shape, w, b, eps: forward(x, shape, w, b, eps, True, x.dtype),
        "rms_forward": lambda x, shape, eps: forward(x, shape, None, None, eps, False, x.dtype)[::2],
        "rms_forward_affine": lambda x, shape, w, eps: forward(x, shape, w, None, eps, False, x.dtype)[::2],
        "backward": lambda dy, mean, rstd, x, shape, eps, lean: backward(dy, mean, rstd, x, None, True)[0],
        "backward_affine": lambda dy, mean, rstd, x, shape, w, b, eps, lean: backward(dy, mean, rstd, x, w, True),
        "rms_backward": lambda dy, rstd, x, shape, eps, lean: backward(dy, zero.expand(len(x)), rstd, x, None, False)[
            0
        ],
        "rms_backward_affine": lambda dy, rstd, x, shape, w, eps, lean: backward(
            dy, zero.expand(len(x)), rstd, x, w, False
        )[:2],
    }


@pytest.mark.parametrize(("dtype", "param"), [(F32, F32), (BF16, None), (F32, None)])
@pytest.mark.parametrize("strided", [False, True])
def test_norms_call_the_extension_right(install, dtype, param, strided):
    install("fused_layer_norm_cuda", **fake_norms())
    x = torch.randn(6, 24).to(dtype)[:, : 16 if strided else 24]
    hidden, out = x.shape[1], param or dtype
    dy = torch.randn(6, hidden).to(out)
    weight, bias = (None, None) if param is None else (torch.randn(hidden), torch.randn(hidden))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is F32 else {"rtol": 1e-2, "atol": 1e-2}

    leaves = [None if t is None else t.float().clone().requires_grad_() for t in (x, weight, bias)]
    truth = F.layer_norm(leaves[0], (hidden,), leaves[1], leaves[2], 1e-5)
    truth.backward(dy.float())
    y, mean, rstd = apex.layer_norm_fwd(x, weight, bias, 1e-5, out)
    need = (True, param is not None, param is not None)
    grads = apex.layer_norm_bwd(dy, x, weight, mean, rstd, need, param)
    assert y.dtype is out
    torch.testing.assert_close(y.float(), truth, **tolerance)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert (grad is None) == (leaf is None)
        if leaf is not None:
            torch.testing.assert_close(grad.float(), leaf.grad, **tolerance)

    leaves = [None if t is None else t.float().clone().requires_grad_() for t in (x, weight)]
    truth = F.rms_norm(leaves[0], (hidden,), leaves[1], 1e-5)
    truth.backward(dy.float())
    y, rstd = apex.rms_norm_fwd(x, weight, 1e-5, 0.0, out)
    grads = apex.rms_norm_bwd(dy, x, weight, rstd, 0.0, need[:2])
    torch.testing.assert_close(y.float(), truth, **tolerance)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert (grad is None) == (leaf is None)
        if leaf is not None:
            torch.testing.assert_close(grad.float(), leaf.grad, **tolerance)


def test_fast_layer_norm_serves_its_widths_when_aligned(install):
    install("fused_layer_norm_cuda", **fake_norms())
    seen = []
    install("fast_layer_norm", ln_fwd=lambda x, w, b, eps: seen.append(x.shape) or (x, x[:, 0], x[:, 0]))
    wide, odd = torch.zeros(2, 768), torch.zeros(2, 769)
    apex.layer_norm_fwd(wide, torch.ones(768), torch.zeros(768), 1e-5, F32)
    apex.layer_norm_fwd(odd, torch.ones(769), torch.zeros(769), 1e-5, F32)
    apex.layer_norm_fwd(torch.zeros(2 * 768 + 1)[1:].view(2, 768), torch.ones(768), torch.zeros(768), 1e-5, F32)
    assert seen == [(2, 768)]


def test_empty_input(install):
    x, weight = torch.zeros(0, 8), torch.ones(8)
    y, mean, rstd = apex.layer_norm_fwd(x, weight, weight, 1e-5, F32)
    dx, dweight, dbias = apex.layer_norm_bwd(y, x, weight, mean, rstd, (True, True, False), F32)
    assert dx.shape == x.shape
    assert dweight.tolist() == [0.0] * 8
    assert dbias is None


def test_weight_offset_is_added_to_the_weight(install):
    install("fused_layer_norm_cuda", **fake_norms())
    x, weight, dy = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)
    y, rstd = apex.rms_norm_fwd(x, weight, 1e-5, 1.0, F32)
    grads = apex.rms_norm_bwd(dy, x, weight, rstd, 1.0, (True, True))
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    truth = F.rms_norm(leaves[0], (8,), leaves[1] + 1.0, 1e-5)
    truth.backward(dy)
    torch.testing.assert_close((y, *grads), (truth, leaves[0].grad, leaves[1].grad))
