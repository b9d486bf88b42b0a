"""The model of GPUs: its record is that of the present kernels, and its times are bounded by what the record counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loops_table, roofline, unfused
from benchmarks.gpus import GPUS, MEMORY_REACHED
from benchmarks.launches import Shape, Tiles
from benchmarks.networks import NETWORK_SHAPES
from benchmarks.recorded import solved
from s3d_fast.models.mobilenet import FULL_WIDTHS
from tests.cases import LARGE_EDGES, NETWORKS, mobilenet_layers

ROOT = Path(__file__).parents[2]
EVERY = [
    (network, name, kind) for network in NETWORK_SHAPES for name, gpu in GPUS.items() for kind in roofline.kinds_of(gpu)
]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return roofline.load()


def run(*arguments: str) -> str:
    """Run a module in a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_networks_are_those_of_the_benchmarks() -> None:
    mobilenet, dgcnn = NETWORK_SHAPES.values()
    layers = mobilenet_layers(FULL_WIDTHS, 32 * 112 * 112)
    assert mobilenet == [(case.N, case.D, case.M) for case in layers]
    rows = [(case.N, case.D, case.M, case.bias, 0) for case in NETWORKS["DGCNN embedding and head, batch 16"]]
    edges = [(case.B * case.P, case.F, case.M, case.bias, case.B) for case in LARGE_EDGES]
    assert [Shape(*own) for own in dgcnn] == [Shape(*own) for own in rows + edges]


