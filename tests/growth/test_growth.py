"""Growth: the record of every phase, and runs that end the same after an interruption or a kill."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import s3d_fast as s3d
from s3d_fast.growth import grower
from s3d_fast.growth import split_step as growth
from s3d_fast.models.mlp import MLP
from s3d_fast.recipes.baselines import random_plan
from tests import grow_worker

ROOT = Path(__file__).parents[2]
STAGES = {"train", "evaluate", "capture", "solve", "select", "split", "measure"}
cross_entropy = nn.functional.cross_entropy


class Shuffled:
    """Batches in an order drawn from the global random state."""

    def __init__(self, x: Tensor, target: Tensor, size: int) -> None:
        self.x, self.target, self.size = x, target, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x)).split(self.size):
            yield self.x[rows], self.target[rows]


def smooth_grower(**options: Any) -> s3d.Grower:
    """Return a Grower of a float64 network with smooth activations, so that the effect of splits can be predicted."""
    x, target = grow_worker.data(dtype=torch.float64)
    torch.manual_seed(2)
    model = MLP([2, 4, 3]).double()
    arguments: dict[str, Any] = {
        "train": s3d.EpochTrainer(Shuffled(x, target, 16), cross_entropy, epochs=10),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        "phases": 4,
        "eps": 0.01,
        "solver": {"tol": 1e-6},
        **options,
    }
    return s3d.Grower(model, x[:2], cross_entropy, [(x, target)], **arguments)


def state(run: s3d.Grower) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def assert_same_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def record(history: list[s3d.Phase]) -> list[dict[str, Any]]:
    """Return a history without times, for comparison: NaN, which is unequal to itself, becomes None."""
    phases = [
        {key: value for key, value in asdict(phase).items() if key not in ("seconds", "epochs")} for phase in history
    ]
    return [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in phase.items()}
        for phase in phases
    ]


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def history_file(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of history.jsonl, which must be strict JSON."""
    text = (folder / "history.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refused) for line in text.splitlines()]


def as_strict(value: Any) -> Any:
    """Return plain data as in strict JSON: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: as_strict(part) for key, part in value.items()}
    if isinstance(value, list):
        return [as_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_batches_are_made_at_every_pass_and_an_iterator_is_kept_as_a_list() -> None:
    x, target = grow_worker.data()
    passes = []

    class Made:
        """Batches that record every pass over them."""

        same_every_pass = True

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Any]:
            passes.append("pass")
            return iter([(x[:24], target[:24]), (x[24:], target[24:])])

    again = grow_worker.grower(None, phases=2)
    again.batches = lambda phase: Made()
    once = grow_worker.grower(None, phases=2)
    once.batches = lambda phase: iter(Made())
    shuffled = grow_worker.grower(None, phases=2)
    shuffled.batches = DataLoader(TensorDataset(x, target), 24, shuffle=True, generator=torch.Generator())
    first, second, third = (run.run()[0] for run in (again, once, shuffled))
    # The first run passes over them for the capture and for the loss after the split; the second run once, for a list.
    assert passes == ["pass"] * 3
    assert first.batches == second.batches == 2
    assert first.split_loss == second.split_loss
    # The losses before and after the split are computed on the same samples.
    assert third.split_loss - third.loss == pytest.approx(third.predicted_change, rel=1)


def test_a_memory_budget_is_kept_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    x, target = grow_worker.data()
    run = grow_worker.grower(None, phases=2, memory_budget=400, progress=True)
    run.batches = [(x[i : i + 4], target[i : i + 4]) for i in range(0, 24, 4)]
    first, _ = run.run()
    assert first.scratch > 400 >= first.memory > 0
    said = capsys.readouterr().err
    assert "in memory of a budget of 400 B" in said
    assert "6 batches" in said
    assert "solve:" in said


def test_every_architecture_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []

    def noted(model: nn.Module, example: Any) -> s3d.Graph:
        traced.append(parameters(model))
        return s3d.trace(model, example)

    monkeypatch.setattr(grower, "trace", noted)
    history = grow_worker.grower(None, phases=4).run()
    assert sum(phase.splits > 0 for phase in history) == 3
    assert traced == [phase.params for phase in history]


def test_a_model_that_training_has_changed_is_traced_again() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        if phase == 0:
            model.layers[1] = nn.Tanh()

    run = smooth_grower(train=train, phases=2)
    assert "tanh" not in {unit.activation.name for unit in run.graph}
    run.run()
    assert {unit.activation.name for unit in run.graph} == {"tanh"}


def test_every_phase_is_recorded() -> None:
    run = grow_worker.grower(None, phases=4)
    history = run.run()
    assert history is run.history
    assert [phase.index for phase in history] == [0, 1, 2, 3]
    assert run.stopped is None
    for phase in history:
        assert 0 <= phase.metrics["accuracy"] <= 1
        first, second = phase.widths.values()
        assert phase.params == parameters(MLP([2, first, second, 3], batchnorm=True))
        assert phase.macs == 2 * first + first * second + second * 3
        assert all(seconds >= 0 for seconds in phase.seconds.values())
    for before, after in itertools.pairwise(history):
        assert set(before.seconds) == STAGES
        assert math.isfinite(before.loss)
        assert math.isfinite(before.split_loss)
        assert before.predicted_change < 0
        assert all(gain < 0 for gain in before.gains.values())
        assert set(before.gains) == set(before.new_filters)
        grown = {name: width + before.new_filters.get(name, 0) for name, width in before.widths.items()}
        assert after.widths == grown
        assert sum(after.widths.values()) > sum(before.widths.values())
        assert after.params > before.params
        assert after.macs > before.macs
        assert before.unconverged >= 0
        assert before.matvecs > 0
        assert before.memory > 0
        assert (before.batches, before.scratch) == (1, 0)
    last = history[-1]
    assert math.isnan(last.loss)
    assert math.isnan(last.split_loss)
    assert last.new_filters == {}
    assert {"train", "evaluate"} <= set(last.seconds)
    assert s3d.trace(run.model, torch.zeros(2, 2)).widths() == last.widths


@pytest.mark.parametrize("selection", [{"c": 1, "fraction": 0.5}, {"c": 1.5, "m": 3}, {"m": "knapsack", "budget": 4}])
def test_a_small_split_changes_the_loss_as_predicted(selection: dict[str, Any]) -> None:
    for phase in smooth_grower(selection=selection, eps=0.003).run()[:-1]:
        assert phase.predicted_change == pytest.approx(0.003**2 / 2 * sum(phase.gains.values()))
        assert phase.predicted_change < 0
        assert phase.split_loss - phase.loss == pytest.approx(phase.predicted_change, rel=0.1)


def test_the_recorded_loss_is_the_loss_of_the_trained_model() -> None:
    x, target = grow_worker.data(dtype=torch.float64)
    losses = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            losses.append(float(cross_entropy(model(x), target)))
        return {"loss": losses[-1]}

    history = smooth_grower(evaluate=evaluate).run()
    assert [phase.metrics["loss"] for phase in history] == losses
    assert [phase.loss for phase in history[:-1]] == pytest.approx(losses[:-1], rel=1e-12)
    assert history[-1].metrics["loss"] < history[0].metrics["loss"]


def plans_of(monkeypatch: pytest.MonkeyPatch, run: s3d.Grower) -> list[s3d.SplitPlan]:
    """Run a growth and return the plans that it carried out."""
    plans: list[s3d.SplitPlan] = []
    original = growth.apply_splits

    def noted(model: nn.Module, plan: s3d.SplitPlan, *args: Any, **kwargs: Any) -> None:
        plans.append(plan)
        original(model, plan, *args, **kwargs)

    monkeypatch.setattr(growth, "apply_splits", noted)
    run.run()
    return plans


def test_a_bound_of_one_splits_with_positive_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of(monkeypatch, smooth_grower(selection={"c": 1}))
    assert len(plans) == 3
    weights = torch.cat([split.weights for plan in plans for split in plan.splits])
    assert bool((weights == 0.5).all())


def test_a_larger_bound_splits_with_negative_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of(monkeypatch, smooth_grower(selection={"c": 3}))
    assert min(float(split.weights.min()) for plan in plans for split in plan.splits) < 0


def test_a_users_function_can_train() -> None:
    x, target = grow_worker.data(dtype=torch.float64)
    seen = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in model.parameters()}
        seen.append((phase, parameters(model)))
        optimizer.zero_grad()
        cross_entropy(model(x), target).backward()
        optimizer.step()

    run = smooth_grower(train=train)
    history = run.run()
    assert seen == [(phase.index, phase.params) for phase in history]


def test_batches_may_depend_on_the_phase_and_units_may_be_chosen() -> None:
    x, target = grow_worker.data()
    asked = []

    def batches(phase: int) -> list[tuple[Tensor, Tensor]]:
        asked.append(phase)
        return [(x[:20], target[:20]), (x[20:40], target[20:40])]

    run = grow_worker.grower(None, units=["layers.3"])
    run.batches = batches
    history = run.run()
    assert asked == [0, 1]
    assert all(set(phase.new_filters) <= {"layers.3"} for phase in history)
    assert history[-1].widths["layers.0"] == 4
    assert history[-1].widths["layers.3"] > 4


def test_every_phase_begins_with_the_initial_learning_rates() -> None:
    rates = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        rates.append([group["lr"] for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            group["lr"] *= 1e-3

    smooth_grower(train=train).run()
    assert rates == [[0.05]] * 4


def test_growth_stops_if_no_split_gains(tmp_path: Path) -> None:
    trained = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        trained.append(phase)

    def stopping(resume: bool) -> s3d.Grower:
        run = grow_worker.grower(tmp_path, train=train)
        run.loss_fn = lambda output, target: 0 * output.sum()
        run.run(resume)
        return run

    run = stopping(resume=False)
    assert run.stopped is not None
    assert trained == [0]
    assert [phase.widths for phase in run.history] == [{"layers.0": 4, "layers.3": 4}]
    assert run.history[0].new_filters == {}
    # A stopped run stays stopped when it is resumed.
    again = stopping(resume=True)
    assert again.stopped == run.stopped
    assert trained == [0]
    assert record(again.history) == record(run.history)


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    x, target = grow_worker.data()
    trainer = s3d.EpochTrainer([(x, target)], lambda output, target: cross_entropy(output, target) / 0.0, epochs=2)
    with pytest.raises(ValueError, match="not finite in phase 0"):
        grow_worker.grower(None, train=trainer).run()


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = grow_worker.grower(None), grow_worker.grower(None), grow_worker.grower(None, seed=4)
    first.run()
    # The random state at the start of a run does not matter.
    torch.manual_seed(1234)
    second.run()
    other.run()
    assert_same_tensors(state(first), state(second))
    assert record(first.history) == record(second.history)
    assert any(not torch.equal(a, b) for a, b in zip(state(first).values(), state(other).values(), strict=False))


def test_a_run_with_a_folder_ends_the_same_and_keeps_the_networks(tmp_path: Path) -> None:
    kept, unkept = grow_worker.grower(tmp_path), grow_worker.grower(None)
    kept.run()
    unkept.run()
    assert_same_tensors(state(kept), state(unkept))
    for phase in kept.history:
        model = MLP([2, 1, 1, 3], batchnorm=True)
        s3d.load_grown(model, tmp_path / f"network-{phase.index:03d}.safetensors")
        assert parameters(model) == phase.params
        assert grow_worker.accuracy(model) == phase.metrics
    assert_same_tensors(dict(model.state_dict()), state(kept))


def interrupted(train: Callable[..., object], phase: int, after: bool) -> Callable[..., object]:
    """Return a train function that is interrupted before or after the training of a phase."""

    def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == phase and not after:
            raise KeyboardInterrupt
        train(model, optimizer, index)
        if index == phase:
            raise KeyboardInterrupt

    return wrapped


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, s3d.Grower]:
    """The folder and the Grower of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run = grow_worker.grower(folder)
    run.run()
    return folder, run


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_an_interrupted_run_resumes(phase: int, after: bool, tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    run = grow_worker.grower(tmp_path)
    run.train = interrupted(run.train, phase, after)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert len(run.history) == phase
    resumed = grow_worker.grower(tmp_path)
    resumed.run(resume=True)
    assert_same_tensors(state(resumed), state(whole[1]))
    assert record(resumed.history) == record(whole[1].history)


def test_a_resumed_run_keeps_the_size_of_its_steps(tmp_path: Path) -> None:
    # Earlier versions had another default.
    grow_worker.grower(tmp_path, eps=0.01, phases=2).run()
    later = grow_worker.grower(tmp_path, eps=None)
    assert later.eps == "relative:0.3"
    later.run(resume=True)
    assert later.eps == 0.01
    assert [(phase.eps, phase.relative) for phase in later.history[:-1]] == [(0.01, False)] * 2
    with pytest.raises(ValueError, match=r"eps is 0\.01 there and 'relative:0\.3' here"):
        grow_worker.grower(tmp_path, eps="relative:0.3").run(resume=True)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02, amsgrad=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    ],
    ids=["sgd", "adamw", "rmsprop"],
)
def test_a_run_with_any_optimizer_resumes(optimizer: Callable[..., torch.optim.Optimizer], tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        x, target = grow_worker.data()
        loader = DataLoader(TensorDataset(x, target), batch_size=16, shuffle=True)
        trainer = s3d.EpochTrainer(
            loader,
            cross_entropy,
            epochs=3,
            schedule=s3d.schedules.cosine(3),
        )
        return {"optimizer": optimizer, "train": trainer}

    uninterrupted = grow_worker.grower(None, **options())
    uninterrupted.run()
    run = grow_worker.grower(tmp_path, **options())
    run.train = interrupted(run.train, 2, after=True)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    resumed = grow_worker.grower(tmp_path, **options())
    resumed.run(resume=True)
    assert_same_tensors(state(resumed), state(uninterrupted))


class Interrupted:
    """The batches of a loader; the given epoch, counted over all phases, is interrupted."""

    def __init__(self, epoch: int | None = None) -> None:
        x, target = grow_worker.data()
        self.loader = DataLoader(TensorDataset(x, target), batch_size=16, shuffle=True)
        self.epoch, self.begun = epoch, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        for index, batch in enumerate(self.loader):
            if self.begun - 1 == self.epoch and index == 1:
                raise KeyboardInterrupt
            yield batch


def four_epochs(folder: Path | None, loader: Interrupted, **options: Any) -> s3d.Grower:
    """Return a Grower with four epochs per phase and a learning rate that depends on the epoch."""
    trainer = s3d.EpochTrainer(loader, cross_entropy, epochs=4, schedule=s3d.schedules.cosine(4))
    return grow_worker.grower(folder, train=trainer, **options)


@pytest.fixture(scope="module")
def whole_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, s3d.Grower]:
    """The folder and the Grower of an uninterrupted run with four epochs per phase."""
    folder, loader = tmp_path_factory.mktemp("whole-epochs"), Interrupted()
    run = four_epochs(folder, loader)
    run.run()
    assert loader.begun == 12
    return folder, run


