"""The command line: its output, its files, and its messages for bad input."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import s3d_fast as s3d
from s3d_fast import __version__, report
from s3d_fast.base.tables import text_table
from s3d_fast.commands.main import main
from s3d_fast.recipes import RECIPES, recipe

SMALL = ["--steps", "1", "--epochs", "2", "--widths", "2,3,4", "--train-samples", "64", "--test-samples", "20"]
SMALL += ["--batch-size", "32", "--split-samples", "32", "--split-batch", "16"]
QUICK = [*SMALL, "--quiet", "--no-report"]


def test_rbf_prints_a_table_and_draws_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["rbf", "--steps", "15", "--seeds", "3", "--neurons", "6", "--out", str(tmp_path / "new" / "rbf")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "median [quartiles]" in out
    assert "At 5 neurons, by the median over 3 seeds, S2D ends at" in out
    folder = tmp_path / "new" / "rbf"
    assert (folder / "rbf.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "rbf.txt").read_text().strip() in out
    records = json.loads((folder / "rbf.json").read_text())
    assert {(record["m"], record["c"]) for record in records} == {
        (2, 1.0), (2, 1.5), (2, 2.0), (2, 3.0), (2, 5.0), (3, 3.0), (4, 3.0),
    }  # fmt: skip
    assert all(len(stage["loss"]) == 3 for record in records for stage in record["stages"])


def test_theorems_prints_a_table_and_draws_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "theorems"
    small = ["--dimension", "2", "--samples", "3", "--target", "0.5"]
    assert main(["theorems", *small, "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert (folder / "theorems.txt").read_text().strip() in out
    records = json.loads((folder / "theorems.json").read_text())
    assert [(one["unit"], one["m"]) for one in records] == [
        (u, m) for u in ("quadratic", "softplus") for m in (4, 3, 2)
    ]
    assert all(0 < one["splits"] <= one["bound"] for one in records)
    picture = (folder / "theorems.svg").read_text()
    assert picture.startswith("<svg")
    assert f"at most T = {records[-1]['bound']:,}" in picture


def test_theorems_refuses_data_that_they_say_nothing_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theorems", "--dimension", "2", "--samples", "4", "--out", str(tmp_path / "new")]) == 2
    assert "samples must be at most d (d + 1) / 2 = 3" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_bad_settings_end_with_a_message_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rbf"
    assert main(["rbf", "--neurons", "3", "--out", str(out)]) == 2
    assert "neurons must be an integer >= 5, got 3" in capsys.readouterr().err
    assert not out.exists()


def test_missing_matplotlib_is_reported_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("figures need matplotlib, which is not installed: pip install 's3d_fast[plots]'")

    monkeypatch.setattr(report, "require_matplotlib", missing)
    assert main(["rbf", "--out", str(tmp_path)]) == 2
    assert "s3d_fast[plots]" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert __version__ in capsys.readouterr().out


def test_text_table_aligns_its_columns() -> None:
    assert text_table([["a", "bb"], ["ccc", "d"]]) == "a    bb\n---  --\nccc  d"


def listing(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    for name in RECIPES:
        assert re.search(rf"^{name} +{re.escape(recipe(name).summary)}$", out, re.MULTILINE)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line for line in lines[2:]}
    assert lines[0].split() == ["setting", *RECIPES[name], "what"]
    paper, cpu = (recipe(name, preset).as_settings() for preset in (None, "cpu"))
    assert set(shown) == {"method", *paper}
    assert shown["method"].split()[1:3] == [recipe(name).method, recipe(name, "cpu").method]
    for setting in ("epochs", "batch_size", "learning_rate", "c"):
        assert shown[setting].split()[1:3] == [str(paper[setting]), str(cpu[setting])]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run on digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["grow", "digits", *SMALL, "--preset", "full", "--quiet", "--tensorboard", "--out", str(folder)]) == 0
    return folder


def test_grow_writes_a_run(digits_run: Path) -> None:
    about = json.loads((digits_run / "run.json").read_text())
    assert (about["recipe"], about["preset"], about["method"], about["seed"]) == ("digits", "full", "s3d", 0)
    assert about["settings"] == json.loads(
        json.dumps(
            recipe("digits").as_settings()
            | {"steps": 1, "epochs": 2, "widths": [2, 3, 4], "train_samples": 64, "test_samples": 20, "batch_size": 32}
            | {"split_samples": 32, "split_share": None, "split_batch": 16}
        )
    )
    phases = history(digits_run)
    assert [phase["index"] for phase in phases] == [0, 1]
    assert [len(phase["epochs"]) for phase in phases] == [2, 2]
    assert phases[0]["widths"] == {"0": 2, "3": 3, "6": 4}
    assert sum(phases[1]["widths"].values()) > 9
    assert (digits_run / "report.html").read_text().startswith("<!DOCTYPE html>")
    for file in ("network-000", "network-001", "phase-000", "phase-001", "spectra-000"):
        load_file(digits_run / f"{file}.safetensors")


def test_grow_writes_events(digits_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(digits_run / "tensorboard")).Reload()
    phases = history(digits_run)
    epochs = [epoch for phase in phases for epoch in phase["epochs"]]

    def assert_scalars(tag: str, expected: list[float]) -> None:
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(len(expected)))
        assert [scalar.value for scalar in scalars] == pytest.approx(expected, rel=1e-6)

    assert_scalars("train/loss", [epoch["loss"] for epoch in epochs])
    assert_scalars("train/learning_rate", [epoch["learning_rate"] for epoch in epochs])
    assert_scalars("test/accuracy", [phase["metrics"]["accuracy"] for phase in phases])
    assert_scalars("size/params", [phase["params"] for phase in phases])
    assert_scalars("size/macs", [phase["macs"] for phase in phases])


def test_grow_prints_a_table_and_nothing_else_if_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["grow", "digits", *QUICK, "--out", str(tmp_path / "run")]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["phase", "filters"]
    phases = history(tmp_path / "run")
    assert lines[-1].startswith("Training took ")
    for line, phase in zip(lines[2:-1], phases, strict=True):
        expected = [phase["index"], sum(phase["widths"].values()), phase["params"], phase["macs"]]
        assert line.split()[:5] == [*map(str, expected), f"{phase['metrics']['accuracy']:.4f}"]
    assert not (tmp_path / "run" / "report.html").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_grow_without_a_recipe_grows_on_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["grow", *SMALL, "--no-report", "--steps", "0", "--seed", "3", "--method", "s2d"]) == 0
    # Progress bars go to stderr.
    assert "phase 0" in capsys.readouterr().err
    about = json.loads((tmp_path / "runs" / "digits-s2d-3" / "run.json").read_text())
    assert (about["recipe"], about["method"], about["seed"]) == ("digits", "s2d", 3)


def test_settings_of_every_type_can_be_overridden(tmp_path: Path) -> None:
    given = {"optimizer": "sgd", "momentum": 0.5, "schedule": "step", "decay_at": (0.25, 0.5), "decay": 0.5}
    given |= {"learning_rate": 0.02, "weight_decay": 0.0, "warmup": 0.5, "label_smoothing": 0.1, "eps": 0.02, "m": 3}
    given |= {"c": 2.0, "macs": (10_000,), "tol": 0.1}
    arguments = []
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        arguments += [f"--{name.replace('_', '-')}", text]
    assert main(["grow", *QUICK, *arguments, "--out", str(tmp_path / "run")]) == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert {name: settings[name] for name in given} == json.loads(json.dumps(given))
    assert settings["fraction"] is None
    assert history(tmp_path / "run")[1]["macs"] <= 10_000


def test_grow_resumes(tmp_path: Path, digits_run: Path) -> None:
    out = str(tmp_path / "run")
    assert main(["grow", "digits", *QUICK, "--steps", "0", "--out", out]) == 0
    assert main(["grow", "digits", *QUICK, "--resume", "--out", out]) == 0
    assert [phase["metrics"] for phase in history(tmp_path / "run")] == [
        phase["metrics"] for phase in history(digits_run)
    ]
    # In an empty folder, resuming starts a new run.
    assert main(["grow", "digits", *QUICK, "--steps", "0", "--resume", "--out", str(tmp_path / "new")]) == 0


def test_grow_starts_from_a_saved_network_and_copies_the_sizes_of_a_run(tmp_path: Path, digits_run: Path) -> None:
    start = digits_run / "network-001.safetensors"
    assert main(["grow", "digits", *QUICK, "--start", str(start), "--out", str(tmp_path / "started")]) == 0
    assert history(tmp_path / "started")[0]["metrics"] == history(digits_run)[1]["metrics"]
    arguments = ["--method", "uniform", "--like", str(digits_run), "--scratch", "phase"]
    assert main(["grow", "digits", *QUICK, *arguments, "--out", str(tmp_path / "uniform")]) == 0
    sizes = [phase["params"] for phase in history(tmp_path / "uniform")]
    assert sizes[0] == history(digits_run)[0]["params"]
    assert sizes == sorted(sizes)


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like ImageNet, with a class of red and a class of blue images."""
    folder = tmp_path_factory.mktemp("jpegs")
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for channel, name in ((0, "n0-red"), (2, "n1-blue")):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 80, (224, 224, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(place / f"{number}.JPEG", quality=90)
    return folder


WIDTHS = (4,) * 14


@functools.cache
def seed_macs() -> int:
    return s3d.count(s3d.trace(recipe("imagenet-mobilenet").network(WIDTHS, 2), torch.zeros(1, 3, 224, 224))).macs


@pytest.fixture(scope="module")
def imagenet_run(tmp_path_factory: pytest.TempPathFactory, jpegs: Path) -> Path:
    """The folder of a run of the ImageNet recipe with its paper preset, with small networks and few images."""
    folder = tmp_path_factory.mktemp("runs") / "imagenet"
    arguments = ["--widths", ",".join(map(str, WIDTHS)), "--steps", "1", "--epochs", "1", "--batch-size", "8"]
    arguments += ["--macs", str(int(1.15 * seed_macs())), "--split-samples", "8", "--split-batch", "4"]
    arguments += ["--workers", "0", "--quiet", "--out", str(folder), "--data", str(jpegs)]
    assert main(["grow", "imagenet-mobilenet", "--preset", "paper", *arguments]) == 0
    return folder


def test_imagenet_grows_to_the_given_macs(imagenet_run: Path) -> None:
    about = json.loads((imagenet_run / "run.json").read_text())
    assert (about["recipe"], about["preset"], about["classes"]) == ("imagenet-mobilenet", "paper", 2)
    assert about["input_shape"] == [3, 224, 224]
    assert about["settings"]["learning_rate"] == 0.2
    phases = history(imagenet_run)
    assert phases[0]["macs"] == seed_macs()
    assert seed_macs() < phases[1]["macs"] <= int(1.15 * seed_macs())
    assert [phase["epochs"][0]["samples"] for phase in phases] == [16, 16]
    # Only the pointwise layers grow.
    grown = {unit for unit, width in phases[1]["widths"].items() if width != 4}
    assert grown
    assert all(re.fullmatch(r"blocks\.\d+\.3", unit) for unit in grown)
    assert (imagenet_run / "report.html").stat().st_size > 10_000
    model = recipe("imagenet-mobilenet").network(WIDTHS, 2)
    s3d.load_grown(model, imagenet_run / "network-001.safetensors")
    assert s3d.count(s3d.trace(model, torch.zeros(1, 3, 224, 224))).macs == phases[1]["macs"]
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 2)


