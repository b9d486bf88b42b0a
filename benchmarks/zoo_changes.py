"""Prunes public models and adds new filters to them: `python -m benchmarks.zoo_changes [NAME ...]` prints a table.

For every model, in float64 with random weights, of all units together: is the network without every third neuron the
one in which consumers read zeros from them, and another than before; is it the same with new filters that are read with
weight 0; do parameters and MACs change as the plan says; does the optimizer's state fit, and does a step of training
run? The libraries of `benchmarks.zoo` are used where they are installed.
"""

from __future__ import annotations

import copy
import importlib
import sys
import time
import warnings
from typing import Any

import torch
from torch import nn

import s3d_fast as s3d
from benchmarks.zoo import _call, _change, _double, _tensors, define_missing_operators
from benchmarks.zoo_models import LIBRARIES
from s3d_fast.base.tables import text_table
from s3d_fast.network.graph import Graph
from s3d_fast.splitting.plan import NewFilter, Removal, SplitPlan

# A few of every kind: residual, depthwise, gated, concatenated, attention, language models.
SAMPLE = {
    "timm": ("resnet18", "mobilenetv3_small_050", "efficientnet_b0", "densenet121", "convnext_atto", "regnety_002"),
    "torchvision": ("vgg13_bn", "squeezenet1_1", "shufflenet_v2_x0_5", "googlenet"),
    "transformers": ("Bert", "GPT2", "Llama", "ViT", "T5"),
}


def main(names: list[str]) -> int:
    """Print the table; return 1 if a model has failed."""
    define_missing_operators()
    rows = [
        [
            "library",
            "model",
            "units",
            "masked - plain",
            "pruned - masked",
            "new filters",
            "parameters",
            "seconds",
            "problems",
        ]
    ]
    for library, sample in SAMPLE.items():
        try:
            importlib.import_module(library)
        except ImportError as error:
            print(f"{library} is not there: {error}", file=sys.stderr)
            continue
        models = LIBRARIES[library]()
        for name in sample:
            if not names or name in names:
                torch.manual_seed(0)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    rows.append([library, name, *_row(*models[name]())])
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(text_table(rows))
    return int(any(row[-1] != "none" for row in rows[1:]))


def _row(model: nn.Module, example: Any) -> list[str]:
    began = time.perf_counter()
    found = changes(model, example)
    seconds = time.perf_counter() - began
    shown = [f"{found[key]:.1e}" if key in found else "-" for key in ("moved", "pruned", "widened")]
    sizes = " / ".join(str(found.get(key, "-")) for key in ("fewer", "before", "more"))
    return [str(found["units"]), *shown, sizes, f"{seconds:.0f}", "; ".join(found["problems"]) or "none"]


def changes(model: nn.Module, example: Any) -> dict[str, Any]:
    """Return what pruning and new filters do to a model: relative changes of outputs, sizes, and problems."""
    model, example = model.double().eval(), _double(example)
    _shake(model)
    graph = s3d.trace(model, example)
    found: dict[str, Any] = {"units": len(graph), "problems": [], "before": s3d.count(graph).params}
    fewer = removal_plan(graph)
    masked = copy.deepcopy(model)
    s3d.mask(masked, fewer)
    with torch.no_grad():
        plain, expected = (_tensors(_call(one, example)) for one in (model, masked))
    found["moved"] = _change(plain, expected)
    if len(fewer) and found["moved"] < 1e-6:
        found["problems"].append(f"masking changes the output by {found['moved']:.1e} only, which proves nothing")
    for name, plan, output in (("pruned", fewer, expected), ("widened", addition_plan(graph), plain)):
        if not len(plan):
            continue
        changed = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in changed.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
        kept = copy.deepcopy(changed.state_dict())
        _step(changed, optimizer, example)
        changed.load_state_dict(kept)
        try:
            if name == "pruned":
                s3d.prune(changed, plan, optimizer)
            else:
                s3d.apply_splits(changed, plan, 0.0, optimizer)
            with torch.no_grad():
                found[name] = _change(output, _tensors(_call(changed, example)))
            if found[name] > 1e-10:
                found["problems"].append(f"{name}: output changes by {found[name]:.1e}")
            found["problems"] += [
                f"{name}: {problem}" for problem in _misfits(changed, graph, plan, optimizer, example)
            ]
            found["fewer" if name == "pruned" else "more"] = sum(p.numel() for p in changed.parameters())
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            found["problems"].append(f"{name}: {type(error).__name__}: {str(error)[:160]}")
    return found


def _shake(model: nn.Module) -> None:
    """Give all parameters values at which every layer matters; as they are made, some are zero or tiny."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, (2 / parameter[0].numel()) ** 0.5)
            else:
                parameter.uniform_(0.3, 1.0)


def _misfits(
    model: nn.Module, graph: Graph, plan: SplitPlan, optimizer: torch.optim.Optimizer, example: Any
) -> list[str]:
    """Return what does not fit after a change: costs, the optimizer's state, another step of training."""
    problems = []
    again = s3d.trace(model, example, prove=False)
    expected = s3d.count(graph, plan.widths())
    if s3d.count(again) != expected:
        problems.append(f"costs are {s3d.count(again)}, the plan says {expected}")
    for parameter in model.parameters():
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if parameter.requires_grad and momentum is not None and momentum.shape != parameter.shape:
            problems.append(f"momentum of {tuple(momentum.shape)} for {tuple(parameter.shape)}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in model.parameters() if p.requires_grad}:
        problems.append("the optimizer holds other parameters than the model")
    _step(model, optimizer, example)
    return problems


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, example: Any) -> None:
    loss = sum((tensor.square().mean() for tensor in _tensors(_call(model, example))), torch.zeros(()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def removal_plan(graph: Graph) -> SplitPlan:
    """Return a plan that removes every third neuron of every unit; at least two stay."""
    gone = [Removal(unit.name, neuron, 0.0) for unit in graph for neuron in range(1, unit.width, 3) if unit.width > 3]
    return SplitPlan(graph, (), removed=gone)


def addition_plan(graph: Graph) -> SplitPlan:
    """Return a plan that adds two random filters to every unit."""
    generator = torch.Generator().manual_seed(0)
    new = [
        NewFilter(unit.name, torch.randn(unit.fan_in, generator=generator, dtype=torch.float64), like % unit.width, 0.0)
        for unit in graph
        for like in (0, 3)
    ]
    return SplitPlan(graph, (), new=new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
