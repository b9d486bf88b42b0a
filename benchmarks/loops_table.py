"""The main loops of another version of the kernels beside those of this one: python -m benchmarks.loops_table.

    python -m benchmarks.loops_table --kernels ANOTHER_CHECKOUT

compiles what the operations of that checkout launch by default for large layers, reads the loops, and writes
docs/loops.json. docs/make_gpu.py writes the tables of docs/loops.md from it and from docs/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.launches import ROOT, Recorded, assembled, compiler, per_width, recording, use_checkout

RECORD = ROOT / "docs" / "loops.json"
TARGETS = ("sm_80", "sm_90")
KINDS = ("bf16", "fp16", "fp32 high", "fp32")
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS, WIDE = (16, 32, 64, 128, 256), 512
ROWS, FILTERS, FEW_ROWS = 65536, 1024, 32
CLOUDS, POINTS, EDGE_INPUTS = 2, 512, 128
SPACES, CAPACITY, LONG = 64, 45, 1024
# The products of each form; other checkouts have other forms.
PRODUCTS = {
    "ieee": 1, "bf16x1": 1, "bf16x2": 2, "bf16x3": 3, "bf16x6": 6, "tf32": 1, "tf32x3": 3, "split": 2, "widened": 2,
    "rounded": 1,
}  # fmt: skip


class Operations:
    """Calls of the operations whose kernels have loops, for one kind of rows; nobody reads the contents."""

    def __init__(self, kind: str) -> None:
        self.kind, self.stored = kind, STORED[kind.split()[0]]

    def layer(self, N: int, D: int) -> dict[str, Any]:
        return {"X": self.rows(N, D), "C": self.rows(N, FILTERS), "V": torch.empty(FILTERS, D), "bias": False}

    def rows(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.stored)

    def calls(self) -> Iterator[tuple[str, int]]:
        """Make every call; yield its name and the width, after it was made."""
        from s3d_fast.backends.triton import TRITON
        from s3d_fast.kernels import grouped
        from s3d_fast.maths.incoming import incoming_edges

        for D in WIDTHS:
            TRITON.splitting_matvec(**self.layer(ROWS, D))
            yield "pointwise", D
        for D in WIDTHS:
            X, C = self.rows(ROWS, D), self.rows(ROWS, FILTERS)
            TRITON.gated_matvec(X=X, c11=C, c12=C, c22=None, V=torch.empty(FILTERS, 2 * D), bias=False)
            yield "gated", D
        grouped._PRESENT.clear()
        layers = [self.layer(ROWS, D) for D in WIDTHS]
        TRITON.splitting_matvec_grouped(**{name: [own[name] for own in layers] for name in layers[0]})
        yield "grouped", 0
        TRITON.splitting_matvec(**self.layer(ROWS, WIDE))
        yield "wide", WIDE
        TRITON.splitting_matvec(**self.layer(FEW_ROWS, WIDE))
        yield "wide, few rows", WIDE
        X, C = self.rows(CLOUDS, POINTS, EDGE_INPUTS), self.rows(CLOUDS, POINTS, FILTERS)
        edges = incoming_edges(torch.zeros(C.shape, dtype=torch.int64))
        V = torch.empty(FILTERS, 2 * EDGE_INPUTS)
        TRITON.edgeconv_matvec(X=X, winner=edges.winner, C=C, V=V, bias=False, incoming=edges, ties=None)
        yield "edgeconv", EDGE_INPUTS
        # Vectors of Lanczos are float32, whatever the rows are.
        if self.kind == "fp32":
            yield from self.lanczos()

    def lanczos(self) -> Iterator[tuple[str, int]]:
        """Make the calls of Lanczos."""
        from s3d_fast.backends.triton import TRITON
        from s3d_fast.maths.reference import KrylovState

        alpha, beta = torch.empty(SPACES, CAPACITY), torch.empty(SPACES, CAPACITY)
        length, vector = torch.full((SPACES,), CAPACITY), torch.empty(SPACES, LONG)
        basis = torch.empty(SPACES, CAPACITY, LONG)
        state = KrylovState(basis=basis, q=vector, alpha=alpha, beta=beta, length=length, scale=torch.empty(SPACES))
        TRITON.krylov_extend(state, torch.empty_like(vector), CAPACITY - 2)
        yield "krylov", LONG
        values, _ = TRITON.tridiagonal_extremes(alpha=alpha, beta=beta, length=length)
        yield "tridiagonal", 0
        growth = torch.empty(SPACES, dtype=torch.float64)
        TRITON.certified_widths(alpha=alpha, beta=beta, length=length, values=values, growth=growth)
        yield "certified widths", 0


# (call, kernel) -> the name in the table.
NAMES = {
    ("pointwise", "fused_kernel"): "pointwise",
    ("gated", "gated_kernel"): "gated",
    ("grouped", "grouped_kernel"): "grouped",
    ("wide", "project_kernel"): "wide, project",
    ("wide", "accumulate_kernel"): "wide, accumulate",
    ("wide, few rows", "project_kernel"): "wide, project, few rows",
    ("edgeconv", "point_products_kernel"): "edgeconv, points",
    ("edgeconv", "receive_kernel"): "edgeconv, receive",
    ("edgeconv", "accumulate_kernel"): "edgeconv, sums",
    ("edgeconv", "edge_sums_kernel"): "edgeconv, sums",
    ("krylov", "extend_kernel"): "krylov",
    ("tridiagonal", "extremes_kernel"): "tridiagonal",
    ("certified widths", "widths_kernel"): "certified widths",
}
# Kernels with loops, but without products.
WITHOUT_PRODUCTS = ("edgeconv, receive", "krylov", "tridiagonal", "certified widths")


def tile_and_work(launch: Recorded) -> tuple[str, list[int]]:
    """Return the tile in words, and the multiply-adds of tensor cores that a pass of each loop needs."""
    a, name = launch.arguments, launch.name
    if name in {kernel for (_, kernel), own in NAMES.items() if own in WITHOUT_PRODUCTS}:
        return f"{launch.warps} warps", []
    products = PRODUCTS[a["FORM"]]
    if name == "grouped_kernel":
        pairs = [a["TILES"][i : i + 2] for i in range(0, len(a["TILES"]), per_width(a["TILES"]))]
        work = [2 * products * rows * filters * D for (rows, filters), D in zip(pairs, WIDTHS, strict=False)]
        tile = " ".join(f"{rows}x{filters}" for rows, filters in pairs)
    elif name == "accumulate_kernel":
        work, tile = [products * a["BM"] * a["BD"] * a["BK"]], f"{a['BD']}x{a['BM']}x{a['BK']}"
    else:
        depth = a["BD"] if "BD" in a else a["BK"]
        times = {"fused_kernel": 2, "gated_kernel": 4, "edge_sums_kernel": 2}.get(name, 1)
        work, tile = [times * products * a["BN"] * a["BM"] * depth], f"{a['BN']}x{a['BM']}x{depth}"
    return f"{tile}, {launch.warps} warps, {launch.stages} stages", work


def read(launch: Recorded, target: str) -> dict[str, Any]:
    """Return what the compiled loops of a launch contain."""
    from s3d_fast.kernels import loops

    code, (tile, work) = assembled(launch, target), tile_and_work(launch)
    found, listed = loops.ptx_loops(code.ptx, launch.warps), loops.sass_loops(code.listing)
    return {
        "tile": tile,
        "instructions": sum(loop.instructions for loop in listed),
        "barriers": max((loop.barriers for loop in found), default=0),
        "work": round(loops.overhead(found, work), 2),
        "registers": code.registers,
        "shared": code.shared_memory,
        "spills": code.spills,
        "serialized": "wgmma.mma_async instructions are serialized" in code.log,
        "outline": compiler().outlined(launch, compiler().TARGETS[target], code.ptx, code.shared_memory)[:200],
    }


def record() -> list[dict[str, Any]]:
    """Return the loops of the kernels for all targets and kinds of rows."""
    from s3d_fast.kernels.options import triton_options

    found = []
    for kind in KINDS:
        _, precision = (*kind.split(), "highest")[:2]
        for target in TARGETS:
            with recording(target) as launches, triton_options(precision=precision):
                for call, width in Operations(kind).calls():
                    for launch in launches:
                        name = NAMES.get((call, launch.name))
                        if name == "edgeconv, points" and launch.arguments["EDGES"]:
                            name = "edgeconv, edges"
                        # Long layers are computed in chunks, with the same kernels.
                        own = {"kernel": name, "width": width, "target": target, "rows": kind}
                        if name and not any(own.items() <= entry.items() for entry in found):
                            found.append({**own, **read(launch, target)})
                    launches.clear()
    return found


def tables(before: dict[str, Any], compiled: Sequence[dict[str, Any]]) -> str:
    """Return the tables of docs/loops.md; `compiled` are the entries of docs/gpu.json."""
    numbers = "instructions | barriers | work | registers | shared |"
    text = []
    for kind in KINDS:
        for target in TARGETS:
            text += [
                f"## {kind} rows, {target}\n",
                f"| kernel | tile before | {numbers} | tile after | {numbers}",
                "|---|---|--:|--:|--:|--:|--:|---|---|--:|--:|--:|--:|--:|",
            ]
            own = [entry for entry in before["loops"] if (entry["rows"], entry["target"]) == (kind, target)]
            present = [entry for entry in compiled if (entry["dtype"], entry["target"]) == (kind, target)]
            for entry in own:
                marks = "S" * entry["serialized"] + "R" * bool(entry["outline"])
                cells = [entry[name] for name in ("kernel", "tile", "instructions", "barriers")]
                cells += [_share(entry["work"]), entry["registers"], entry["shared"], marks]
                after = _after(entry, present)
                if after is None:
                    cells += ["two launches (`wide`)", "", "", "", "", ""]
                else:
                    cells += [after[name] for name in ("config", "loop_instructions", "loop_barriers")]
                    cells += [_share(after["overhead"]), after["registers"], after["shared_memory"]]
                text.append(f"| {' | '.join(map(str, cells))} |")
            text.append("")
    return "\n".join(text)


def _share(work: float) -> str:
    """Return tensor-core work over need; nothing where there is none."""
    return f"{work:.2f}" if work else ""


def _after(entry: dict[str, Any], compiled: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the compiled kernel that does now what another did; None if two launches do."""
    # EdgeConv's sums are those of wide layers.
    name = "wide, accumulate" if entry["kernel"] == "edgeconv, sums" else entry["kernel"]
    found = [own for own in compiled if own["kernel"] == name]
    if name in WITHOUT_PRODUCTS:
        return next(own for own in found if name != "krylov" or own["config"].startswith(f"{entry['width']},"))
    if name in ("pointwise", "gated"):
        found = [own for own in found if re.match(rf"\d+x\d+x{entry['width']},", own["config"])]
    # Layers with few filters have tiles of their own.
    return max(found, key=lambda own: int(own["config"].split("x")[1].split()[0].strip(",")), default=None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops_table", description=__doc__)
    parser.add_argument("--kernels", type=Path, required=True, help="the checkout whose kernels are compiled")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    use_checkout(options.kernels)
    commit = ["git", "-C", str(options.kernels), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
    lines = ",\n".join(map(json.dumps, record()))
    options.out.write_text(f'{{"commit": "{found}", "loops": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
