"""The file that `make bench DEVICE=cuda` writes: what it holds, with a GPU that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_report, roofline
from benchmarks.launches import Shape
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.backends.triton import TRITON
from s3d_fast.kernels.launch import Launch
from s3d_fast.maths import reference
from tests.cases import EdgeCase, RowsCase, relative_error

ROOT = Path(__file__).parents[2]
SMALL = {
    "MobileNetV1 1.0x, ImageNet, batch 32": [Shape(40, 16, 8), Shape(20, 300, 12)],
    "DGCNN, batch 16": [Shape(16, 20, 8, True), Shape(24, 6, 5, False, 2)],
}
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "NETWORKS", SMALL)
    monkeypatch.setattr(gpu_report, "ROUNDS", 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)


def test_without_a_gpu_the_command_says_so_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--out", str(tmp_path / "file.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "PyTorch sees none here" in run.stderr
    assert not list(tmp_path.iterdir())


def test_make_asks_first() -> None:
    planned = subprocess.run(["make", "-n", "bench", "DEVICE=cuda"], cwd=ROOT, capture_output=True, text=True).stdout
    assert planned.index("gpu_report --check") < planned.index("pytest") < planned.rindex("gpu_report")
    assert "gpu_report" not in subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.usefixtures("small")
def test_the_file_holds_launches_errors_times_and_predictions(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    extra = {"ratios": {"reference": 2.5}}
    bench.write_text(json.dumps({"benchmarks": [{"group": "S v", "name": "one", "extra_info": extra}]}))
    found = gpu_report.report(bench, TRITON, "cpu")
    assert json.loads(json.dumps(found)) == found
    assert found["environment"]["torch"] == torch.__version__
    assert found["gpu"]["multi_processor_count"] == 132
    assert found["benchmarks"] == [{"group": "S v", "name": "one", "ratios": {"reference": 2.5}}]
    assert [(own["network"], own["rows"]) for own in found["networks"]] == [
        (network, kind) for network in SMALL for kind in ("fp32", "fp32 high", "bf16")
    ]
    for own in found["networks"]:
        # Two parts of bfloat16 have 16 bits, in each of two products.
        assert own["error"] < (2.0**-15 if own["rows"] == "bf16" else 1e-6)
        assert own["error, unfused"] < 1e-4
        assert own["ms"]["shortest"] <= own["ms"]["median"] <= own["ms"]["longest"]
        assert own["predicted, ms"]["fastest"] < own["predicted, ms"]["slowest"]
        assert own["predicted, ms"]["same number of processors"]
    kernels = {launch["kernel"] for own in found["networks"] for launch in own["launches"]}
    assert {"grouped", "wide, project, few rows", "wide, accumulate", "edgeconv, edges"} <= kernels
    assert any(launch["config"] for launch in found["networks"][0]["launches"])
    lines = gpu_report.summary(found).splitlines()
    assert len(lines) == 6
    assert all("predicted" in line and "error" in line for line in lines)


def test_launches_say_what_their_compiled_code_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(n_regs=96, n_spills=8)
    monkeypatch.setattr(Launch, "run", lambda own: compiled)
    with gpu_report.launches() as found:
        assert Launch("one", None, (3, 2), {}, 4, label="32x64").run() is compiled
    takes = {"n_regs": 96, "n_spills": 8}
    assert found == [{"kernel": "one", "config": "32x64", "grid": [3, 2], "warps": 4, "stages": 2, **takes}]


@pytest.mark.usefixtures("small")
def test_a_gpu_that_the_model_does_not_know_has_no_prediction() -> None:
    network = next(iter(SMALL))
    known = gpu_report.gpu()
    assert gpu_report.predicted(known, network, "bf16") is not None
    assert gpu_report.predicted({**known, "major": 12}, network, "bf16") is None
    other = gpu_report.predicted({**known, "multi_processor_count": 114}, network, "bf16")
    assert other is not None
    assert not other["same number of processors"]
    amd = {"hip": "7.0", "gcnArchName": "gfx942:sramecc+", "multi_processor_count": 304}
    assert gpu_report.predicted(amd, network, "fp32") is not None


def test_a_graph_that_cannot_be_captured_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(call: Any) -> Any:
        raise RuntimeError("no stream")

    monkeypatch.setattr(gpu_report, "in_graph", refuse)
    assert gpu_report.of_graph(lambda: None) == "failed: no stream"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_unfused_form_agrees_with_the_reference(dtype: torch.dtype) -> None:
    for bias in (False, True):
        case = RowsCase(50, 20, 7, dtype, bias)
        X, C = case.tensors()
        V = torch.randn(7, 20 + bias)
        exact = reference.splitting_matvec(X.double(), C.double(), V.double(), bias)
        assert relative_error(gpu_report.unfused_rows(X, C, V, bias), exact) < 1e-4
    X, winner, C = EdgeCase(2, 9, 6, 4, 5, dtype).won()
    V = torch.randn(5, 12)
    given = {"X": X, "winner": winner, "C": C, "V": V, "bias": False, "incoming": None, "ties": None}
    double = {name: value.double() if name in ("X", "C", "V") else value for name, value in given.items()}
    exact = REFERENCE.edgeconv_matvec(**double)
    assert relative_error(gpu_report.unfused_edges(X, winner, C, V), exact) < 1e-4
