"""Loggers of a run for TensorBoard, Weights & Biases and MLflow: `Grower(..., loggers=[TensorBoardLogger(folder)])`.

Anything with a method `log(values, step, axis)` is a logger; `growth.loggers.Logger` says what it gets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from s3d_fast.base import require
from s3d_fast.growth.loggers import Logger

__all__ = ["Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]


class TensorBoardLogger:
    """Write TensorBoard events.

    Args:
        folder: the folder of the events; it is made when the first numbers come.

    Raises:
        RuntimeError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require.library("tensorboard", "events need tensorboard", "'s3d_fast[tensorboard]'")
        self.folder = os.fspath(folder)
        self.writer: Any = None

    def log(self, values: Mapping[str, float], step: int, axis: str) -> None:
        """See `Logger`. Every name has steps of its own in TensorBoard, so `axis` does not matter."""
        # Opened late, when the folder is known to belong to this run.
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder)
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class WandbLogger:
    """Log to Weights & Biases.

    Args:
        run: a run that `wandb.init` has started; by default one is started when the first numbers come.
        **options: for `wandb.init`, such as project="growth".

    Raises:
        RuntimeError: wandb is not installed.
        ValueError: both a run and options are given.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        require.library("wandb", "this logger needs wandb", "wandb")
        if run is not None and options:
            raise ValueError(f"give run or options for wandb.init, not both; got {', '.join(options)}")
        self.run, self.options = run, options
        self.known: set[str] = set()

    def log(self, values: Mapping[str, float], step: int, axis: str) -> None:
        """See `Logger`. Each name is drawn over its axis: a W&B run itself has one step that only rises."""
        if self.run is None:
            import wandb

            self.run = wandb.init(**self.options)
        for name in values.keys() - self.known:
            self.run.define_metric(name, step_metric=axis)
        self.known |= values.keys()
        self.run.log({**values, axis: step})


class MLflowLogger:
    """Log to an MLflow run.

    Args:
        run_id: the id of a run; by default the active one, or one that is started when the first numbers come.
        client: an `mlflow.MlflowClient`; by default one for MLflow's tracking URI.

    Raises:
        RuntimeError: mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None, client: Any = None) -> None:
        require.library("mlflow", "this logger needs mlflow", "mlflow")
        self.run_id, self.client = run_id, client

    def log(self, values: Mapping[str, float], step: int, axis: str) -> None:
        """See `Logger`. Every name has steps of its own in MLflow, so `axis` does not matter."""
        import mlflow

        if self.client is None:
            self.client = mlflow.MlflowClient()
        if self.run_id is None:
            self.run_id = (mlflow.active_run() or mlflow.start_run()).info.run_id
        for name, value in values.items():
            self.client.log_metric(self.run_id, name, value, step=step)
