"""Interrupt a growth run and resume it: the weights equal those of an uninterrupted run, bit for bit."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import s3d_fast as s3d
from s3d_fast.models import MLP

generator = torch.Generator().manual_seed(0)
x = torch.randn(256, 2, generator=generator)
y = (x[:, 0] * x[:, 1] > 0).long()


class Interrupted(Exception):
    """Stands for a power cut."""


def make_grower(folder: Path, interrupt_in: int | None = None) -> s3d.Grower:
    """Return a run of four phases that is interrupted at the end of training in phase `interrupt_in`."""
    torch.manual_seed(0)
    loop = s3d.EpochTrainer([(x, y)], F.cross_entropy, epochs=50)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        loop(model, optimizer, phase)
        if phase == interrupt_in:
            raise Interrupted

    return s3d.Grower(
        MLP([2, 2, 2]),
        x[:2],
        F.cross_entropy,
        batches=[(x, y)],
        train=train,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        phases=4,
        selection={"m": 2, "c": 1.3, "top_k": 1},
        out=folder,
    )


with tempfile.TemporaryDirectory() as folder:
    whole = make_grower(Path(folder) / "whole")
    whole.run()

    try:
        make_grower(Path(folder) / "cut", interrupt_in=2).run()
    except Interrupted:
        print("interrupted in phase 2; files:", sorted(path.name for path in (Path(folder) / "cut").iterdir()))
    resumed = make_grower(Path(folder) / "cut")
    resumed.run(resume=True)

    pairs = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    print("widths:", [phase.widths for phase in resumed.history])
    print("same weights:", all(torch.equal(a, b) for a, b in pairs))

    # A saved network loads into a new network of the seed widths.
    fresh = MLP([2, 2, 2])
    s3d.load_grown(fresh, Path(folder) / "cut" / "network-003.safetensors")
    print("same outputs:", torch.equal(fresh(x), resumed.model(x)))
