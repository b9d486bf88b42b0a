"""Growth of one hidden layer: its networks and folds, its splits against the real loss, and where S2D is stuck."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast.data.tabular import NAMES, regression
from s3d_fast.experiments import layer_growth as layers
from s3d_fast.maths.activations import activation
from s3d_fast.models.layer_batch import LayerBatch

SMALL = layers.LayerSettings(seeds=3, added=4, steps=20)


def random_folds(rows: int = 60, width: int = 2, parts: int = 2) -> layers.Folds:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=draw, dtype=torch.float64)
    return layers.fold(x, (3 * x[:, 0]).sin() + x[:, 1] * x[:, 0], parts)


@pytest.fixture(scope="module")
def folds() -> layers.Folds:
    return random_folds()


def test_a_network_is_the_sum_of_its_living_neurons() -> None:
    theta, w, b = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4), torch.randn(2, 3)
    alive = torch.ones(2, 3, 4)
    alive[1, 2, 3] = 0
    model = LayerBatch(theta, w, b, activation("softplus"), True, alive)
    x = torch.randn(2, 7, 5)
    expected = b[1, 2] + sum(w[1, 2, i] * torch.nn.functional.softplus(x[1] @ theta[1, 2, i]) for i in range(3))
    torch.testing.assert_close(model(x)[1, 2], expected)
    assert model.sizes.tolist() == [[4, 4, 4], [4, 4, 3]]


def test_every_row_is_once_in_a_test_part_and_training_parts_are_scaled() -> None:
    x = torch.arange(23, dtype=torch.float64)[:, None] ** 2
    found = layers.fold(x, 3 * x[:, 0] + 1, parts=5)
    assert found.x.shape == (5, 16, 2)
    assert found.test_x.shape == (5, 4, 2)
    torch.testing.assert_close(found.y.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.y.square().mean(1), torch.ones(5))
    # The target is linear in the row, so all parts of a fold have the same scale.
    everything = torch.cat([found.x[0, :, 0], found.test_x[0, :, 0]])
    assert len(everything.unique()) == 20
    seen = layers.shuffled(23)[:20].reshape(5, 4)
    assert sorted(seen.flatten().tolist()) == sorted(set(seen.flatten().tolist()))
    whole = layers.fold(x, x[:, 0], parts=1)
    assert (whole.x.shape[1], whole.test_x.shape[1]) == (23, 0)


@pytest.mark.parametrize(("m", "c"), [(2, 1.0), (2, 3.0), (3, 3.0), (4, 2.0)])
def test_a_split_changes_the_real_loss_by_its_gain(folds: layers.Folds, m: int, c: float) -> None:
    double = layers.Folds(*(part.double() for part in (folds.x, folds.y, folds.test_x, folds.test_y)))
    draw = torch.Generator().manual_seed(3)
    theta = torch.randn(2, 3, 4, 3, generator=draw, dtype=torch.float64)
    w = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    model = LayerBatch(theta, w, torch.zeros(2, 3, dtype=torch.float64), activation("softplus"), True)
    chosen, useful, splits = layers.best_splits(model, double, m, c, 0.01)
    assert useful.any()
    p, r = torch.arange(2)[:, None], torch.arange(3)
    gain, weights, offsets = (one[p, r, chosen] for one in (splits.gain, splits.weights, splits.offsets))
    errors = []
    for eps in (1e-2, 1e-3):
        grown = layers.split(model, chosen, useful, weights, eps * offsets)
        before, after = ((one(double.x) - double.y[:, None]).square().mean(-1) for one in (model, grown))
        errors.append((after - before - eps**2 / 2 * gain).abs().max().item())
    # The error is at least of third order: a tenth of the step gives at most a thousandth of the error.
    assert errors[1] < 2e-3 * errors[0] + 1e-14


def test_positive_splits_of_one_convex_neuron_stay_convex_or_concave(folds: layers.Folds) -> None:
    settings = replace(SMALL, steps=60)
    line = torch.linspace(-3, 3, 200)
    rows = torch.stack([line, -line, torch.ones(200)], 1).expand(2, -1, -1)
    bends: dict[str, Tensor] = {}
    for rule in (layers.S2D, layers.Rule(m=3, c=3.0)):
        model = layers.grow(folds, rule, settings).stages[-1].model
        with torch.no_grad():
            bends[rule.name] = model.double()(rows.double()).diff(n=2)
    one_sign = (bends["S2D"] > -1e-9).all(-1) | (bends["S2D"] < 1e-9).all(-1)
    assert one_sign.all()
    signed = bends["S3D m=3 c=3"]
    assert ((signed.amax(-1) > 1e-4) & (signed.amin(-1) < -1e-4)).any()


@pytest.mark.parametrize("rule", layers.RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("act", ["softplus", "relu"])
def test_rules_have_their_sizes_steps_and_compute(folds: layers.Folds, rule: layers.Rule, act: str) -> None:
    run = layers.grow(folds, rule, replace(SMALL, activation=act, start=2))
    last = run.stages[-1]
    assert last.neurons == 6
    assert torch.isfinite(last.loss).all()
    assert torch.isfinite(last.test).all()
    assert (last.sizes <= 6).all()
    by_one = SMALL.steps * (2 + 3 + 4 + 5 + 6)
    if rule.kind == layers.SCRATCH:
        assert by_one - 6 < last.compute <= by_one
    else:
        assert last.steps == 5 * SMALL.steps
    if rule.kind == "split":
        assert [stage.neurons for stage in run.stages] == list(range(2, 7, rule.m - 1))
        assert run.splits <= 2 * SMALL.seeds * (len(run.stages) - 1)
        assert run.signed == 0 if rule.c == 1 else run.signed >= 0


def test_new_neurons_change_nothing_at_first_where_outputs_are_trained(folds: layers.Folds) -> None:
    settings = replace(SMALL, trained_outputs=True, added=1)
    begun = layers.grow(folds, layers.Rule(layers.NEW), replace(settings, added=0)).stages[-1]
    # With a learning rate of almost nothing, the second phase shows the network as the step has left it.
    grown = layers.grow(folds, layers.Rule(layers.NEW), replace(settings, learning_rate=1e-12)).stages
    assert grown[1].model.sizes.tolist() == [[2] * 3] * 2
    torch.testing.assert_close(grown[0].loss, grown[1].loss)
    assert not torch.equal(begun.loss, grown[0].loss)
    fixed = layers.grow(
        folds, layers.Rule(layers.NEW), replace(settings, trained_outputs=False, learning_rate=1e-12)
    ).stages
    assert not torch.allclose(fixed[0].loss, fixed[1].loss)


def test_a_seed_does_not_depend_on_the_other_seeds(folds: layers.Folds) -> None:
    for rule in (layers.S2D, layers.Rule(layers.NET2NET), layers.Rule(layers.NEW)):
        together = layers.grow(folds, rule, SMALL).stages[-1].loss
        alone = layers.grow(folds, rule, replace(SMALL, seeds=1, first_seed=2)).stages[-1].loss
        torch.testing.assert_close(alone[:, 0], together[:, 2], rtol=1e-3, atol=1e-4)


def test_bad_settings_name_the_argument(folds: layers.Folds) -> None:
    for name, value in {"seeds": 0, "start": 0, "steps": 0, "added": -1, "eps": 0.0, "learning_rate": 0.0}.items():
        with pytest.raises(ValueError, match=f"{name} must"):
            layers.LayerSettings(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which must be one of"):
        layers.LayerSettings(activation="none such")
    with pytest.raises(ValueError, match="kind must be"):
        layers.Rule("none such")
    with pytest.raises(ValueError, match="added must be a multiple of 3 for m = 4, got 4"):
        layers.grow(folds, layers.Rule(m=4, c=2.0), SMALL)
    with pytest.raises(ValueError, match="rows must"):
        layers.fold(torch.randn(5, 2), torch.randn(5), parts=3)


@pytest.mark.parametrize("name", NAMES)
def test_data_sets_have_their_sizes(name: str) -> None:
    x, y = regression(name)
    assert tuple(x.shape) == {"photograph": (256, 2), "breast cancer": (569, 30), "diabetes": (442, 10)}[name]
    assert y.shape == x.shape[:1]
    assert float(y.std()) > 0


def test_the_photograph_is_the_right_way_up() -> None:
    x, y = regression("photograph", side=8)
    assert x[0].tolist() == [-0.875, -0.875]
    assert x[7].tolist() == [0.875, -0.875]
    # The sky is on top.
    assert float(y[:8].mean()) > float(y[-8:].mean())
    assert 0 <= float(y.min()) < float(y.max()) <= 1
    with pytest.raises(ValueError, match="name must be"):
        regression("none such")


@pytest.mark.parametrize(("missing", "extra"), [("sklearn.datasets", "digits"), ("PIL", "images")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, missing: str, extra: str) -> None:
    usual = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == missing:
            raise ImportError(name)
        return usual(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(RuntimeError, match=rf"pip install 's3d_fast\[{extra}\]'"):
        regression("photograph")