def test_the_record_has_the_launches_of_the_present_kernels(record: dict[str, Any], tmp_path: Path) -> None:
    # Through links, as if the kernels were of another checkout.
    for name in ("s3d_fast", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    options = ("--launches", "--targets", "sm_90", "gfx942", "--rows", "bf16", "--kernels", str(tmp_path))
    made = json.loads(run("benchmarks.recorded", *options))
    compiled = ("registers", "shared_memory", "spills")
    for network, own in made.items():
        for where, launches in own.items():
            known = record["after"]["networks"][network][where]
            stored = [{key: value for key, value in entry.items() if key not in compiled} for entry in known]
            assert stored == launches, "run python -m benchmarks.recorded && python docs/make_gpu.py"


@pytest.mark.parametrize(("network", "name", "kind"), EVERY)
def test_no_network_is_faster_than_its_work_at_the_peaks(
    network: str, name: str, kind: str, record: dict[str, Any]
) -> None:
    gpu, shapes = GPUS[name], roofline.NETWORKS[network]
    for time, own in zip(
        roofline.before_and_after(record, network, gpu, kind), (roofline.AS_ACCURATE.get(kind, kind), kind), strict=True
    ):
        peak = gpu.flops[roofline.MULTIPLIED[own]]
        least = max(2 * time.work["tensor"] / peak, time.work["bytes"] / gpu.memory / MEMORY_REACHED)
        assert least < time.fastest < time.slowest
        # float32 products are single multiplications on NVIDIA.
        if time.work["tensor"]:
            assert time.work["tensor"] >= 0.999 * roofline.needed(shapes, own)
        rows = sum(own.N * (own.D + own.M) for own in shapes) * unfused.STORED[kind][0]
        assert time.work["bytes"] >= rows
    other = roofline.unfused(shapes, gpu, kind)
    # Three TF32 products, or one of float32, do the work of six of bfloat16.
    parts = {"fp32 high": (1 / 6, 1 / 2)}.get(kind, (1,))
    assert any(other.work["tensor"] == part * roofline.needed(shapes, kind) for part in parts)
    assert other.work["bytes"] > rows


def test_a_launch_takes_longer_with_every_cost(record: dict[str, Any]) -> None:
    gpu, where = GPUS["H100"], "sm_90 bf16"
    launch = next(
        own for own in record["after"]["networks"]["DGCNN, batch 16"][where] if own["kernel"] == "accumulate_kernel"
    )
    costs = record["after"]["costs"][where]

    def time(launch: dict[str, Any], costs: dict[str, Any]) -> roofline.Time:
        return roofline.launch_time(gpu, "bf16", launch, costs, roofline.Cache(gpu.cache_size))

    before = time(launch, costs)
    for cost in ("instructions", "tensor", "shared bytes", "requested bytes", "barriers"):
        more = deepcopy(costs)
        more[launch["kinds"][0]]["accumulate_kernel"]["pass"][cost] *= 100
        after = time(launch, more)
        assert after.slowest > before.slowest
        assert after.fastest > before.fastest, cost
    # With more registers, a processor holds fewer programs.
    assert roofline.resident(gpu, {**launch, "registers": 32, "shared_memory": 0}) == 8
    assert roofline.resident(gpu, {**launch, "registers": 255, "shared_memory": 0}) == 1


def test_the_cache_holds_what_was_touched_last() -> None:
    cache = roofline.Cache(100)
    assert cache.missed([("a", 60, False), ("b", 30, True)]) == 90
    assert cache.missed([("a", 60, False)]) == 0
    assert cache.missed([("c", 50, False)]) == 50
    # b was the oldest, then a.
    assert cache.missed([("c", 50, False), ("a", 60, False)]) == 60
    assert cache.missed([("d", 101, False), ("d", 101, False)]) == 202
    assert cache.missed([("a", 60, True), ("a", 60, True)]) == 120


def test_costs_of_tiles_and_passes_are_solved_from_two_runs() -> None:
    runs = [(Tiles(2, 8, 4), {"x": 2 * 7.0 + 8 * 3}), (Tiles(3, 30, 10), {"x": 3 * 7.0 + 30 * 3})]
    assert solved(runs) == {"tile": {"x": 7.0}, "pass": {"x": 3.0}}
    same = [(Tiles(2, 8, 4), {"x": 10.0}), (Tiles(4, 16, 4), {"x": 20.0})]
    assert solved(same) == {"tile": {"only": 4.0, "x": 5.0}, "pass": {"x": 0.0}}


def test_the_unfused_form_does_what_its_page_says() -> None:
    split, product, scaled, sums, added = unfused.operations(0, Shape(1000, 64, 32), "bf16")
    assert split.multiply_adds == scaled.multiply_adds == added.multiply_adds == 0
    # Two planes: twice the filters in both products.
    assert product.multiply_adds == sums.multiply_adds == 2 * 1000 * 64 * 32
    assert ("0 wide", 2 * 4 * 1000 * 32, True) in product.touched
    assert ("0 U", 2 * 2 * 1000 * 32, True) in scaled.touched
    assert len(list(unfused.operations(0, Shape(1000, 64, 32), "fp32"))) == 3
    three = list(unfused.operations(0, Shape(1000, 64, 32), "fp32 high"))
    assert sum(own.multiply_adds for own in three) == 2 * 3 * 1000 * 64 * 32
    assert len(list(unfused.operations(0, Shape(1000, 64, 32, clouds=2), "bf16"))) == 7


def test_a_kernel_is_compared_with_the_one_that_does_its_work_now() -> None:
    compiled = [
        {"kernel": "pointwise", "config": "64x64x16, 4 warps, 3 stages"},
        {"kernel": "pointwise", "config": "32x16x16, 1 warps, 3 stages"},
        {"kernel": "wide, accumulate", "config": "128x128x32, 8 warps, 3 stages"},
    ]
    after = loops_table._after
    assert after({"kernel": "pointwise", "width": 16}, compiled) == compiled[0]
    assert after({"kernel": "pointwise", "width": 256}, compiled) is None
    assert after({"kernel": "edgeconv, sums", "width": 128}, compiled) == compiled[2]


def test_the_command_says_that_it_is_a_model() -> None:
    printed = run("benchmarks.roofline")
    assert printed.startswith("A MODEL, NOT A MEASUREMENT")
    assert all(word in printed for word in (*GPUS, *NETWORK_SHAPES, "eigen phase", "before", "unfused"))
