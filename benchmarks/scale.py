"""The lowest possible cost of a splitting step on ImageNet with eight GPUs: python -m benchmarks.scale.

A MODEL, NOT A MEASUREMENT, with the peaks of `benchmarks.gpus`. Every GPU takes its part of the images. A pass
through the network takes the longer of two times: its arithmetic, and reading and writing the inputs and outputs of
every layer. Rows kept for the solver are read and written once. A step of the solver takes the shorter time of
`benchmarks.roofline` for 32 images, times their number, then a ring all-reduce of all products. Training is a forward
pass, a backward pass and the gradients of the weights, in bfloat16; capture is in float32. Depthwise layers count as
arithmetic at the peak. Nothing overlaps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpus import GAP, GPUS, Gpu
from benchmarks.roofline import NETWORKS, STEPS, Time, eigen_phase, fused, lanczos_step, load
from s3d_fast.base.tables import text_table
from s3d_fast.models.mobilenet import FULL_WIDTHS, MobileNetV1
from s3d_fast.recipes import recipe
from tests.cases import RowsCase, mobilenet_layers

IMAGENET = 1_281_167
RANKS = 8
DTYPES = {"fp32": 4, "bf16": 2}
# The network of the roofline, and its images.
MOBILENET, BATCH = "MobileNetV1 1.0x, ImageNet, batch 32", 32


@dataclass(frozen=True)
class Link:
    """The connection of the GPUs of a node: bytes per second that each can send while it receives as much."""

    bandwidth: float
    memory: float  # bytes per GPU
    latency: float = 20e-6  # of an all-reduce of one number


# NVLink 3 and 4, and Infinity Fabric of 7 links, from the vendors' data sheets: half of the bidirectional bandwidth.
LINKS = {
    "A100": Link(300e9, 80e9),
    "H100": Link(450e9, 80e9),
    "MI300X": Link(448e9, 192e9),
}


@dataclass(frozen=True)
class Pass:
    """The arithmetic and the data movement of one image in the network."""

    macs: int
    taken: int  # numbers in the inputs of all layers
    left: int  # numbers in the outputs of all layers


@lru_cache
def passes() -> Pass:
    """Return the pass of an image through MobileNetV1 1.0x at 224 x 224, layer by layer."""
    with torch.device("meta"):
        model = MobileNetV1()
        image = torch.empty(1, 3, 224, 224)
    macs = taken = left = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal macs, taken, left
        taken, left = taken + inputs[0].numel(), left + output.numel()
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            macs += module.weight[0].numel() * output.numel()

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    model(image)
    return Pass(macs, taken, left)


@dataclass(frozen=True)
class Step:
    """A splitting step on `images` images, and an epoch of training, on one node."""

    name: str
    gpu: Gpu
    link: Link
    dtype: str
    images: int
    record: dict[str, Any]  # of `benchmarks.recorded`

    @property
    def own(self) -> int:
        """The images of one GPU."""
        return -(-self.images // RANKS)

    @cached_property
    def layers(self) -> list[RowsCase]:
        """The splittable layers, with the rows of one GPU."""
        return mobilenet_layers(FULL_WIDTHS, self.own * 112 * 112)

    def passing(self, images: float, dtype: str, flops_per_mac: int, taken: int, left: int) -> float:
        """Return the seconds of passes that move layer inputs `taken` times and layer outputs `left` times."""
        one = passes()
        moved = DTYPES[dtype] * (taken * one.taken + left * one.left)
        return images * max(flops_per_mac * one.macs / self.gpu.flops[dtype], moved / self.gpu.memory)

    @property
    def stored(self) -> int:
        """Bytes of rows and coefficients on one GPU."""
        return sum(case.N * (case.D + case.M) for case in self.layers) * DTYPES[self.dtype]

    @property
    def fits(self) -> bool:
        """Whether rows and coefficients fit into half the memory of a GPU."""
        return self.stored <= self.link.memory / 2

    @property
    def capture(self) -> float:
        """Seconds of the capture: forward, backward without weight gradients, reading and writing the kept rows."""
        # Backward reads a layer's input and the gradient of its output, and writes the gradient of its input.
        return self.passing(self.own, "fp32", 4, 1 + 2, 1 + 1) + 2 * self.stored / self.gpu.memory

    @cached_property
    def product(self) -> float:
        """Seconds of one Lanczos step without the all-reduce."""
        product, batches = Time(), self.own / BATCH
        for _, once in fused(self.record["after"], MOBILENET, self.gpu, self.dtype):
            seconds = (once.fastest - GAP) * batches + GAP
            product += Time(seconds, seconds, 1)
        phase = eigen_phase(product, lambda step: lanczos_step(self.gpu, NETWORKS[MOBILENET], step))
        return phase.fastest / STEPS

    @property
    def products_bytes(self) -> int:
        """Bytes of the products of all filters, in float32, that an all-reduce sums."""
        return 4 * sum(case.M * case.D for case in self.layers)

    @property
    def sent(self) -> float:
        """Bytes that each GPU sends in a ring all-reduce."""
        return 2 * (RANKS - 1) / RANKS * self.products_bytes

    @property
    def reduce(self) -> float:
        """Seconds of an all-reduce."""
        return self.link.latency + self.sent / self.link.bandwidth

    @property
    def solve(self) -> float:
        """Seconds of all steps; every step captures again if the rows do not fit."""
        again = 0.0 if self.fits else self.capture
        return STEPS * (self.product + self.reduce + again)

    @property
    def surgery(self) -> float:
        """Seconds to read the weights and their momentum, and to write both at twice the size."""
        return 2 * 3 * self.products_bytes / self.gpu.memory

    @property
    def total(self) -> float:
        """Seconds of capture, solver and surgery."""
        return self.capture + self.solve + self.surgery

    @property
    def epoch(self) -> float:
        """Seconds of an epoch of training on all of ImageNet."""
        return self.passing(IMAGENET / RANKS, "bf16", 6, 1 + 3, 1 + 2)


def affordable(name: str, dtype: str, record: dict[str, Any], share: float) -> int:
    """Return how many images fit into a share of an epoch's time; at least one batch per GPU."""
    images, least = IMAGENET, RANKS * recipe("imagenet-mobilenet").split_batch
    while images > least:
        step = Step(name, GPUS[name], LINKS[name], dtype, images, record)
        if step.total <= share * step.epoch:
            break
        images = max(least, min(images - 1, int(images * max(0.5, share * step.epoch / step.total))))
    return images


