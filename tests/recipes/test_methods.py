"""Every method runs on digits, end to end, and resumes to the same network; baselines match what they compare with."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from s3d_fast import data, recipes
from s3d_fast.base.tensor_files import read_safetensors
from s3d_fast.network import costs
from s3d_fast.network.forward_time import ForwardTime
from s3d_fast.network.tracing import trace
from s3d_fast.recipes.from_scratch import Training, training_lengths
from s3d_fast.recipes.job import Job, make_network
from s3d_fast.recipes.methods import METHODS, as_method
from s3d_fast.recipes.running import run
from s3d_fast.records.record import Phase
from s3d_fast.records.run import read_run, training_compute
from s3d_fast.records.run_folder import RunFolder
from s3d_fast.splitting import forward_cost

DATA = data.digits()
SMALL = recipes.recipe("digits", "cpu").with_settings(
    {"steps": 2, "epochs": 1, "train_samples": 256, "test_samples": 128, "split_samples": 128, "split_batch": 64}
)


def job(method: str, out: Path | None, steps: int = 2, **options: object) -> Job:
    settings: dict[str, object] = {"steps": steps}
    if method == "regrow":
        settings["macs"] = (3000, 4000)
    if METHODS[method].kind == "prune":
        settings["width_multiplier"] = 0.5
    fields = {name: options.pop(name) for name in ("like", "scratch") if name in options}
    return Job(SMALL.with_settings({**settings, **options}), DATA, preset="cpu", method=method, out=out, **fields)


class Interrupted(Exception):
    """Ends a run."""


def interrupt(phase: Phase) -> None:
    raise Interrupted(phase.index)


def network(folder: Path, phase: int) -> dict[str, torch.Tensor]:
    return read_safetensors(RunFolder(folder).file("network", phase))[0]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "s3d"
    run(job("s3d", folder))
    return folder


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.kind != "train"])
def test_every_method_runs_and_resumes(method: str, tmp_path: Path) -> None:
    whole = run(job(method, tmp_path / "whole"))
    assert len(whole) == 3
    assert all(0 <= phase.metrics["accuracy"] <= 1 for phase in whole)
    first, last = whole[0], whole[-1]
    if METHODS[method].kind == "prune":
        assert last.macs <= 0.5 * first.macs
        assert sum(phase.removed for phase in whole) > 0
    else:
        assert last.macs > first.macs
    if METHODS[method].kind == "grow" and METHODS[method].options.get("splits") is False:
        assert sum(phase.added for phase in whole) > 0
        assert sum(phase.splits for phase in whole) == 0
    with pytest.raises(Interrupted):
        run(replace(job(method, tmp_path / "part"), after_phase=interrupt))
    again = run(job(method, tmp_path / "part"), resume=True)
    assert [phase.widths for phase in again] == [phase.widths for phase in whole]
    one, other = network(tmp_path / "whole", 2), network(tmp_path / "part", 2)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["full", "scratch", "uniform"])
def test_networks_from_scratch(method: str, grown: Path, tmp_path: Path) -> None:
    like = {"like": grown} if method != "full" else {}
    history = run(job(method, tmp_path / "run", **like))
    past = read_run(grown).phases
    if method == "full":
        assert list(history[-1].widths.values()) == list(SMALL.full())
    elif method == "scratch":
        assert history[-1].widths == past[-1].widths
        assert history[-1].macs == past[-1].macs
    assert len(history[-1].epochs) == SMALL.all_epochs
    assert run(job(method, tmp_path / "run", **like), resume=True)[-1].params == history[-1].params
    assert read_run(tmp_path / "run").is_grown is False


def test_scratch_does_not_know_the_grown_weights(grown: Path) -> None:
    of_run = job("scratch", None, like=grown)
    (training,) = training_lengths(of_run)
    model = training.network(of_run)
    saved = network(grown, 2)
    weights = {name: tensor for name, tensor in model.state_dict().items() if tensor.dim() > 1}
    assert all(weights[name].shape == saved[name].shape for name in weights)
    assert all(not torch.equal(weights[name], saved[name]) and bool(weights[name].any()) for name in weights)
    again = training.network(of_run).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", ["scratch", "uniform"])
def test_equal_compute(method: str, grown: Path) -> None:
    of_run = job(method, None, like=grown, scratch="compute")
    (training,) = training_lengths(of_run)
    graph = trace(training.network(of_run), torch.zeros(2, *DATA.input_shape))
    wanted = training_compute(read_run(grown))[-1]
    assert wanted is not None
    per_epoch = costs.count(graph).macs * len(of_run.train_set)
    assert training.epochs == max(1, round(wanted / per_epoch))


def test_compute_that_cannot_be_equal_is_refused(grown: Path) -> None:
    with pytest.raises(ValueError, match="one epoch of this network takes"):
        training_lengths(job("full", None, like=grown, scratch="compute"))


def test_width_multiplier() -> None:
    half = SMALL.with_settings({"width_multiplier": 0.5})
    assert half.full() == (8, 8, 8)
    assert training_lengths(Job(half, DATA, method="full")) == [Training((8, 8, 8), half.all_epochs)]


@pytest.mark.parametrize("method", ["l1", "bn", "amc", "morphnet"])
def test_pruning_reaches_the_budget_it_was_given(method: str) -> None:
    of_run = job(method, None, prune_to=0.3)
    history: list[Phase] = run(of_run)
    widths = SMALL.with_settings({"width_multiplier": 0.5}).full()
    graph = trace(make_network(replace(SMALL, widths=widths), 10), torch.zeros(2, *DATA.input_shape))
    full = costs.count(graph).macs
    assert history[0].macs == full
    assert 0.15 * full < history[-1].macs <= 0.3 * full
    if method == "morphnet":
        # The last step widens what the steps before it have narrowed.
        assert history[2].macs > history[1].macs


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("scratch", {}, "like"),
        ("full", {"scratch": "compute"}, "like"),
        ("s3d", {"scratch": "phase"}, "no effect"),
        ("l1", {"like": Path("here")}, "no effect"),
    ],
)
def test_bad_jobs(method: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        job(method, None, **options)


def test_regrow_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="macs"):
        Job(SMALL, DATA, method="regrow")


SELECTIONS: dict[str, dict[str, object]] = {
    "knapsack": {"m": "knapsack", "params": (200, 300)},
    "relaxed": {"macs": (6000, 9000), "relax": True},
    "top-k": {"top_k": 2},
    "threshold": {"fraction": 0.5, "threshold": 1e9},
    "the paper's triplets": {"m": 3, "c": 2.0, "theorem": "paper"},
    "rayleigh": {"solver": "rayleigh"},
    "relative": {"eps": "relative:0.3"},
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_of_the_paper_has_settings(name: str) -> None:
    history = run(job("s3d", None, **SELECTIONS[name]))
    if name == "threshold":
        # No gain is as large.
        assert len(history) == 1
        return
    assert history[-1].params > history[0].params
    if name == "top-k":
        assert [phase.splits for phase in history] == [2, 2, 0]
    for budget, phase in zip(SELECTIONS[name].get("params", ()), history[1:], strict=False):
        assert phase.params <= budget


@pytest.mark.parametrize("settings", [{"m": "knapsack"}, {"relax": True}, {"m": 5}, {"theorem": "other"}])
def test_bad_selections(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"knapsack|relax|m must|theorem"):
        SMALL.with_settings(settings)


def test_a_run_from_before_these_settings_resumes(grown: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(grown, folder)
    about = json.loads((folder / "run.json").read_text())
    for name in ("schedule_over", "theorem", "threshold", "relax", "solver", "prune_to", "penalty", "width_multiplier"):
        del about["settings"][name]
    (folder / "run.json").write_text(json.dumps(about))
    assert len(run(job("s3d", folder), resume=True)) == 3


def noisy_clock() -> Callable[..., list[ForwardTime]]:
    """Return what takes the place of the clock: a time for every multiply-accumulate, and noise that never repeats."""
    noise = random.Random(0)

    def timed(networks: Sequence[tuple[torch.nn.Module, torch.Tensor]], *_: int) -> list[ForwardTime]:
        macs = [costs.count(trace(model, x[:2], prove=False)).macs for model, x in networks]
        return [ForwardTime((1e-9 * own * noise.uniform(1, 1.1),), (1.0,)) for own in macs]

    return timed


@pytest.mark.parametrize("settings", [{"growth": 1.3, "cost": "time"}, {"milliseconds": (1e4, 2e4)}])
def test_growth_by_time_takes_the_times_that_are_stored(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Real times of networks this small are mostly noise.
    monkeypatch.setattr(forward_cost, "time_in_turns", noisy_clock())
    whole = run(job("s3d", tmp_path / "whole", **settings))
    assert whole[-1].macs > whole[0].macs
    stored = RunFolder(tmp_path / "whole").read_times()
    assert set(stored) == {0, 1}
    assert all(stored[phase]["batch"] == 16 for phase in stored)
    assert stored[1]["widths"][0] == whole[1].widths
    # A clock never shows the same twice: with the same measurements the runs are the same.
    (tmp_path / "part").mkdir()
    shutil.copy(tmp_path / "whole" / "times.json", tmp_path / "part")
    with pytest.raises(Interrupted):
        run(replace(job("s3d", tmp_path / "part", **settings), after_phase=interrupt))
    assert RunFolder(tmp_path / "part").read_times() == stored
    again = run(job("s3d", tmp_path / "part", **settings), resume=True)
    assert [phase.widths for phase in again] == [phase.widths for phase in whole]
    first, other = network(tmp_path / "whole", 2), network(tmp_path / "part", 2)
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("cost", ["macs", "params"])
def test_growth_by_a_factor(cost: str) -> None:
    history = run(job("s3d", None, growth=1.3, cost=cost))
    for before, after in pairwise(history):
        assert getattr(before, cost) < getattr(after, cost) <= 1.3 * getattr(before, cost)


@pytest.mark.parametrize("method", ["l1", "bn", "amc", "morphnet"])
def test_a_share_that_cannot_be_reached_is_refused_before_training(method: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prune_to is too small"):
        run(job(method, tmp_path / "run", prune_to=0.001))
    assert not (tmp_path / "run").exists()


def test_regrow_may_have_to_shrink_first() -> None:
    seed = count_macs((4, 4, 4))
    history = run(job("regrow", None, widths=(4, 4, 4), macs=(int(0.7 * seed), int(1.4 * seed)), eps="relative:0.3"))
    assert history[0].macs == seed
    assert history[0].removed > 0
    assert history[1].macs <= 0.7 * seed < history[2].macs <= 1.4 * seed
    with pytest.raises(ValueError, match="budget"):
        run(job("regrow", None, macs=(10, 10)))


def count_macs(widths: tuple[int, ...]) -> int:
    return costs.count(trace(make_network(replace(SMALL, widths=widths), 10), torch.zeros(2, *DATA.input_shape))).macs


def test_settings_of_methods() -> None:
    assert as_method(SMALL, "s3d") is SMALL
    s2d = as_method(SMALL, "s2d")
    assert (s2d.m, s2d.c) == (2, 1.0)
    regrow = as_method(SMALL, "regrow")
    assert (regrow.growth, regrow.fraction, regrow.eps) == (1.5, None, "relative:0.3")
    own = as_method(SMALL.with_settings({"params": (500, 900), "eps": 0.1}), "regrow", ("params", "eps"))
    assert (own.growth, own.params, own.eps) == (None, (500, 900), 0.1)
    history = run(Job(regrow, DATA, method="regrow"))
    for before, after in pairwise(history):
        assert before.macs < after.macs <= 1.5 * before.macs