@pytest.mark.parametrize("phase", [None, 0, 1])
def test_inspect_shows_layers_and_spectra(
    phase: int | None, digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(digits_run), *([] if phase is None else ["--phase", str(phase)])]) == 0
    out = capsys.readouterr().out
    shown = history(digits_run)[1 if phase is None else phase]
    assert f"network-{shown['index']:03d}.safetensors: {shown['params']} parameters" in out
    assert "from 32 training samples" in out
    layers, spectra = out.split("Extreme eigenvalues")
    for unit, width in shown["widths"].items():
        assert re.search(rf"^{unit} +conv +{width} +yes", layers, re.MULTILINE)
        (row,) = re.findall(rf"^{unit} +{width} +(.*)$", spectra, re.MULTILINE)
        low, middle, high_middle, high, gain, gain_middle = map(float, row.split())
        assert low <= middle <= high_middle <= high
        assert gain <= gain_middle <= 0
        # With c = 1.3, two copies gain at least as much as with S2D.
        assert gain <= min(low, 0)
    # How far copies are apart one phase after their split, over the run and in this network.
    first, second = history(digits_run)[:2]
    assert re.search(rf"^0 +0.01 .* {100 * second['apart']:.1f} % ", layers, re.MULTILINE)
    assert ("Distances of the copies of the split after phase 0" in layers) == (shown["index"] == 1)
    if shown["index"] == 1:
        _, distances = layers.split("Distances of the copies")
        for unit, groups in first["copies"].items():
            assert re.search(rf"^{unit} +{len(groups)} +\S+ % +\S+ % +\S+ %", distances, re.MULTILINE)


