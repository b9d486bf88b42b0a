"""Growth inside Lightning: two splits, resuming, checkpoints of grown modules, moving averages, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    # Lightning's own imports warn.
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from tests.integrations import lightning_worker as worker

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> worker.Fitted:
    """A run of six epochs with splits before the third and the fifth, and a checkpoint of every epoch."""
    return worker.fit(tmp_path_factory.mktemp("whole"))


def weights(fitted: worker.Fitted) -> dict[str, Tensor]:
    return fitted.module.state_dict()


def test_two_splits_grow_the_network_and_its_optimizer(whole: worker.Fitted) -> None:
    widths = [sum(step.plan.widths().values()) for step in whole.growth.steps]
    assert whole.growth.grown == [2, 4]
    assert len(widths) == 2
    assert 8 < widths[0] < widths[1] == sum(layer.out_features for layer in whole.module.net.layers[:4:2])
    held = whole.trainer.optimizers[0]
    assert [id(p) for group in held.param_groups for p in group["params"]] == [id(p) for p in whole.module.parameters()]
    assert all(held.state[p]["exp_avg"].shape == p.shape for p in whole.module.parameters())
    assert whole.module.losses[-1] < whole.module.losses[0]


@pytest.mark.parametrize("epoch", [1, 2, 4])
def test_a_resumed_run_ends_with_the_same_weights(epoch: int, whole: worker.Fitted, tmp_path: Path) -> None:
    resumed = worker.fit(tmp_path, ckpt_path=str(whole.folder / f"{epoch}.ckpt"))
    assert resumed.growth.grown == [2, 4]
    assert len(resumed.growth.steps) == {1: 2, 2: 1, 4: 0}[epoch]
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_a_checkpoint_of_a_grown_module_is_loaded(whole: worker.Fitted) -> None:
    loaded = worker.Net.load_from_checkpoint(whole.folder / "5.ckpt")
    x, _ = worker.points()
    assert torch.equal(loaded(x), whole.module(x))
    small = worker.Net.load_from_checkpoint(whole.folder / "1.ckpt")
    assert [layer.out_features for layer in small.net.layers[:4:2]] == [4, 4]


def test_the_whole_module_can_be_grown_on_batches_of_ones_own(tmp_path: Path) -> None:
    fitted = worker.fit(tmp_path, network=None, batches=lambda: [worker.points()], epochs=[1, 2], max_epochs=3)
    assert [len(step.plan) > 0 for step in fitted.growth.steps] == [True, True]


def test_moving_averages_grow_along_and_resume(tmp_path: Path) -> None:
    def averaging() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.5)

    whole = worker.fit(tmp_path / "whole", more=[averaging()])
    resumed = worker.fit(tmp_path / "resumed", more=[averaging()], ckpt_path=str(tmp_path / "whole" / "2.ckpt"))
    assert len(resumed.growth.steps) == 1
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"epochs must be an integer >= 1, got 0"):
        worker.fit(tmp_path, epochs=[0])
    loader = DataLoader(TensorDataset(*worker.points()), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 48, 48))
    with pytest.raises(ValueError, match=r"order of our own, got one with a WeightedRandomSampler"):
        worker.fit(tmp_path, loader=loader)


def test_processes_grow_alike(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.lightning_worker", str(tmp_path)],
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
    assert first["weights"].keys() == second["weights"].keys()
    for name, tensor in first["weights"].items():
        assert torch.equal(tensor, second["weights"][name]), name
    assert first["widths"] == second["widths"]
    assert first["widths"][-1] > 8
