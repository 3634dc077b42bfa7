"""Every optimizer, on every backend, against torch's in float64; and proof that the judge catches faults."""

from __future__ import annotations

import pytest
import torch
from optim_helpers import DEVICES, PLACES, build, make_params, new_grads, truncates

from fusedops import optim
from fusedops.registry import OPTIMS
from fusedops.testing_optim import assert_step, judge_step

SHAPES = ((), (1,), (7, 5), (0,), (1023,), (33, 129), (70_001,))
FEW = ((), (7, 5), (0,), (1200,))  # Triton's interpreter is slow

# parameter dtype, options
MIXES = [
    pytest.param(torch.float32, {}, id="fp32"),
    pytest.param(torch.float64, {}, id="fp64"),
    pytest.param(torch.float32, {"state_dtype": torch.bfloat16}, id="fp32-bf16"),
    pytest.param(torch.bfloat16, {"bf16_stochastic_round": True}, id="bf16-stochastic"),
    pytest.param(
        torch.bfloat16, {"bf16_stochastic_round": True, "state_dtype": torch.float32}, id="bf16-fp32-stochastic"
    ),
    *(
        pytest.param(dtype, options, id=f"{name}-{'-'.join(options) or 'plain'}")
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
        for options in (
            {},
            {"state_dtype": torch.float32},
            {"master_weights": True},
            {"state_dtype": torch.float32, "master_weights": True},
            {"kahan_sum": True},
            {"state_dtype": torch.float32, "kahan_sum": True},
        )
    ),
]
VARIANTS = [
    pytest.param(name, options, id=f"{name}-{i}")
    for name, spec in OPTIMS.items()
    for i, options in enumerate(spec.options)
]


