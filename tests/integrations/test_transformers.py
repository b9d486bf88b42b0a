"""Growth inside Hugging Face's Trainer: two splits, the same run resumed, Accelerate's optimizer, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import s3d_fast as s3d

with warnings.catch_warnings():
    # The libraries' own imports warn.
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer

    from s3d_fast.integrations.transformers import GrowthCallback
    from tests.integrations import transformers_worker as worker

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> worker.Trained:
    """Three epochs of four steps with splits after the first and the second, and a checkpoint of every epoch."""
    return worker.train(tmp_path_factory.mktemp("whole"), epochs=[1, 2])


def widths(model: torch.nn.Module) -> list[int]:
    return [layer.intermediate.dense.out_features for layer in model.bert.encoder.layer]


def test_two_splits_grow_the_model_and_its_optimizer(whole: worker.Trained) -> None:
    assert len(whole.growth.steps_done) == 2
    first, second = (sum(step.plan.widths().values()) for step in whole.growth.steps_done)
    assert sum(whole.growth.steps_done[0].plan.graph.widths().values()) < first < second
    optimizer = whole.trainer.optimizer
    assert isinstance(optimizer, AcceleratedOptimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in whole.model.parameters()}
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in whole.model.parameters())


@pytest.mark.parametrize("step", [4, 6, 8])
def test_a_resumed_run_ends_with_the_same_weights(step: int, whole: worker.Trained, tmp_path: Path) -> None:
    resumed = worker.train(tmp_path, epochs=[1, 2], resume=whole.folder / f"checkpoint-{step}")
    assert len(resumed.growth.steps_done) == {4: 2, 6: 1, 8: 1}[step]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_a_checkpoint_of_a_grown_model_is_loaded(whole: worker.Trained) -> None:
    fresh = worker.make()
    s3d.load_grown(fresh, whole.folder / "checkpoint-12" / "model.safetensors")
    assert widths(fresh) == widths(whole.model)
    batch = worker.batch()
    assert torch.equal(fresh.eval()(**batch)["logits"], whole.model.eval()(**batch)["logits"])


def test_steps_may_be_chosen_instead_of_epochs(tmp_path: Path) -> None:
    trained = worker.train(tmp_path, steps=[3, 6], max_steps=8)
    assert [bool(step) for step in trained.growth.steps_done] == [True, True]
    resumed = worker.train(tmp_path / "again", steps=[3, 6], max_steps=8, resume=tmp_path / "checkpoint-6")
    assert len(resumed.growth.steps_done) == 1
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_a_decoder_grows_without_its_cache(tmp_path: Path) -> None:
    trained = worker.train(tmp_path, make=worker.make_decoder, steps=[2], max_steps=4)
    assert [bool(step) for step in trained.growth.steps_done] == [True]
    # Older trainers leave the cache on.
    model, loader, growth = worker.make_decoder(), DataLoader(worker.Words(), batch_size=8), GrowthCallback(steps=[2])
    assert model.config.use_cache
    growth.on_step_begin(
        None, SimpleNamespace(global_step=2), None, model=model, optimizer=None, train_dataloader=loader
    )
    assert [bool(step) for step in growth.steps_done] == [True]
    assert model.config.use_cache


def test_a_callback_without_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="give the epochs or the steps after which to grow"):
        GrowthCallback()


def test_processes_grow_alike(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.transformers_worker", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ""
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert sum(tensor.numel() for tensor in first.values()) > sum(p.numel() for p in worker.make().parameters())
