"""A process of several that share the data of a splitting step: torchrun -m tests.shard_worker MODEL FOLDER BUDGET."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models import DGCNN, MobileNetV1
from s3d_fast.sharding import sharded

BATCHES = 8


def case(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a model and data."""
    torch.manual_seed(0)
    if name == "mobilenet":
        model: nn.Module = MobileNetV1([8, 12, 20, 40], 10, stem_stride=1, strides=(1, 2, 1))
        batches = [(torch.randn(4, 3, 8, 8), torch.randint(10, (4,))) for _ in range(BATCHES)]
    else:
        model = DGCNN((6, 8), 5, k=4, embedding=16, hidden=(8,))
        batches = [(torch.randn(4, 16, 3), torch.randint(5, (4,))) for _ in range(BATCHES)]
    return model.eval(), batches


def split(name: str, rank: int, ranks: int, budget: int | None) -> tuple[dict[str, Tensor], str]:
    """Split a model on this process's part of the data; return spectra and weights as tensors, and the plan."""
    model, batches = case(name)
    graph = s3d.trace(model, batches[0][0])
    mine = batches[rank::ranks]
    operators = s3d.capture(model, F.cross_entropy, mine, graph, memory_budget=budget)
    if ranks > 1:
        operators = sharded(operators, len(mine))
    tensors = {"loss": torch.tensor(operators.loss, dtype=torch.float64)}
    for solver in ("lanczos", "auto"):
        spectra = s3d.extremal_eigenpairs(operators, solver=solver, tol=1e-6)
        for unit, spectrum in spectra.items():
            tensors[f"{solver}/{unit}/min"] = spectrum.lambda_min
            tensors[f"{solver}/{unit}/max"] = spectrum.lambda_max
    plan = s3d.select(spectra, graph, m=2, c=1.3, fraction=0.35)
    s3d.apply_splits(model, plan, 0.01)
    weights = {f"weight/{key}": value.contiguous() for key, value in model.state_dict().items()}
    chosen = " ".join(f"{s.unit}:{s.neuron}:{s.copies}" for s in plan.splits)
    return tensors | weights, chosen


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found, chosen = split(sys.argv[1], rank, ranks, int(sys.argv[3]) or None)
    save_file(found, Path(sys.argv[2]) / f"rank-{rank}.safetensors", metadata={"plan": chosen})
    dist.destroy_process_group()