def report(record: dict[str, Any], dtypes: Sequence[str] = tuple(DTYPES)) -> str:
    """Return the model's figures as a table."""
    head = ["GPU", "rows", "images", "kept, GB a GPU", "capture s", "S v ms", "all-reduce ms", "sent, GB a GPU"]
    lines = [[*head, "solve s", "surgery ms", "step s", "of an epoch"]]
    for name, gpu in GPUS.items():
        for dtype in dtypes:
            for images in (affordable(name, dtype, record, 0.01), IMAGENET // 100, IMAGENET):
                if dtype != "fp32" and images == IMAGENET:
                    # Rows that are captured again at every step are not stored, so their dtype does not matter.
                    continue
                step = Step(name, gpu, LINKS[name], dtype, images, record)
                kept = short(step.stored / 1e9) if step.fits else "captured again"
                times = (step.capture, 1e3 * step.product, 1e3 * step.reduce)
                rest = (STEPS * step.sent / 1e9, step.solve, 1e3 * step.surgery, step.total)
                costs = [short(number) for number in (*times, *rest)]
                lines.append([name, dtype, str(images), kept, *costs, f"{short(100 * step.total / step.epoch)} %"])
    return text_table(lines)


def short(number: float) -> str:
    """Return a number with three digits, or more if it has more before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def main() -> None:
    """Print the model's figures."""
    argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__).parse_args()
    print("A MODEL, NOT A MEASUREMENT.\n")
    print(report(load()))


if __name__ == "__main__":
    main()
