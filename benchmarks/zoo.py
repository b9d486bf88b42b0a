"""Traces and splits public models: `python -m benchmarks.zoo` runs over whatever model libraries are installed.

For every model, in float64 with random weights: can torch.export follow it, what can be split, is the function the same
after a split of size zero (1e-9 of the output's size), and does an optimizer step run afterwards? None of the libraries
is a dependency of the project. Results go to a file of JSON lines, one for each model; models that are in it are not
run again. The table is printed at the end.

    python -m benchmarks.zoo --out runs/zoo.jsonl [--only timm] [--match resnet]
    python -m benchmarks.zoo --out runs/zoo.jsonl --table    # the table alone
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import s3d_fast as s3d
from benchmarks.zoo_models import LIBRARIES
from s3d_fast.network.graph import REPEATED, Graph
from s3d_fast.splitting.plan import NeuronSplit, SplitPlan

SECONDS = 240
TOLERANCE = 1e-9


def main() -> None:
    """Run the zoo and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/zoo.jsonl"))
    parser.add_argument("--only", action="append", help="a library; may be given several times")
    parser.add_argument("--match", default="", help="run only models whose name contains this")
    parser.add_argument("--table", action="store_true", help="print the table of the file, run nothing")
    options = parser.parse_args()
    if not options.table:
        run(options.out, options.only, options.match)
    print(table(read(options.out)))


def run(out: Path, only: list[str] | None, match: str) -> None:
    """Run all models that are not in the file yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["library"], row["model"]) for row in read(out)} if out.exists() else set()
    define_missing_operators()
    for library, models in LIBRARIES.items():
        if only and library not in only:
            continue
        try:
            importlib.import_module(library)
        except Exception as error:
            print(f"{library} is not there: {error}", file=sys.stderr)
            continue
        for name, build in models().items():
            if match in name and (library, name) not in done:
                row = {"library": library, "model": name, **examined(build)}
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                shown = {key: value for key, value in row.items() if key != "reasons"}
                print(json.dumps(shown), file=sys.stderr, flush=True)


def define_missing_operators() -> None:
    """Define the operators that torchvision expects of its compiled part, which a CPU build of torch cannot load."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


# A library of operators lives as long as its object.
_KEPT: list[torch.library.Library] = []


def examined(build: Callable[[], tuple[nn.Module, Any]]) -> dict[str, Any]:
    """Return what became of one model."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"status": "cannot be built"}
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, example = build()
            model = model.double().eval()
            example = _double(example)
            row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
            row["status"] = "cannot be evaluated"
            with torch.no_grad():
                before = _tensors(_call(model, example))
            row["status"] = "cannot be traced"
            began = time.perf_counter()
            graph = s3d.trace(model, example)
            row |= {"seconds": round(time.perf_counter() - began, 2), "units": len(graph)}
            row |= {"share": share(graph, model), "reasons": reasons(graph, model), "status": "breaks"}
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
            s3d.apply_splits(model, random_plan(graph), eps=0.0, optimizer=optimizer)
            with torch.no_grad():
                after = _tensors(_call(model, example))
            row["change"] = _change(before, after)
            row["status"] = "preserved" if row["change"] <= TOLERANCE else "changed"
            loss = sum((tensor.square().mean() for tensor in _tensors(_call(model, example))), torch.zeros(()))
            loss.backward()
            optimizer.step()
            row["stepped"] = True
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:400]}"
    finally:
        signal.alarm(0)
    return row


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def random_plan(graph: Graph) -> SplitPlan:
    """Return a plan that splits every third channel of every unit into two or three copies with random weights."""
    generator = torch.Generator().manual_seed(0)
    splits = []
    for unit in graph:
        for neuron in range(0, unit.width, 3):
            copies = 2 + neuron % 2
            weights = torch.rand(copies, generator=generator, dtype=torch.float64) + 0.2
            offsets = torch.zeros(copies, unit.fan_in, dtype=torch.float64)
            splits.append(NeuronSplit(unit.name, neuron, weights / weights.sum(), offsets, 0.0))
    return SplitPlan(graph, splits)


def share(graph: Graph, model: nn.Module) -> float:
    """Return the share of the model's parameters that are in rows of units."""
    total = inside = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        rows = [
            ((layout.unit >= 0) & (layout.role == REPEATED)).mean() for layout in graph.tensors.get(name, {}).values()
        ]
        inside += parameter.numel() * max(rows, default=0.0)
    return round(inside / max(total, 1), 4)


def reasons(graph: Graph, model: nn.Module) -> dict[str, int]:
    """Return the parameters of layers that cannot be split, by reason without names."""
    found: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        sizes[name.rpartition(".")[0]] += parameter.numel()
        sizes[name] += parameter.numel()
    for layer in graph.layers.values():
        if layer.makes_channels and layer.reason is not None and "split along" not in layer.reason:
            found[re.sub(r"'[^']*'", "", layer.reason).replace(" in ", " ").strip()] += sizes[layer.name]
    return dict(found.most_common())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results by library, and the reasons of all refusals by the parameters that they cost."""
    rows = [row for row in rows if row["status"] not in ("cannot be built", "cannot be evaluated")]
    lines = ["| library | models | traced | with units | parameters in splittable rows | preserved | stepped |"]
    lines.append("|---|---|---|---|---|---|---|")
    for library in [*dict.fromkeys(row["library"] for row in rows), "all"]:
        mine = [row for row in rows if library in ("all", row["library"])]
        traced = [row for row in mine if "units" in row]
        units = [row for row in traced if row["units"]]
        rate = sum(row.get("share", 0.0) * row["parameters"] for row in mine) / max(
            1, sum(r["parameters"] for r in mine)
        )
        mean = sum(row.get("share", 0.0) for row in mine) / max(1, len(mine))
        preserved = sum(row["status"] == "preserved" for row in traced)
        stepped = sum(bool(row.get("stepped")) for row in traced)
        counts = f"{len(mine)} | {len(traced)} | {len(units)} | {rate:.0%} (mean {mean:.0%}) | {preserved} | {stepped}"
        lines.append(f"| {library} | {counts} |")
    lost: Counter[str] = Counter()
    for row in rows:
        lost.update(row.get("reasons", {}))
    lines += ["", "| why layers cannot be split | millions of parameters |", "|---|---|"]
    lines += [f"| {reason} | {count / 1e6:.1f} |" for reason, count in lost.most_common(25)]
    failed = [row for row in rows if row["status"] != "preserved" or not row.get("stepped")]
    lines += ["", "| not preserved, not traced or not trained | status | error |", "|---|---|---|"]
    for row in failed:
        error = row.get("error", "").replace("|", "/").replace("\n", " ")[:160]
        lines.append(f"| {row['library']} {row['model']} | {row['status']} {row.get('change', '')} | {error} |")
    return "\n".join(lines)


def _double(example: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return torch.utils._pytree.tree_map(cast, example)


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def _tensors(output: Any) -> list[Tensor]:
    return [tensor for tensor in _leaves(output) if tensor.is_floating_point()]


def _leaves(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _leaves(value)


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


if __name__ == "__main__":
    main()
