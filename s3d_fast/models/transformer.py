"""A pre-norm transformer block; splitting can grow its feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    Args:
        width: width of the residual stream.
        heads: number of attention heads.
        hidden: width of the feed-forward layer.
        activation: makes the activation module.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, activation: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.activation = activation()
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width) -> the same
        """Return the stream after the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.activation(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        """Return multi-head self-attention over the T positions."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.project(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
