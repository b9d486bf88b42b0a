"""Growth: what every phase records, and that a run which was interrupted or killed ends like one which was not."""

from __future__ import annotations

import itertools
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
from s3d_fast import growth
from s3d_fast.models.mlp import MLP
from tests import grow_worker

ROOT = Path(__file__).parent.parent
STAGES = {"train", "evaluate", "capture", "solve", "select", "split"}
cross_entropy = nn.functional.cross_entropy


class Shuffled:
    """Batches in an order drawn from the global random state."""

    def __init__(self, x: Tensor, target: Tensor, size: int) -> None:
        self.x, self.target, self.size = x, target, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x)).split(self.size):
            yield self.x[rows], self.target[rows]


def smooth_grower(**options: Any) -> s3d.Grower:
    """Return a Grower of a float64 network with smooth activations, whose splits can be predicted."""
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
    """Return a history without its times; NaN, which is unequal to itself, becomes None."""
    phases = [
        {key: value for key, value in asdict(phase).items() if key not in ("seconds", "epochs")} for phase in history
    ]
    return [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in phase.items()}
        for phase in phases
    ]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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
    last = history[-1]
    assert math.isnan(last.loss)
    assert math.isnan(last.split_loss)
    assert last.new_filters == {}
    assert {"train", "evaluate"} <= set(last.seconds)
    assert s3d.trace(run.model, torch.zeros(2, 2)).widths() == last.widths


@pytest.mark.parametrize("selection", [{"c": 1, "fraction": 0.5}, {"c": 1.5, "m": 3}, {"m": "knapsack", "budget": 4}])
def test_a_small_split_does_what_it_promises(selection: dict[str, Any]) -> None:
    for phase in smooth_grower(selection=selection, eps=0.003).run()[:-1]:
        assert phase.predicted_change == pytest.approx(0.003**2 / 2 * sum(phase.gains.values()))
        assert phase.predicted_change < 0
        assert phase.split_loss - phase.loss == pytest.approx(phase.predicted_change, rel=0.1)


def test_the_loss_is_that_of_the_trained_model() -> None:
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
    """Run, and return the plans that were carried out."""
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


def test_a_function_of_the_user_trains() -> None:
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


def test_batches_and_units_may_be_chosen() -> None:
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


def test_learning_rates_go_back_to_their_first_values() -> None:
    x, target = grow_worker.data(dtype=torch.float64)
    trainer = s3d.EpochTrainer(
        Shuffled(x, target, 16),
        cross_entropy,
        epochs=3,
        schedule=lambda epoch: 0.1 ** (1 + int(epoch)),
    )
    rates = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, phase: int) -> None:
        before = [group["lr"] for group in optimizer.param_groups]
        trainer(model, optimizer, phase)
        rates.append((before, [group["lr"] for group in optimizer.param_groups]))

    run = smooth_grower(train=train)
    run.run()
    assert len(rates) == 4
    for before, after in rates:
        assert before == [0.05]
        assert after == pytest.approx([0.05e-3])


def test_growth_stops_where_nothing_gains(tmp_path: Path) -> None:
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
    # It stays stopped.
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
    # The random state that a run begins with does not matter.
    torch.manual_seed(1234)
    second.run()
    other.run()
    assert_same_tensors(state(first), state(second))
    assert record(first.history) == record(second.history)
    assert any(not torch.equal(a, b) for a, b in zip(state(first).values(), state(other).values(), strict=False))


def test_a_folder_changes_nothing_but_keeps_the_networks(tmp_path: Path) -> None:
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
    """The folder and the Grower of a run that nothing disturbed."""
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


def test_the_interrupted_grower_itself_can_resume(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
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


def test_prices_from_a_function_do_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
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
    """The folders of runs that were killed, one for each scenario, and the signals that ended each."""
    folder = tmp_path_factory.mktemp("killed")
    done = work("kill-all", str(folder))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return folder, {name: [int(number) for number in numbers] for name, *numbers in lines}


def work(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.grow_worker", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def assert_like_the_whole_run(folder: Path, whole: Path) -> None:
    # The same files with the same tensors, and no leftovers, hidden or not.
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.glob("*.safetensors"):
        assert_same_tensors(load_file(folder / path.name), load_file(path))


@pytest.mark.parametrize("scenario", grow_worker.SCENARIOS)
def test_a_killed_run_resumes(
    scenario: str, killed: tuple[Path, dict[str, list[int]]], whole: tuple[Path, s3d.Grower]
) -> None:
    folder, signals = killed[0] / scenario, killed[1]
    assert signals[scenario] == [signal.SIGKILL] * len(grow_worker.SCENARIOS[scenario])
    # What has a final name is complete, however the process ended.
    for path in folder.glob("*.safetensors"):
        load_file(path)
    run = grow_worker.grower(folder)
    run.run(resume=True)
    assert record(run.history) == record(whole[1].history)
    assert_like_the_whole_run(folder, whole[0])


def test_a_killed_process_is_resumed_by_another(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    assert work("kill", str(tmp_path), "half-phase", "1").returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("phase-*.safetensors")] == ["phase-000.safetensors"]
    assert list(tmp_path.glob(".*.tmp"))
    done = work("run", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert_like_the_whole_run(tmp_path, whole[0])


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


def test_more_phases_continue_with_a_split_or_not_at_all(tmp_path: Path, whole: tuple[Path, s3d.Grower]) -> None:
    grow_worker.grower(tmp_path, phases=2).run()
    longer = grow_worker.grower(tmp_path)
    try:
        longer.run(resume=True)
    except ValueError:
        return
    # There is a split between every two phases.
    assert [phase.widths for phase in longer.history] == [phase.widths for phase in whole[1].history]