def without_seconds(epochs: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in epochs]


@pytest.mark.parametrize("epoch", [0, 1, 3, 4, 6, 7, 9, 11])
def test_a_phase_resumes_after_its_last_finished_epoch(
    epoch: int, tmp_path: Path, whole_epochs: tuple[Path, s3d.Grower]
) -> None:
    run = four_epochs(tmp_path, Interrupted(epoch))
    with pytest.raises(KeyboardInterrupt):
        run.run()
    phase, finished = divmod(epoch, 4)
    kept = [f"epoch-{phase:03d}.safetensors"] if finished else []
    assert [path.name for path in tmp_path.glob("epoch-*")] == kept
    if epoch:
        # The history so far can be read, including the unfinished phase.
        lines = history_file(tmp_path)
        assert [len(line["epochs"]) for line in lines] == [4] * phase + [finished] * bool(finished)
        assert [line["index"] for line in lines] == list(range(len(lines)))

    loader = Interrupted()
    resumed = four_epochs(tmp_path, loader)
    resumed.run(resume=True)
    assert loader.begun == 12 - epoch
    assert_same_tensors(state(resumed), state(whole_epochs[1]))
    assert record(resumed.history) == record(whole_epochs[1].history)
    for one, other in zip(resumed.history, whole_epochs[1].history, strict=True):
        assert without_seconds(one.epochs) == without_seconds(other.epochs)
        assert one.seconds["train"] >= sum(entry["seconds"] for entry in one.epochs)
    assert_like_the_whole_run(tmp_path, whole_epochs[0])


