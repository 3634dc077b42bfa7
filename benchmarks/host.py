"""What calls cost the calling thread, beside PyTorch's: python benchmarks/host.py [cpu | cuda] prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fusedops

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
LOOPS = 15


def cost(call: Callable[[], Any], calls: int) -> list[float]:
    """Return minimum and median of the microseconds a call takes, over loops that the device is waited for after."""
    call()
    found = []
    for _ in range(LOOPS):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(timeit.timeit(call, number=calls) / calls * 1e6)
    return [round(min(found), 2), round(statistics.median(found), 2)]


def layer_norm() -> dict[str, list[float]]:
    """Time calls on 4 x 256 elements in fp32, and under autocast."""
    found = {}
    for name, norm in (("torch", F.layer_norm), ("ours", fusedops.layer_norm)):
        x, w, b = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((4, 256), (256,), (256,)))
        with torch.no_grad():
            found[f"{name} no_grad"] = cost(lambda norm=norm, x=x, w=w, b=b: norm(x, (256,), w, b), 300)
        found[f"{name} fwd grad"] = cost(lambda norm=norm, x=x, w=w, b=b: norm(x, (256,), w, b), 300)
        y, dy = norm(x, (256,), w, b), torch.randn_like(x)
        found[f"{name} bwd"] = cost(
            lambda y=y, x=x, w=w, b=b, dy=dy: torch.autograd.grad(y, (x, w, b), dy, retain_graph=True), 300
        )
        half = x.detach().bfloat16().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            found[f"{name} amp fwd grad"] = cost(lambda norm=norm, x=half, w=w, b=b: norm(x, (256,), w, b), 300)
    return found


def adamw(count: int) -> dict[str, list[float]]:
    """Time steps over ``count`` tensors of 64 elements in two groups, and clipping."""
    params = [torch.randn(64, device=DEVICE, requires_grad=True) for _ in range(count)]
    grads = [[torch.randn(64, device=DEVICE) for _ in range(count)] for _ in range(2)]
    turn = 0

    def move() -> None:
        nonlocal turn
        turn ^= 1
        for p, g in zip(params, grads[turn], strict=True):
            p.grad = g

    move()
    groups = [{"params": params[: count // 2], "weight_decay": 0.1}, {"params": params[count // 2 :]}]
    step = fusedops.optim.AdamW(groups, lr=1e-3).step
    clipped = fusedops.optim.AdamW(params, lr=1e-3, max_grad_norm=1.0).step
    return {
        "step": cost(step, 30),
        "(moving gradients alone)": cost(move, 30),
        "step, gradients moved (incl. moving)": cost(lambda: (move(), step()), 30),
        "step with max_grad_norm": cost(clipped, 30),
        "clip_grad_norm_": cost(lambda: fusedops.clip_grad_norm_(params, 1.0), 30),
        "torch fused step": cost(torch.optim.AdamW(params, lr=1e-3, fused=True).step, 5),
        "torch clip_grad_norm_": cost(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0), 5),
    }


if __name__ == "__main__":
    sizes = {str(count): adamw(count) for count in (148, 300, 1000)}
    print(json.dumps({"layer_norm 4x256": layer_norm(), "adamw, by number of tensors of 64 elements": sizes}, indent=1))