@pytest.mark.filterwarnings("ignore:.*round.* away")
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize(("dtype", "mix"), MIXES)
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_step_by_step(name, options, dtype, mix, backend, device, need_backend):
    need_backend(backend)
    if truncates(backend, device) and dtype is torch.bfloat16 and "master_weights" in mix:
        pytest.skip("Triton's interpreter truncates to bf16: the parameter is not its master, rounded")
    torch.manual_seed(0)
    params = make_params(device, dtype, *(FEW if truncates(backend, device) else SHAPES))
    optimizer = build(OPTIMS[name].optimizer, params, backend, lr=0.05, **options, **mix)
    for _ in range(3):
        assert_step(optimizer)
        new_grads(params)


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("name", OPTIMS)
def test_scaled_clipped_groups_of_several_dtypes(name, backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(1)
    narrow = torch.float16 if truncates(backend, device) else torch.bfloat16
    sets = [make_params(device, dtype, (17, 3), (4099,)) for dtype in (torch.float32, narrow, torch.float16)]
    groups = [
        {"params": sets[0], "lr": torch.tensor(0.05, device=device), "weight_decay": 0.3},
        {"params": sets[1], "lr": 0.02, "betas": (0.7, 0.9), "master_weights": True},
        {"params": sets[2], "lr": 0.06, "maximize": True, "state_dtype": torch.float32, "master_weights": True},
    ]
    optimizer = build(OPTIMS[name].optimizer, groups, backend, max_grad_norm=5.0)
    params = [p for group in sets for p in group]
    optimizer.grad_scale = torch.tensor(64.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    for _ in range(3):
        new_grads(params, 64.0)
        norm = torch.cat([p.grad.double().flatten() for p in params]).norm() / 64
        kept = [p.grad.clone() for p in params]
        assert_step(optimizer, grad_scale=64.0)
        torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, kept, strict=True)), "a gradient was written"
    optimizer.max_grad_norm = 1e9  # nothing to clip
    new_grads(params, 64.0)
    assert_step(optimizer, grad_scale=64.0)


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_layouts(backend, device, need_backend):
    """Transposed, channels-last, misaligned and gapped parameters; gradients of other strides; size-one axes."""
    need_backend(backend)
    torch.manual_seed(2)
    flat = torch.randn(1000, device=device)
    leaves = [
        torch.randn(31, 17, device=device).t(),
        torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last),
        flat[3:510].view(13, 39),
        torch.randn(20, 20, device=device)[:, 3:14],
        torch.randn(2, 1, 100, device=device),
    ]
    params = [torch.nn.Parameter(t.detach()) for t in leaves]
    optimizer = build(optim.AdamW, params, backend, lr=0.05)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, device=device)  # contiguous, whatever the parameter is
        params[4].grad = torch.randn(200, device=device).as_strided((2, 1, 100), (100, 1, 1))
        assert_step(optimizer)
    params[2].grad = torch.randn(39, 13, device=device).t()
    assert_step(optimizer)


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_gradients_that_come_and_go(backend, device, need_backend):
    need_backend(backend)
    torch.manual_seed(3)
    params = make_params(device, torch.float32, (5,), (6, 7), (300,))
    params[2].grad = None
    optimizer = build(optim.AdamW, params, backend, lr=0.05)
    for i in range(6):
        assert_step(optimizer)
        new_grads(params)
        params[i % 3].grad = None
    steps = [float(optimizer.state[p]["step"]) for p in params]
    assert steps == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_free_run_follows_torch(dtype, backend, device, need_backend):
    """Over 60 steps on one recorded gradient sequence the distance to float64 stays within twice torch's own."""
    need_backend(backend)
    torch.manual_seed(4)
    master = {"master_weights": True, "state_dtype": torch.float32} if dtype is torch.bfloat16 else {}
    start = torch.randn(2000) * 0.1
    grads = [torch.randn(2000).to(dtype) for _ in range(60)]
    p = torch.nn.Parameter(start.to(device, dtype))
    ours = build(optim.AdamW, [p], backend, lr=1e-3, **master)
    q, t = (torch.nn.Parameter(p.detach().to(kind)) for kind in (torch.float32, torch.float64))
    plain, truth = (torch.optim.AdamW([x], lr=1e-3, foreach=False) for x in (q, t))
    for grad in grads:
        for x in (p, q, t):
            x.grad = grad.to(device, x.dtype)
        for optimizer in (ours, plain, truth):
            optimizer.step()
    weight = ours.state[p].get("master", p).double()
    torchs_error = (q.double() - t).abs().max()
    assert (weight - t).abs().max() <= 2 * torchs_error + 1e-9


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.9])
def test_the_first_moment_is_torchs_lerp_bit_for_bit(beta1, as_tensor, backend, device, need_backend):
    """In every backend: from m where 1 - beta1 < 0.5, else from g.

    m, g and their difference, as fp32 rounds it, are powers of two, so no product is rounded and it does not matter
    which of them a compiler fuses with a sum; all that is left to differ is the formula.
    """
    need_backend(backend)
    powers = torch.tensor([sign * 2.0**k for k in range(-45, 6) for sign in (1, -1)] + [0.0])
    m, g = (x.flatten() for x in torch.meshgrid(powers, powers, indexing="ij"))
    exact = [float(x) in (0.0, 0.5) for x in torch.frexp(g - m).mantissa.abs()]
    m, g = m[exact], g[exact]
    gap, weight = g - m, torch.tensor(1 - beta1, dtype=torch.float64).float()
    from_m, from_g = m + weight * gap, g - (1 - weight) * gap
    assert not torch.equal(from_m, from_g), "these numbers can't tell"

    p = torch.nn.Parameter(torch.zeros_like(m, device=device))
    p.grad = g.to(device)
    beta = torch.tensor(beta1, dtype=torch.float64, device=device) if as_tensor else beta1
    other = torch.tensor(0.99, device=device) if as_tensor else 0.99
    optimizer = build(optim.AdamW, [p], backend, betas=(beta, other))
    optimizer.state[p] = {
        "step": torch.tensor(2.0, device=device),
        "exp_avg": m.to(device, copy=True),
        "exp_avg_sq": torch.ones_like(p),
    }
    optimizer.step()
    assert torch.equal(optimizer.state[p]["exp_avg"].cpu(), torch.where(weight < 0.5, from_m, from_g))
    if beta1 == 0:
        assert torch.equal(optimizer.state[p]["exp_avg"].cpu(), g)


# ---- planted faults: each must be caught ----


