"""The Apex adapter without Apex: what it accepts as Apex, what it refuses, and how it calls the extensions.

The fakes keep the extensions' signatures and habits (contiguous inputs only, gradients scaled in place) in plain torch.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from fusedops.backends import apex, apex_adam
from fusedops.backends.reference_adam import ReferenceAdamPlan
from fusedops.backends.reference_adam import grad_norm as reference_norm
from fusedops.dispatch import Call
from fusedops.errors import UnsupportedError

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def install(monkeypatch):
    """Put fake modules where imports find them, forget what was found before, and let the CPU pass for the GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for name in (*apex.EXTENSIONS, "apex"):
        monkeypatch.delitem(sys.modules, name, raising=False)
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
    install("amp_C")
    assert apex.unavailable("cuda") is None
    assert apex.parts()["amp_C"] is None
    assert "not installed" in apex.parts()["fused_layer_norm_cuda"]
    assert apex.LIMITS["layer_norm"].refuse(layer_norm_call(F32)) == ["fused_layer_norm_cuda is not installed"]


def test_extension_of_another_torch_is_a_reason_not_a_traceback(install, tmp_path, monkeypatch):
    (tmp_path / "amp_C.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "must be rebuilt: undefined symbol" in apex.unavailable("cuda")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (layer_norm_call(F32, F32, F32), None),
        (layer_norm_call(BF16), None),
        (layer_norm_call(F16, F32, F32, F32), None),
        (layer_norm_call(BF16, BF16, BF16), "rounds three times"),
        (layer_norm_call(BF16, F32, F32, F32), "fp32 throughout"),
        (layer_norm_call(BF16, F32, F32, BF16), "fp32 throughout"),
        (layer_norm_call(F32, BF16, BF16, BF16), "fp32 throughout"),
        (layer_norm_call(BF16, None, None, F32), "fp32 throughout"),
        (layer_norm_call(F32, F32), "together or neither"),
        (layer_norm_call(torch.float64), "it takes torch.bfloat16"),
        (layer_norm_call(F32, rows=2**31 - 1), "elements"),
        (layer_norm_call(F32, compiling=True), "torch.compile"),
    ],
)
def test_norm_limits(install, call, reason):
    install("fused_layer_norm_cuda")
    reasons = apex.LIMITS["layer_norm"].refuse(call)
    assert (reasons == []) if reason is None else (reason in "; ".join(reasons))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mixes": ((F32, F32, False), (BF16, F32, True))}, None),
        ({"mixes": ((BF16, BF16, False),)}, "moments are fp32"),
        ({"amsgrad": True}, "amsgrad"),
        ({"largest": 2**31}, "32-bit"),
    ],
)
def test_adam_limits(install, options, reason):
    install("amp_C")
    reasons = apex.LIMITS["adamw"].refuse(Call("adamw", "cuda", 0, (("param", F32),), options=tuple(options.items())))
    assert (reasons == []) if reason is None else (reason in "; ".join(reasons))


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
        "forward_affine_mixed_dtypes": lambda x, shape, w, b, eps: forward(x, shape, w, b, eps, True, w.dtype),
        "rms_forward": lambda x, shape, eps: forward(x, shape, None, None, eps, False, x.dtype)[::2],
        "rms_forward_affine": lambda x, shape, w, eps: forward(x, shape, w, None, eps, False, x.dtype)[::2],
        "rms_forward_affine_mixed_dtypes": lambda x, shape, w, eps: forward(x, shape, w, None, eps, False, w.dtype)[
            ::2
        ],
        "backward": lambda dy, mean, rstd, x, shape, eps, lean: backward(dy, mean, rstd, x, None, True)[0],
        "backward_affine": lambda dy, mean, rstd, x, shape, w, b, eps, lean: backward(dy, mean, rstd, x, w, True),
        "rms_backward": lambda dy, rstd, x, shape, eps, lean: backward(dy, zero.expand(len(x)), rstd, x, None, False)[
            0
        ],
        "rms_backward_affine": lambda dy, rstd, x, shape, w, eps, lean: backward(
            dy, zero.expand(len(x)), rstd, x, w, False
        )[:2],
    }


@pytest.mark.parametrize(("dtype", "param"), [(F32, F32), (BF16, F32), (F32, None)])
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
    apex.layer_norm_fwd(wide.bfloat16(), torch.ones(768), torch.zeros(768), 1e-5, F32)
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


def fake_amp():
    """``amp_C`` in plain torch: it scales the gradients it is given in place."""

    def adam(chunk, noop, lists, lr, beta1, beta2, eps, step, decoupled, correct, decay, inv_scale):
        assert step.dtype is torch.int32
        assert len({len(tensors) for tensors in lists}) == 1
        if noop.item():
            return
        for g, p, m, v, *master in zip(*lists, strict=True):
            assert g.dtype == p.dtype
            assert m.dtype == v.dtype == F32
            value = (master[0] if master else p).float()
            grad = g.float() * inv_scale
            g.copy_(grad)
            if not decoupled:
                grad = grad + decay * value
            m.mul_(beta1).add_(grad, alpha=1 - beta1)
            v.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
            denominator = (v / (1 - beta2 ** step.item())).sqrt() + eps
            update = m / (1 - beta1 ** step.item()) / denominator + (decay * value if decoupled else 0)
            value = value - lr * update
            p.copy_(value)
            if master:
                master[0].copy_(value)

    def norm(chunk, noop, lists, per_tensor):
        return torch.stack([g.float().norm() for g in lists[0]]).norm().reshape(1), None

    return {
        "multi_tensor_adam_capturable": adam,
        "multi_tensor_adam_capturable_master": adam,
        "multi_tensor_l2norm": norm,
    }


