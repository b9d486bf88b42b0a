"""What a GPU measures, in one file to send to us: python -m benchmarks.gpu_report, which `make bench DEVICE=cuda` runs.

runs/bench-cuda.json has the versions, the GPU and its clocks, S v of MobileNetV1 and DGCNN (every launch with its
configuration, the error against float64, times launch by launch and as a CUDA graph, the best unfused form beside them)
and, if the GPU is one of those of `benchmarks.gpus`, what the model predicts. With runs/bench.json, also all ratios of
the benchmarks. It holds no names of people or machines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.gpus import GPUS
from benchmarks.launches import Shape
from benchmarks.networks import KINDS
from s3d_fast import env
from s3d_fast.backends.interface import Backend
from s3d_fast.kernels.options import triton_options
from s3d_fast.maths import reference
from s3d_fast.maths.incoming import incoming_edges

OUT = Path("runs") / "bench-cuda.json"
WARM_UP, ROUNDS = 3, 20


def why_not() -> str:
    """Return why there is nothing to measure; empty if there is a GPU that the kernels run on."""
    if not torch.cuda.is_available():
        return (
            "make bench DEVICE=cuda needs a GPU, and PyTorch sees none here. Nothing was measured. "
            "python -m s3d_fast.env shows what is available; make bench measures the CPU."
        )
    state = env.report()["backend triton"]
    return "" if state == "available" else f"make bench DEVICE=cuda needs the Triton kernels: {state}"


def gpu() -> dict[str, Any]:
    """Return the properties of the GPU."""
    own = torch.cuda.get_device_properties(0)
    names = (
        "name", "major", "minor", "gcnArchName", "multi_processor_count", "total_memory", "L2_cache_size",
        "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "regs_per_multiprocessor", "warp_size",
        "clock_rate", "memory_clock_rate",
    )  # fmt: skip
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {name: getattr(own, name) for name in names if hasattr(own, name)} | versions


CLOCKS = {
    "nvidia-smi": [
        "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu,driver_version",
        "--format=csv",
    ],
    "rocm-smi": ["--showclocks", "--showpower", "--json"],
}


def clocks() -> dict[str, str]:
    """Return what the vendor's tool says of clocks, power and temperature."""
    found = {}
    for tool, arguments in CLOCKS.items():
        if shutil.which(tool):
            run = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)
            found[tool] = run.stdout.strip() if run.returncode == 0 else f"failed with code {run.returncode}"
    return found


class Network:
    """S v of a network: our kernels, and the unfused form."""

    def __init__(self, shapes: Sequence[Shape], kind: str, device: str, backend: Backend) -> None:
        self.backend = backend
        dtype, self.precision = KINDS[kind]
        stored: torch.dtype = getattr(torch, dtype)
        random = torch.Generator(device).manual_seed(0)

        def numbers(*sizes: int, dtype: torch.dtype = stored) -> Tensor:
            return torch.randn(sizes, generator=random, device=device).to(dtype)

        def rows(*sizes: int, is_multiplied: bool = True) -> Tensor:
            # As a solver has them.
            with triton_options(precision=self.precision):
                return backend.prepared(numbers(*sizes), is_multiplied)

        self.rows = [own for own in shapes if not own.clouds]
        self.X = [rows(own.N, own.D) for own in self.rows]
        self.C = [rows(own.N, own.M, is_multiplied=False) for own in self.rows]
        self.V = [numbers(own.M, own.D + own.bias, dtype=torch.float32) for own in self.rows]
        self.edges = []
        for own in shapes:
            if own.clouds:
                sizes = own.clouds, own.N // own.clouds
                winner = torch.randint(sizes[1], (*sizes, own.M), generator=random, device=device)
                given = {"X": rows(*sizes, own.D), "C": numbers(*sizes, own.M), "winner": winner}
                self.edges.append({**given, "V": numbers(own.M, 2 * own.D, dtype=torch.float32)})
        self.incoming = [incoming_edges(own["winner"]) for own in self.edges]

    def ours(self) -> list[Tensor]:
        """Return S v of all layers by the kernels."""
        with triton_options(precision=self.precision):
            return self._ours()

    def _ours(self) -> list[Tensor]:
        found = []
        if self.rows:
            biases = [own.bias for own in self.rows]
            found += self.backend.splitting_matvec_grouped(X=self.X, C=self.C, V=self.V, bias=biases)
        for own, incoming in zip(self.edges, self.incoming, strict=True):
            found.append(self.backend.edgeconv_matvec(**own, bias=False, incoming=incoming, ties=None))
        return found

    def unfused(self) -> list[Tensor]:
        """Return S v of all layers by matrix products of the vendor's library, as in `benchmarks.unfused`."""
        layers = zip(self.X, self.C, self.V, self.rows, strict=True)
        return [unfused_rows(X, C, V, own.bias) for X, C, V, own in layers] + [
            unfused_edges(**own) for own in self.edges
        ]

    def exact(self) -> Iterator[Tensor]:
        """Yield S v of every layer in float64, with the same stored rows."""
        for X, C, V, own in zip(self.X, self.C, self.V, self.rows, strict=True):
            yield reference.splitting_matvec(X.double(), C.double(), V.double(), own.bias)
        for given in self.edges:
            yield reference.edgeconv_matvec(
                given["X"].double(), given["winner"], given["C"].double(), given["V"].double()
            )


