"""Recipes on point clouds: sizes of the networks in the paper's table, and runs on small clouds in the true format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import s3d_fast as s3d
from s3d_fast.commands.main import main
from s3d_fast.recipes import recipe
from s3d_fast.recipes.baselines import parameter_count
from s3d_fast.recipes.saved import load_network, saved_network

POINTS = 128
QUICK = ["--preset", "cpu", "--epochs", "1", "--batch-size", "8", "--train-samples", "16", "--test-samples", "8"]
QUICK += ["--split-samples", "8", "--split-batch", "4", "--quiet", "--no-report"]
# A seed network that takes no time.
NARROW = {
    "modelnet40-dgcnn": (4,) * 4,
    "modelnet40-pointnet": (4,) * 12,
    "modelnet40-pointnet2": (4,) * 11,
}
every_recipe = pytest.mark.parametrize("name", NARROW)


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with clouds on ellipsoids, whose axes depend on the class."""
    generator = np.random.default_rng(0)
    arrays = {}
    for split, number in (("train", 16), ("test", 8)):
        labels = np.arange(number) % 4
        points = generator.normal(size=(number, POINTS, 3))
        points /= np.linalg.norm(points, axis=-1, keepdims=True)
        arrays[f"x_{split}"] = points * np.stack([1 - 0.2 * labels, np.ones(number), 0.2 + 0.2 * labels], -1)[:, None]
        arrays[f"y_{split}"] = labels
    path = tmp_path_factory.mktemp("clouds") / "modelnet40.npz"
    np.savez(path, **arrays)
    return path


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def widths_of(name: str) -> str:
    return ",".join(map(str, NARROW[name]))


# From the table of the paper, in millions; at 0.5 it has 1.52, where half the channels in all four layers make 1.48.
@pytest.mark.parametrize(("multiplier", "params"), [(1.0, 1.81), (0.75, 1.64), (0.5, 1.48)])
def test_dgcnn_has_the_sizes_of_the_table_at_every_multiplier(multiplier: float, params: float) -> None:
    entry = recipe("modelnet40-dgcnn").with_settings({"width_multiplier": multiplier})
    assert entry.full() == tuple(int(multiplier * width) for width in (64, 64, 128, 256))
    assert parameter_count(lambda: entry.network(entry.full(), 40)) / 1e6 == pytest.approx(params, rel=0.01)


@pytest.mark.parametrize("multiplier", [0.5, 0.75, 1.0])
def test_dgcnn_is_trained_at_every_multiplier(multiplier: float, clouds: Path, tmp_path: Path) -> None:
    given = ["--method", "full", "--width-multiplier", str(multiplier), "--steps", "0", "--out", str(tmp_path / "run")]
    assert main(["grow", "modelnet40-dgcnn", *QUICK, *given, "--data", str(clouds)]) == 0
    (phase,) = history(tmp_path / "run")
    found = {unit: width for unit, width in phase["widths"].items() if unit.startswith("edgeconvs")}
    assert list(found.values()) == [int(multiplier * width) for width in (64, 64, 128, 256)]


def test_pointnet_and_pointnet2_have_the_sizes_of_their_papers() -> None:
    # Qi et al. (2017a), table 6: 3.5 million parameters. PointNet++ by its layers, as in the test of the network.
    for name, params in (("modelnet40-pointnet", 3.5), ("modelnet40-pointnet2", 1.48)):
        entry = recipe(name)
        assert parameter_count(lambda entry=entry: entry.network(entry.full_widths, 40)) / 1e6 == pytest.approx(
            params, rel=0.02
        )


@pytest.mark.parametrize("name", ["modelnet40-pointnet", "modelnet40-pointnet2"])
def test_seed_networks_have_a_quarter_of_the_filters_that_can_be_split(name: str) -> None:
    entry = recipe(name)
    graph = s3d.trace(entry.network(entry.widths, 40).eval(), torch.zeros(2, POINTS, 3))
    full = s3d.trace(entry.network(entry.full_widths, 40).eval(), torch.zeros(2, POINTS, 3)).widths()
    assert all(4 * width == full[unit] for unit, width in graph.widths().items())


@every_recipe
def test_a_network_grows_is_saved_and_opened_again(
    name: str, clouds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    given = ["--widths", widths_of(name), "--steps", "1", "--fraction", "0.5", "--c", "3", "--out", str(folder)]
    assert main(["grow", name, *QUICK, *given, "--data", str(clouds)]) == 0
    before, after = history(folder)
    assert (
        0
        < sum(before["new_filters"].values())
        <= 0.5 * sum(width for unit, width in before["widths"].items() if recipe(name).may_split(unit))
    )
    assert after["params"] > before["params"]
    assert np.isfinite([phase["metrics"]["loss"] for phase in (before, after)]).all()
    about, path = saved_network(folder, None)
    model = load_network(about, path)
    assert sum(parameter.numel() for parameter in model.parameters()) == after["params"]
    assert model.eval()(torch.zeros(2, POINTS, 3)).shape == (2, 40)
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    assert "Extreme eigenvalues of the filters, from the run" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["modelnet40-pointnet", "modelnet40-pointnet2"])
@pytest.mark.parametrize("method", ["full", "l1", "net2net"])
def test_other_methods_work_as_well(name: str, method: str, clouds: Path, tmp_path: Path) -> None:
    given = ["--method", method, "--steps", "1", "--out", str(tmp_path / "run")]
    given += ["--widths", widths_of(name)] if method == "net2net" else ["--width-multiplier", "0.125"]
    assert main(["grow", name, *QUICK, *given, "--data", str(clouds)]) == 0
    phases = history(tmp_path / "run")
    assert len(phases) == (1 if method == "full" else 2)
    if method == "l1":
        assert phases[1]["macs"] <= 0.5 * phases[0]["macs"]
    if method == "net2net":
        assert phases[1]["macs"] > phases[0]["macs"]
