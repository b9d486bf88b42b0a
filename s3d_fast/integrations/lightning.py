"""Growth inside Lightning: a callback that splits neurons at chosen epochs.

    trainer = Trainer(max_epochs=30, callbacks=[GrowthCallback(epochs=[10, 20], loss_fn=F.cross_entropy)])
    trainer.fit(module, loader)

Checkpoints of grown models resume by `trainer.fit(module, loader, ckpt_path=...)`. For `load_from_checkpoint`, call
`s3d_fast.growable(self)` at the end of the module's `__init__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.growth.checkpoint import growable
from s3d_fast.growth.grow_step import GrowthStep
from s3d_fast.integrations.schedule import Growing, moments

if TYPE_CHECKING:
    Callback: Any = object
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        # The same library under its other name.
        Callback = require.library(
            "pytorch_lightning.callbacks", "growth inside Lightning needs lightning", "'s3d_fast[lightning]'"
        ).Callback

__all__ = ["GrowthCallback"]


class GrowthCallback(Callback):  # type: ignore[misc]
    """Split the neurons of a LightningModule that gain the most, at the start of chosen epochs.

    The optimizer, DistributedDataParallel, and the moving averages of Lightning's WeightAveraging callbacks grow along.
    An epoch that has been split is never split again, also when a run is resumed.

    Args:
        epochs: split at the start of these epochs, that is, after as many epochs of training.
        loss_fn: `loss_fn(output, target)` or `loss_fn(model, batch)`, as for `capture`.
        network: the part of the module to grow: the name of a submodule; by default the whole module, whose `forward`
            is then traced.
        batches: the batches to split on, or a function that returns them, or how many batches of the usual size to draw
            from the training data, together with all other processes.
        seed: of this draw.
        on_growth: called with every `GrowthStep`, in every process.
        **options: for `grow_step`, such as fraction=0.35, eps=0.01, units=[...], memory_budget="4GiB".

    Attributes:
        grown: the epochs that have been split.
        steps: a `GrowthStep` for each split that this object has made.

    Raises:
        ValueError: a bad argument; while training, more than one optimizer.
    """

    def __init__(
        self,
        epochs: Iterable[int],
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        network: str | None = None,
        batches: int | Iterable[Any] | Callable[[], Iterable[Any]] = 8,
        seed: int = 0,
        on_growth: Callable[[GrowthStep], object] = lambda step: None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.epochs, self.network, self.on_growth = moments("epochs", epochs), network, on_growth
        self.growing = Growing(loss_fn, batches, seed, options)
        self.grown: list[int] = []

    @property
    def steps(self) -> list[GrowthStep]:
        """A `GrowthStep` for each split that this object has made."""
        return self.growing.steps

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Let the module load checkpoints of grown ones, before Lightning loads one and makes the optimizer."""
        growable(pl_module)
        for average in _averages(trainer):
            growable(average)

    def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Split, if this epoch is one of those chosen."""
        epoch = trainer.current_epoch
        if epoch not in self.epochs or epoch in self.grown:
            return
        if len(trainer.optimizers) > 1:
            raise ValueError(f"GrowthCallback grows a module with one optimizer, got {len(trainer.optimizers)}")
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        if optimizer is not None and not type(optimizer).__module__.startswith("torch."):
            optimizer = getattr(optimizer, "_optimizer", optimizer)
        step = self.growing(
            self._part(pl_module),
            optimizer,
            trainer.train_dataloader,
            epoch,
            [self._part(average.module) for average in _averages(trainer)],
        )
        self.grown.append(epoch)
        self.on_growth(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of Lightning must hold."""
        return {"grown": list(self.grown)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint of Lightning holds."""
        self.grown = list(state_dict["grown"])

    def _part(self, module: nn.Module) -> nn.Module:
        return module if self.network is None else module.get_submodule(self.network)


def _averages(trainer: Any) -> list[torch.optim.swa_utils.AveragedModel]:
    """Return the moving averages that other callbacks of the trainer hold."""
    found = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
    return [one for one in found if isinstance(one, torch.optim.swa_utils.AveragedModel)]
