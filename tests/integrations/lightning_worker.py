"""A small run of Lightning: python -m tests.integrations.lightning_worker FOLDER runs it in two processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import s3d_fast as s3d
from s3d_fast.integrations.lightning import GrowthCallback
from s3d_fast.models import MLP
from tests.forked import launch
from tests.grow_worker import data as points

__all__ = ["Fitted", "Net", "fit", "points"]


class Net(LightningModule):
    """A classifier of points; it remembers its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP([2, 4, 4, 3])
        self.losses: list[float] = []
        s3d.growable(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.02)


@dataclass
class Fitted:
    """A finished run: its folder has a checkpoint for every epoch."""

    module: Net
    trainer: Trainer
    growth: GrowthCallback
    folder: Path


def fit(
    folder: Path,
    *,
    epochs: Iterable[int] = (2, 4),
    network: str | None = "net",
    batches: int | Callable[[], Any] = 2,
    max_epochs: int = 6,
    more: Sequence[Callback] = (),
    loader: Any = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Fitted:
    """Train from the same initial weights, and split at the start of the given epochs."""
    torch.manual_seed(1)
    module = Net()
    growth = GrowthCallback(epochs, F.cross_entropy, network=network, batches=batches, eps=0.05)
    saving = ModelCheckpoint(folder, "{epoch}", auto_insert_metric_name=False, save_top_k=-1)
    trainer = Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*more, growth, saving],
        **{"devices": 1, **options},
    )
    loader = DataLoader(TensorDataset(*points()), batch_size=16) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return Fitted(module, trainer, growth, folder)


def one_of_two(folder: Path) -> None:
    """Train as one of two processes; save the weights and the widths."""
    torch.set_num_threads(1)
    fitted = fit(folder, devices=2, strategy="ddp")
    widths = [sum(step.plan.widths().values()) for step in fitted.growth.steps]
    saved = {"weights": fitted.module.state_dict(), "widths": widths}
    torch.save(saved, folder / f"rank-{fitted.trainer.global_rank}.pt")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps(launch(2, one_of_two, place).report))
