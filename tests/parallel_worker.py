"""Networks that grow inside torch's own tools for several processes: python -m tests.parallel_worker FOLDER.

Every case runs in two forked processes, "sharded-1" in one. A line for each case tells torchrun's report of it, which
is empty if no assertion failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import s3d_fast as s3d
from s3d_fast.base.random_state import seed_all
from s3d_fast.base.world import ALONE, World, existing, joined
from s3d_fast.splitting import surgery
from tests import grow_worker
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


def sharded_model(**options: Any) -> nn.Module:
    """Return a network that `fully_shard` has divided in two groups."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    fully_shard(model[3], mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    return model


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of all whole parameters, buffers and moments."""
    found = {name: tensor.clone() for name, tensor in states.get_model_state_dict(model, options=WHOLE).items()}
    moments = states.get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    return found | {f"{name} {key}": value.clone() for name, one in moments.items() for key, value in one.items()}


def grow_what_is_sharded(folder: Path) -> None:
    """See through `fully_shard`: the split is that of a whole model, and the result is divided as before."""
    model = sharded_model(reshard_after_forward=False)
    model[3].set_reshard_after_backward(False)
    model.set_modules_to_forward_prefetch([model[3]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    x, _ = data(0)
    with pytest.raises(ValueError, match=r"give s3d_fast\.unsharded\(model\)"):
        s3d.save_grown(model, folder / "net")

    plain = s3d.unsharded(model)
    assert type(plain[3]) is nn.Linear
    assert not plain._forward_pre_hooks
    kept = states.get_model_state_dict(model, options=WHOLE)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    carried = torch.optim.Adam(plain.parameters(), lr=0.01)
    moments = states.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    states.set_optimizer_state_dict(plain, carried, moments)
    groups = [group_settings(module) for module in (model, model[3])]
    before = plain.eval()(x)

    # A split that fails leaves the divided model and its optimizer as they were, and they still train.
    unchanged, held = whole_state(model, optimizer), [id(p) for p in model.parameters()]
    graph = s3d.trace(model, x)
    operators = s3d.capture(model, F.mse_loss, [data(0)], graph)
    plan = s3d.select(s3d.extremal_eigenpairs(operators), graph, top_k=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surgery, "_commit_state", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s3d.apply_splits(model, plan, 0.1, optimizer)
    assert [id(p) for p in model.parameters()] == held == [id(p) for p in optimizer.param_groups[0]["params"]]
    now = whole_state(model, optimizer)
    assert all(torch.equal(tensor, now[name]) for name, tensor in unchanged.items())
    assert torch.equal(model.eval()(x), before)

    # The running statistics, and so the plans, differ between processes: the first one's plan counts.
    s3d.apply_splits(model, plan, 0.1, optimizer)
    held = [plan.splits]
    dist.broadcast_object_list(held, 0)
    s3d.apply_splits(plain, replace(plan, splits=held[0]), 0.1, carried)
    assert [group_settings(module) for module in (model, model[3])] == groups
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
    grown, expected = whole_state(model, optimizer), whole_state(plain, carried)
    assert grown.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(grown[name], tensor, rtol=0, atol=0, msg=lambda said, name=name: f"{name}: {said}")
    # It trains on, and can be grown again.
    for _ in range(2):
        train(model.train(), optimizer)
    whole = dict(s3d.unsharded(model).named_parameters())
    assert_the_same_everywhere(whole)
    assert not torch.equal(whole["0.weight"], expected["0.weight"])
    assert split(model, optimizer, 0.1) == 3


def group_settings(module: nn.Module) -> tuple[object, ...]:
    """Return how `fully_shard` treats the parameters of a module."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    group, prefetched = state._fsdp_param_group, [one._modules for one in state._states_to_forward_prefetch]
    reshards = state._auto_reshard_after_forward or group.post_forward_mesh_info is not None
    return reshards, group.reshard_after_backward, group.mesh_info.mesh, len(group.fsdp_params), prefetched


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


