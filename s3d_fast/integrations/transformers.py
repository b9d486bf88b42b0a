"""Growth inside Hugging Face's Trainer: a callback that splits neurons at chosen epochs or steps.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[GrowthCallback(epochs=[1, 2])])
    trainer.train()

`trainer.train(resume_from_checkpoint=...)` takes checkpoints of grown models. `from_pretrained` builds the sizes of the
configuration; load a grown model by `s3d_fast.load_grown(model, "checkpoint-500/model.safetensors")` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.growth.checkpoint import growable
from s3d_fast.growth.grow_step import GrowthStep
from s3d_fast.integrations.schedule import Growing, moments

if TYPE_CHECKING:
    TrainerCallback: Any = object
else:
    TrainerCallback = require.library(
        "transformers", "growth inside Hugging Face's Trainer needs transformers", "'s3d_fast[transformers]'"
    ).TrainerCallback

__all__ = ["GrowthCallback", "model_loss"]


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a Hugging Face model computes by itself from a batch with labels."""
    return model(**batch)["loss"]


class GrowthCallback(TrainerCallback):  # type: ignore[misc]
    """Split the neurons of a model that gain the most, at chosen times of a Trainer.

    The optimizer, inside Accelerate's wrapper, and DistributedDataParallel grow along. A checkpoint that is written at
    such a time holds the model before the split; a run that is resumed from it splits then.

    Args:
        epochs: split after as many epochs.
        steps: split after as many steps of the optimizer.
        loss_fn: as for `capture`; by default the loss that the model computes from the batch.
        batches: the batches to split on, or a function that returns them, or how many batches of the usual size to draw
            from the training data, together with all other processes.
        seed: of this draw.
        on_growth: called with every `GrowthStep`, in every process.
        **options: for `grow_step`, such as fraction=0.35, eps=0.01, units=[...], also=[ema].

    Attributes:
        steps_done: a `GrowthStep` for each split that this object has made.

    Raises:
        ValueError: a bad argument, or neither epochs nor steps.
    """

    def __init__(
        self,
        epochs: Iterable[int] = (),
        *,
        steps: Iterable[int] = (),
        loss_fn: Callable[[Any, Any], Tensor] = model_loss,
        batches: int | Iterable[Any] | Callable[[], Iterable[Any]] = 8,
        seed: int = 0,
        on_growth: Callable[[GrowthStep], object] = lambda step: None,
        **options: Any,
    ) -> None:
        self.epochs, self.steps, self.on_growth = moments("epochs", epochs), moments("steps", steps), on_growth
        if not (self.epochs or self.steps):
            raise ValueError("give the epochs or the steps after which to grow; got neither")
        self.growing = Growing(loss_fn, batches, seed, options)

    @property
    def steps_done(self) -> list[GrowthStep]:
        """A `GrowthStep` for each split that this object has made."""
        return self.growing.steps

    def on_init_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Let the model load checkpoints of grown ones."""
        if known.get("model") is not None:
            growable(known["model"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Split, if as many epochs have passed as were chosen."""
        # A run that is resumed within an epoch has split at its beginning already.
        if any(abs((state.epoch or 0) - epoch) < 1e-6 for epoch in self.epochs):
            self._grow(state, known)

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Split, if as many steps have passed as were chosen."""
        if state.global_step in self.steps:
            self._grow(state, known)

    def _grow(self, state: Any, known: dict[str, Any]) -> None:
        with _without_cache(known["model"]):
            step = self.growing(known["model"], known["optimizer"], known["train_dataloader"], state.global_step)
        self.on_growth(step)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Let a decoder return no cache of keys and values, which torch.export does not know, within the block."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True
