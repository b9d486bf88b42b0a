"""Every kernel compiles for GPUs that are not here, without spills, and its loops are as tight as we state.

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
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from s3d_fast.kernels import aot, configs, loops, tiles
from s3d_fast.kernels.checked import STORED
from s3d_fast.kernels.compiled import TARGETS, Compiled, fingerprint
from s3d_fast.kernels.device import Device
from s3d_fast.kernels.launch import Launch
from s3d_fast.kernels.products import product_form
from s3d_fast.kernels.tiles import Config

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "gpu.json"


# Records are compared where the compiler is the one that made them.
IS_PINNED = f"triton=={triton.__version__}" in (ROOT / "constraints.txt").read_text().split()
pinned_triton = pytest.mark.skipif(not IS_PINNED, reason="docs/gpu.json is of the Triton in constraints.txt")
UPDATE = "run python -m s3d_fast.kernels.aot --update docs/gpu.json && python docs/make_gpu.py"
RENEW = "run python -m s3d_fast.kernels.aot --json docs/gpu.json && python docs/make_gpu.py"


def run_python(*arguments: str) -> str:
    """Run Python in a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def run_aot(*arguments: str) -> str:
    return run_python("-m", "s3d_fast.kernels.aot", *arguments)


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
            wanted = {"pointwise", "wide", "gated", "grouped", "edgeconv", "depthwise", "curvature", "surgery"}
            assert wanted | {"sum of slices"} <= families
            if dtype == "fp32":
                assert {"krylov", "tridiagonal"} <= families
    faults = [(identity(entry), aot.faults(Compiled(**entry))) for entry in committed]
    assert [fault for fault in faults if fault[1]] == []


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("kind", aot.CHECKED)
def test_every_configuration_of_the_fused_kernels_is_compiled(
    target: str, kind: str, committed: list[dict[str, Any]]
) -> None:
    dtype, precision = (*kind.split(), "highest")[:2]
    device, stored = TARGETS[target].device, STORED[dtype]
    form = product_form(stored, precision, device)
    labels: dict[str, set[str]] = {}
    for entry in committed:
        if (entry["target"], entry["dtype"]) == (target, kind):
            labels.setdefault(entry["kernel"].split(",")[0], set()).add(entry["config"])
            if "atomic" in entry["kernel"]:
                labels.setdefault("atomic", set()).add(entry["config"])
    for width, filters, bias in product(tiles.WIDTHS, (16, 32, 64, 1024), (False, True)):
        own = device, form, stored, width, filters, bias
        for name, found in (("pointwise", configs.pointwise(*own)), ("gated", configs.gated(*own))):
            assert {config.label for config in found} <= labels.get(name, set()), (name, own)
        if filters == 1024:
            atomic = [config for config in configs.pointwise(*own, True) if configs.adds_atomically(config, device)]
            assert {config.label for config in atomic} <= labels.get("atomic", set()), own


def test_a_sample_compiles_to_what_the_table_says(committed: list[dict[str, Any]], tmp_path: Path) -> None:
    compiled = compile_anew(tmp_path, "--sample")
    families = {entry["kernel"].split(",")[0] for entry in committed}
    for targets in ({"sm_80", "sm_90"}, {"sm_100"}, {"gfx942"}):
        assert {entry["kernel"].split(",")[0] for entry in compiled if entry["target"] in targets} == families
    if IS_PINNED:
        assert [entry for entry in compiled if entry not in committed] == [], RENEW


@pytest.mark.long
def test_everything_compiles_to_what_the_table_says(committed: list[dict[str, Any]], tmp_path: Path) -> None:
    compiled = compile_anew(tmp_path)
    assert list(map(identity, committed)) == list(map(identity, compiled))
    if IS_PINNED:
        assert committed == compiled, RENEW


# In another process: in this one kernels are interpreted, and have no signature.
AGAIN = """
from dataclasses import replace
from s3d_fast.kernels import aot, compiled

job = aot.sample(aot.jobs(["sm_90"], ["bf16"]))[0]
known, _ = aot.check([job], 1)
assert known[0].fingerprint.count("-") == 1
other = replace(known[0], fingerprint=known[0].fingerprint.partition("-")[0] + "-other", outline="wrong")

def refuse(*_):
    raise AssertionError("compiled again")

aot.compile_launch = refuse
assert aot.check([job], 1, [other]) == (known, [])
"""