def test_inspect_shows_the_spectra_that_the_run_has_saved(
    imagenet_run: Path, jpegs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(imagenet_run), "--phase", "0"]) == 0
    out = capsys.readouterr().out
    assert "from the run" in out
    saved = load_file(imagenet_run / "spectra-000.safetensors")
    for block in range(13):
        low, high = (saved[f"blocks.{block}.3/lambda_{end}"] for end in ("min", "max"))
        (row,) = re.findall(rf"^blocks\.{block}\.3 +4 +(.*)$", out.split("Extreme")[1], re.MULTILINE)
        values = [low.min(), np.median(low), np.median(high), high.max()]
        assert [float(text) for text in row.split()[:4]] == pytest.approx([float(value) for value in values], rel=5e-3)
    # Phase 0 is the last phase with saved spectra, so it is shown by default.
    assert main(["inspect", str(imagenet_run)]) == 0
    assert capsys.readouterr().out == out
    assert main(["inspect", str(imagenet_run), "--phase", "1"]) == 0
    assert "give --data" in capsys.readouterr().out
    assert main(["inspect", str(imagenet_run), "--data", str(jpegs), "--workers", "0"]) == 0
    assert "from 8 training samples" in capsys.readouterr().out


def test_compare_overlays_runs(
    tmp_path: Path, digits_run: Path, imagenet_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert main(["grow", "digits", *QUICK, "--method", "net2net", "--out", str(other)]) == 0
    capsys.readouterr()
    out = tmp_path / "new" / "compare"
    assert main(["compare", str(digits_run), str(other), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "s3d" in printed
    assert "net2net" in printed
    (page,) = (tmp_path / "new").rglob("*.html")
    assert str(page) in printed
    assert "net2net" in page.read_text()


def test_visualize_draws_the_filters_of_a_run(
    tmp_path: Path, imagenet_run: Path, jpegs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(jpegs / "val" / "n0-red" / "0.JPEG")
    before = listing(imagenet_run)
    out = tmp_path / "new" / "filters.png"
    arguments = ["--run", str(imagenet_run), "--image", image, "--layer", "blocks.11.3", "--out", str(out)]
    assert main(["visualize", *arguments, "--phase", "0"]) == 0
    assert re.search(r"takes the image for class [01]\.", capsys.readouterr().out)
    with Image.open(out) as picture:
        assert min(picture.size) > 100
    assert main(["visualize", *arguments, "--label", "1", "--all"]) == 0
    printed = capsys.readouterr().out
    assert "takes the image" not in printed
    assert f"Written: {out}" in printed
    assert listing(imagenet_run) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grow", "mnist"], "mnist"),
        (["grow", "digits", "--method", "pruning"], "pruning"),
        (["grow", "digits", "--epochs", "many"], "--epochs"),
        (["grow", "digits", "--widths", "2,two,2"], "--widths"),
        (["grow", "digits", "--precision", "fp8"], "fp8"),
        (["grow", "digits", "--unknown"], "--unknown"),
        (["recipes", "mnist"], "mnist"),
        (["visualize", "--image", "x.jpg"], "--run"),
        (["visualize", "--run", "run", "--vgg19", "file", "--image", "x.jpg"], "--vgg19"),
        (["compare"], "RUN"),
        (["inspect"], "RUN"),
        (["inspect", "run", "--phase", "last"], "--phase"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_a_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not listing(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grow", "cifar100-mobilenet"], "--data"),
        (["grow", "modelnet40-dgcnn", "--preset", "cpu"], "--data"),
        (["grow", "imagenet-mobilenet"], "--data"),
        (["grow", "digits", "--data", "."], "--data"),
        (["grow", "cifar100-mobilenet", "--data", "missing"], "missing"),
        (["grow", "cifar100-mobilenet", "--data", "empty"], "empty"),
        (["grow", "imagenet-mobilenet", "--data", "empty"], "expected folders train and val"),
        (["grow", "modelnet40-dgcnn", "--data", "empty"], "empty"),
        (["grow", "imagenet-mobilenet", "--data", "JPEGS", "--workers", "0", "--preset", "paper"], "split_batch"),
        (["grow", "digits", "--widths", "2,2"], "widths must be 3"),
        (["grow", "digits", "--epochs", "0"], "epochs"),
        (["grow", "digits", "--c", "0.5"], "c must be"),
        (["grow", "digits", "--split-samples", "5000", "--split-batch", "500"], "split_samples"),
        (["grow", "digits", "--fraction", "0.2", "--macs", "1000"], "one of fraction, macs"),
        (["grow", "digits", "--fraction", "2"], "fraction"),
        (["grow", "digits", "--seed", "-1"], "seed"),
        (["grow", "digits", "--threads", "0"], "thread"),
        (["grow", "digits", "--start", "missing.safetensors"], "missing.safetensors"),
        (["grow", "digits", "--method", "uniform", "--start", "missing.safetensors"], "start"),
        (["grow", "digits", "--like", "missing"], "like"),
        (["grow", "digits", "--scratch", "phase"], "scratch"),
        (["grow", "digits", "--method", "uniform", "--like", "missing"], "missing"),
        (["grow", "digits", "--method", "uniform", "--like", "empty"], "run.json"),
        (["grow", "digits", "--method", "uniform", "--macs", "1,2,3,4,5,6"], "like"),
        (["inspect", "missing"], "missing"),
        (["inspect", "empty"], "empty must be the folder of a run"),
        (["inspect", "DIGITS", "--phase", "7"], "no network of phase 7"),
        (["inspect", "DIGITS", "--phase", "-1"], "no network of phase -1"),
        (["inspect", "DIGITS", "--data", "empty"], "--data"),
        (["inspect", "IMAGENET", "--data", "empty"], "expected folders train and val"),
        (["grow", "--device", "nonsense"], "device 'nonsense' cannot be used"),
        (["grow", "--method", "uniform", "--device", "meta:nonsense"], "device 'meta:nonsense' cannot be used"),
        (["grow", "--label-smoothing", "1.5"], "label_smoothing must be below 1"),
        (["grow", "--method", "uniform", "--decay-at", "2"], "decay_at must hold shares"),
        (["grow", "--method", "uniform", "--fraction", "2"], "fraction must lie in (0, 1]"),
        (["grow", "--method", "s2d", "--c", "2"], "--c has no effect without --method s3d"),
        (["grow", "--method", "net2net", "--m", "3"], "--m has no effect"),
        (["grow", "--momentum", "0.5"], "--momentum has no effect without --optimizer sgd"),
        (["grow", "--decay-at", "0.5"], "--decay-at has no effect without --schedule step"),
        (["grow", "--workers", "2"], "--workers decode JPEGs"),
        (["inspect", "DIGITS", "--memory-budget", "1GB"], "have no effect without --dry-run"),
        (["inspect", "digits", "--dry-run", "--phase", "1"], "--phase goes with a run"),
        (["compare", "missing"], "missing"),
        (["compare", "DIGITS", "empty"], "run.json"),
        (["visualize", "--run", "empty", "--image", "IMAGE"], "empty must be the folder of a run"),
        (["visualize", "--run", "DIGITS", "--image", "IMAGE"], "three channels"),
        (["visualize", "--run", "IMAGENET", "--image", "missing.jpg"], "missing.jpg"),
        (["visualize", "--run", "IMAGENET", "--image", "IMAGE", "--layer", "nowhere"], "nowhere"),
        (["visualize", "--run", "IMAGENET", "--image", "IMAGE", "--label", "2"], "Target 2 is out of bounds"),
        (["visualize", "--vgg19", "missing.pth", "--image", "IMAGE"], "missing.pth"),
    ],
    ids=" ".join,
)
def test_bad_input_ends_with_a_message_and_writes_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    digits_run: Path,
    imagenet_run: Path,
    jpegs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"JPEGS": jpegs, "DIGITS": digits_run, "IMAGENET": imagenet_run}
    places["IMAGE"] = jpegs / "val" / "n0-red" / "0.JPEG"
    before = listing(digits_run) | listing(imagenet_run)
    assert main([str(places.get(argument, argument)) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert "s3d-fast: " in err
    assert message in err
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    assert listing(digits_run) | listing(imagenet_run) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "resume it"),
        (["--seed", "1"], "holds another run: seed is 0 there and 1 here; give another folder"),
        (["--resume", "--seed", "1"], "seed is 0 there and 1 here"),
        (["--resume", "--method", "s2d"], "method is 's3d' there and 's2d' here, c is 1.3 there and 1.0 here;"),
        (["--resume", "--preset", "cpu"], "preset is 'full' there and 'cpu' here"),
        (["--resume", "--eps", "0.02"], "holds another run: eps is 0.01 there and 0.02 here;"),
    ],
    ids=" ".join,
)
def test_the_folder_of_another_run_is_refused(
    changes: list[str], message: str, digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(digits_run)
    again = ["grow", "digits", *SMALL, "--preset", "full", "--out", str(digits_run), "--tensorboard"]
    assert main([*again, *changes]) == 2
    assert message in capsys.readouterr().err
    assert listing(digits_run) == before


def test_inspect_names_the_missing_entries_of_a_description(
    tmp_path: Path, digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "recipe must be a string, got nothing" in capsys.readouterr().err
    about = json.loads((digits_run / "run.json").read_text())
    del about["classes"]
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "does not say classes" in capsys.readouterr().err


def test_networks_from_scratch_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "uniform"
    assert main(["grow", *SMALL, "--method", "uniform", "--quiet", "--no-report", "--out", str(folder)]) == 0
    capsys.readouterr()
    for phase in (0, 1):
        assert main(["inspect", str(folder), "--phase", str(phase)]) == 0
        assert f"size-{phase:03d}" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--phase", "2"]) == 2


def test_the_folder_of_a_grower_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests import grow_worker

    grow_worker.grower(tmp_path, phases=1).run()
    before = listing(tmp_path)
    assert main(["grow", *SMALL, "--quiet", "--out", str(tmp_path)]) == 2
    assert "something else than a recipe" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_a_dry_run_says_what_a_capture_keeps(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "digits", "--dry-run", "--preset", "cpu"]) == 0
    everything = capsys.readouterr().out
    assert "no budget" in everything
    assert "GFLOP" in everything
    assert main(["inspect", str(digits_run), "--dry-run", "--memory-budget", "20MB"]) == 0
    assert "a budget of 19.1 MiB" in capsys.readouterr().out
    # A share of 0.8 is 8 batches of 128; each of three processes gets at most three of them.
    assert main(["inspect", "digits", "--dry-run", "--processes", "3", "--device", "cpu"]) == 0
    shared = capsys.readouterr().out
    assert "8 batches of 128 training samples, 3 in each process" in shared
    assert "the capture of 3 batches" in shared
    assert main(["inspect", "digits", "--dry-run", "--processes", "0"]) == 2
    assert "processes" in capsys.readouterr().err
    assert main(["inspect", "digits", "--dry-run", "--memory-budget", "little"]) == 2
    assert "memory_budget must be a positive number of bytes" in capsys.readouterr().err
