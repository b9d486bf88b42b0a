"""Networks that grow inside torch's own tools for several processes: python -m tests.parallel_worker FOLDER.

Every case runs in two forked processes, "sharded-1" in one. A line for each case tells torchrun's report of it, which
is empty if no assertion failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import s3d_fast as s3d
from tests.forked import launch

WHOLE = states.StateDictOptions(full_state_dict=True)


def build(hidden: int = 6) -> nn.Module:
    """Return a small network with a BatchNorm, the same one in every process."""
    torch.manual_seed(0)
    layers = (nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 5), nn.SiLU(), nn.Linear(5, 2))
    return nn.Sequential(*layers).double()


def data(part: int) -> tuple[Tensor, Tensor]:
    """Return a batch that differs between processes."""
    generator = torch.Generator().manual_seed(part)
    return tuple(torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (3, 2))  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step on this process's batch."""
    x, target = data(dist.get_rank())
    optimizer.zero_grad()
    F.mse_loss(model(x), target).backward()
    optimizer.step()


def split(model: nn.Module, optimizer: torch.optim.Optimizer | None, eps: float) -> int:
    """Split some neurons, the same ones in every process; return their number."""
    x, target = data(0)
    graph = s3d.trace(model, x)
    spectra = s3d.extremal_eigenpairs(s3d.capture(model, F.mse_loss, [(x, target)], graph))
    plan = s3d.select(spectra, graph, top_k=3)
    s3d.apply_splits(model, plan, eps, optimizer)
    return len(plan)


def assert_the_same_everywhere(tensors: dict[str, Tensor]) -> None:
    """Assert that the parameters of all processes are equal bit for bit."""
    for name, tensor in tensors.items():
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor), name


def grow_inside_ddp(folder: Path) -> None:
    """Grow inside DistributedDataParallel, which must be made anew after a split."""
    model = DistributedDataParallel(build())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    x, _ = data(0)
    before = model.module.eval()(x)
    assert split(model, optimizer, 0.0) == 3
    torch.testing.assert_close(model.module(x), before, rtol=1e-9, atol=1e-9)
    with pytest.raises(RuntimeError, match=r"wrap it again, as DistributedDataParallel\(model\.module\)"):
        model(x)
    again = DistributedDataParallel(model.module.train())
    for _ in range(2):
        train(again, optimizer)
    assert sum(len(p) for p in again.module[0].parameters()) + sum(len(p) for p in again.module[3].parameters()) > 22
    assert_the_same_everywhere(dict(again.module.named_parameters()))


def grow_what_is_sharded(folder: Path) -> None:
    """Refuse a model that `fully_shard` has divided; grow a copy with whole parameters, and divide it again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    fully_shard(model[3], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    x, _ = data(0)
    for refused in (lambda: s3d.trace(model, x), lambda: s3d.save_grown(model, folder / "net")):
        with pytest.raises(ValueError, match=r"grow s3d_fast\.unsharded\(model\), and call fully_shard"):
            refused()

    plain = s3d.unsharded(model)
    assert type(plain[3]) is nn.Linear
    assert not plain._forward_pre_hooks
    kept = states.get_model_state_dict(model, options=WHOLE)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    moments = states.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    carried = torch.optim.Adam(plain.parameters(), lr=0.01)
    states.set_optimizer_state_dict(plain, carried, moments)
    before = plain.eval()(x)
    assert split(plain, carried, 0.0) == 3
    torch.testing.assert_close(plain(x), before, rtol=1e-9, atol=1e-9)
    # The model that was divided is as it was, and still trains.
    assert torch.equal(model.eval()(x), before)
    train(model.train(), optimizer)

    moments = states.get_optimizer_state_dict(plain, carried)
    fully_shard(plain[3], mesh=mesh)
    fully_shard(plain, mesh=mesh)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    states.set_optimizer_state_dict(plain, optimizer, moments, options=WHOLE)
    torch.testing.assert_close(plain(x), before, rtol=1e-9, atol=1e-9)
    train(plain.train(), optimizer)
    whole = {name: parameter.full_tensor() for name, parameter in plain.named_parameters()}
    assert_the_same_everywhere(whole)
    assert all(bool(tensor.isfinite().all()) for tensor in whole.values())
    # A model that has been grown and divided can be grown again.
    assert split(s3d.unsharded(plain), None, 0.1) == 3


def save_and_load_a_checkpoint(folder: Path) -> None:
    """Save a grown model with torch.distributed.checkpoint; a new one takes its sizes, then its weights."""
    model = build()
    split(model, None, 0.1)
    dcp.save(model.state_dict(), checkpoint_id=folder / "checkpoint")
    fresh = build(4)
    saved = dcp.FileSystemReader(folder / "checkpoint").read_metadata().state_dict_metadata
    s3d.resize_like(fresh, {name: torch.empty(entry.size, device="meta") for name, entry in saved.items()})
    loaded = fresh.state_dict()
    dcp.load(loaded, checkpoint_id=folder / "checkpoint")
    fresh.load_state_dict(loaded)
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


CASES: dict[str, tuple[int, Callable[[Path], None]]] = {
    "ddp": (2, grow_inside_ddp),
    "sharded-1": (1, grow_what_is_sharded),
    "sharded-2": (2, grow_what_is_sharded),
    "checkpoint": (2, save_and_load_a_checkpoint),
}


def run_case(name: str, folder: Path) -> None:
    """Run a case as one of its processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        CASES[name][1](folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # PyTorch imports modules on first use: import them once here instead of once in every child.
    split(build(), None, 0.0)
    for case, (ranks, _) in CASES.items():
        place = Path(sys.argv[1]) / case
        place.mkdir()
        print(json.dumps([case, launch(ranks, run_case, case, place).report]), flush=True)
