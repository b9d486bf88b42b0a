"""The eigen phase on several processes: the same spectra, the same plan, the same weights as on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import shard_worker

ROOT = Path(__file__).parent.parent


def run(model: str, ranks: int, folder: Path, budget: int = 0) -> list[tuple[dict[str, torch.Tensor], str]]:
    """Run the worker in several processes; return what each has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "tests.shard_worker", model, str(folder), str(budget)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}.safetensors"
        with safe_open(path, "pt") as file:
            found.append((load_file(path), file.metadata()["plan"]))
    return found


@pytest.mark.parametrize(
    ("model", "ranks", "budget"),
    # 8 batches in 3 processes are 3, 3 and 2.
    [("mobilenet", 2, 0), ("mobilenet", 3, 0), ("mobilenet", 2, 60_000), ("dgcnn", 4, 0)],
)
def test_ranks_agree_with_one_process(model: str, ranks: int, budget: int, tmp_path: Path) -> None:
    wanted, plan = shard_worker.split(model, 0, 1, None)
    found = run(model, ranks, tmp_path, budget)
    for tensors, chosen in found:
        assert chosen == plan
        # Among one another to the last bit, to one process up to the order of sums.
        assert all(torch.equal(tensor, found[0][0][name]) for name, tensor in tensors.items())
        assert set(tensors) == set(wanted)
        for name, tensor in tensors.items():
            if name.startswith("weight/"):
                torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
                continue
            if name == "loss":
                assert float(tensor) == pytest.approx(float(wanted[name]), rel=1e-6)
                continue
            ends = [wanted[f"{name.rpartition('/')[0]}/{end}"].abs() for end in ("min", "max")]
            radius = torch.maximum(*ends).clamp(min=1e-30)
            assert float(((tensor - wanted[name]).abs() / radius).max()) < 1e-5, name
