"""Compile every kernel ahead of time, without a GPU, and check the result: python -m s3d_fast.kernels.aot.

The check fails on compiler errors, on spills to local memory, on more shared memory than the GPU has, and on kernels
for 16-bit rows without tensor-core instructions. Each compiled kernel is recorded with a fingerprint of what was
compiled, which tells without compiling whether the record is still valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from tqdm.auto import tqdm

from s3d_fast.kernels import (
    curvature,
    edgeconv,
    gated,
    grouped,
    krylov,
    launch,
    pointwise,
    pointwise_wide,
    surgery,
    tridiagonal,
)
from s3d_fast.kernels.compiled import TARGETS, Compiled, KernelSource, Target, compile_source, identity
from s3d_fast.kernels.device import INTERPRETED
from s3d_fast.kernels.launch import Config
from s3d_fast.kernels.products import DTYPES, product_form, wants_filters_along_threads
from s3d_fast.maths.activations import activation, activation_names

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# The dtype of the rows, followed by the precision unless that is "highest".
CHECKED = ("fp32", "bf16")
EVERYTHING = (*CHECKED, "fp16", "fp64", "fp32 high", "bf16 medium", "fp16 medium")
# With this many filters every tile has its full size; layers with few filters get smaller tiles.
MANY_FILTERS = 1024


class KernelSources:
    """The kernels for one target and one dtype of the rows, in their default configurations.

    Each matrix kernel has two variants. The plain one is for layers without a bias whose sizes are multiples of 16. The
    "general" one is for layers with a bias, several vectors per filter, and any sizes and strides.
    """

    def __init__(self, target: Target, kind: str) -> None:
        dtype, precision = (*kind.split(), "highest")[:2]
        self.device, self.dtype, self.stored, self.kind = target.device, dtype, STORED[dtype], kind
        self.form = product_form(self.stored, precision, self.device)
        self.across = wants_filters_along_threads(self.form, self.device)
        self.number = "fp64" if dtype == "fp64" else "fp32"
        self.types = {
            "X": f"*{dtype}", "C": f"*{dtype}", "V": f"*{self.number}", "out": f"*{self.number}",
            "partial": f"*{self.number}", "t": f"*{self.number}", "received": f"*{self.number}",
            "products": f"*{self.number}", "table": "*i64", "order": "*i32", "start": "*i32", "winner": "*i32",
            "runner": "*i32", "runner_order": "*i32", "runner_start": "*i32", "tie": f"*{dtype}", "d1": f"*{dtype}",
            "d2": f"*{dtype}", "back": f"*{self.number}",
        }  # fmt: skip

    def __iter__(self) -> Iterator[KernelSource]:
        for is_general in (False, True):
            yield from self.pointwise(is_general)
            yield from self.wide(is_general)
            yield from self.gated(is_general)
            yield from self.edgeconv(is_general)
            yield from self.grouped(is_general)
        yield from self.sums()
        yield from self.curvature()
        yield from self.surgery()
        yield from self.lanczos()

    def source(
        self,
        function: triton.JITFunction,
        name: str,
        label: str,
        constants: dict[str, Any],
        warps: int,
        stages: int = 2,
        aligned: Sequence[str] = (),
        types: dict[str, str] | None = None,
        uses_products: bool = True,
    ) -> KernelSource:
        types = {**self.types, **(types or {})}
        constants = {key: value for key, value in constants.items() if key in function.arg_names}
        aligned = [key for key in aligned if key in function.arg_names and key not in constants]
        own = {key: value for key, value in types.items() if key in function.arg_names and key not in constants}
        pointers = [key for key in own if own[key].startswith("*")]
        on_tensor_cores = uses_products and self.form != "ieee"
        return KernelSource(
            name, function, self.kind, label, own, constants, [*pointers, *aligned], warps, stages, on_tensor_cores
        )

    def layer(self, is_general: bool, *sizes: str) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the constants of a layer, and the names of the sizes that are multiples of 16."""
        constants = {"K": 2 if is_general else 1, "BIAS": is_general, "FORM": self.form, "FAR": False}
        # In V either the filters or the entries of a vector are contiguous; `pointwise` hides this from the compiler.
        constants["v_row" if self.across else "v_column"] = 1
        constants["ACROSS"] = self.across
        if is_general:
            return constants, ()
        return {**constants, "x_column": 1, "c_column": 1}, sizes

    def pointwise(self, is_general: bool) -> Iterator[KernelSource]:
        for width in grouped.WIDTHS:
            for filters in (MANY_FILTERS,) if is_general else (16, MANY_FILTERS):
                config = pointwise.configs(self.device, self.form, self.stored, width, filters)[0]
                constants, aligned = self.layer(is_general, "D", "F", "M", "x_row", "c_row", "v_row", "rows_per_slice")
                constants = {key: value for key, value in constants.items() if key not in ("v_row", "v_column")}
                constants |= {"ATOMIC": False, "BN": config.rows, "BM": config.filters, "BD": width}
                yield self.source(
                    pointwise.fused_kernel, _named("pointwise", is_general), _label(config), constants,
                    config.warps, config.stages, aligned,
                )  # fmt: skip
                if not is_general and filters == MANY_FILTERS:
                    atomic = {**constants, "ATOMIC": True}
                    yield self.source(
                        pointwise.fused_kernel, "pointwise, atomic", _label(config), atomic,
                        config.warps, config.stages, aligned,
                    )  # fmt: skip

    def wide(self, is_general: bool) -> Iterator[KernelSource]:
        project, accumulate = pointwise_wide.configs(self.device, self.form, self.stored, not is_general)[0]
        product = pointwise_wide.product_storage(self.form, self.stored)[1]
        types = {"U": f"*{next(name for name, dtype in STORED.items() if dtype == product)}"}
        for name, config in (("", project), (", few rows", pointwise_wide.FEW_ROWS_CONFIG)):
            constants, aligned = self.layer(is_general, "D", "F", "M", "x_row", "c_row", "v_row", "v_column", "plane")
            constants |= {"BN": config.rows, "BM": config.filters, "BK": config.depth}
            yield self.source(
                pointwise_wide.project_kernel, _named(f"wide, project{name}", is_general), _label(config), constants,
                config.warps, config.stages, aligned, types,
            )  # fmt: skip
        constants, aligned = self.layer(is_general, "D", "F", "x_row", "plane", "rows_per_slice")
        constants |= {"BD": accumulate.rows, "BM": accumulate.filters, "BK": accumulate.depth}
        yield self.source(
            pointwise_wide.accumulate_kernel, _named("wide, accumulate", is_general), _label(accumulate), constants,
            accumulate.warps, accumulate.stages, aligned, types,
        )  # fmt: skip

    def gated(self, is_general: bool) -> Iterator[KernelSource]:
        sizes = ("D", "F", "M", "x_row", "c11_row", "c12_row", "c22_row", "v_row", "rows_per_slice")
        types = {name: f"*{self.dtype}" for name in ("c11", "c12", "c22")}
        for width in gated.widths(self.device, self.form, self.stored):
            config = gated.configs(self.device, self.form, self.stored, width, MANY_FILTERS)[0]
            constants, aligned = self.layer(is_general, *sizes)
            constants = {key: value for key, value in constants.items() if key not in ("v_row", "v_column")}
            if not is_general:
                constants |= {"c11_column": 1, "c12_column": 1, "c22_column": 1}
            constants |= {"FULL": is_general, "BN": config.rows, "BM": config.filters, "BD": width}
            yield self.source(
                gated.gated_kernel, _named("gated", is_general), _label(config), constants,
                config.warps, config.stages, aligned, types,
            )  # fmt: skip

    def edgeconv(self, is_general: bool) -> Iterator[KernelSource]:
        product, sums = edgeconv.configs(self.device, self.form, self.stored)[0]
        for name, is_second, is_atomic, is_tied in (
            ("points", False, False, False),
            ("edges", True, False, False),
            ("edges, atomic", True, True, False),
            ("edges, tied", True, False, True),
        ):
            constants, aligned = self.layer(is_general, "F", "L", "M", "x_row", "c_row", "v_row", "v_column")
            constants |= {"EDGES": is_second, "ATOMIC": is_atomic, "TIES": is_tied, "SLOPES": is_tied and is_general}
            constants |= {"BN": product.rows, "BM": product.filters, "BK": product.depth}
            yield self.source(
                edgeconv.point_products_kernel, _named(f"edgeconv, {name}", is_general), _label(product), constants,
                product.warps, product.stages, aligned,
            )  # fmt: skip
        constants, aligned = self.layer(is_general, "F", "L", "x_row", "rows_per_slice")
        constants |= {"BN": sums.rows, "BM": sums.filters, "BD": sums.depth}
        yield self.source(
            edgeconv.edge_sums_kernel, _named("edgeconv, sums", is_general), _label(sums), constants,
            sums.warps, sums.stages, aligned,
        )  # fmt: skip
        for is_tied in (False, True):
            constants = {"K": 2 if is_general else 1, "BN": edgeconv.RECEIVE_ROWS, "BM": edgeconv.RECEIVE_FILTERS}
            yield self.source(
                edgeconv.receive_kernel, _named("edgeconv, receive" + ", tied" * is_tied, is_general),
                f"{edgeconv.RECEIVE_ROWS}x{edgeconv.RECEIVE_FILTERS}", constants | {"TIES": is_tied},
                edgeconv.RECEIVE_WARPS, aligned=() if is_general else ("L", "M"), uses_products=False,
            )  # fmt: skip

    def grouped(self, is_general: bool) -> Iterator[KernelSource]:
        # The solver drops filters that have converged; the columns of C that remain may be unaligned.
        for x_aligned, c_aligned in ((False, False),) if is_general else ((True, True), (True, False)):
            config = grouped.configs(self.device, self.form, self.stored, x_aligned)[0]
            constants = {
                "ROWS": DTYPES[self.stored], "K": 2 if is_general else 1, "BIAS": is_general,
                "X_ALIGNED": x_aligned, "C_ALIGNED": c_aligned, "FORM": self.form, "ACROSS": self.across,
                "LAYERS": grouped.LEAST_LAYERS, "PRESENT": 2 ** len(grouped.WIDTHS) - 1,
                "TILES": sum(config.tiles, ()),
            }  # fmt: skip
            tiles = " ".join(f"{rows}x{filters}" for rows, filters in config.tiles)
            label = f"{tiles}, {config.warps} warps, {config.stages} stages"
            name = _named("grouped" + ", any C" * (x_aligned and not c_aligned), is_general)
            yield self.source(grouped.grouped_kernel, name, label, constants, config.warps, config.stages)
        constants = {"BIAS": is_general, "LAYERS": grouped.LEAST_LAYERS, "BLOCK": launch.SUM_BLOCK}
        yield self.source(
            grouped.sum_layers_kernel, _named("grouped, sums", is_general), str(launch.SUM_BLOCK), constants,
            launch.SUM_WARPS, uses_products=False,
        )  # fmt: skip

    def sums(self) -> Iterator[KernelSource]:
        constants = {"BLOCK": launch.SUM_BLOCK}
        yield self.source(
            launch.sum_slices_kernel, "sum of slices", str(launch.SUM_BLOCK), constants, launch.SUM_WARPS,
            uses_products=False,
        )  # fmt: skip

    def curvature(self) -> Iterator[KernelSource]:
        number = DTYPES[torch.float64 if self.dtype == "fp64" else torch.float32]
        types = {name: f"*{self.dtype}" for name in ("g", "z", "scale", "row_norm", "bandwidth", "out")}
        acts = [activation(name) for name in activation_names()] + [activation("gelu", approximate="tanh")]
        for act in acts:
            name = "gelu, tanh" if act is acts[-1] else act.name
            for by_width in (False, True) if act.kinks else (False,):
                constants = {**curvature.constants(act), "SCALED": True, "BY_WIDTH": by_width, "NUMBER": number}
                constants |= {"LEAST": curvature.least_number(self.stored), "BLOCK": curvature.BLOCK}
                yield self.source(
                    curvature.curvature_kernel, f"curvature, {name}" + ", by width" * by_width, str(curvature.BLOCK),
                    constants, curvature.WARPS, types=types, uses_products=False,
                )  # fmt: skip

    def surgery(self) -> Iterator[KernelSource]:
        everything = ("ROW_SCALE", "SHIFT", "SHIFT_ROWS", "REPEAT", "COLUMN_SCALE")
        constants = {name: True for name in everything} | {"BR": surgery.ROWS, "BC": surgery.COLUMNS}
        constants["NUMBER"] = tl.float64 if self.dtype == "fp64" else tl.float32
        types = {name: f"*{self.dtype}" for name in ("weight", "row_scale", "shift", "column_scale", "out")}
        types |= {name: "*i64" for name in ("rows", "shift_rows", "columns")} | {"shift_scale": "*fp64"}
        yield self.source(
            surgery.grow_kernel, "surgery", f"{surgery.ROWS}x{surgery.COLUMNS}", constants, surgery.WARPS,
            types=types, uses_products=False,
        )  # fmt: skip

    def lanczos(self) -> Iterator[KernelSource]:
        # Vectors are float32, except for float64 rows.
        if self.kind not in ("fp32", "fp64"):
            return
        numbers = {name: f"*{self.dtype}" for name in ("basis", "product", "alpha", "beta", "scale", "q")}
        for width in (64, 1024, krylov.WIDEST // (2 if self.kind == "fp64" else 1)):
            BK, BD, warps = krylov.config(width)
            constants = {"BK": BK, "BD": BD}
            yield self.source(
                krylov.extend_kernel, "krylov", f"{BK}x{BD}, {warps} warps", constants, warps,
                aligned=("D", "p_row"), types={**numbers, "length": "*i64", "noise": "fp32"}, uses_products=False,
            )  # fmt: skip
        constants = {"LANES": tridiagonal.LANES, "SHIFTS": tridiagonal.SHIFTS, "ROUNDS": tridiagonal.ROUNDS}
        doubles = {name: "*fp64" for name in ("values", "vectors", "work")}
        yield self.source(
            tridiagonal.extremes_kernel, "tridiagonal", f"{tridiagonal.LANES} lanes", constants, tridiagonal.WARPS,
            types={**numbers, **doubles, "length": "*i64"}, uses_products=False,
        )  # fmt: skip


def _named(name: str, is_general: bool) -> str:
    return name + ", general" * is_general


def _label(config: Config) -> str:
    sizes = f"{config.rows}x{config.filters}x{config.depth}"
    return f"{sizes}, {config.warps} warps, {config.stages} stages"


def faults(compiled: Compiled, source: KernelSource) -> list[str]:
    """Return the faults of a compiled kernel; an empty list means none."""
    found = []
    if compiled.spills:
        found.append(f"spills {compiled.spills} bytes a thread to local memory")
    limit = TARGETS[compiled.target].device.shared_memory
    if compiled.shared_memory > limit:
        found.append(f"wants {compiled.shared_memory} bytes of shared memory of {limit}")
    if source.on_tensor_cores and not compiled.tensor_core:
        found.append("has no tensor-core instruction")
    return found


# A target, a kind of rows and an index into their KernelSources: only this is sent to another process.
Job = tuple[str, str, int]


def jobs(targets: Sequence[str], kinds: Sequence[str]) -> list[Job]:
    """Return all that is to be compiled for these targets and kinds of rows."""
    return [
        (target, kind, index)
        for target in targets
        for kind in kinds
        for index in range(len(list(KernelSources(TARGETS[target], kind))))
    ]


def sample(everything: Sequence[Job]) -> list[Job]:
    """Return the first and the last job of every kernel function for NVIDIA's GPUs, and for AMD's.

    With all targets and CHECKED these are float32 rows, the plain variant and the older GPU; and bfloat16 rows, the
    general variant and the newer GPU.
    """
    first: dict[tuple[str, str], Job] = {}
    last: dict[tuple[str, str], Job] = {}
    for job in everything:
        key = _source(job).function.__name__, TARGETS[job[0]].device.vendor
        first.setdefault(key, job)
        last[key] = job
    chosen = {*first.values(), *last.values()}
    return [job for job in everything if job in chosen]


def identities(everything: Sequence[Job]) -> list[dict[str, str]]:
    """Return the name, target, rows, configuration and fingerprint of every job, without compiling."""
    return [identity(_source(job), TARGETS[job[0]]) for job in everything]


def check(
    everything: Sequence[Job], processes: int = 2, known: Sequence[Compiled] = ()
) -> tuple[list[Compiled], list[str]]:
    """Compile all kernels except those whose fingerprint is known; return the compiled kernels and their faults."""
    records: dict[str, Compiled | str] = {item.fingerprint: item for item in known}
    own = identities(everything)
    # Kernels that do not depend on the rows have one fingerprint for all of them.
    missing = {entry["fingerprint"]: job for entry, job in zip(own, everything, strict=True)}
    missing = {key: job for key, job in missing.items() if key not in records}
    with ProcessPoolExecutor(processes) as pool:
        results = tqdm(pool.map(_compile, missing.values()), total=len(missing), desc="kernels", disable=None)
        records |= dict(zip(missing, results, strict=True))
    compiled, found = [], []
    for job, entry in zip(everything, own, strict=True):
        where = "{kernel} ({config}) for {target} in {dtype}".format(**entry)
        record = records[entry["fingerprint"]]
        if isinstance(record, str):
            found.append(f"{where} does not compile: {record}")
            continue
        compiled.append(Compiled(**{**record.as_dict(), **entry}))
        found += [f"{where} {fault}" for fault in faults(compiled[-1], _source(job))]
    return compiled, found


def _source(job: Job) -> KernelSource:
    target, kind, index = job
    return list(KernelSources(TARGETS[target], kind))[index]


def _compile(job: Job) -> Compiled | str:
    """Return the compiled kernel, or the compiler's error."""
    try:
        return compile_source(_source(job), TARGETS[job[0]])
    except Exception as error:
        return str(error)


def table(compiled: Sequence[Compiled]) -> str:
    """Return the compiled kernels as a Markdown table."""
    lines = [
        "| kernel | rows | target | tile | registers | shared memory | spills | tensor core | instructions |",
        "|---|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for item in sorted(compiled, key=lambda item: (item.kernel, item.dtype, list(TARGETS).index(item.target))):
        cells = (
            item.kernel, item.dtype, item.target, item.config, item.registers, item.shared_memory, item.spills,
            item.tensor_core, item.instructions,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def as_json(entries: Sequence[dict[str, Any]]) -> str:
    """Return a JSON list with one entry a line."""
    lines = ",\n".join(map(json.dumps, entries))
    return f"[\n{lines}\n]\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all kernels; return 0 if there are no faults."""
    parser = argparse.ArgumentParser(prog="python -m s3d_fast.kernels.aot", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--rows", nargs="+", choices=EVERYTHING, default=list(CHECKED))
    parser.add_argument(
        "--everything", action="store_const", dest="rows", const=list(EVERYTHING), help="all choices of --rows"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--sample", action="store_true", help="only the first and the last of every kernel function for either vendor"
    )
    parser.add_argument(
        "--fingerprints", action="store_true", help="compile nothing; print the kernels and their fingerprints as JSON"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", type=Path, help="write the compiled kernels to this file")
    output.add_argument("--update", type=Path, help="the same, but compile only kernels that the file does not have")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    chosen = jobs(options.targets, options.rows)
    if options.sample:
        chosen = sample(chosen)
    if options.fingerprints:
        print(as_json(identities(chosen)), end="")
        return 0
    known = json.loads(options.update.read_text()) if options.update else []
    compiled, found = check(chosen, options.processes, [Compiled(**entry) for entry in known])
    path = options.json or options.update
    if path:
        path.write_text(as_json([item.as_dict() for item in compiled]))
    if options.markdown:
        options.markdown.write_text(table(compiled))
    if not (path or options.markdown):
        print(table(compiled), end="")
    for fault in found:
        print(fault, file=sys.stderr)
    print(f"{len(compiled)} kernels, {len(found)} faults", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
