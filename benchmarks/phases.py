"""Eigen phases over training steps: `python -m benchmarks.phases` prints a table of networks.

For every network: the CPU seconds of capture and solve on some images, over those of one forward and backward pass of
the same images in the same batches, all on one thread and in turn. The rows differ in settings: what `Grower` uses by
default (64 rows per sample, the tolerance that the noise asks for, stopping at the cut, bfloat16 where the processor
has it), all rows to a tolerance of 1e-2, and the same with the curvature of the first activation alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models import DGCNN, MLP, VGG19, MobileNetV1, ResNet
from s3d_fast.models.transformer import TransformerBlock
from s3d_fast.solvers import Cut
from s3d_fast.solvers.noise import COARSE_DELTA, COARSEST


class Transformer(nn.Module):
    """Four blocks of width 256 with feed-forward layers four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TransformerBlock(256, 4, 1024) for _ in range(4)))
        self.head = nn.Linear(256, 100)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 256) -> (B, 100)
        """Return the class scores."""
        return self.head(self.blocks(x).mean(1))


def images(samples: int) -> Tensor:
    """Return random images of CIFAR's size."""
    return torch.randn(samples, 3, 32, 32)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MobileNetV1-32, SiLU": lambda: (
        MobileNetV1([32] * 14, 100, stem_stride=1, activation=nn.SiLU), images(512)
    ),
    "MobileNetV1-32, ReLU": lambda: (MobileNetV1([32] * 14, 100, stem_stride=1, activation=nn.ReLU), images(512)),
    "VGG19-BN, 16 filters": lambda: (VGG19([16] * 16, 100), images(512)),
    "VGG19-BN": lambda: (VGG19(num_classes=100), images(128)),
    "ResNet-18": lambda: (ResNet((2, 2, 2, 2), (64, 128, 256, 512), num_classes=100), images(128)),
    "DGCNN": lambda: (DGCNN(), torch.randn(16, 1024, 3)),
    "transformer, width 256": lambda: (Transformer(), torch.randn(64, 64, 256)),
    "MLP, 128 wide": lambda: (MLP([128, 128, 128, 100]), torch.randn(8192, 128)),
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--match", default="", help="run only networks whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | settings | capture | solve | whole phase | products |\n|---|---|---|---|---|---|")
    for name, build in NETWORKS.items():
        if options.match in name:
            measure(name, *build(), options.rounds)


def measure(name: str, model: nn.Module, x: Tensor, rounds: int) -> None:
    """Print the rows of one network."""
    torch.manual_seed(0)
    y = torch.randint(40, (len(x),))
    trained(model, x, y)
    model.eval()
    graph = s3d.trace(model, x[:2])
    # Four batches, so that the noise is known.
    batches = list(zip(x.chunk(4), y.chunk(4), strict=True))
    filters = sum(unit.width for unit in graph.captured())
    cut = Cut(round(0.35 * filters), 2, 1.3)
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "defaults": (
            {"rows_per_sample": 64},
            {"tol": COARSEST, "until": cut, "delta": COARSE_DELTA, "precision": "medium"},
        ),
        "all rows, tol 1e-2": ({}, {"tol": 1e-2}),
        "the paper's S, all rows, tol 1e-2": ({"curvature": "paper"}, {"tol": 1e-2}),
    }
    times: dict[str, list[list[float]]] = {kind: [] for kind in settings}
    products = {}
    for number in range(rounds + 1):
        step = seconds(lambda: steps(model, batches))
        for kind, (capture, solve) in settings.items():
            held: list[Any] = []
            first = seconds(
                lambda c=capture, h=held: h.append(s3d.capture(model, F.cross_entropy, batches, graph, **c))
            )  # type: ignore[misc]
            second = seconds(lambda s=solve, h=held: h.append(s3d.extremal_eigenpairs(h[0], **s)))  # type: ignore[misc]
            counts = torch.cat([spectrum.matvecs for spectrum in held[1].values()]).double()
            products[kind] = float(counts.mean())
            # The first round warms up.
            if number:
                times[kind].append([first / step, second / step])
    for kind, ratios in times.items():
        capture_ratio, solve_ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
        whole = statistics.median(sum(pair) for pair in ratios)
        print(
            f"| {name} | {kind} | {capture_ratio:.2f} | {solve_ratio:.2f} | {whole:.2f} | {products[kind]:.1f} |",
            flush=True,
        )


def trained(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Take a few training steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(3):
        steps(model.train(), [(x, y)])
        optimizer.step()


def steps(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Run a forward and a backward pass of every batch."""
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()


def seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    main()