def step_inside_ddp(folder: Path) -> None:
    """Grow inside DistributedDataParallel in one call: the same wrapper goes on, with all options and hooks."""
    inner = build()
    model = DistributedDataParallel(inner, find_unused_parameters=True, bucket_cap_mb=3)
    called: list[int] = []
    model.register_forward_hook(lambda *rest: called.append(1))
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    ema = torch.optim.swa_utils.AveragedModel(inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    # The caller has the module inside the wrapper alone, as a trainer's callback has.
    grown = s3d.grow_step(inner, F.mse_loss, [data(dist.get_rank())], optimizer, also=[ema], top_k=3)
    assert len(grown.plan) == 3
    assert sum(inner[place].out_features for place in (0, 3)) == 14
    assert [tuple(p.shape) for p in ema.module.parameters()] == [tuple(p.shape) for p in inner.parameters()]
    assert (model.find_unused_parameters, model.bucket_bytes_cap, len(model._comm_hooks)) == (True, 3 * 2**20, 1)
    for _ in range(2):
        train(model, optimizer)
    assert len(called) == 3
    assert_the_same_everywhere(dict(inner.named_parameters()))

    # An error in one process is an error in all, and changes nothing.
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    x, target = data(0)
    bad = [(x, target * (float("nan") if dist.get_rank() == 1 else 1.0))]
    with pytest.raises((ValueError, RuntimeError), match="the loss of batch 0 is not finite"):
        s3d.grow_step(model, F.mse_loss, bad, optimizer)
    assert all(torch.equal(tensor, inner.state_dict()[name]) for name, tensor in before.items())
    train(model, optimizer)


def step_on_shards(folder: Path) -> None:
    """Grow a model that `fully_shard` has divided in one call: the splits are those of all batches."""
    model = sharded_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    plain = s3d.unsharded(model)
    every = [data(rank) for rank in range(dist.get_world_size())]
    alone = s3d.grow_step(plain, F.mse_loss, every, top_k=3, world=ALONE)
    together = s3d.grow_step(model, F.mse_loss, [data(dist.get_rank())], optimizer, top_k=3)
    assert together.loss == pytest.approx(alone.loss, rel=1e-12)
    assert [(one.unit, one.neuron) for one in together.plan.splits] == [
        (one.unit, one.neuron) for one in alone.plan.splits
    ]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for (name, mine), theirs in zip(s3d.unsharded(model).named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, msg=name)
    train(model, optimizer)


def train_with_batchnorm_over_all(folder: Path) -> None:
    """Two processes train as one does on all samples, with BatchNorm over all processes; without it they do not."""
    everyone = existing()

    def trained(world: World, sync: bool) -> dict[str, Tensor]:
        model = build()
        batches = [data(rank) for rank in range(2)]
        whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
        loader = [whole] if world.size == 1 else [batches[world.rank]]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = s3d.EpochTrainer(loader, F.mse_loss, 3, world=world, sync_batchnorm=sync)
        trainer(model, optimizer, 0)
        assert not any("forward" in vars(module) for module in model.modules())
        return model.state_dict()

    expected, found, apart = trained(ALONE, False), trained(everyone, True), trained(everyone, False)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    assert not torch.allclose(apart["0.weight"], expected["0.weight"], rtol=1e-6)


def drop_other_units(folder: Path) -> None:
    """Dropout draws other masks in every process, the order of the data stays common, and both repeat themselves."""

    class Watched(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            masks.append((y == 0).clone())
            return y

    masks: list[Tensor] = []
    orders: list[Tensor] = []

    def run() -> tuple[Tensor, Tensor]:
        masks.clear(), orders.clear()
        seed_all(5)
        torch_model = nn.Sequential(nn.Linear(3, 40), Watched(0.5), nn.Linear(40, 2)).double()

        class Shuffled:
            def __len__(self) -> int:
                return 2

            def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
                for _ in range(2):
                    orders.append(torch.randperm(8))
                    x, target = data(0)
                    yield x[orders[-1]], target[orders[-1]]

        optimizer = torch.optim.SGD(torch_model.parameters(), lr=0.1)
        s3d.EpochTrainer(Shuffled(), F.mse_loss, 2)(torch_model, optimizer, 0)
        return torch.stack(masks), torch.stack(orders)

    mine, order = run()
    again, order_again = run()
    assert torch.equal(mine, again)
    assert torch.equal(order, order_again)
    assert not torch.equal(order[0], order[2])
    assert not torch.equal(mine[0], mine[2])
    theirs, common = mine.to(torch.uint8), order.clone()
    dist.broadcast(theirs, 0)
    dist.broadcast(common, 0)
    assert torch.equal(common, order)
    assert torch.equal(theirs, mine.to(torch.uint8)) == (dist.get_rank() == 0)


def use_the_group_that_exists(folder: Path) -> None:
    """A process group that somebody else has made is used, and is still there afterwards."""
    with joined(torch.device("cpu")) as world:
        assert (world.rank, world.size) == (dist.get_rank(), 2)
    assert dist.is_initialized()
    assert grow_worker.grower(None).world == world
    assert world.everyone(world.rank) == [0, 1]
    with pytest.raises((ValueError, RuntimeError), match="only here"):
        world.from_first(lambda: fail("only here"))
    sent = {"half": torch.full((2, 2), float(world.rank), dtype=torch.bfloat16), "none": torch.empty(0, 3)}
    sent |= {"flag": torch.tensor(world.rank == 1), "word": torch.tensor(world.rank + 5)}
    got = world.same_tensors(sent, source=1)
    assert torch.equal(got["half"], torch.ones(2, 2, dtype=torch.bfloat16))
    assert (bool(got["flag"]), int(got["word"]), tuple(got["none"].shape)) == (True, 6, (0, 3))


def fail(message: str) -> None:
    """Raise an error."""
    raise ValueError(message)


CASES: dict[str, tuple[int, Callable[[Path], None]]] = {
    "ddp": (2, grow_inside_ddp),
    "sharded-1": (1, grow_what_is_sharded),
    "sharded-2": (2, grow_what_is_sharded),
    "checkpoint": (2, save_and_load_a_checkpoint),
    "step-ddp": (2, step_inside_ddp),
    "step-sharded": (2, step_on_shards),
    "batchnorm": (2, train_with_batchnorm_over_all),
    "dropout": (2, drop_other_units),
    "group": (2, use_the_group_that_exists),
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
