"""Recipes: the paper's numbers, checks of settings, and runs with every method, repeated and resumed."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast import data
from s3d_fast.growth import split_step as growth
from s3d_fast.network.edgeconv import EdgeConv
from s3d_fast.recipes import RECIPES, Recipe, preset_for, recipe
from s3d_fast.recipes.baselines import parameter_count
from s3d_fast.recipes.from_scratch import uniform_sizes
from s3d_fast.recipes.job import Job, evaluate, make_loss, make_network, make_optimizer
from s3d_fast.recipes.methods import METHODS
from s3d_fast.recipes.running import run
from s3d_fast.recipes.split_data import SplitData

EVERY = [(name, preset) for name, presets in RECIPES.items() for preset in presets]
every_recipe = pytest.mark.parametrize(("name", "preset"), EVERY, ids=["-".join(pair) for pair in EVERY])
SHAPES = {
    "digits": (1, 8, 8),
    "cifar100-mobilenet": (3, 32, 32),
    "modelnet40-dgcnn": (128, 3),
    "modelnet40-pointnet": (128, 3),
    "modelnet40-pointnet2": (128, 3),
    "imagenet-mobilenet": (3, 64, 64),
}
CLASSES = {"digits": 10, "cifar100": 100, "modelnet40": 40, "imagenet": 1000}
# The paper grows neither of these.
OUR_OWN = ("digits", "modelnet40-pointnet", "modelnet40-pointnet2")


def test_there_is_a_recipe_for_every_experiment() -> None:
    assert set(RECIPES) == set(SHAPES)
    for name, presets in RECIPES.items():
        more = ("energy", "energy-cpu") if name == "cifar100-mobilenet" else ()
        assert tuple(presets) == ("full" if name in OUR_OWN else "paper", "cpu", *more)
        assert recipe(name) is recipe(name, preset_for(name, has_gpu=True))
        assert recipe(name, preset_for(name, has_gpu=False)) is presets["cpu"]
        for preset, entry in presets.items():
            assert recipe(name, preset) is entry
            assert entry.name == name
            assert entry.dataset in data.SETS
            # Outside of the paper's numbers, MobileNets grow by what wins at equal compute: docs/results.md, D.
            wins = name.endswith("mobilenet") and preset == "cpu"
            assert entry.method == ("new" if wins else "s3d")
            assert METHODS[entry.method].kind == "grow"
            assert (entry.growth is not None and entry.cost == "macs") or not wins


@pytest.mark.parametrize(("name", "preset", "argument"), [("mnist", "paper", "recipe"), ("digits", "paper", "preset")])
def test_an_unknown_recipe_or_preset_is_an_error(name: str, preset: str, argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        recipe(name, preset)


def test_the_energy_aware_setting_reaches_the_flops_of_the_table() -> None:
    paper, energy = recipe("cifar100-mobilenet", "paper"), recipe("cifar100-mobilenet", "energy")
    changed = {name for name, value in energy.as_settings().items() if value != paper.as_settings()[name]}
    assert changed == {"fraction", "growth"}
    seed = s3d.count(s3d.trace(make_network(energy, 100), torch.zeros(2, 3, 32, 32), prove=False)).macs
    assert energy.growth is not None
    assert 2 * seed * energy.growth**energy.steps == pytest.approx(73.69e6, rel=0.01)


# From the appendix, section CIFAR-100; the table of results has five steps.
CIFAR100 = {
    "widths": (32,) * 14,
    "steps": 5,
    "epochs": 160,
    "batch_size": 128,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.1,
    "weight_decay": 1e-4,
    "schedule": "step",
    "decay_at": (0.5, 0.75),
    "decay": 0.1,
    "warmup": 0,
    "eps": 0.01,
    "m": 2,
    "c": 1.3,
    "fraction": 0.35,
    "macs": None,
    "train_samples": None,
    "test_samples": None,
}
# From the section Point Cloud Classification: four steps, each with 40% more filters.
MODELNET40 = {
    "widths": (16,) * 4,
    "steps": 4,
    "epochs": 250,
    "batch_size": 32,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "warmup": 0,
    "eps": 0.01,
    "m": 2,
    "c": 1.3,
    "fraction": 0.4,
    "macs": None,
    "train_samples": None,
    "test_samples": None,
}
# From the section ImageNet: 128 samples on each of four GPUs, and the MACs of S3D-1 to S3D-4.
IMAGENET = {
    "steps": 4,
    "batch_size": 512,
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "schedule": "cosine",
    "warmup": 5,
    "label_smoothing": 0.1,
    "eps": 0.01,
    "m": 2,
    "fraction": None,
    "macs": (82_000_000, 140_000_000, 291_000_000, 558_000_000),
    "train_samples": None,
    "test_samples": None,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("cifar100-mobilenet", CIFAR100), ("modelnet40-dgcnn", MODELNET40), ("imagenet-mobilenet", IMAGENET)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_have_the_numbers_of_the_paper(name: str, settings: dict[str, Any]) -> None:
    stated = recipe(name).as_settings()
    assert {setting: stated[setting] for setting in settings} == settings


def test_full_networks_have_the_sizes_in_the_paper() -> None:
    mobilenet = (32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    assert recipe("cifar100-mobilenet").full_widths == recipe("imagenet-mobilenet").full_widths == mobilenet
    assert recipe("modelnet40-dgcnn").full_widths == (64, 64, 128, 256)
    cifar, dgcnn, imagenet = (recipe(name) for name in ("cifar100-mobilenet", "modelnet40-dgcnn", "imagenet-mobilenet"))
    # From the tables of the paper: parameters and MACs of the full networks, in millions.
    assert parameter_count(lambda: cifar.network(mobilenet, 100)) / 1e6 == pytest.approx(3.31, rel=0.01)
    assert parameter_count(lambda: dgcnn.network((64, 64, 128, 256), 40)) / 1e6 == pytest.approx(1.81, rel=0.01)
    assert macs(imagenet, mobilenet, 1000, (3, 224, 224)) / 1e6 == pytest.approx(569, rel=0.01)


def macs(entry: Recipe, widths: tuple[int, ...], classes: int, shape: tuple[int, ...]) -> int:
    return s3d.count(s3d.trace(entry.network(widths, classes), torch.zeros(1, *shape))).macs


def test_the_seed_for_imagenet_has_the_macs_of_the_paper() -> None:
    entry = recipe("imagenet-mobilenet")
    assert entry.data_options == {"size": 224}
    found = macs(entry, entry.widths, 1000, (3, 224, 224))
    assert found / 1e9 == pytest.approx(0.059, rel=0.01)
    # All layers are narrowed by the same factor.
    ratios = [width / full for width, full in zip(entry.widths, entry.full_widths, strict=True)]
    assert max(ratios) - min(ratios) < 0.5 / min(entry.full_widths) + 0.5 / 64
    assert entry.macs is not None
    assert list(itertools.accumulate((found, *entry.macs), max)) == [found, *entry.macs]


def test_clouds_have_the_points_and_neighbours_of_the_paper() -> None:
    assert recipe("modelnet40-dgcnn").data_options == {"points": 1024}
    assert {module.k for module in recipe("modelnet40-dgcnn").network((4,) * 4, 40).edgeconvs} == {20}


@pytest.mark.parametrize(
    ("name", "epoch", "rate"),
    [
        ("cifar100-mobilenet", 0, 0.1),
        ("cifar100-mobilenet", 79.9, 0.1),
        ("cifar100-mobilenet", 80, 0.01),
        ("cifar100-mobilenet", 120, 0.001),
        ("modelnet40-dgcnn", 0, 0.1),
        ("modelnet40-dgcnn", 125, 0.05),
        ("modelnet40-dgcnn", 250, 0.0),
        ("imagenet-mobilenet", 0, 0.0),
        ("imagenet-mobilenet", 2.5, 0.1 * (1 + math.cos(math.pi * 2.5 / 120)) / 2),
        ("imagenet-mobilenet", 60, 0.1),
        ("imagenet-mobilenet", 120, 0.0),
        ("digits", 15, 0.005),
    ],
)
def test_learning_rates_follow_the_paper(name: str, epoch: float, rate: float) -> None:
    entry = recipe(name)
    assert entry.learning_rate * entry.learning_rates()(epoch) == pytest.approx(rate, abs=1e-12)


def test_a_constant_schedule_can_be_warmed_up() -> None:
    schedule = recipe("digits").with_settings({"schedule": "constant", "warmup": 2}).learning_rates()
    assert [schedule(epoch) for epoch in (0, 1, 2, 30)] == [0, 0.5, 1, 1]


def test_the_loss_is_smoothed() -> None:
    output, target = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5
    log = output.log_softmax(1)
    by_hand = -(0.9 * log[torch.arange(6), target] + 0.1 * log.mean(1)).mean()
    torch.testing.assert_close(make_loss(recipe("imagenet-mobilenet"))(output, target), by_hand)
    plain = make_loss(recipe("cifar100-mobilenet"))(output, target)
    torch.testing.assert_close(plain, -log[torch.arange(6), target].mean())


def small_network(name: str, preset: str) -> tuple[Recipe, nn.Module]:
    entry = recipe(name, preset)
    torch.manual_seed(0)
    return entry, entry.network((4,) * len(entry.widths), CLASSES[entry.dataset])


@every_recipe
def test_recipes_split_the_layers_that_they_name(name: str, preset: str) -> None:
    entry, model = small_network(name, preset)
    graph = s3d.trace(model, torch.zeros(2, *SHAPES[name]))
    split = {unit for unit in graph.units if entry.may_split(unit)}
    if name == "modelnet40-dgcnn":
        wanted = {layer for layer, module in model.named_modules() if isinstance(module, EdgeConv)}
        assert len(wanted) == 4
        # The other units could be split but are not.
        assert len(graph.units) > 4
    elif name in ("modelnet40-pointnet", "modelnet40-pointnet2"):
        wanted = {layer for layer, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
        # Outputs and predicted matrices; and the layer whose channels such a matrix mixes.
        wanted -= {"head.8", "local.3", "input_transform.head.8", "feature_transform.head.8"}
        assert len(wanted) == {"modelnet40-pointnet": 16, "modelnet40-pointnet2": 11}[name]
    elif name == "digits":
        wanted = {layer for layer, module in model.named_modules() if isinstance(module, nn.Conv2d)}
        assert len(wanted) == 3
    else:
        wanted = {
            layer
            for layer, module in model.named_modules()
            if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
        }
        assert len(wanted) == len(entry.widths) - 1
        assert "stem.0" not in split
    assert split == wanted
    if name != "digits":
        # No other module may be split: not depthwise layers, BatchNorms or the blocks themselves.
        assert {layer for layer, _ in model.named_modules() if entry.may_split(layer)} == wanted


@every_recipe
def test_only_weights_of_layers_decay(name: str, preset: str) -> None:
    entry, model = small_network(name, preset)
    optimizer = make_optimizer(entry)(model.parameters())
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert {group["weight_decay"] for group in optimizer.param_groups} == {entry.weight_decay, 0}
    assert entry.weight_decay > 0
    layers = (nn.Conv2d, nn.Linear, EdgeConv)
    weights = {id(module.weight) for module in model.modules() if isinstance(module, layers)}
    assert decayed == weights
    for group in optimizer.param_groups:
        assert group["lr"] == entry.learning_rate
        assert group.get("momentum", entry.momentum) == entry.momentum
    assert isinstance(optimizer, torch.optim.Adam if entry.optimizer == "adam" else torch.optim.SGD)


@every_recipe
def test_settings_survive_json(name: str, preset: str) -> None:
    entry = recipe(name, preset)
    settings = json.loads(json.dumps(entry.as_settings()))
    assert set(settings) == set(Recipe.settings())
    assert entry.with_settings(settings) == entry
    # They turn the other preset into this one: they contain everything that a user can set.
    other = recipe(name, None if preset == "cpu" else "cpu")
    if len(other.full_widths) == len(entry.full_widths):
        assert other.with_settings(settings).as_settings() == entry.as_settings()


def test_settings_are_changed_in_a_copy() -> None:
    entry = recipe("digits")
    changed = entry.with_settings({"epochs": 3, "widths": [1, 2, 3]})
    assert (changed.epochs, changed.widths) == (3, (1, 2, 3))
    assert replace(changed, epochs=entry.epochs, widths=entry.widths) == entry
    with pytest.raises(FrozenInstanceError):
        entry.epochs = 5  # type: ignore[misc]


def test_a_fraction_replaces_macs_and_macs_replace_a_fraction() -> None:
    by_fraction = recipe("imagenet-mobilenet").with_settings({"fraction": 0.2})
    assert (by_fraction.fraction, by_fraction.macs) == (0.2, None)
    by_macs = recipe("digits").with_settings({"macs": [1, 2, 3, 4, 5, 6]})
    assert (by_macs.fraction, by_macs.macs) == (None, (1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("widths", (2, 2)),
        ("widths", (2, 0, 2)),
        ("steps", -1),
        ("steps", 1.5),
        ("epochs", 0),
        ("batch_size", 0),
        ("train_samples", 0),
        ("test_samples", -3),
        ("optimizer", "lbfgs"),
        ("learning_rate", 0),
        ("learning_rate", math.nan),
        ("momentum", -0.1),
        ("weight_decay", -1e-4),
        ("weight_decay", math.inf),
        ("schedule", "linear"),
        ("decay", 0),
        ("warmup", -1),
        ("label_smoothing", -0.1),
        ("label_smoothing", 1.0),
        ("momentum", 1.5),
        ("decay_at", (0.5, 2.0)),
        ("fraction", 0),
        ("fraction", 1.5),
        ("fraction", -0.5),
        ("widths", (1.5, 2, 2)),
        ("widths", 3),
        ("macs", (-1,) * 6),
        ("macs", (1.5,) * 6),
        ("eps", 0),
        ("m", 5),
        ("c", 0.5),
        ("macs", (10, 20)),
        ("split_samples", 0),
        ("split_samples", 100),
        ("split_batch", 0),
        ("tol", 0),
    ],
)
def test_bad_settings_are_named(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{setting} "):
        recipe("digits").with_settings({setting: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "'epoch' is not a setting"),
        ({"name": "other"}, "'name' is not a setting"),
        ({"fraction": 0.2, "macs": [1] * 6}, "one of fraction, macs"),
        ({"fraction": None}, "one of fraction, macs"),
    ],
    ids=["unknown", "no-setting", "both", "neither"],
)
def test_unknown_and_contradictory_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("digits").with_settings(settings)


def test_metrics_agree_with_a_computation_by_hand() -> None:
    class Fixed(nn.Module):
        """Returns its input; it needs a parameter only to have a device."""

        def __init__(self) -> None:
            super().__init__()
            self.zero = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.zero

    output = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))
    target = torch.arange(20) % 12
    batches = list(zip(output.split(8), target.split(8), strict=True))
    ranks = (output > output[torch.arange(20), target][:, None]).sum(1)
    found = evaluate(Fixed(), batches)
    assert found == {
        "accuracy": int((ranks == 0).sum()) / 20,
        "top5": int((ranks < 5).sum()) / 20,
        "loss": pytest.approx(float(nn.functional.cross_entropy(output, target)), rel=1e-6),
    }
    # With ten classes there is no top5.
    assert set(evaluate(Fixed(), [(output[:, :10], target % 10)])) == {"accuracy", "loss"}


TINY = recipe("digits").with_settings(
    {
        "steps": 2,
        "epochs": 1,
        "widths": (3, 4, 5),
        "fraction": 0.5,
        "c": 3.0,
        "train_samples": 96,
        "test_samples": 40,
        "batch_size": 32,
        "split_samples": 32,
        "split_batch": 16,
    }
)


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.digits()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, digits: data.Dataset) -> tuple[Path, list[s3d.Phase]]:
    """The folder and the history of a run of S3D."""
    folder = tmp_path_factory.mktemp("runs") / "s3d"
    return folder, run(Job(TINY, digits, out=folder))


def test_split_time_is_a_share_of_the_median_epoch(digits: data.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []
    count = SplitData.count
    monkeypatch.setattr(SplitData, "count", lambda self, seconds: asked.append(seconds) or count(self, seconds))
    history = run(Job(TINY.with_settings({"split_time": 0.5, "epochs": 3}), digits))
    assert len(asked) == 2
    for phase, seconds in zip(history, asked, strict=False):
        assert seconds == sorted(epoch["seconds"] for epoch in phase.epochs)[1]
        assert 1 <= phase.batches <= 6


def test_a_memory_budget_that_is_too_small_is_refused_before_training(digits: data.Dataset, tmp_path: Path) -> None:
    job = Job(TINY.with_settings({"memory_budget": "100B"}), digits, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"memory_budget is too small.*larger budget, or smaller batches"):
        run(job)
    assert not (tmp_path / "run").exists()
    # Random splits capture nothing, so any budget is enough.
    assert len(run(replace(job, method="net2net"))) == 3


def test_a_run_resumes_with_another_memory_budget_and_without_newer_settings(
    digits: data.Dataset, tmp_path: Path, done: tuple[Path, list[s3d.Phase]]
) -> None:
    folder = shutil.copytree(done[0], tmp_path / "run")
    about = json.loads((folder / "run.json").read_text())
    for name in ("split_share", "split_time"):
        assert about["settings"].pop(name) is None
    (folder / "run.json").write_text(json.dumps(about))
    recipe = TINY.with_settings({"memory_budget": "1MB", "split_batch": 8})
    assert record(run(Job(recipe, digits, out=folder), resume=True)) == record(done[1])
    with pytest.raises(ValueError, match=r"split_share is None there and 0\.5 here"):
        run(Job(TINY.with_settings({"split_share": 0.5}), digits, out=folder), resume=True)


def record(history: list[s3d.Phase]) -> str:
    """Return a history without times, as text, because NaN is unequal to itself."""
    plain = [{name: value for name, value in asdict(phase).items() if name != "seconds"} for phase in history]
    for phase in plain:
        phase["epochs"] = [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in phase["epochs"]]
    return json.dumps(plain)


def networks(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.rglob("network-*.safetensors"))}


def assert_same_networks(first: Path, second: Path) -> None:
    one, other = networks(first), networks(second)
    assert list(one) == list(other)
    for file, tensors in one.items():
        assert set(tensors) == set(other[file])
        for name, tensor in tensors.items():
            assert torch.equal(tensor, other[file][name]), (file, name)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", ["s3d", "s2d", "net2net"])
def test_a_run_grows_by_the_share_of_the_recipe(
    method: str, digits: data.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[Tensor] = []
    original = growth.apply_splits

    def noted(model: nn.Module, plan: s3d.SplitPlan, *args: Any, **options: Any) -> None:
        weights.extend(split.weights for split in plan.splits)
        original(model, plan, *args, **options)

    monkeypatch.setattr(growth, "apply_splits", noted)
    told: list[int] = []
    history = run(Job(TINY, digits, method=method, after_phase=lambda phase: told.append(phase.index)))
    assert told == [phase.index for phase in history] == [0, 1, 2]
    assert [len(phase.epochs) for phase in history] == [1, 1, 1]
    assert history[0].widths == {"0": 3, "3": 4, "6": 5}
    # At most half of 12 and half of 18; some neurons may gain nothing.
    first, second = (sum(phase.new_filters.values()) for phase in history[:2])
    assert 0 < first <= 6
    assert 0 < second <= 9
    if method == "net2net":
        assert (first, second) == (6, 9)
        assert all(math.isnan(gain) for phase in history[:2] for gain in phase.gains.values())
    else:
        assert all(gain < 0 for phase in history[:2] for gain in phase.gains.values())
    assert bool(torch.cat(weights).min() < 0) == (method == "s3d")
    assert [phase.splits for phase in history] == [first, second, 0]
    assert sum(phase.negative for phase in history) == sum(bool(split.min() < 0) for split in weights)
    if method != "s3d":
        assert bool((torch.cat(weights) == 0.5).all())
    for before, after in itertools.pairwise(history):
        grown = {unit: width + before.new_filters.get(unit, 0) for unit, width in before.widths.items()}
        assert after.widths == grown
    for phase in history:
        network = TINY.network(tuple(phase.widths.values()), 10)
        assert phase.params == sum(parameter.numel() for parameter in network.parameters())
        assert 0 <= phase.metrics["accuracy"] <= 1


def test_all_methods_begin_with_the_same_network(digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]) -> None:
    for method in ("s2d", "net2net"):
        history = run(Job(replace(TINY, steps=0), digits, method=method))
        assert history[0].metrics == done[1][0].metrics
        assert history[0].epochs[0]["loss"] == done[1][0].epochs[0]["loss"]


def test_a_run_learns(digits: data.Dataset) -> None:
    settings = {"steps": 1, "epochs": 4, "train_samples": 512, "batch_size": 16, "test_samples": None}
    history = run(Job(TINY.with_settings(settings), digits))
    assert history[-1].metrics["accuracy"] > 0.5


def test_a_seed_determines_a_run(tmp_path: Path, digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]) -> None:
    torch.manual_seed(99)
    assert record(run(Job(TINY, digits, out=tmp_path / "same"))) == record(done[1])
    assert_same_networks(tmp_path / "same", done[0])
    other = run(Job(TINY, digits, seed=1, out=tmp_path / "other"))
    assert other[0].epochs[0]["loss"] != done[1][0].epochs[0]["loss"]


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = make_network(TINY, 10, seed=3)
    torch.manual_seed(2)
    same, other = make_network(TINY, 10, seed=3), make_network(TINY, 10, seed=4)
    assert torch.equal(first[0].weight, same[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_the_folder_of_a_run_describes_it(done: tuple[Path, list[s3d.Phase]]) -> None:
    folder, history = done
    about = json.loads((folder / "run.json").read_text())
    assert (about["recipe"], about["preset"], about["method"], about["seed"]) == ("digits", "full", "s3d", 0)
    assert recipe("digits").with_settings(about["settings"]) == TINY
    assert (about["classes"], about["input_shape"]) == (10, [1, 8, 8])
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["params"] for line in lines] == [phase.params for phase in history]
    assert list(networks(folder)) == [f"network-{index:03d}.safetensors" for index in range(3)]


class Stop(Exception):
    """Raised to end a run on purpose."""


def stop_after(index: int) -> Callable[[s3d.Phase], None]:
    def after_phase(phase: s3d.Phase) -> None:
        if phase.index == index:
            raise Stop

    return after_phase


@pytest.mark.parametrize("method", ["s3d", "net2net", "uniform"])
@pytest.mark.parametrize("index", [0, 1])
def test_an_interrupted_run_resumes(method: str, index: int, tmp_path: Path, digits: data.Dataset) -> None:
    whole = run(Job(TINY, digits, method=method, out=tmp_path / "whole"))
    job = Job(TINY, digits, method=method, out=tmp_path / "run", after_phase=stop_after(index))
    with pytest.raises(Stop):
        run(job)
    told: list[int] = []
    resumed = run(replace(job, after_phase=lambda phase: told.append(phase.index)), resume=True)
    assert record(resumed) == record(whole)
    assert told == list(range(index + 1, 3))
    assert_same_networks(tmp_path / "run", tmp_path / "whole")
    lines = [(tmp_path / name / "history.jsonl").read_text().splitlines() for name in ("run", "whole")]
    assert [len(found) for found in lines] == [3, 3]


def test_a_finished_run_is_not_run_again(digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]) -> None:
    before = {name: content for name, content in contents(done[0]).items() if name != "run.json"}
    history = run(Job(TINY, digits, out=done[0], after_phase=stop_after(0)), resume=True)
    assert record(history) == record(done[1])
    assert {name: content for name, content in contents(done[0]).items() if name != "run.json"} == before


def test_a_run_begins_with_a_saved_network(
    tmp_path: Path, digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]
) -> None:
    saved = done[0] / "network-001.safetensors"
    history = run(Job(TINY, digits, start=saved, seed=5, out=tmp_path / "run"))
    assert history[0].epochs == []
    assert history[0].widths == done[1][1].widths
    assert history[0].metrics == done[1][1].metrics
    assert [len(phase.epochs) for phase in history] == [0, 1, 1]
    assert history[1].params > history[0].params
    # With the same initial weights, later random numbers still depend on the seed.
    other = run(Job(replace(TINY, steps=1), digits, start=saved, seed=6))
    assert other[0].metrics == history[0].metrics
    assert other[1].epochs[0]["loss"] != history[1].epochs[0]["loss"]
    first, start = load_file(tmp_path / "run" / "network-000.safetensors"), load_file(saved)
    assert all(torch.equal(tensor, start[name]) for name, tensor in first.items())


@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resume"])
@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"seed": 1}, "seed"),
        ({"method": "s2d"}, "method"),
        ({"method": "uniform"}, "method"),
        ({"preset": "cpu"}, "preset"),
        ({"precision": "bf16"}, "precision"),
        ({"recipe": replace(TINY, eps=0.02)}, "settings"),
        ({"recipe": replace(TINY, epochs=2)}, "settings"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_the_folder_of_another_run_is_refused(
    changes: dict[str, Any], differing: str, resume: bool, digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]
) -> None:
    before = contents(done[0])
    with pytest.raises(ValueError, match=rf"out: .*{differing}"):
        run(replace(Job(TINY, digits, out=done[0]), **changes), resume=resume)
    assert contents(done[0]) == before


def test_a_folder_that_holds_the_run_is_not_overwritten(
    digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]
) -> None:
    before = contents(done[0])
    with pytest.raises(ValueError, match="holds a run already"):
        run(Job(TINY, digits, out=done[0]))
    assert contents(done[0]) == before


def test_a_run_resumes_for_more_steps(tmp_path: Path, digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]) -> None:
    run(Job(replace(TINY, steps=1), digits, out=tmp_path / "run"))
    history = run(Job(TINY, digits, out=tmp_path / "run"), resume=True)
    assert [phase.widths for phase in history] == [phase.widths for phase in done[1]]
    assert [phase.metrics for phase in history] == [phase.metrics for phase in done[1]]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["steps"] == 2


@pytest.mark.parametrize(("scratch", "epochs"), [("total", [1, 2, 3]), ("phase", [1, 1, 1])])
def test_networks_from_scratch_train_for_the_given_epochs(
    scratch: str, epochs: list[int], digits: data.Dataset
) -> None:
    history = run(Job(TINY, digits, method="uniform", scratch=scratch))
    assert [phase.index for phase in history] == [0, 1, 2]
    assert [len(phase.epochs) for phase in history] == epochs
    assert [phase.new_filters for phase in history] == [{}, {}, {}]
    # Every network has half as many filters again as the one before.
    for phase, wanted in zip(history, (12, 18, 27), strict=True):
        assert abs(sum(phase.widths.values()) - wanted) <= 1
    assert history[0].widths == {"0": 3, "3": 4, "6": 5}


def test_networks_from_scratch_have_the_sizes_of_a_given_run(
    tmp_path: Path, digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]
) -> None:
    job = Job(TINY, digits, method="uniform", scratch="phase", like=done[0], out=tmp_path / "run")
    history = run(job)
    sizes = {
        widths: parameter_count(lambda widths=widths: TINY.network(widths, 10))
        for widths in {tuple(max(1, round(k / 997 * width)) for width in TINY.widths) for k in range(1, 5 * 997)}
    }
    for phase, grown in zip(history, done[1], strict=True):
        closest = min(abs(size - grown.params) for size in sizes.values())
        assert abs(phase.params - grown.params) <= closest
        assert tuple(phase.widths.values()) in sizes
    assert history[0].params == done[1][0].params
    assert [tuple(phase.widths.values()) for phase in history] == uniform_sizes(job)
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 3


def test_a_run_that_gives_the_sizes_must_have_enough_phases(
    tmp_path: Path, digits: data.Dataset, done: tuple[Path, list[s3d.Phase]]
) -> None:
    job = Job(replace(TINY, steps=5), digits, method="uniform", like=done[0], out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"like: .*3 phases"):
        run(job)
    assert not (tmp_path / "run").exists()


def test_macs_bound_the_growth(digits: data.Dataset) -> None:
    seed = macs(TINY, TINY.widths, 10, (1, 8, 8))
    targets = (int(1.3 * seed), int(1.8 * seed))
    for method in ("s3d", "net2net"):
        history = run(Job(TINY.with_settings({"macs": targets}), digits, method=method))
        assert history[0].macs == seed
        for phase, target in zip(history[1:], targets, strict=True):
            assert 0.8 * target < phase.macs <= target
    with pytest.raises(ValueError, match="like"):
        run(Job(TINY.with_settings({"macs": targets}), digits, method="uniform"))


def test_uniform_networks_grow_by_macs_where_growth_does(digits: data.Dataset) -> None:
    sizes = uniform_sizes(Job(TINY.with_settings({"growth": 1.8}), digits, method="uniform"))
    assert sizes[0] == TINY.widths
    found = [macs(TINY, widths, 10, (1, 8, 8)) for widths in sizes]
    assert len(found) == TINY.steps + 1
    for step, own in enumerate(found):
        # Widths are integers: all layers together get one filter more or less.
        assert own == pytest.approx(found[0] * 1.8**step, rel=0.3)
    with pytest.raises(ValueError, match="like"):
        uniform_sizes(Job(TINY.with_settings({"growth": 1.8, "cost": "params"}), digits, method="uniform"))


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"method": "pruning"}, "method"),
        ({"scratch": "none", "method": "uniform"}, "scratch"),
        ({"seed": -1}, "seed"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used"),
        ({"like": Path("somewhere")}, "like"),
        ({"scratch": "phase"}, "scratch"),
        ({"start": Path("somewhere"), "method": "uniform"}, "start"),
        ({"recipe": replace(TINY, split_samples=128)}, "split_samples"),
    ],
    ids=["method", "scratch", "seed", "device", "like", "scratch-grown", "start", "split_samples"],
)
def test_bad_jobs_are_refused(changes: dict[str, Any], argument: str, digits: data.Dataset) -> None:
    with pytest.raises(ValueError, match=argument):
        replace(Job(TINY, digits), **changes)


def test_there_are_ways_to_grow_to_prune_and_to_train() -> None:
    kinds = {kind: [name for name, method in METHODS.items() if method.kind == kind] for kind in ("grow", "prune")}
    assert kinds["grow"] == ["s3d", "s2d", "net2net", "new", "firefly", "gradmax", "regrow"]
    assert kinds["prune"] == ["l1", "bn", "morphnet", "amc"]
    assert [name for name in METHODS if name not in kinds["grow"] + kinds["prune"]] == ["full", "uniform", "scratch"]


def test_a_recipe_uses_the_given_numbers_of_samples(digits: data.Dataset) -> None:
    job = Job(TINY, digits)
    assert (len(job.train_set), len(job.test_set)) == (96, 40)
    every = Job(replace(TINY, train_samples=None, test_samples=10**6), digits)
    assert (len(every.train_set), len(every.test_set)) == (1437, 360)


def test_a_run_does_not_start_from_a_network_of_another_recipe(tmp_path: Path, digits: data.Dataset) -> None:
    path = tmp_path / "other.safetensors"
    s3d.save_grown(nn.Linear(3, 2), path)
    with pytest.raises(ValueError, match=re.escape("the file does not belong to this model")):
        run(Job(TINY, digits, start=path, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