def make_state(shapes, dtype, master):
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    params[0] = params[0].t().contiguous().t()  # dense, not row-major
    moments = [[torch.zeros_like(p, dtype=F32) for p in params] for _ in range(2)]
    masters = [p.float() if master else None for p in params]
    return params, *moments, [], masters, [torch.zeros(()) for _ in params]


@pytest.mark.parametrize(("dtype", "master"), [(F32, False), (BF16, True)])
def test_adam_follows_the_reference_and_leaves_gradients_alone(install, dtype, master):
    install("amp_C", **fake_amp())
    torch.manual_seed(0)
    shapes, group = [(4, 6), (0,), (5,), (7,)], [0, 0, 1, 1]
    mine = make_state(shapes, dtype, master)
    theirs = tuple([None if t is None else t.clone() for t in tensors] for tensors in mine)
    plan, reference = apex_adam.adam_plan(*mine, group), ReferenceAdamPlan(*theirs, group)
    for number in range(5):
        grads = [torch.randn(shape).to(dtype) for shape in shapes]
        grads[3] = None if number == 1 else grads[3]  # its step falls behind its group's
        before = [None if g is None else g.clone() for g in grads]
        scaled = number != 3
        found = torch.tensor([float(number == 2)])
        arguments = (
            grads, [torch.tensor(1e-2), 2e-2], [0.9, 0.8], [0.99, 0.95], [1e-8, 1e-6], [0.1, 0.01], [True, False],
            [False, False], [False, True], torch.tensor([8.0]) if scaled else None, found,
            torch.tensor([3.0]) if scaled else None, 1.0,
        )  # fmt: skip
        plan.step(*arguments)
        reference.step(*arguments)
        for g, kept in zip(grads, before, strict=True):
            assert g is None or torch.equal(g, kept)
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a, b, strict=True):
                if x is not None:
                    torch.testing.assert_close(x, y, rtol=1e-2 if x.dtype is BF16 else 1e-5, atol=1e-6)


def test_adam_follows_tensors_that_get_other_memory(install):
    install("amp_C", **fake_amp())
    params, m, v, _, masters, steps = make_state([(4, 6), (5,)], F32, False)
    plan = apex_adam.adam_plan(params, m, v, [], masters, steps, [0, 0])
    lists = ([0.1], [0.9], [0.99], [1e-8], [0.0], [True], [False], [False], None, None, None, None)
    plan.step([torch.ones_like(p) for p in params], *lists)
    before = [p.clone() for p in params]
    for tensor in (*params, *m):
        tensor.data = tensor.data.clone()
    plan.step([torch.ones_like(p) for p in params], *lists)
    for p, old in zip(params, before, strict=True):
        torch.testing.assert_close(p, old - 0.1)
    torch.testing.assert_close(m[0], torch.full((4, 6), 0.19))


def test_adam_refuses_what_it_would_misread(install):
    install("amp_C", **fake_amp())
    params, m, v, _, _, steps = make_state([(4, 6)], BF16, False)
    plan = apex_adam.adam_plan(params, m, v, [], [None], steps, [0])
    lists = ([1e-3], [0.9], [0.99], [1e-8], [0.0], [True], [False], [False], None, None, None, None)
    with pytest.raises(UnsupportedError, match="gradient of parameter 0: expected"):
        plan.step([torch.zeros(4, 6)], *lists)
    with pytest.raises(UnsupportedError, match="fp32 moments"):
        apex_adam.adam_plan(params, params, v, [], [None], steps, [0])
    with pytest.raises(UnsupportedError, match="amsgrad"):
        apex_adam.adam_plan(params, m, v, m, [None], steps, [0])
    gaps = [torch.zeros(4, 6)[:, :3]]
    with pytest.raises(UnsupportedError, match="without gaps"):
        apex_adam.adam_plan(gaps, gaps, gaps, [], [None], steps, [0])


def test_grad_norm_tells_inf_from_overflow(install):
    install("amp_C", **fake_amp())
    grads = [torch.randn(5), torch.randn(3).half()]
    torch.testing.assert_close(
        apex_adam.grad_norm(grads, torch.tensor([2.0]), None), reference_norm(grads, torch.tensor([2.0]), None)
    )
    found = torch.zeros(1)
    apex_adam.grad_norm([torch.full((3,), 1e30)], None, found)
    assert found.item() == 0.0
    apex_adam.grad_norm([torch.tensor([1.0, float("inf")])], None, found)
    assert found.item() == 1.0
    half = [torch.ones(3), torch.ones(2).half()]
    apex_adam.grad_scale_(half, torch.tensor([0.5]))
    assert [g.tolist() for g in half] == [[0.5] * 3, [0.5] * 2]
