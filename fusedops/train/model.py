"""A plain GPT: the model a user would bring, knowing nothing of fusedops.

*Source*: the architecture of GPT-2 (Radford et al., 2019): pre-norm blocks, learned positions, tied head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT: `width` is the hidden size, `context` the longest sequence it can read."""

    layers: int
    heads: int
    width: int
    context: int
    vocab: int


# 50,304 is GPT-2's vocabulary rounded up to a multiple of 64; bytes use its first 256 entries.
MODELS = {
    "nano": GPTConfig(layers=4, heads=4, width=128, context=256, vocab=256),
    "124M": GPTConfig(layers=12, heads=12, width=768, context=1024, vocab=50304),
    "355M": GPTConfig(layers=24, heads=16, width=1024, context=1024, vocab=50304),
}


class Attention(nn.Module):
    """Causal self-attention on (batch, seq, width)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from each position of x (batch, seq, width) to itself and what came before."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both branches to x (batch, seq, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids (batch, seq) → next-token loss, given targets of the same shape; else logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal(0, 0.02) as in GPT-2; what writes into the residual stream is scaled by its depth."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                into_residual = name.endswith(("attention.out", "down"))
                depth = 2 * self.config.layers if into_residual else 1
                module.weight.normal_(std=0.02 / depth**0.5)
            if isinstance(module, nn.Linear):
                module.bias.zero_()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Loss (a scalar) of tokens and targets (batch, seq), or logits (batch, seq, vocab)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)  # the head is the embedding, tied
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