def test_a_run_interrupted_in_every_epoch_ends_the_same(tmp_path: Path, whole_epochs: tuple[Path, s3d.Grower]) -> None:
    for _ in range(11):
        # Each run trains one epoch and begins another.
        loader = Interrupted(1)
        with pytest.raises(KeyboardInterrupt):
            four_epochs(tmp_path, loader).run(resume=True)
        assert loader.begun == 2
    resumed = four_epochs(tmp_path, Interrupted())
    resumed.run(resume=True)
    assert_same_tensors(state(resumed), state(whole_epochs[1]))
    assert_like_the_whole_run(tmp_path, whole_epochs[0])


def test_every_epoch_is_recorded(whole_epochs: tuple[Path, s3d.Grower]) -> None:
    for phase in whole_epochs[1].history:
        assert [epoch["epoch"] for epoch in phase.epochs] == [0, 1, 2, 3]
        assert [epoch["samples"] for epoch in phase.epochs] == [48] * 4
        # The rate at the last of three batches in each of four epochs, along a cosine from 0.02.
        rates = [0.01 * (1 + math.cos(math.pi * (epoch + 2 / 3) / 4)) for epoch in range(4)]
        assert [epoch["learning_rate"] for epoch in phase.epochs] == pytest.approx(rates)
        assert all(math.isfinite(epoch["loss"]) for epoch in phase.epochs)


