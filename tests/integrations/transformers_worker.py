"""A small run of Hugging Face's Trainer: python -m tests.integrations.transformers_worker FOLDER, in two processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from s3d_fast.integrations.transformers import GrowthCallback
from tests.forked import launch

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 8, "max_position_embeddings": 8, "num_labels": 2, "pad_token_id": 0}


class Words(Dataset):
    """Sentences of five words; the class is whether the first word comes late in the alphabet."""

    def __init__(self) -> None:
        self.ids = torch.randint(1, 20, (32, 5), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[0] > 10).long()}


def batch() -> dict[str, Tensor]:
    """Return all sentences."""
    every = [one for _, one in zip(range(32), Words(), strict=False)]
    return {name: torch.stack([one[name] for one in every]) for name in every[0]}


def make() -> nn.Module:
    """Return a small encoder with dropout, always the same."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES))


def make_decoder() -> nn.Module:
    """Return a small decoder, always the same."""
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES))


@dataclass
class Trained:
    """A finished run."""

    model: nn.Module
    trainer: Trainer
    growth: GrowthCallback
    folder: Path


def train(
    folder: Path,
    *,
    epochs: Iterable[int] = (),
    steps: Iterable[int] = (),
    make: Callable[[], nn.Module] = make,
    max_steps: int = -1,
    resume: Path | None = None,
    **options: Any,
) -> Trained:
    """Train with checkpoints after every second step, and split at the given times."""
    model = make()
    growth = GrowthCallback(epochs, steps=steps, batches=2, eps=0.05, fraction=0.3)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=3,
        max_steps=max_steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Words(), callbacks=[growth])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Trained(model, trainer, growth, folder)


def one_of_two(folder: Path) -> None:
    """Train as one of two processes, and save the weights."""
    torch.set_num_threads(1)
    trained = train(folder / "run", epochs=[1, 2], ddp_backend="gloo")
    torch.save(trained.model.state_dict(), folder / f"rank-{trained.trainer.args.process_index}.pt")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(json.dumps(launch(2, one_of_two, place).report))
