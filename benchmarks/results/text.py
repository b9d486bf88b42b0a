"""Bytes of Python's own library, a small gated transformer for them, and training within a budget of compute."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Modules of the standard library whose text is read; the last one is for tests.
FILES = ("argparse.py", "ast.py", "difflib.py", "doctest.py", "inspect.py", "pickle.py", "tarfile.py", "typing.py")
TEST_FILE = "turtle.py"
# Bytes beyond ASCII are read as this one.
SYMBOLS, OTHER = 128, 127
CONTEXT, WIDTH, HEADS, BLOCKS = 32, 32, 2, 2
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and sequences to test with; `digest` tells versions of Python apart."""

    train: Tensor  # (N,), int64
    test: Tensor  # (T, CONTEXT + 1)
    digest: str

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield sequences from random places with the bytes that follow, without end."""
        steps = torch.arange(CONTEXT + 1)
        while True:
            starts = torch.randint(len(self.train) - CONTEXT, (size, 1), generator=generator)
            rows = self.train[starts + steps]
            yield rows[:, :-1], rows[:, 1:]


def load(tests: int = 512) -> Text:
    """Return the text; `tests` sequences are taken from the test file at equal distances."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    read = {name: (folder / name).read_bytes() for name in (*FILES, TEST_FILE)}
    train, test = (_symbols(b"".join(read[name] for name in names)) for names in (FILES, (TEST_FILE,)))
    starts = torch.linspace(0, len(test) - CONTEXT - 1, tests).long()[:, None]
    digest = hashlib.sha256(b"".join(read.values())).hexdigest()[:16]
    return Text(train, test[starts + torch.arange(CONTEXT + 1)], digest)


def _symbols(text: bytes) -> Tensor:
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return torch.where(values < OTHER, values, OTHER)


class Block(nn.Module):
    """x + causal attention(norm(x)), then x + down(silu(gate(y)) * up(y)) with y = norm(x)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.merge = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, WIDTH) -> the same
        """Return the stream after the block."""
        parts = self.attend(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.merge(read.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Reader(nn.Module):
    """A transformer that predicts the next byte.

    Args:
        hidden: the width of every block's gated feed-forward layer.
    """

    def __init__(self, hidden: Sequence[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(own) for own in hidden))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T), int64 -> (B, T, SYMBOLS)
        """Return scores of the next byte at every place."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.place)))


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy per byte."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def reader(hidden: Sequence[int], seed: int) -> Reader:
    """Return a transformer with the random weights of a seed."""
    torch.manual_seed(seed)
    return Reader(hidden)


@torch.no_grad()
def bits(model: nn.Module, text: Text) -> float:
    """Return the bits per byte on the test sequences."""
    model.eval()
    rows = text.test.split(128)
    losses = [loss_of(model(part[:, :-1]), part[:, 1:]) * len(part) for part in rows]
    return float(torch.stack(losses).sum()) / len(text.test) / math.log(2)
