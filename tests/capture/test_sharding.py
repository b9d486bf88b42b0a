"""Splits and training in several processes give the results of one process, and the ranks agree bit for bit."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from s3d_fast.base.world import ALONE
from tests import shard_worker

ROOT = Path(__file__).parents[2]
Found = tuple[dict[str, torch.Tensor], str]

each_case = pytest.mark.parametrize(
    ("model", "ranks", "budget"),
    [(model, ranks, budget) for ranks, cases in shard_worker.CASES.items() for model, budget in cases],
)


@functools.cache
def alone(model: str) -> Found:
    """Return the results of one process without a memory budget."""
    return shard_worker.split_and_train(model, ALONE, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the worker's results, with one folder for each number of processes."""
    folder = tmp_path_factory.mktemp("shards")
    done = subprocess.run(
        [sys.executable, "-m", "tests.shard_worker", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def found(model: str, ranks: int, budget: int, folder: Path) -> list[Found]:
    """Return the results of every rank."""
    results = []
    for rank in range(ranks):
        path = shard_worker.file(folder / f"ranks-{ranks}", model, budget, rank)
        with safe_open(path, "pt") as file:
            results.append((load_file(path), file.metadata()["plan"]))
    return results


@each_case
def test_ranks_split_as_one_process_does(found: list[Found], model: str, budget: int) -> None:
    wanted, plan = alone(model)
    assert plan
    for tensors, chosen in found:
        assert chosen == plan
        assert set(tensors) == {name for name in wanted if budget == 0 or "/moments/" not in name}
        assert any(name.startswith("size/") for name in tensors)
        assert float(tensors["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-6)
        for name, tensor in tensors.items():
            if name.startswith("split/"):
                torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
            elif name.startswith("size/"):
                torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
            elif name.startswith("spectrum/"):
                ends = [wanted[f"{name.rpartition('/')[0]}/{end}"].abs() for end in ("min", "max")]
                radius = torch.maximum(*ends).clamp(min=1e-30)
                assert float(((tensor - wanted[name]).abs() / radius).max()) < 1e-5, name


@each_case
def test_ranks_agree_bit_for_bit_before_and_after_an_epoch(found: list[Found]) -> None:
    (first, _), *others = found
    for tensors, _ in others:
        assert [name for name, tensor in tensors.items() if not torch.equal(tensor, first[name])] == []


@each_case
def test_an_epoch_changes_every_weight_buffer_and_momentum(found: list[Found]) -> None:
    for tensors, _ in found:
        before, after = (
            {name.removeprefix(stage): tensor for name, tensor in tensors.items() if name.startswith(stage)}
            for stage in ("split/", "trained/")
        )
        assert set(before) == set(after)
        assert any(name.endswith("|momentum_buffer") for name in before)
        unchanged = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
        # Only splits change the metric of an EdgeConv; training does not.
        assert [name for name in unchanged if not name.endswith(".metric")] == []
        assert tensors["trained_loss"].shape == (1,)
        assert tensors["trained_loss"].isfinite().all()