def test_checkpoints_of_epochs_are_removed_after_their_phase(whole_epochs: tuple[Path, s3d.Grower]) -> None:
    names = sorted(path.name for path in whole_epochs[0].iterdir())
    networks, phases = ([f"{kind}-{index:03d}.safetensors" for index in range(3)] for kind in ("network", "phase"))
    spectra = ["spectra-000.safetensors", "spectra-001.safetensors"]
    assert names == ["history.jsonl", *networks, *phases, "run.json", *spectra]


def test_the_history_is_in_a_file(whole_epochs: tuple[Path, s3d.Grower]) -> None:
    folder, run = whole_epochs
    assert history_file(folder) == [as_strict(asdict(phase)) for phase in run.history]
    assert history_file(folder)[-1]["loss"] is None


def test_the_history_of_a_stopped_run_is_in_a_file(tmp_path: Path) -> None:
    run = grow_worker.grower(tmp_path)
    run.loss_fn = lambda output, target: 0 * output.sum()
    run.run()
    assert history_file(tmp_path) == [as_strict(asdict(phase)) for phase in run.history]
    assert len(run.history) == 1
    assert not list(tmp_path.glob("epoch-*"))


def test_saved_spectra_belong_to_the_trained_network(tmp_path: Path) -> None:
    run = smooth_grower(out=tmp_path, solver={"tol": 1e-9, "solver": "exact"})
    run.run()
    x, target = grow_worker.data(dtype=torch.float64)
    assert sorted(path.name for path in tmp_path.glob("spectra-*")) == [
        f"spectra-{index:03d}.safetensors" for index in range(3)
    ]
    for phase in run.history[:-1]:
        model = MLP([2, 4, 3]).double()
        s3d.load_grown(model, tmp_path / f"network-{phase.index:03d}.safetensors")
        graph = s3d.trace(model, x[:2])
        spectra = s3d.extremal_eigenpairs(s3d.capture(model, cross_entropy, [(x, target)], graph), solver="exact")
        saved = load_file(tmp_path / f"spectra-{phase.index:03d}.safetensors")
        assert set(saved) == {f"{name}/{end}" for name in graph.units for end in ("lambda_min", "lambda_max")}
        for name, spectrum in spectra.items():
            torch.testing.assert_close(saved[f"{name}/lambda_min"], spectrum.lambda_min.float(), rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(saved[f"{name}/lambda_max"], spectrum.lambda_max.float(), rtol=1e-6, atol=1e-9)


def test_spectra_are_written_for_the_units_that_may_be_split(tmp_path: Path) -> None:
    grow_worker.grower(tmp_path, units=["layers.3"]).run()
    for index in (0, 1):
        saved = load_file(tmp_path / f"spectra-{index:03d}.safetensors")
        assert set(saved) == {"layers.3/lambda_min", "layers.3/lambda_max"}


def test_a_selection_may_depend_on_phase_and_graph(tmp_path: Path) -> None:
    def selection(phase: int, graph: s3d.Graph) -> dict[str, Any]:
        return {"c": 1.3, "top_k": phase + 1, "caps": {name: 12 - width for name, width in graph.widths().items()}}

    asked = []

    def noted(phase: int, graph: s3d.Graph) -> dict[str, Any]:
        asked.append((phase, graph.widths()))
        return selection(phase, graph)

    run = grow_worker.grower(tmp_path, selection=noted)
    asked.clear()
    history = run.run()
    assert [sum(phase.new_filters.values()) for phase in history] == [1, 2, 0]
    assert asked == [(phase.index, phase.widths) for phase in history[:2]]


def test_a_bad_selection_from_a_function_fails_before_training() -> None:
    with pytest.raises(ValueError, match="fraction"):
        grow_worker.grower(None, train=never, selection=lambda phase, graph: {"fraction": 2.0})


def chosen_by_hand(phase: int, graph: s3d.Graph) -> s3d.SplitPlan:
    """Return a plan that splits one neuron of the second unit; its index is the number of the phase."""
    unit = graph.units["layers.3"]
    offset = torch.zeros(2, unit.fan_in)
    offset[:, 0] = torch.tensor([1.0, -1.0])
    return s3d.SplitPlan(graph, [s3d.NeuronSplit("layers.3", phase, torch.tensor([0.5, 0.5]), offset, -2.0)])


def test_a_plan_may_be_made_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = grow_worker.grower(tmp_path, plan=chosen_by_hand)
    plans = plans_of(monkeypatch, run)
    assert [[split.neuron for split in plan.splits] for plan in plans] == [[0], [1]]
    assert [phase.widths for phase in run.history] == [{"layers.0": 4, "layers.3": 4 + index} for index in range(3)]
    for phase in run.history[:-1]:
        assert phase.new_filters == {"layers.3": 1}
        assert phase.gains == {"layers.3": -2.0}
        assert phase.predicted_change == pytest.approx(0.05**2 / 2 * -2)
        assert math.isfinite(phase.loss)
        assert math.isfinite(phase.split_loss)
        # No eigenvalues are computed.
        assert set(phase.seconds) == {"train", "evaluate", "capture", "measure", "select", "split"}
        assert (phase.matvecs, phase.memory) == (0, 0)
    assert not list(tmp_path.glob("spectra-*"))


def test_a_run_with_random_plans_resumes(tmp_path: Path) -> None:
    def grower(folder: Path | None, loader: Interrupted) -> s3d.Grower:
        return four_epochs(
            folder, loader, plan=lambda phase, graph: random_plan(graph, list(graph.units), {"fraction": 0.5})
        )

    uninterrupted = grower(None, Interrupted())
    uninterrupted.run()
    with pytest.raises(KeyboardInterrupt):
        grower(tmp_path, Interrupted(6)).run()
    resumed = grower(tmp_path, Interrupted())
    resumed.run(resume=True)
    assert_same_tensors(state(resumed), state(uninterrupted))
    # Gains that were not computed are null.
    assert all(gain is None for line in history_file(tmp_path)[:2] for gain in line["gains"].values())
    assert history_file(tmp_path) == [as_strict(asdict(phase)) for phase in resumed.history]


def test_growth_stops_if_the_plan_is_empty() -> None:
    run = grow_worker.grower(None, plan=lambda phase, graph: s3d.SplitPlan(graph, []))
    run.run()
    assert len(run.history) == 1
    assert run.stopped is not None


def test_a_trained_model_is_not_trained_before_its_first_split(tmp_path: Path) -> None:
    loader = Interrupted()
    run = four_epochs(tmp_path, loader, trained=True)
    before = state(run)
    history = run.run()
    assert loader.begun == 8
    assert [len(phase.epochs) for phase in history] == [0, 4, 4]
    model = MLP([2, 4, 4, 3], batchnorm=True)
    s3d.load_grown(model, tmp_path / "network-000.safetensors")
    assert_same_tensors(dict(model.state_dict()), before)
    assert history[0].metrics == grow_worker.accuracy(model)
    assert history[0].was_selected


def test_a_run_is_not_resumed_with_another_value_of_trained(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        four_epochs(tmp_path, Interrupted(5)).run()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="trained"):
        four_epochs(tmp_path, Interrupted(), trained=True).run(resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_after_phase_is_called_once_per_saved_phase(tmp_path: Path) -> None:
    def told(loader: Interrupted) -> list[int]:
        """Resume the run and return the phases that `after_phase` was called with."""
        phases = []

        def after_phase(phase: s3d.Phase) -> None:
            assert run.history[-1] is phase
            assert (tmp_path / f"phase-{phase.index:03d}.safetensors").exists()
            assert history_file(tmp_path)[-1] == as_strict(asdict(phase))
            phases.append(phase.index)

        run = four_epochs(tmp_path, loader, after_phase=after_phase)
        try:
            run.run(resume=True)
        except KeyboardInterrupt:
            assert loader.epoch is not None
        return phases

    assert told(Interrupted(6)) == [0]
    assert told(Interrupted(1)) == []
    assert told(Interrupted()) == [1, 2]
    assert told(Interrupted()) == []


def test_an_interrupted_grower_can_resume_itself(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    run = grow_worker.grower(tmp_path)
    train = run.train
    run.train = interrupted(train, 1, after=True)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    run.train = train
    run.run(resume=True)
    assert_same_tensors(state(run), state(whole[1]))


def test_a_finished_run_is_not_run_again(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    grow_worker.grower(tmp_path).run()

    def train(*_: object) -> None:
        raise AssertionError("a finished run trained again")

    again = grow_worker.grower(tmp_path, train=train)
    again.run(resume=True)
    assert_same_tensors(state(again), state(whole[1]))
    assert record(again.history) == record(whole[1].history)


def test_resuming_an_empty_folder_starts_from_the_beginning(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    run = grow_worker.grower(tmp_path / "new" / "folder")
    run.run(resume=True)
    assert_same_tensors(state(run), state(whole[1]))


def test_a_run_with_prices_from_a_function_resumes(tmp_path: Path) -> None:
    # A process that resumes has its own copy of the function, at another address.
    def options() -> dict[str, Any]:
        return {"selection": {"c": 1.3, "budget": 3, "cost": lambda unit: 1.0}}

    first = options()
    run = grow_worker.grower(tmp_path, **first)
    run.train = interrupted(run.train, 1, after=True)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    resumed = grow_worker.grower(tmp_path, **options())
    resumed.run(resume=True)
    assert len(resumed.history) == 3


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """The folder of the killed runs, with a subfolder for each scenario, and the signals that ended their processes."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.grow_worker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return folder, {name: [int(number) for number in numbers] for name, *numbers in lines}


def assert_like_the_whole_run(folder: Path, whole: Path) -> None:
    # The same files with the same tensors, and no leftovers, not even hidden ones.
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.glob("*.safetensors"):
        assert_same_tensors(load_file(folder / path.name), load_file(path))


@pytest.mark.parametrize("scenario", grow_worker.SCENARIOS)
def test_a_killed_run_resumes(
    scenario: str, killed: tuple[Path, dict[str, list[int]]], whole: tuple[Path, s3d.Grower]
) -> None:
    folder, signals = killed[0] / scenario, killed[1]
    assert signals[scenario] == [signal.SIGKILL] * len(grow_worker.SCENARIOS[scenario])
    if scenario == "half-phase-1":
        # The half of a checkpoint that was written has another name.
        assert [path.name for path in folder.glob("phase-*.safetensors")] == ["phase-000.safetensors"]
        assert list(folder.glob(".*.tmp"))
    # A file with its final name is complete, however the process ended.
    for path in folder.glob("*.safetensors"):
        load_file(path)
    run, loader = grow_worker.grower(folder), Interrupted()
    assert isinstance(run.train, s3d.EpochTrainer)
    run.train.loader = loader
    run.run(resume=True)
    deaths = grow_worker.SCENARIOS[scenario]
    assert loader.begun == grow_worker.PHASES * grow_worker.EPOCHS - grow_worker.epochs_kept(deaths)
    assert record(run.history) == record(whole[1].history)
    assert_like_the_whole_run(folder, whole[0])
    assert history_file(folder) == [as_strict(asdict(phase)) for phase in run.history]


def never(*_: object) -> None:
    raise AssertionError("trained before the arguments were checked")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"phases": 0}, "phases"),
        ({"phases": 1.5}, "phases"),
        ({"eps": 0}, "eps"),
        ({"eps": -0.1}, "eps"),
        ({"eps": math.nan}, "eps"),
        ({"seed": -1}, "seed"),
        ({"units": ["layers.99"]}, "units"),
    ],
    ids=str,
)
def test_bad_arguments_fail_before_training(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        grow_worker.grower(None, train=never, **options).run()


def test_resuming_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="out"):
        grow_worker.grower(None, train=never).run(resume=True)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with the first phase of a run."""
    run = grow_worker.grower(tmp_path)
    run.train = interrupted(run.train, 1, after=False)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    return tmp_path


def test_a_folder_that_holds_a_run_is_not_overwritten(begun: Path) -> None:
    before = {path.name: path.read_bytes() for path in begun.iterdir()}
    with pytest.raises(ValueError, match="out"):
        grow_worker.grower(begun, train=never).run()
    assert {path.name: path.read_bytes() for path in begun.iterdir()} == before


@pytest.mark.parametrize(
    "options",
    [
        {"eps": 0.01},
        {"seed": 4},
        {"selection": {"m": 2, "c": 1, "fraction": 0.35}},
        {"solver": {"tol": 1e-3}},
        {"units": ["layers.0"]},
        {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9)},
    ],
    ids=["eps", "seed", "selection", "solver", "units", "optimizer"],
)
def test_another_run_is_not_resumed(options: dict[str, Any], begun: Path) -> None:
    before = {path.name: path.read_bytes() for path in begun.iterdir()}
    with pytest.raises(ValueError, match=r"out|optimizer"):
        grow_worker.grower(begun, train=never, **options).run(resume=True)
    assert {path.name: path.read_bytes() for path in begun.iterdir()} == before


def test_the_run_of_another_model_is_not_resumed(begun: Path) -> None:
    run = grow_worker.grower(begun, train=never)
    run.model = MLP([2, 4, 4, 4, 3], batchnorm=True)
    with pytest.raises(ValueError, match="model"):
        run.run(resume=True)


def test_a_damaged_checkpoint_is_an_error(begun: Path) -> None:
    path = begun / "phase-000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="phase-000"):
        grow_worker.grower(begun, train=never).run(resume=True)


def test_more_phases_continue_with_a_split(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    grow_worker.grower(tmp_path, phases=2).run()
    longer = grow_worker.grower(tmp_path)
    longer.run(resume=True)
    # There is a split between every two phases.
    assert [phase.widths for phase in longer.history] == [phase.widths for phase in whole[1].history]


@pytest.mark.parametrize("size", [0.01, 30.0], ids=["small", "overflowing"])
def test_the_scale_of_the_loss_is_resumed(size: float, tmp_path: Path) -> None:
    def grower(folder: Path | None, loader: Interrupted) -> s3d.Grower:
        # For sizes above about 1, the first scale of 65536 overflows in half precision and is halved a few times.
        trainer = s3d.EpochTrainer(
            loader, lambda output, target: size * cross_entropy(output, target), epochs=4, precision="fp16"
        )
        return grow_worker.grower(folder, train=trainer, phases=1)

    whole = grower(None, Interrupted())
    whole.run()
    scales = [epoch["loss_scale"] for epoch in whole.history[0].epochs]
    assert scales[0] == 65536 if size < 1 else scales[0] < 65536
    with pytest.raises(KeyboardInterrupt):
        grower(tmp_path, Interrupted(2)).run()
    resumed = grower(tmp_path, Interrupted())
    resumed.run(resume=True)
    assert_same_tensors(state(resumed), state(whole))
    assert [epoch["loss_scale"] for epoch in resumed.history[0].epochs] == scales


class Deepening(nn.Module):
    """Uses its second layer only when it is told to; the first can be split only until then."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.deep = False

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.a(x))
        if self.deep:
            x = x + nn.functional.silu(self.b(x))
        return self.c(x)


def deepen(model: nn.Module) -> None:
    model.deep = True  # type: ignore[assignment]


def tie(model: nn.Module) -> None:
    model.b.weight = model.c.weight = nn.Parameter(torch.randn(4, 4))


@pytest.mark.parametrize("change", [deepen, tie], ids=["another branch", "shared weights"])
def test_changes_that_keep_all_sizes_are_traced_again(change: Callable[[nn.Module], None]) -> None:
    x, _ = grow_worker.data()
    model = Deepening()
    if change is tie:
        model.c = nn.Linear(4, 4)
    graph = s3d.trace(model, x[:2])
    assert graph.is_current(model)
    change(model)
    assert not graph.is_current(model)


def test_a_network_that_training_has_deepened_is_not_broken_by_a_split() -> None:
    x, target = grow_worker.data()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        deepen(model)

    run = s3d.Grower(Deepening(), x[:2], cross_entropy, [(x, target)], train, torch.optim.Adam, phases=2)
    run.run()
    assert run.model(x).shape == (len(x), 3)
    # The addition ties both layers: they have grown together.
    assert run.graph.units["a"].followers == ("b",)
    width = len(run.model.a.weight)  # type: ignore[union-attr, arg-type]
    assert width > 4
    assert run.model.b.weight.shape == (width, width)  # type: ignore[union-attr]


def test_a_loss_may_take_gradients_itself() -> None:
    x, target = grow_worker.data(dtype=torch.float64)

    def penalised(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].detach().requires_grad_()
        loss = cross_entropy(model(inputs), batch[1])
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + 0.1 * gradient.square().sum()

    torch.manual_seed(0)
    model = MLP([2, 4, 3]).double()
    run = s3d.Grower(
        model, x[:2], penalised, [(x, target)], lambda *_: None, torch.optim.Adam, phases=2, eps=1e-3, trained=True
    )
    first, _ = run.run()
    assert math.isfinite(first.loss)
    assert math.isfinite(first.split_loss)


def test_no_batches_are_an_error_with_a_plan_of_your_own() -> None:
    run = smooth_grower(plan=lambda phase, graph: random_plan(graph, list(graph.units), {"fraction": 0.5}))
    run.batches = []
    with pytest.raises(ValueError, match="batches must hold at least one batch"):
        run.run()