def parts(numbers: Tensor, stored: torch.dtype, axis: int) -> Tensor:
    """Return float32 numbers as they are or, for 16-bit rows, as two planes along an axis."""
    if stored == torch.float32:
        return numbers
    high = numbers.to(stored)
    return torch.cat([high, (numbers - high).to(stored)], axis)


def multiplied(A: Tensor, B: Tensor) -> Tensor:
    """Return A B in float32."""
    if A.dtype == torch.float32 or not A.is_cuda:
        return A.float() @ B.float()
    return torch.mm(A, B, out_dtype=torch.float32)


def halves_added(wide: Tensor, parts_: int, axis: int) -> Tensor:
    return wide if parts_ == 1 else torch.add(*wide.chunk(2, axis))


def unfused_rows(X: Tensor, C: Tensor, V: Tensor, bias: bool) -> Tensor:
    """Return S v of a layer by two matrix products, with planes for 16-bit rows."""
    count, D = (1 if X.dtype == torch.float32 else 2), X.shape[1]
    U = halves_added(multiplied(X, parts(V[:, :D], X.dtype, 0).T), count, 1)
    U = (U + V[:, D] if bias else U) * C
    sums = halves_added(multiplied(parts(U, X.dtype, 1).T, X), count, 0)
    return torch.cat([sums, U.sum(0)[:, None]], 1) if bias else sums


def unfused_edges(X: Tensor, winner: Tensor, C: Tensor, V: Tensor) -> Tensor:
    """Return S v of EdgeConv by two matrix products over points, a gather and a scatter."""
    (clouds, points, F), M = X.shape, len(V)
    count, rows = (1 if X.dtype == torch.float32 else 2), X.reshape(-1, F)
    vectors = torch.cat([V[:, :F], V[:, F:] - V[:, :F]])
    both = halves_added(multiplied(rows, parts(vectors, X.dtype, 0).T), count, 1).view(clouds, points, 2 * M)
    t = C * (both[..., :M].gather(1, winner) + both[..., M:])
    received = torch.zeros_like(t).scatter_add_(1, winner, t)
    U = torch.cat([received - t, t], 2).view(-1, 2 * M)
    sums = halves_added(multiplied(parts(U, X.dtype, 1).T, rows), count, 0)
    return torch.cat([sums[:M], sums[M:]], 1)


@contextmanager
def launches() -> Iterator[list[dict[str, Any]]]:
    """Collect the launches of our kernels: names, configurations, grids, and what the compiled code takes."""
    from s3d_fast.kernels.launch import Launch

    found: list[dict[str, Any]] = []
    before = Launch.run

    def run(launch: Launch) -> Any:
        own = {"kernel": launch.name, "config": launch.label, "grid": list(launch.grid)}
        compiled = before(launch)
        takes = {name: getattr(compiled, name) for name in ("n_regs", "n_spills") if hasattr(compiled, name)}
        found.append({**own, "warps": launch.warps, "stages": launch.stages, **takes})
        return compiled

    Launch.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Launch.run = before  # type: ignore[method-assign]


def errors(found: Sequence[Tensor], exact: Iterator[Tensor]) -> float:
    """Return the largest error of a layer, relative to its largest entry."""
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, exact, strict=True))