def zero_half(key):
    def spoil(optimizer):
        for state in optimizer.state.values():
            state[key].flatten()[: state[key].numel() // 2] = 0

    return spoil


def skip_tail(optimizer):
    for p in optimizer.kept:
        p.data.flatten()[-64:] = optimizer.kept[p].flatten()[-64:]


def scale_weights(factor):
    def spoil(optimizer):
        for p, old in optimizer.kept.items():
            p.data.copy_(old + (p.data - old) * factor)

    return spoil


def drop_master(optimizer):
    for p in optimizer.kept:
        p.data.add_(p.data * 2**-7)


def advance_counter(optimizer):
    for state in optimizer.state.values():
        state["step"] += 1


FAULTS = {
    "zero half of exp_avg": zero_half("exp_avg"),
    "zero half of exp_avg_sq": zero_half("exp_avg_sq"),
    "tail not written": skip_tail,
    "lr off by a thousandth": scale_weights(1.001),
    "counter twice": advance_counter,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, device):
    torch.manual_seed(5)
    params = make_params(device, torch.float32, (4096,), (33, 40))
    optimizer = optim.AdamW(params, lr=0.05, backend="reference")

    def spoiled():
        optimizer.kept = {p: p.detach().clone() for p in params}
        optimizer.step()
        FAULTS[fault](optimizer)

    for _ in range(2):
        with pytest.raises(AssertionError):
            assert_step(optimizer, spoiled)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", [False, True])
def test_a_step_that_does_nothing_is_caught(master, dtype, device):
    torch.manual_seed(6)
    params = make_params(device, dtype, (4096,))
    optimizer = optim.AdamW(params, lr=0.05, backend="reference", master_weights=master)
    for _ in range(3):
        with pytest.raises(AssertionError, match="expected"):
            assert_step(optimizer, lambda: None)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_is_not_its_master_is_caught(dtype):
    torch.manual_seed(7)
    params = make_params("cpu", dtype, (4096,))
    optimizer = optim.AdamW(params, lr=0.05, backend="reference", master_weights=True)

    def spoiled():
        optimizer.kept = params
        optimizer.step()
        drop_master(optimizer)

    with pytest.raises(AssertionError, match="not its master"):
        assert_step(optimizer, spoiled)


def test_a_written_parameter_without_gradient_is_caught():
    params = make_params("cpu", torch.float32, (8,), (8,))
    params[1].grad = None
    optimizer = optim.AdamW(params, lr=0.05, backend="reference")

    def spoiled():
        optimizer.step()
        params[1].data.add_(1)

    assert [item.problem for item in judge_step(optimizer, spoiled) if item.problem] == [
        "changed, though the parameter has no gradient"
    ]


def test_a_learning_rate_that_hides_faults_is_refused():
    params = make_params("cpu", torch.bfloat16, (4096,), size=1.0)
    with pytest.warns(UserWarning, match="master_weights"):
        optimizer = optim.AdamW(params, lr=1e-3, backend="reference")
    with pytest.raises(ValueError, match="4 ulp"):
        judge_step(optimizer)


@pytest.mark.parametrize("options", [{}, {"kahan_sum": True}])
def test_only_a_weight_beyond_its_dtype_may_be_inf(options):
    def make():
        p = torch.nn.Parameter(torch.tensor([65000.0, 100.0], dtype=torch.float16))
        p.grad = torch.ones_like(p)
        return p, optim.AdamW([p], lr=1000.0, weight_decay=0.0, maximize=True, backend="reference", **options)

    p, optimizer = make()
    assert_step(optimizer)
    assert p.tolist() == [float("inf"), 1100.0]
    for spoil in (float("-inf"), float("nan"), 65504.0):
        p, optimizer = make()
        at = 0 if spoil != 65504.0 else 1

        def spoiled(p=p, optimizer=optimizer, at=at, spoil=spoil):
            optimizer.step()
            p.data[at] = spoil

        with pytest.raises(AssertionError):
            assert_step(optimizer, spoiled)


@pytest.mark.parametrize("options", [{}, {"kahan_sum": True}, {"master_weights": True}])
def test_nan_is_right_where_the_truth_is_nan(options):
    """A gradient of inf: inf / inf. What was added up is NaN there as well."""

    def make():
        p = torch.nn.Parameter(torch.tensor([3.0, 100.0], dtype=torch.float16))
        p.grad = torch.tensor([float("inf"), 1.0], dtype=torch.float16)
        return p, optim.Adam([p], lr=10.0, backend="reference", **options)

    p, optimizer = make()
    assert_step(optimizer)
    assert p.isnan().tolist() == [True, False]
    p, optimizer = make()

    def spoiled():
        optimizer.step()
        p.data[0] = 3.0

    with pytest.raises(AssertionError):
        assert_step(optimizer, spoiled)