def test_an_edit_of_the_simulator_only_executes_the_outline_again() -> None:
    run_python("-c", AGAIN)


DIFFERENT = """
import sys
from s3d_fast.kernels.checked import CheckedLaunches
from s3d_fast.kernels.compiled import TARGETS, fingerprint

target = TARGETS[sys.argv[1]]
checked = CheckedLaunches(target, sys.argv[2])
everything = {fingerprint(launch, target) for launch in checked._all()}
assert len(everything) > 100
assert everything == {fingerprint(launch, target) for launch in checked}
for variant in ("general", "tuned", "two vectors", "of one", "of one, bias"):
    assert any(launch.name.endswith(f", {variant}") for launch in checked), variant
"""


@pytest.mark.parametrize(("target", "kind"), [("sm_90", "bf16"), ("gfx942", "fp32")])
def test_no_variant_is_taken_for_another(target: str, kind: str) -> None:
    run_python("-c", DIFFERENT, target, kind)


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


def kernel_launch(folder: Path, text: str = KERNEL) -> Launch:
    folder.mkdir()
    (folder / "kernel.py").write_text(text)
    function = runpy.run_path(str(folder / "kernel.py"))["kernel"]
    arguments = {"X": torch.empty(64, device="meta"), "D": 3, "BLOCK": 64}
    return Launch("kernel", function, (1,), arguments, 4)


def changed(launch: Launch, **arguments: Any) -> Launch:
    return replace(launch, arguments={**launch.arguments, **arguments})


def test_fingerprints_know_all_that_the_code_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, target = kernel_launch(tmp_path / "one"), TARGETS["sm_80"]
    found = [
        fingerprint(launch, target),
        fingerprint(launch, TARGETS["sm_90"]),
        fingerprint(launch, TARGETS["gfx942"]),
        fingerprint(changed(launch, X=torch.empty(64, dtype=torch.bfloat16, device="meta")), target),
        # Not at a multiple of 16 bytes.
        fingerprint(changed(launch, X=torch.empty(65)[1:]), target),
        fingerprint(changed(launch, BLOCK=128), target),
        fingerprint(changed(launch, D=1), target),
        fingerprint(changed(launch, D=16), target),
        fingerprint(changed(launch, D=2**40), target),
        fingerprint(replace(launch, warps=8), target),
        fingerprint(replace(launch, stages=3), target),
        fingerprint(kernel_launch(tmp_path / "called", KERNEL.replace("x + SHIFT", "x - SHIFT")), target),
        fingerprint(kernel_launch(tmp_path / "global", KERNEL.replace("constexpr(1)", "constexpr(2)")), target),
    ]
    monkeypatch.setattr(triton, "__version__", "0.0")
    found.append(fingerprint(launch, target))
    assert len(set(found)) == len(found)


def test_fingerprints_depend_on_nothing_else(tmp_path: Path) -> None:
    launch, target = kernel_launch(tmp_path / "one"), TARGETS["sm_80"]
    other = replace(kernel_launch(tmp_path / "two"), name="other", label="other", work=(7,), grid=(3,))
    assert fingerprint(changed(other, D=5), target) == fingerprint(launch, target)


def test_the_pages_show_the_table_and_the_models() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_gpu.py"))["documents"]()
    assert {page.name for page in made} == {"gpu.md", "compiled.md", "loops.md", "scale.md"}
    for page, text in made.items():
        assert page.read_text() == text, "run python docs/make_gpu.py"


def configs_of(label: str) -> list[Config]:
    """Return the configurations that a label names, with the width unknown for lists of layers."""
    parts = label.split(", ")
    options = {"warps": int(parts[1].split()[0]), "stages": int(parts[2].split()[0])}
    if "x" not in parts[0] or len(parts[0].split()[0].split("x")) == 2:
        return []
    return [Config(*map(int, parts[0].split("x")), **options, turned="flat" not in parts)]


