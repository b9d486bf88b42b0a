"""Capture by names of layers, without tracing, gives what capture gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d


class Network(nn.Module):
    """Layers of every kind, and activations in every form."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.point, self.wide = nn.Conv2d(8, 6, 1, bias=False), nn.Conv2d(6, 5, 3, stride=2)
        self.dense, self.dense_norm, self.head = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x))
        h = F.relu_(self.point(h * torch.sigmoid(h)))
        h = F.gelu(self.wide(h)).mean((2, 3))
        return self.head(torch.tanh(self.dense_norm(self.dense(h))))


LAYERS: dict[str, Any] = {"stem": "silu", "point": "relu", "wide": F.gelu, "dense": nn.Tanh()}


@pytest.fixture(scope="module")
def case() -> tuple[Network, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Network().double()
    batches = [(torch.randn(6, 3, 9, 9).double(), torch.randint(3, (6,))) for _ in range(2)]
    model.train()(batches[0][0])
    return model.eval(), batches


def test_layers_by_name_have_the_matrices_of_a_traced_capture(case: Any) -> None:
    model, batches = case
    # Without a graph, S has the curvature of the activation named, and no other.
    graph = s3d.trace(model, batches[0][0])
    traced = s3d.capture(model, F.cross_entropy, batches, graph, curvature="paper")
    named = s3d.capture_layers(model, LAYERS, F.cross_entropy, batches)
    assert named.loss == pytest.approx(traced.loss)
    for name in LAYERS:
        torch.testing.assert_close(named[name].dense(), traced[name].dense(), rtol=1e-10, atol=1e-14)


def test_a_memory_budget_gives_the_same_matrices(case: Any) -> None:
    model, batches = case
    whole = s3d.capture_layers(model, LAYERS, F.cross_entropy, batches)
    within = s3d.capture_layers(model, LAYERS, F.cross_entropy, batches, memory_budget="200kB")
    assert within.plan is not None
    for name in LAYERS:
        torch.testing.assert_close(within[name].dense(), whole[name].dense(), rtol=1e-6, atol=1e-9)


def test_vectors_come_in_the_shapes_of_the_layer(case: Any) -> None:
    model, batches = case
    spectra = s3d.extremal_eigenpairs(s3d.capture_layers(model, LAYERS, F.cross_entropy, batches))
    for name, spectrum in spectra.items():
        layer = model.get_submodule(name)
        weight, bias = spectrum.as_weights("v_min")
        assert weight.shape == layer.weight.shape
        assert (bias is None) == (layer.bias is None)
        flat = weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias[:, None]], 1)
        torch.testing.assert_close(flat, spectrum.v_min)
    with pytest.raises(ValueError, match="name must be"):
        spectrum.as_weights("v")


def test_batchnorms_may_use_the_statistics_of_the_batch(case: Any) -> None:
    model, batches = case
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (x, y) = batches[0]
    S = s3d.capture_layers(model, {"stem": "silu"}, F.cross_entropy, [(x, y)], batchnorm="train")["stem"].dense()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training
    # With running statistics the scale is another, and so is the matrix.
    running = s3d.capture_layers(model, {"stem": "silu"}, F.cross_entropy, [(x, y)])["stem"].dense()
    assert bool(S.abs().max() > 0)
    assert not torch.allclose(S, running, rtol=1e-3)


@pytest.mark.parametrize(
    ("layers", "error", "words"),
    [
        ({"stem": "gelu"}, ValueError, "nothing behind 'stem' computes gelu"),
        ({"stom": "silu"}, ValueError, "no layer 'stom'; it has stem, point"),
        ({"norm": "silu"}, TypeError, "must be a Linear or a Conv2d"),
        ({"stem": "swoosh"}, ValueError, "swoosh"),
        ({}, ValueError, "at least one layer"),
    ],
)
def test_bad_layers_are_refused(case: Any, layers: Any, error: type[Exception], words: str) -> None:
    model, batches = case
    with pytest.raises(error, match=words):
        s3d.capture_layers(model, layers, F.cross_entropy, batches)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_layer_that_is_evaluated_twice_is_refused() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU())
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="evaluated once per batch"):
        s3d.capture_layers(model, {"0": "relu"}, F.mse_loss, [(x, x)])


def test_a_relu_of_positive_numbers_is_found() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        model[0].bias.fill_(50.0)  # type: ignore[union-attr]
        model[1].bias.fill_(100.0)  # type: ignore[union-attr]
    x = torch.randn(6, 3).double()
    graph = s3d.trace(model, x)
    batches = [(x, torch.zeros(6, 2).double())]
    traced = s3d.capture(model, F.mse_loss, batches, graph)["0"].dense()
    named = s3d.capture_layers(model, {"0": "relu"}, F.mse_loss, batches)["0"].dense()
    torch.testing.assert_close(named, traced)
