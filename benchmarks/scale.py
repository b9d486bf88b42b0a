"""What a splitting step would at best cost on a node of eight GPUs, for ImageNet: python -m benchmarks.scale.

A MODEL, NOT A MEASUREMENT, with the peaks of `benchmarks.roofline`. Every GPU takes its part of the images. Passes
through the network read and write what every layer takes and leaves, or do its arithmetic, whichever takes longer; what
is kept for the solver is read and written once. A step of the solver is the roofline's, followed by a ring all-reduce
of all products. Training is a pass forward, one backward, and the gradients of the weights, in bfloat16; capture is in
float32. The depthwise layers count as arithmetic at the peak, and nothing overlaps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from benchmarks.roofline import GPUS, STEPS, TABLE, Gpu, Table, predict
from s3d_fast.base.tables import text_table
from s3d_fast.models.mobilenet import FULL_WIDTHS, MobileNetV1
from s3d_fast.recipes import recipe
from tests.cases import RowsCase, mobilenet_layers

IMAGENET = 1_281_167
RANKS = 8
DTYPES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Link:
    """What connects the GPUs of a node: bytes a second that each can send, while it receives as much."""

    bandwidth: float
    memory: float  # of a GPU, bytes
    latency: float = 20e-6  # of an all-reduce of one number


# NVLink 3 and 4, and Infinity Fabric of 7 links, by their makers' data sheets: half of what is called bidirectional.
LINKS = {
    "A100": Link(300e9, 80e9),
    "H100": Link(450e9, 80e9),
    "MI300X": Link(448e9, 192e9),
}


@dataclass(frozen=True)
class Pass:
    """What one image moves and computes in the network."""

    macs: int
    taken: int  # numbers that layers take
    left: int  # numbers that layers leave


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
    """A splitting step on so many images, and an epoch of training, on a node."""

    name: str
    gpu: Gpu
    link: Link
    dtype: str
    images: int
    table: Table

    @property
    def own(self) -> int:
        """The images of one GPU."""
        return -(-self.images // RANKS)

    @cached_property
    def layers(self) -> list[RowsCase]:
        """The splittable layers, with the rows of one GPU."""
        return mobilenet_layers(FULL_WIDTHS, self.own * 112 * 112)

    def passing(self, images: float, dtype: str, flops_per_mac: int, taken: int, left: int) -> float:
        """Return the seconds of passes that move what layers take and leave so many times."""
        one = passes()
        moved = DTYPES[dtype] * (taken * one.taken + left * one.left)
        return images * max(flops_per_mac * one.macs / self.gpu.flops[dtype], moved / self.gpu.memory)

    @property
    def stored(self) -> int:
        """The bytes of rows and coefficients of one GPU."""
        return sum(case.N * (case.D + case.M) for case in self.layers) * DTYPES[self.dtype]

    @property
    def fits(self) -> bool:
        """Whether they fit into half the memory of a GPU."""
        return self.stored <= self.link.memory / 2

    @property
    def capture(self) -> float:
        """Forward; backward without the gradients of weights; reading and writing what is kept."""
        # Backward reads a layer's input and the gradient of its output, and writes that of its input.
        return self.passing(self.own, "fp32", 4, 1 + 2, 1 + 1) + 2 * self.stored / self.gpu.memory

    @cached_property
    def product(self) -> float:
        """One step of Lanczos without the all-reduce."""
        predicted = predict(self.gpu, self.dtype, self.table, self.layers, [])
        return predicted[f"eigen phase, {STEPS} steps"][0].seconds / STEPS

    @property
    def products_bytes(self) -> int:
        """The products of all filters, in float32, that an all-reduce sums."""
        return 4 * sum(case.M * case.D for case in self.layers)

    @property
    def sent(self) -> float:
        """The bytes that each GPU sends in an all-reduce around a ring."""
        return 2 * (RANKS - 1) / RANKS * self.products_bytes

    @property
    def reduce(self) -> float:
        """An all-reduce."""
        return self.link.latency + self.sent / self.link.bandwidth

    @property
    def solve(self) -> float:
        """All steps; each captures anew where rows do not fit."""
        again = 0.0 if self.fits else self.capture
        return STEPS * (self.product + self.reduce + again)

    @property
    def surgery(self) -> float:
        """Reading the weights and their momentum, and writing as many of twice the size."""
        return 2 * 3 * self.products_bytes / self.gpu.memory

    @property
    def total(self) -> float:
        """Capture, solver and surgery."""
        return self.capture + self.solve + self.surgery

    @property
    def epoch(self) -> float:
        """An epoch of training on all of ImageNet."""
        return self.passing(IMAGENET / RANKS, "bf16", 6, 1 + 3, 1 + 2)


def affordable(name: str, dtype: str, table: Table, share: float) -> int:
    """Return how many images a share of an epoch's time pays for; a batch for every GPU at the least."""
    images, least = IMAGENET, RANKS * recipe("imagenet-mobilenet").split_batch
    while images > least:
        step = Step(name, GPUS[name], LINKS[name], dtype, images, table)
        if step.total <= share * step.epoch:
            break
        images = max(least, min(images - 1, int(images * max(0.5, share * step.epoch / step.total))))
    return images


def report(table: Table, dtypes: Sequence[str] = tuple(DTYPES)) -> str:
    """Return the model's figures as a table."""
    share = recipe("imagenet-mobilenet").split_time
    assert share is not None
    head = ["GPU", "rows", "images", "kept, GB a GPU", "capture s", "S v ms", "all-reduce ms", "sent, GB a GPU"]
    lines = [[*head, "solve s", "surgery ms", "step s", "of an epoch"]]
    for name, gpu in GPUS.items():
        for dtype in dtypes:
            for images in (affordable(name, dtype, table, share), IMAGENET // 100, IMAGENET):
                if dtype != "fp32" and images == IMAGENET:
                    # What is captured again at every step is not stored.
                    continue
                step = Step(name, gpu, LINKS[name], dtype, images, table)
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
    print("A MODEL, NOT A MEASUREMENT: peaks of data sheets, reached by everything.\n")
    print(report(Table(TABLE)))


if __name__ == "__main__":
    main()