def milliseconds(call: Callable[[], object]) -> dict[str, float]:
    """Return the median, shortest and longest time of a call."""
    from benchmarks.device import seconds

    for _ in range(WARM_UP):
        call()
    times = [1e3 * seconds(call) for _ in range(ROUNDS)]
    return {"median": statistics.median(times), "shortest": min(times), "longest": max(times)}


def in_graph(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def predicted(properties: dict[str, Any], network: str, kind: str) -> dict[str, Any] | None:
    """Return what the model predicts, in milliseconds; None if it does not know the GPU."""
    version = f"sm_{properties.get('major')}{properties.get('minor')}"
    target = properties.get("gcnArchName", "").split(":")[0] if properties.get("hip") else version
    model = next((gpu for gpu in GPUS.values() if gpu.target == target), None)
    if model is None:
        return None
    # Other models of the family have other numbers of processors.
    exact = model.processors == properties.get("multi_processor_count")
    plain = roofline.AS_ACCURATE.get(kind, kind)
    own = kind if kind in roofline.kinds_of(model) else plain
    product = roofline.summed(roofline.fused(roofline.load()["after"], network, model, own))
    # What is measured beside it: the library's products of the rows as they are.
    other = roofline.unfused(roofline.NETWORKS[network], model, plain)
    return {
        "fastest": 1e3 * product.fastest, "slowest": 1e3 * product.slowest, "unfused": 1e3 * other.fastest,
        "bound": product.bound, "same number of processors": exact,
    }  # fmt: skip


def measured(network: str, kind: str, device: str, backend: Backend, properties: dict[str, Any]) -> dict[str, Any]:
    """Return what S v of a network takes on this device, and its error."""
    own = Network(roofline.NETWORKS[network], kind, device, backend)
    own.ours()
    with launches() as chosen:
        result = own.ours()
    entry: dict[str, Any] = {
        "network": network, "rows": kind, "launches": chosen, "error": errors(result, own.exact()),
        "error, unfused": errors(own.unfused(), own.exact()), "ms": milliseconds(own.ours),
        "unfused, ms": milliseconds(own.unfused), "predicted, ms": predicted(properties, network, kind),
    }  # fmt: skip
    if device != "cpu":
        entry |= {"graph, ms": of_graph(own.ours), "unfused graph, ms": of_graph(own.unfused)}
    return entry


def of_graph(call: Callable[[], object]) -> dict[str, float] | str:
    """Return the times of a call in a CUDA graph, or why there is none: other measurements must not be lost."""
    try:
        return milliseconds(in_graph(call))
    except RuntimeError as error:
        return f"failed: {error}"


def ratios(bench: Path) -> list[dict[str, Any]]:
    """Return all ratios of a run of the benchmarks; none if no benchmark ran."""
    text = bench.read_text() if bench.exists() else ""
    found = json.loads(text)["benchmarks"] if text else []
    return [
        {"group": one["group"], "name": one["name"], "ratios": one["extra_info"].get("ratios", {})} for one in found
    ]


def report(bench: Path, backend: Backend, device: str = "cuda", networks: Sequence[str] = ()) -> dict[str, Any]:
    """Return everything that the file holds."""
    properties = gpu()
    result = {"environment": env.report(), "gpu": properties, "clocks before": clocks()}
    names = networks or list(roofline.NETWORKS)
    result["networks"] = [measured(network, kind, device, backend, properties) for network in names for kind in KINDS]
    return {**result, "clocks after": clocks(), "benchmarks": ratios(bench)}


def summary(found: dict[str, Any]) -> str:
    """Return measured and predicted times, a line for each network and kind of rows."""
    lines = []
    for own in found["networks"]:
        times = own.get("graph, ms", own["ms"])
        took = f"{times['median']:.3g} ms" if isinstance(times, dict) else times
        model = own["predicted, ms"]
        expected = f"{model['fastest']:.3g} to {model['slowest']:.3g} ms" if model else "this GPU is not in the model"
        lines.append(f"{own['network']}, {own['rows']}: {took}; predicted: {expected}; error {own['error']:.1e}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the file; return 1, with a message, if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU to measure")
    parser.add_argument("--bench", type=Path, default=Path("runs") / "bench.json", help="a run of the benchmarks")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    if options.check:
        return 0
    from s3d_fast.backends.choice import choose

    found = report(options.bench, choose("triton"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(summary(found))
    print(f"{options.out} holds all of it: please send it to us, as an issue or by mail.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