def test_no_kernel_takes_more_shared_memory_than_its_table_is_pruned_by() -> None:
    for entry in json.loads(COMMITTED.read_text()):
        device = TARGETS[entry["target"]].device
        dtype, precision = (*entry["dtype"].split(), "highest")[:2]
        stored, family = STORED[dtype], entry["kernel"].split(",")[0]
        form = product_form(stored, precision, device)
        if not entry["multiplies"]:
            continue
        for config in configs_of(entry["config"]):
            if family == "pointwise":
                bound = configs.fused_memory(config, device, form, stored, 1)
            elif entry["kernel"].startswith("gated") and "project" not in entry["kernel"]:
                bound = configs.fused_memory(config, device, form, stored, 2)
            elif family == "edgeconv":
                # Its tiles are parts of those that the table is pruned by.
                whole = [pair[0] for pair in configs.wide(device, form, stored, 1 << 16)]
                bound = max(configs.wide_memory(o, device, form, stored) for o in whole if o.for_gathers() == config)
            else:
                bound = configs.wide_memory(config, device, form, stored)
            assert entry["shared_memory"] <= bound, entry


# The least that a GPU has on which Triton's kernels run: sm_86, and every AMD GPU.
@pytest.mark.parametrize("device", [Device("nvidia", 20, 101376, True), Device("amd", 20, 65536, False)], ids=str)
def test_small_gpus_have_configurations_that_fit(device: Device) -> None:
    for dtype in STORED.values():
        for precision in ("highest", "high", "medium"):
            form = product_form(dtype, precision, device)
            for width in tiles.WIDTHS[:3]:
                assert configs.pointwise(device, form, dtype, width, 1024), (dtype, form, width)
            assert configs.wide(device, form, dtype, 1000), (dtype, form)


GOOD = Compiled(
    kernel="pointwise", target="sm_90", dtype="bf16", config="32x64x64", registers=128, shared_memory=40000, spills=0,
    tensor_core=96, instructions=1000, loop_instructions=300, loop_barriers=4, multiplies=True, overhead=1.0,
    serialized=False, outline="", fingerprint="0123456789abcdef",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spills": 8}, "spills 8 bytes"),
        ({"shared_memory": 240000}, "wants 240000 bytes of shared memory of 232448"),
        ({"tensor_core": 0}, "no tensor-core instruction"),
        ({"loop_barriers": 5}, "has 5 barriers in a loop, more than 4"),
        ({"loop_barriers": 5, "kernel": "pointwise, bias"}, "has 5 barriers in a loop, more than 4"),
        ({"loop_barriers": 5, "kernel": "gated, general", "dtype": "fp32"}, "has 5 barriers in a loop, more than 4"),
        ({"loop_barriers": 5, "kernel": "grouped, general"}, "has 5 barriers in a loop, more than 4"),
        ({"loop_barriers": 5, "target": "gfx942"}, "has 5 barriers in a loop, more than 4"),
        ({"loop_barriers": 41, "target": "sm_100"}, "has 41 barriers in a loop, more than 40"),
        ({"overhead": 1.25}, "issues 1.25 times the tensor-core work"),
        ({"overhead": 1.5, "target": "gfx942"}, "issues 1.50 times the tensor-core work"),
        ({"serialized": True}, "the assembler serialized them"),
        ({"outline": "race: written while wgmma reads it"}, "is wrong in outline: race: written while wgmma reads it"),
    ],
)
def test_faults_are_found(change: dict[str, Any], fault: str) -> None:
    assert aot.faults(GOOD) == []
    (found,) = aot.faults(replace(GOOD, **change))
    assert fault in found


PTX = """
$L__BB0_1:
	mov.u32 	%r1, 0;
$L__BB0_2:
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 1;
	bar.sync 	0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
	@%p1 bra 	$L__BB0_2;
	bar.sync 	0;
	@%p2 bra 	$L__BB0_1;
"""


def test_loops_of_ptx_are_counted() -> None:
    (loop,) = loops.ptx_loops(PTX, 8)
    work = 2 * 64 * 64 * 16 + 8 * 16 * 8 * 16
    assert (loop.instructions, loop.barriers, loop.tensor_core, loop.multiply_adds) == (4, 1, 2, work)
    assert loops.overhead([loop], [work // 2]) == 2
    assert loops.overhead([loop], []) == 0
