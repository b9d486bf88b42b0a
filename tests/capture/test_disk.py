"""A capture leaves a share of the disk free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import s3d_fast as s3d
from s3d_fast.models.mlp import MLP


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with free space that the test sets."""
    usage = SimpleNamespace(total=2**62, used=0, free=2**60)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    return usage


def test_a_capture_leaves_a_share_of_the_disk_free(disk: SimpleNamespace, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP([60, 50, 2])
    batches = [(torch.randn(64, 60), torch.randn(64, 2)) for _ in range(12)]
    graph = s3d.trace(model, batches[0][0])
    whole = sum(s3d.capture(model, F.mse_loss, batches, graph).memory().values())

    def places() -> tuple[set[str], int]:
        plan = s3d.capture(model, F.mse_loss, batches, graph, memory_budget=whole // 4, scratch=tmp_path).plan
        assert plan is not None
        return set(plan.places.values()), plan.disk_bytes

    found, size = places()
    assert found == {"disk"}
    for share, place in ((0.5, "disk"), (0.85, "disk"), (0.95, "recompute"), (1.0, "recompute"), (2.0, "recompute")):
        disk.free = int(size / share)
        assert places() == ({place}, size if place == "disk" else 0), share
