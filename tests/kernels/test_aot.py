"""Every kernel compiles for GPUs that are not here, without spills, within shared memory, and for tensor cores.

Compiling everything takes minutes, so docs/gpu.json records it with fingerprints of what was compiled. `make test`
checks that the fingerprints are those of the present kernels, that no record has a fault, and that a sample compiles to
what is recorded. `pytest -m long tests/kernels/test_aot.py` compiles everything.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from benchmarks import roofline
from s3d_fast.kernels import aot, edgeconv, gated, grouped, pointwise, pointwise_wide
from s3d_fast.kernels.compiled import TARGETS, Compiled, KernelSource, fingerprint
from s3d_fast.kernels.configs import Config
from s3d_fast.kernels.device import Device
from s3d_fast.kernels.products import product_form

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "gpu.json"


# Records are compared where the compiler is the one that made them.
IS_PINNED = f"triton=={triton.__version__}" in (ROOT / "constraints.txt").read_text().split()
pinned_triton = pytest.mark.skipif(not IS_PINNED, reason="docs/gpu.json is of the Triton in constraints.txt")
UPDATE = "run python -m s3d_fast.kernels.aot --update docs/gpu.json && python docs/make_gpu.py"
RENEW = "run python -m s3d_fast.kernels.aot --json docs/gpu.json && python docs/make_gpu.py"


def run_aot(*arguments: str) -> str:
    """Run the command in a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "s3d_fast.kernels.aot", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def compile_anew(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Compile with an empty cache; the command fails if a kernel has a fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        run_aot("--json", str(folder / "gpu.json"), *arguments)
    return json.loads((folder / "gpu.json").read_text())


@pytest.fixture(scope="module")
def committed() -> list[dict[str, Any]]:
    return json.loads(COMMITTED.read_text())


@pytest.fixture(scope="module")
def present() -> list[dict[str, Any]]:
    """What would be compiled now, with fingerprints."""
    return json.loads(run_aot("--fingerprints"))


def identity(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("kernel", "target", "dtype", "config"))


def test_the_table_lists_the_present_kernels(committed: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    assert list(map(identity, committed)) == list(map(identity, present)), UPDATE


@pinned_triton
def test_the_table_is_of_the_present_source(committed: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    recorded = {(identity(entry), entry["fingerprint"]) for entry in committed}
    stale = [identity(entry) for entry in present if (identity(entry), entry["fingerprint"]) not in recorded]
    assert not stale, f"{UPDATE}: {len(stale)} kernels have changed, first {stale[0]}"


def test_the_table_has_every_family_without_a_fault(committed: list[dict[str, Any]]) -> None:
    for target in TARGETS:
        for dtype in aot.CHECKED:
            own = {entry["kernel"] for entry in committed if (entry["target"], entry["dtype"]) == (target, dtype)}
            families = {name.split(",")[0] for name in own}
            wanted = {"pointwise", "wide", "gated", "grouped", "edgeconv", "curvature", "surgery", "sum of slices"}
            assert wanted <= families
            if dtype == "fp32":
                assert {"krylov", "tridiagonal"} <= families
    assert all(entry["spills"] == 0 for entry in committed)
    for entry in committed:
        assert entry["shared_memory"] <= TARGETS[entry["target"]].device.shared_memory
        multiplies = entry["kernel"].split(",")[0] in ("pointwise", "wide", "gated", "edgeconv", "grouped")
        only_adds = entry["kernel"].startswith(("grouped, sums", "edgeconv, receive"))
        if entry["dtype"] == "bf16" and multiplies and not only_adds:
            assert entry["tensor_core"] > 0, entry


def test_a_sample_compiles_to_what_the_table_says(committed: list[dict[str, Any]], tmp_path: Path) -> None:
    compiled = compile_anew(tmp_path, "--sample")
    families = {entry["kernel"].split(",")[0] for entry in committed}
    for vendor in ({"sm_80", "sm_90"}, {"gfx942"}):
        assert {entry["kernel"].split(",")[0] for entry in compiled if entry["target"] in vendor} == families
    if IS_PINNED:
        assert [entry for entry in compiled if entry not in committed] == [], RENEW


@pytest.mark.long
def test_everything_compiles_to_what_the_table_says(committed: list[dict[str, Any]], tmp_path: Path) -> None:
    compiled = compile_anew(tmp_path)
    assert list(map(identity, committed)) == list(map(identity, compiled))
    if IS_PINNED:
        assert committed == compiled, RENEW


KERNEL = """
import triton.language as tl
from triton.runtime import JITFunction

SHIFT = tl.constexpr(1)

@JITFunction
def shifted(x):
    return x + SHIFT

@JITFunction
def kernel(X, D, BLOCK: tl.constexpr):
    entries = tl.arange(0, BLOCK)
    tl.store(X + entries, shifted(tl.load(X + entries)), entries < D)
"""


def kernel_source(folder: Path, text: str = KERNEL) -> KernelSource:
    folder.mkdir()
    (folder / "kernel.py").write_text(text)
    function = runpy.run_path(str(folder / "kernel.py"))["kernel"]
    return KernelSource("kernel", function, "fp32", "64", {"X": "*fp32"}, {"BLOCK": 64}, ["X"], 4, 2, False)


def test_fingerprints_know_all_that_the_code_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = kernel_source(tmp_path / "one"), TARGETS["sm_80"]
    found = [
        fingerprint(source, target),
        fingerprint(source, TARGETS["sm_90"]),
        fingerprint(source, TARGETS["gfx942"]),
        fingerprint(replace(source, types={"X": "*bf16"}), target),
        fingerprint(replace(source, constants={"BLOCK": 128}), target),
        fingerprint(replace(source, constants={"BLOCK": 64, "D": 64}), target),
        fingerprint(replace(source, aligned=["X", "D"]), target),
        fingerprint(replace(source, warps=8), target),
        fingerprint(replace(source, stages=3), target),
        fingerprint(kernel_source(tmp_path / "called", KERNEL.replace("x + SHIFT", "x - SHIFT")), target),
        fingerprint(kernel_source(tmp_path / "global", KERNEL.replace("constexpr(1)", "constexpr(2)")), target),
    ]
    monkeypatch.setattr(triton, "__version__", "0.0")
    found.append(fingerprint(source, target))
    assert len(set(found)) == len(found)


def test_fingerprints_depend_on_nothing_else(tmp_path: Path) -> None:
    source, target = kernel_source(tmp_path / "one"), TARGETS["sm_80"]
    other = replace(kernel_source(tmp_path / "two"), name="other", config="other", on_tensor_cores=True)
    assert fingerprint(other, target) == fingerprint(source, target)


def test_the_pages_show_the_table_and_the_models() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_gpu.py"))["documents"]()
    assert {page.name for page in made} == {"gpu.md", "scale.md"}
    for page, text in made.items():
        assert page.read_text() == text, "run python docs/make_gpu.py"


def config_of(label: str) -> Config:
    tile, warps, stages = label.split(", ")
    sizes = map(int, tile.split("x"))
    return Config(*sizes, warps=int(warps.split()[0]), stages=int(stages.split()[0]))


def test_no_kernel_takes_more_shared_memory_than_its_table_is_pruned_by() -> None:
    for entry in json.loads(COMMITTED.read_text()):
        device, dtype = TARGETS[entry["target"]].device, aot.STORED[entry["dtype"]]
        form = product_form(dtype, "highest", device)
        family = entry["kernel"].split(",")[0]
        if family == "pointwise":
            bound = pointwise.shared_memory(config_of(entry["config"]), device, form, dtype)
        elif family == "gated":
            bound = gated.shared_memory(config_of(entry["config"]), device, form, dtype)
        elif family == "wide":
            bound = pointwise_wide.shared_memory(config_of(entry["config"]), device, form, dtype)
        elif family == "edgeconv" and "receive" not in entry["kernel"]:
            config = config_of(entry["config"])
            bound = edgeconv.shared_memory(config, config, device, dtype)["sums" in entry["kernel"]]
        elif family == "grouped" and "sums" not in entry["kernel"]:
            config = grouped.configs(device, form, dtype, "general" not in entry["kernel"])[0]
            bound = grouped.shared_memory(config, device, form, dtype)
        else:
            continue
        assert entry["shared_memory"] <= bound, entry


# The least that a GPU has on which Triton's kernels run: sm_86, and every AMD GPU.
@pytest.mark.parametrize("device", [Device("nvidia", 20, 101376, True), Device("amd", 20, 65536, False)], ids=str)
def test_small_gpus_have_configurations_that_fit(device: Device) -> None:
    for dtype in aot.STORED.values():
        for precision in ("highest", "high", "medium"):
            form = product_form(dtype, precision, device)
            for width in grouped.WIDTHS:
                assert pointwise.configs(device, form, dtype, width, 1024), (dtype, form, width)
            for width in gated.widths(device, form, dtype):
                assert gated.configs(device, form, dtype, width, 1024), (dtype, form, width)
            for is_aligned in (False, True):
                assert grouped.configs(device, form, dtype, is_aligned), (dtype, form, is_aligned)
            assert pointwise_wide.configs(device, form, dtype, True), (dtype, form)
            assert edgeconv.configs(device, form, dtype), (dtype, form)


GOOD = Compiled("pointwise", "sm_80", "bf16", "32x64x64", 128, 40000, 0, 96, 1000, "0123456789abcdef")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spills": 8}, "spills 8 bytes"),
        ({"shared_memory": 170000}, "wants 170000 bytes of shared memory of 166912"),
        ({"tensor_core": 0}, "no tensor-core instruction"),
    ],
)
def test_faults_are_found(change: dict[str, int], fault: str) -> None:
    source = next(iter(aot.KernelSources(TARGETS["sm_80"], "bf16")))
    assert source.on_tensor_cores
    assert aot.faults(GOOD, source) == []
    (found,) = aot.faults(replace(GOOD, **change), source)
    assert fault in found


def test_roofline_predicts_every_network_on_every_gpu() -> None:
    table = roofline.Table(COMMITTED)
    for rows, edges in roofline.NETWORK_LAYERS.values():
        for gpu in roofline.GPUS.values():
            for dtype in ("fp32", "bf16"):
                parts = roofline.predict(gpu, dtype, table, rows, edges)
                product, unfused = parts["S v of the network"]
                # No kernel is faster than its arithmetic or its traffic at the peaks; and the flops are those of S v.
                least = max(product.flops / gpu.flops[dtype], product.bytes / gpu.memory)
                assert product.seconds >= least
                flops = sum(4 * case.N * case.D * case.M for case in rows)
                flops += sum(8 * case.B * case.P * case.F * case.M for case in edges)
                assert product.flops >= flops
                assert unfused.flops >= flops
                assert unfused.bytes > product.bytes


def test_roofline_says_that_it_is_a_model() -> None:
    command = [sys.executable, "-m", "benchmarks.roofline", "--dtypes", "bf16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.startswith("A MODEL, NOT A MEASUREMENT")
    assert all(name in run.stdout for name in ("A100", "H100", "MI300X", "MobileNetV1", "DGCNN", "eigen phase"))
