"""What keeps the small updates of 16-bit parameters: stochastic rounding and compensated sums."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from optim_helpers import DEVICES, PLACES, build, make_params, new_grads, ones, truncates, twins

from fusedops import backends, optim
from fusedops.backends import philox
from fusedops.testing_optim import assert_step

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
quiet = pytest.mark.filterwarnings("ignore:.*round.* away")
WORD = 0xFFFFFFFF


def words(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32 with ten rounds, once more, on Python's integers."""
    for _ in range(10):
        even, odd = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [odd >> 32 ^ counter[1] ^ key[0], odd & WORD, even >> 32 ^ counter[3] ^ key[1], even & WORD]
        key = [key[0] + 0x9E3779B9 & WORD, key[1] + 0xBB67AE85 & WORD]
    return counter


def expected_bits(count: int, index: int, step: int, seed: int) -> torch.Tensor:
    key = [seed & WORD, seed >> 32]
    octets = [words([octet & WORD, octet >> 32, index, step], key) for octet in range(math.ceil(count / 8))]
    return torch.tensor([half for four in octets for word in four for half in (word & 0xFFFF, word >> 16)])[:count]


def round_away(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bf16 neighbours of fp32 numbers, by the share of the spacing between them."""
    below = (value.view(torch.int32) >> 16).bitwise_left_shift(16)
    up = (value.view(torch.int32) & 0xFFFF) + bits.int() >= 65536
    return (below + 65536 * up.int()).view(F32).bfloat16()


@pytest.mark.parametrize(
    ("counter", "key", "out"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_its_authors_numbers(counter, key, out):
    counter, key, out = ([int(word, 16) for word in row.split()] for row in (counter, key, out))
    assert words(counter, key) == out
    given = tuple(torch.tensor([word]) for word in counter)
    assert [int(word) for word in philox.philox(given, *key)] == out


def exact(device: str, seed: int, backend: str, state_dtype: torch.dtype | None) -> tuple[optim.Adam, list]:
    """An optimizer whose every fp32 weight is exact in any backend: p - lr, as |m| / √v is one."""
    shapes = [(5, 3), (), (0,), (1,), (20_011,), (3, 4, 2, 5), (64,), (20, 11)]
    params = [torch.nn.Parameter(torch.randn(shape).to(device, BF16)) for shape in shapes]
    params[5].data = params[5].data.to(memory_format=torch.channels_last)
    params[6].data = torch.randn(67, device=device).to(BF16)[3:]  # misaligned
    params[7].data = torch.randn(20, 20, device=device).to(BF16)[:, 3:14]  # with gaps: counted row by row
    params[3].requires_grad_(False)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.0371}]
    options = {"lr": 0.00123, "betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    rounding = {"bf16_stochastic_round": True, "seed": seed, "state_dtype": state_dtype}
    return build(optim.AdamW, groups, backend, **options, **rounding), params


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("state_dtype", [None, F32, F16])
@pytest.mark.parametrize("seed", [0, 2**63 + 12345])
def test_the_same_bits_in_every_backend(seed, state_dtype, backend, device, need_backend):
    need_backend(backend)
    optimizer, params = exact(device, seed, backend, state_dtype)
    for step in (1, 2, 3):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.where(torch.rand(p.shape) < 0.5, 1.0, -1.0).to(device, BF16) if p.requires_grad else None
        optimizer.step()
        for index, (p, old) in enumerate(zip(params, before, strict=True)):
            if not p.requires_grad:
                assert torch.equal(p, old)
                continue
            lr = torch.tensor(0.00123 if index < 2 else 0.0371, device=device)  # rounds to fp32
            value = old.float() - lr * p.grad.float()
            order = torch.arange(p.numel()).as_strided(p.shape, torch.empty_like(p).stride())  # as they lie in memory
            bits = expected_bits(p.numel(), index, step, seed)[order].to(device)
            assert torch.equal(p.detach(), round_away(value, bits)), (step, index)


@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_rounding_keeps_the_mean(backend, device, need_backend):
    """5 sigma of a binomial: a sound generator fails one check in 1.7 million; every one of the 12 is at other bits."""
    need_backend(backend)
    count = 1 << (14 if truncates(backend, device) else 20)
    p = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
    options = {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0, "maximize": True}
    optimizer = build(optim.AdamW, [p], backend, lr=1.0, bf16_stochastic_round=True, **options)
    p.grad = torch.ones_like(p)
    previous = torch.zeros(count, device=device)
    for share in (2**-16, 0.001, 0.1, 0.25, 0.5, 0.9):
        p.data.fill_(1.0)
        optimizer.param_groups[0]["lr"] = share * 2**-7  # bf16 is spaced 2^-7 above 1
        share = float(torch.tensor(1 + share * 2**-7) - 1) * 2**7
        optimizer.step()
        up = (p.detach() > 1).float()
        assert set(p.detach().unique().tolist()) <= {1.0, 1 + 2**-7}
        sigma = math.sqrt(count * share * (1 - share))
        assert abs(float(up.sum()) - count * share) <= 5 * sigma + 1
        # Neighbours, and the steps before, decide independently: correlation of 0 with an error of 1 / √count.
        centred = (up - up.mean()) / up.std().clamp(min=1e-6)
        if share > 0.01:
            for other in (centred.roll(1), centred.roll(8), previous):
                assert abs(float((centred * other).mean())) <= 5 / math.sqrt(count)
            previous = centred


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_small_steps_add_up(backend, device, need_backend):
    """Steps of a two-hundredth of a spacing: rounding to nearest moves nothing, at random all of it arrives."""
    need_backend(backend)
    count, steps = (1_000, 50) if truncates(backend, device) else (20_000, 200)
    lr = 0.005 * 2**-8  # below 1 bf16 is spaced 2^-8
    cases = (({"bf16_stochastic_round": True}, True), ({}, False))
    for options, moved in cases[: 1 if truncates(backend, device) else 2]:
        p = torch.nn.Parameter(torch.full((count,), 0.75, dtype=BF16, device=device))
        p.grad = torch.ones_like(p)
        optimizer = build(optim.AdamW, [p], backend, lr=lr, weight_decay=0.0, state_dtype=F32, **options)
        for _ in range(steps):
            optimizer.step()
        distance = float(0.75 - p.detach().double().mean())
        # Each step rounds up with probability 0.005: a variance of steps * 0.005 spacings squared, an element.
        sigma = 2**-8 * math.sqrt(steps * 0.005 / count)
        assert abs(distance - steps * lr * moved) <= 5 * sigma + 1e-6 * moved


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"bf16_stochastic_round": True, "seed": 7}, {"kahan_sum": True}, {"master_weights": True, "state_dtype": F32}],
    ids=["stochastic", "kahan", "master"],
)
def test_a_resumed_run_is_the_uninterrupted_one(options, amsgrad, backend, device, need_backend):
    """Bit for bit, from the state dict alone: whatever seed or option the second optimizer was made with."""
    need_backend(backend)
    params = make_params(device, BF16, (6, 5), (300,), ())
    frozen = make_params(device, BF16, (4,))
    grads = [[torch.randn(p.shape).to(device, BF16) for p in params] for _ in range(6)]

    def run(optimizer, mine, chosen):
        for row in chosen:
            for p, g in zip(mine, row, strict=True):
                p.grad = g
            frozen[0].grad = None
            optimizer.step()

    optimizer = build(optim.AdamW, [*frozen, *params], backend, lr=0.01, amsgrad=amsgrad, **options)
    run(optimizer, params, grads[:3])
    copies, saved = twins(params), copy.deepcopy(optimizer.state_dict())
    resumed = build(optim.AdamW, [*twins(frozen), *copies], backend, lr=1.0, seed=99)
    resumed.load_state_dict(saved)
    run(resumed, copies, grads[3:])
    run(optimizer, params, grads[3:])
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(p, q)
        assert set(optimizer.state[p]) == set(resumed.state[q])
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][key]), key


@quiet
def test_another_backend_goes_on_with_the_same_bits():
    if backends.get("native").unavailable("cpu"):
        pytest.skip("the native kernels are not built")
    optimizer, params = exact("cpu", 3, "native", None)
    for p in params:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    other = optim.AdamW([{"params": twins(params[:2])}, {"params": twins(params[2:])}], lr=1.0, backend="reference")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copies = [p for group in other.param_groups for p in group["params"]]
    for p, q in zip(params, copies, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    for _ in range(3):
        optimizer.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True))


@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, torch.finfo(BF16).max])
def test_what_is_not_finite_flows(value, backend, device, need_backend):
    need_backend(backend)
    for options in ({"bf16_stochastic_round": True}, {"kahan_sum": True}):
        p = torch.nn.Parameter(torch.full((40,), value, dtype=BF16, device=device))
        p.grad = torch.ones_like(p)
        optimizer = build(optim.AdamW, [p], backend, lr=0.5, weight_decay=0.0, **options)
        for _ in range(3):
            optimizer.step()
        torch.testing.assert_close(p.detach(), torch.full_like(p, value), equal_nan=True)


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_kahan_follows_an_fp32_run(dtype, backend, device, need_backend):
    """300 small steps end close to an fp32 weight's, bf16 within 3 % of the way; rounded to nearest, most stay put."""
    need_backend(backend)
    if truncates(backend, device) and dtype is BF16:
        pytest.skip("Triton's interpreter truncates to bf16: what each compensation loses adds up")
    torch.manual_seed(1)
    start = torch.randn(1000).to(device, dtype)
    grads = [torch.randn(1000).to(device) + 0.5 for _ in range(20 if truncates(backend, device) else 300)]
    runs = {}
    for name, options in (("kahan", {"kahan_sum": True}), ("plain", {}), ("fp32", {})):
        p = torch.nn.Parameter(start.to(F32 if name == "fp32" else dtype, copy=True))
        optimizer = build(optim.AdamW, [p], backend, lr=2e-5, state_dtype=F32, **options)
        for grad in grads:
            p.grad = grad.to(dtype).to(p.dtype)
            optimizer.step()
        runs[name] = p.detach().double()
        if name == "kahan":
            rest = optimizer.state[p]["compensation"]
            assert rest.dtype is dtype
            runs[name] += rest.double()
    way = (runs["fp32"] - start.double()).abs().mean()
    # Each step rounds the compensation: by chance to either side, 2^-17 of a bf16 weight and 2^-23 of an fp16 one.
    assert (runs["kahan"] - runs["fp32"]).abs().mean() <= {BF16: 0.03, F16: 0.003}[dtype] * way
    assert (runs["plain"] - runs["fp32"]).abs().mean() >= 0.5 * way


@quiet
@pytest.mark.parametrize("device", DEVICES)
def test_masters_and_compensations_become_each_other(device):
    params = make_params(device, BF16, (50,))
    optimizer = optim.AdamW(params, lr=1e-3, master_weights=True, state_dtype=F32)
    for _ in range(5):
        optimizer.step()
    master = optimizer.state[params[0]]["master"].clone()
    kahan = optim.AdamW(twins(params), kahan_sum=True)
    kahan.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert kahan.param_groups[0]["master_weights"] is False
    q = kahan.param_groups[0]["params"][0]
    q.grad = None
    kahan.step()
    assert set(kahan.state[q]) == {"step", "exp_avg", "exp_avg_sq", "compensation"}
    weight = q.detach().float() + kahan.state[q]["compensation"].float()
    torch.testing.assert_close(weight, master, rtol=2**-16, atol=0)
    back = optim.AdamW(twins([q]), master_weights=True)
    back.load_state_dict(kahan.state_dict())
    back.param_groups[0]["params"][0].grad = None
    back.step()
    assert torch.equal(back.state[back.param_groups[0]["params"][0]]["master"], weight)


@quiet
@pytest.mark.parametrize("option", ["bf16_stochastic_round", "kahan_sum"])
def test_wider_parameters_are_as_ever(option):
    p, q = ones(100), ones(100)
    for parameter, options in ((p, {option: True}), (q, {})):
        optimizer = optim.AdamW([parameter], lr=0.01, **options)
        optimizer.step()
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(p, q)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_replays_draw_new_bits(backend):
    optimizer, params = exact("cuda", 5, backend, None)
    other, copies = exact("cuda", 5, backend, None)
    for p, q in zip(params, copies, strict=True):
        q.data.copy_(p.data)
        for x in (p, q):
            x.grad = torch.ones_like(x) if x.requires_grad else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    other.step()
    for _ in range(4):
        graph.replay()
        other.step()
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(p, q)


@quiet
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_modes_beside_each_other(backend, device, need_backend):
    """One launch for groups of every kind, a scale to undo and a norm to clip."""
    need_backend(backend)
    torch.manual_seed(2)
    sets = [make_params(device, dtype, (17, 3), (4099,)) for dtype in (BF16, BF16, F16, BF16, F32)]
    kinds = [{"bf16_stochastic_round": True}, {"kahan_sum": True}, {"kahan_sum": True}, {}, {"maximize": True}]
    groups = [{"params": ps, **kind} for ps, kind in zip(sets, kinds, strict=True)]
    optimizer = build(optim.AdamW, groups, backend, lr=0.05, max_grad_norm=5.0)
    optimizer.grad_scale = torch.tensor(8.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    params = [p for ps in sets for p in ps]
    for _ in range(3):
        new_grads(params, 8.0)
        assert_step(optimizer, grad_scale=8.0)
    before = copy.deepcopy([[p.detach(), dict(optimizer.state[p])] for p in params])
    optimizer.found_inf.fill_(1.0)
    optimizer.step()
    torch.testing.assert_close([[p.detach(), dict(optimizer.state[p])] for p in params], before, rtol=0, atol=0)
