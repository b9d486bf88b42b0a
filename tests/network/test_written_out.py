"""Networks as public libraries write them: units are found, splits of size zero keep the outputs, twice, and training
goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from tests.model_cases import random_plan


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.3), nn.Parameter(torch.randn(nf) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class RMSNorm(nn.Module):
    """Llama's norm, which computes in float32 at least."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Attention with heads, rotated as in Llama if asked."""

    def __init__(self, size: int, heads: int, rotary: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.rotary, self.causal = heads, rotary, causal
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.rotary:
            with torch.no_grad():
                angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.ones(q.shape[-1], device=x.device)
            q, k = (t * angle.cos() + torch.cat(t.chunk(2, -1)[::-1], -1) * angle.sin() for t in (q, k))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(h.transpose(1, 2).flatten(2))


class Bert(nn.Module):
    """An encoder with norms behind the residual additions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(10, 8)
        self.attention, self.norm1, self.norm2 = Attention(8, 2, False, False), nn.LayerNorm(8), nn.LayerNorm(8)
        self.intermediate, self.output, self.pooler = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.norm1(x + self.attention(x))
        x = self.norm2(x + self.output(F.gelu(self.intermediate(x))))
        return {"last": x, "pooled": torch.tanh(self.pooler(x[:, 0]))}


class GPT2(nn.Module):
    """A decoder with transposed weights and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.attention, self.fc, self.proj = Attention(8, 2, False, True), Conv1D(12, 8), Conv1D(8, 12)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        x = x + self.attention(self.norm(x))
        h = self.fc(self.norm(x))
        h = 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3))))
        return F.linear(x + self.proj(h), self.wte.weight)


class Llama(nn.Module):
    """A decoder with rotations and gated units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(20, 8), RMSNorm(8), Attention(8, 2, True, True)
        self.gate, self.up, self.down = (nn.Linear(8, 12, bias=False), nn.Linear(8, 12), nn.Linear(12, 8))
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, None]:
        x = self.embed(input_ids)
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.silu(self.gate(self.norm(x))) * self.up(self.norm(x)))
        return self.head(self.norm(x)), None


class ViT(nn.Module):
    """Patches, a class token, positions, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.norm, self.attention, self.scale = (
            nn.LayerNorm(8),
            Attention(8, 2, False, False),
            nn.Parameter(torch.ones(8)),
        )
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = x + self.scale * self.attention(self.norm(x))
        x = x + self.scale * self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x[:, 0])


class Conv(nn.Conv2d):
    """A subclass that only forwards, as growers write them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class MyBN(nn.Module):
    """A BatchNorm written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.gamma / torch.sqrt(self.var + 1e-5)
        return (x - self.mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + self.beta.view(1, -1, 1, 1)


class HandMobileNet(nn.Module):
    """Depthwise separable blocks with swish written as x * sigmoid(x)."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem, self.stem_norm = Conv(3, 4, 3, 2, 1, bias=False), norm(4)
        self.depth, self.depth_norm = Conv(4, 4, 3, 1, 1, groups=4, bias=False), norm(4)
        self.point, self.point_norm = Conv(4, 6, 1, bias=False), norm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in (
            (self.stem, self.stem_norm),
            (self.depth, self.depth_norm),
            (self.point, self.point_norm),
        ):
            x = norm(conv(x))
            x = x * torch.sigmoid(x)
        return self.head(x.mean([2, 3]))


IDS = {"input_ids": torch.arange(12).view(2, 6) % 7}
CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...]]] = {
    "bert": (Bert, IDS, ("intermediate",)),
    "gpt2": (GPT2, IDS, ("fc",)),
    "llama": (Llama, IDS, ("gate",)),
    "vit": (ViT, {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}, ("up",)),
    "mobilenet": (HandMobileNet, torch.randn(2, 3, 9, 9, dtype=torch.float64), ("stem", "point")),
    "own batchnorm": (lambda: HandMobileNet(MyBN), torch.randn(2, 3, 9, 9, dtype=torch.float64), ("stem", "point")),
}


def evaluate(model: nn.Module, example: Any) -> list[Tensor]:
    """Return all outputs of a model."""
    found = model(**example) if isinstance(example, dict) else model(example)
    values = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    return [value for value in values if value is not None]


@pytest.mark.parametrize("name", CASES)
def test_networks_as_libraries_write_them_grow_twice_and_train(name: str) -> None:
    build, example, units = CASES[name]
    torch.manual_seed(0)
    model = build().double().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(2):
        graph = s3d.trace(model, example)
        assert tuple(graph.units) == units, graph.explain()
        with torch.no_grad():
            before = evaluate(model, example)
        s3d.apply_splits(model, random_plan(graph, 2, seed=seed, every=3), eps=0.0, optimizer=optimizer, check=example)
        for a, b in zip(before, evaluate(model, example), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        sum(out.square().mean() for out in evaluate(model, example)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("name", "unit"), [("gpt2", "fc"), ("mobilenet", "stem"), ("llama", "gate")])
def test_activations_that_are_written_out_are_recognised(name: str, unit: str) -> None:
    build, example, _ = CASES[name]
    act = s3d.trace(build().double(), example).units[unit].activation
    assert act is not None
    assert act.name == ("gelu" if name == "gpt2" else "silu")
    assert act.formula is not None
