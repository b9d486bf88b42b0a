"""Pictures of filters: guided backpropagation compared with gradients by hand; files of images and weights."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models import VGG19
from s3d_fast.models.dgcnn import DGCNN
from s3d_fast.solvers.spectrum import Spectrum
from s3d_fast.visualize import (
    FilterPicture,
    draw,
    drawing,
    filter_pictures,
    guided_backpropagation,
    interesting_filters,
    load_image,
    load_vgg19,
)
from tests.cases import relative_error
from tests.model_cases import MakeActivation, data, net

WIDTHS = (2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 4)
# The indices of the convolutions in torchvision's vgg19 and vgg19_bn.
PLAIN_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)
NORMED_CONVOLUTIONS = (0, 3, 7, 10, 14, 17, 20, 23, 27, 30, 33, 36, 40, 43, 46, 49)


def two_convolutions(activation: MakeActivation = nn.ReLU, kernel: int = 3) -> nn.Module:
    """Return a model conv - act - conv - act - linear; tests look at its second convolution, `second`."""
    return net(
        lambda m, x: m.head(m.act2(m.second(m.act1(m.first(x)))).mean((2, 3))),
        first=nn.Conv2d(2, 5, kernel),
        act1=activation(),
        second=nn.Conv2d(5, 4, kernel),
        act2=activation(),
        head=nn.Linear(4, 3),
    )


def vgg(batchnorm: bool = True, activation: MakeActivation = nn.ReLU) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VGG19((6,) * 16, 3, pool=2, hidden=(5,), batchnorm=batchnorm, activation=activation).double()
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.uniform_(module.bias, 0, 0.3)
    return model.eval()


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    state = {name: (id(value), value.clone(), value._version) for name, value in model.state_dict().items()}
    objects = [(id(p), p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._backward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [m.training for m in model.modules()], hooks, objects, list(state), list(state.values())


def assert_unchanged(model: nn.Module, before: tuple[Any, ...]) -> None:
    now = snapshot(model)
    assert now[:2] == before[:2]
    for (own, needs, grad), (was, needed, had) in zip(now[2], before[2], strict=True):
        assert (own, needs) == (was, needed)
        assert torch.equal(grad, had) if isinstance(had, Tensor) else grad is None
    assert now[3] == before[3]
    for (_, value, version), (_, was_value, was_version) in zip(now[4], before[4], strict=True):
        assert torch.equal(value, was_value)
        assert version == was_version


def test_the_picture_of_a_tiny_network_agrees_with_a_computation_by_hand() -> None:
    # h = (relu(x), relu(-x));  A = sum over positions of relu(2 h_0 - 3 h_1 + 1).
    model = two_convolutions(kernel=1)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
        model.first.weight[0, 0], model.first.weight[1, 0] = 1, -1
        model.second.weight.zero_()
        model.second.weight[2, :2] = torch.tensor([2.0, -3.0]).view(2, 1, 1)
        model.second.bias.fill_(1)
    image = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    image[0, 0] = torch.tensor([[1.0, 2.0, -0.1], [-4.0, 0.0, 5.0]])
    graph = s3d.trace(model, image)
    # At -0.1 the filter is active, but only through its negative weight. At -4 it is not active. At 0 nothing passes.
    expected = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    assert torch.equal(guided_backpropagation(model, image, graph, "second", 2), expected)
    # With the opposite sign of that weight, -0.1 and -4 appear with weight 3.
    row = torch.tensor([2.0, 3.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    expected = torch.tensor([[2.0, 2.0, 3.0], [3.0, 0.0, 2.0]], dtype=torch.float64)
    assert torch.equal(guided_backpropagation(model, image, graph, "second", 2, row), expected)


@pytest.mark.parametrize("activation", [nn.ReLU, partial(nn.LeakyReLU, 0.3), nn.SiLU], ids=["relu", "leaky", "silu"])
def test_the_picture_of_two_convolutions_agrees_with_a_computation_by_hand(activation: MakeActivation) -> None:
    model, image = two_convolutions(activation), data(1, 2, 9, 8)
    graph = s3d.trace(model, image)

    def slope(z: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(activation()(z.requires_grad_()).sum(), z)
        return found

    with torch.no_grad():
        z1 = model.first(image)
        z2 = model.second(activation()(z1))
    for index in range(4):
        own = z2[:, index : index + 1].clone()
        at_second = torch.where(own > 0, slope(own), 0.0)
        at_first = F.conv_transpose2d(at_second, model.second.weight[index : index + 1])
        at_first = torch.where((z1 > 0) & (at_first > 0), slope(z1) * at_first, 0.0)
        assert at_first.any()
        expected = F.conv_transpose2d(at_first, model.first.weight).abs().sum((0, 1))
        actual = guided_backpropagation(model, image, graph, "second", index)
        assert relative_error(actual, expected.detach()) < 1e-12


def plain_gradient(model: nn.Module, image: Tensor, index: int) -> Tensor:
    pixels = image.clone().requires_grad_()
    response = model.act2(model.second(model.act1(model.first(pixels))))[:, index].sum()
    (gradient,) = torch.autograd.grad(response, pixels)
    return gradient[0].abs().sum(0)


SMOOTH_RECTIFIERS = [nn.SiLU, nn.GELU, nn.ELU, nn.Softplus, nn.ReLU6, nn.LeakyReLU, nn.Hardswish]


@pytest.mark.parametrize("activation", [nn.ReLU, *SMOOTH_RECTIFIERS])
def test_the_picture_is_the_plain_gradient_if_everything_is_positive(activation: MakeActivation) -> None:
    model, image = two_convolutions(activation), data(1, 2, 7, 7).abs()
    with torch.no_grad():
        for parameter in model.parameters():
            # Small weights keep activations below the upper kink of ReLU6.
            parameter.abs_().mul_(0.1)
    graph = s3d.trace(model, image)
    actual = guided_backpropagation(model, image, graph, "second", 1)
    assert actual.min() > 0
    assert relative_error(actual, plain_gradient(model, image, 1)) < 1e-12


def test_the_picture_is_not_the_plain_gradient_if_signs_are_mixed() -> None:
    model, image = two_convolutions(), data(1, 2, 7, 7)
    actual = guided_backpropagation(model, image, s3d.trace(model, image), "second", 1)
    assert relative_error(actual, plain_gradient(model, image, 1)) > 0.1


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_activations_that_are_no_rectifiers_pass_the_plain_gradient(activation: MakeActivation) -> None:
    model, image = two_convolutions(activation), data(1, 2, 7, 7)
    actual = guided_backpropagation(model, image, s3d.trace(model, image), "second", 3)
    assert relative_error(actual, plain_gradient(model, image, 3)) < 1e-12


@pytest.mark.parametrize("kind", ["inplace module", "function", "method", "inplace function", "result unused"])
def test_every_way_to_call_an_activation_is_guided(kind: str) -> None:
    image = data(1, 2, 7, 7)
    reference = two_convolutions()
    calls = {
        "inplace module": nn.ReLU(inplace=True),
        "function": torch.relu,
        "method": lambda h: h.relu(),
        "inplace function": partial(F.relu, inplace=True),
        "result unused": lambda h: (torch.relu_(h), h)[1],
    }
    act = calls[kind]
    parts = {"act": act} if isinstance(act, nn.Module) else {}
    model = net(
        lambda m, x: m.head(m.second(act(m.first(x))).relu().mean((2, 3))),
        first=nn.Conv2d(2, 5, 3),
        second=nn.Conv2d(5, 4, 3),
        head=nn.Linear(4, 3),
        **parts,
    )
    model.load_state_dict(reference.state_dict())
    expected = guided_backpropagation(reference, image, s3d.trace(reference, image), "second", 2)
    assert torch.equal(guided_backpropagation(model, image, s3d.trace(model, image), "second", 2), expected)


def test_linear_units_and_flattened_channels_have_pictures() -> None:
    image = data(1, 2, 4, 4)
    model = net(
        lambda m, x: m.out(m.hidden(m.first(x).flatten(1).relu()).relu()),
        first=nn.Conv2d(2, 3, 3),
        hidden=nn.Linear(12, 5),
        out=nn.Linear(5, 2),
    )
    graph = s3d.trace(model, image)
    # A filter of the first layer passes only its own rectifier, so guiding changes nothing.
    pixels = image.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model.first(pixels)[:, 1].relu().sum(), pixels)
    actual = guided_backpropagation(model, image, graph, "first", 1)
    assert relative_error(actual, expected[0].abs().sum(0)) < 1e-12
    theta = torch.cat([model.hidden.weight[4], model.hidden.bias[4:]]).detach()
    before = guided_backpropagation(model, image, graph, "hidden", 4)
    assert torch.equal(guided_backpropagation(model, image, graph, "hidden", 4, theta), before)


def test_a_filter_that_is_never_active_has_a_black_picture() -> None:
    model, image = two_convolutions(), data(1, 2, 7, 7)
    with torch.no_grad():
        model.second.bias[2] = -1e3
    picture = guided_backpropagation(model, image, s3d.trace(model, image), "second", 2)
    assert torch.equal(picture, torch.zeros(7, 7, dtype=torch.float64))


@pytest.mark.parametrize("batchnorm", [True, False])
def test_pictures_agree_with_a_model_whose_weights_are_edited_by_hand(batchnorm: bool) -> None:
    model, image, eps = vgg(batchnorm), data(1, 3, 32, 32), 0.05
    unit = "features.49" if batchnorm else "features.34"
    pictures = filter_pictures(model, image, 2, eps=eps, solver="exact")
    target = torch.tensor([2])
    graph = s3d.trace(model, image)
    operator = s3d.capture(model, F.cross_entropy, [(image, target)], graph)[unit]
    spectrum = s3d.extremal_eigenpairs(operator, "exact")
    assert [picture.title for picture in pictures] == list(interesting_filters(spectrum))[:4]
    seen = 0.0
    for picture in pictures[:2]:
        assert picture.unit == unit
        assert picture.filter == interesting_filters(spectrum)[picture.title]
        assert picture.lambda_min == float(spectrum.lambda_min[picture.filter])
        assert picture.lambda_max == float(spectrum.lambda_max[picture.filter])
        assert picture.radius == max(abs(picture.lambda_min), abs(picture.lambda_max))
        gain = 1.15 * min(picture.lambda_min, 0) - 0.15 * max(picture.lambda_max, 0)
        assert picture.gain == pytest.approx(gain, rel=1e-12)
        assert picture.converged
        steps = {
            "before": torch.zeros_like(spectrum.v_min),
            "minus_min": -eps * spectrum.v_min,
            "plus_min": eps * spectrum.v_min,
            "minus_max": -eps * spectrum.v_max,
            "plus_max": eps * spectrum.v_max,
        }
        for name, step in steps.items():
            edited = copy.deepcopy(model)
            layer = edited.get_submodule(unit)
            with torch.no_grad():
                layer.weight[picture.filter] += step[picture.filter, :-1].view(6, 3, 3)
                layer.bias[picture.filter] += step[picture.filter, -1]
            expected = guided_backpropagation(edited, image, s3d.trace(edited, image), unit, picture.filter)
            assert relative_error(getattr(picture, name), expected) < 1e-9, name
            seen = max(seen, float(expected.max()))
        changes = picture.changes()
        assert changes["plus_max"] == pytest.approx(
            float((picture.plus_max - picture.before).norm() / picture.before.norm()) if picture.before.any() else 0.0
        )
    assert seen > 0


def test_pictures_show_all_extremes_of_a_given_unit_and_target() -> None:
    model, image = two_convolutions(), data(1, 2, 7, 7)
    goal = data(1, 3, seed=4)
    pictures = filter_pictures(model, image, goal, "first", loss_fn=F.mse_loss, all_extremes=True)
    operator = s3d.capture(model, F.mse_loss, [(image, goal)], s3d.trace(model, image))["first"]
    extremes = interesting_filters(s3d.extremal_eigenpairs(operator))
    assert {picture.title: picture.filter for picture in pictures} == extremes
    assert len(pictures) == 8


def test_a_grown_network_has_pictures_too(tmp_path: Path) -> None:
    model, image = two_convolutions(), data(1, 2, 7, 7)
    graph = s3d.trace(model, image)
    spectra = s3d.extremal_eigenpairs(s3d.capture(model, F.cross_entropy, [(image, torch.tensor([0]))], graph))
    s3d.apply_splits(model, s3d.select(spectra, graph, m=2, c=1.3, fraction=0.5), eps=0.01)
    s3d.save_grown(model, tmp_path / "grown.safetensors")
    fresh = two_convolutions()
    s3d.load_grown(fresh, tmp_path / "grown.safetensors")
    assert fresh.first.out_channels + fresh.second.out_channels > 9
    for ours, theirs in zip(filter_pictures(model, image, 0), filter_pictures(fresh, image, 0), strict=True):
        assert torch.equal(ours.plus_min, theirs.plus_min)


def spectrum_of(lambda_min: list[float], lambda_max: list[float]) -> Spectrum:
    low, high = torch.tensor(lambda_min), torch.tensor(lambda_max)
    zeros, v = torch.zeros_like(low), torch.ones(len(low), 1)
    return Spectrum(low, v, high, v, zeros, zeros, zeros == 0, zeros.long(), zeros.long())


def test_interesting_filters_are_the_extremes_of_the_spectrum() -> None:
    # G_4 with c = 3 is 2 lambda_min - lambda_max: -16, -24, -25, -1.5, -15
    spectrum = spectrum_of([0.0, -12.0, -10.0, -0.5, -6.0], [16.0, 0.0, 5.0, 0.5, 3.0])
    found = interesting_filters(spectrum, c=3.0)
    assert list(found.items()) == [
        ("largest lambda_max", 0),
        ("smallest lambda_min", 1),
        ("smallest G_4", 2),
        ("smallest rho", 3),
        ("smallest lambda_max", 1),
        ("largest lambda_min", 0),
        ("largest G_4", 3),
        ("largest rho", 0),
    ]
    # With c = 1, only lambda_min matters.
    assert interesting_filters(spectrum, c=1.0)["smallest G_4"] == 1


def test_interesting_filters_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match="spectrum"):
        interesting_filters(spectrum_of([], []))
    with pytest.raises(ValueError, match="c must be"):
        interesting_filters(spectrum_of([0.0], [1.0]), c=0.5)


BAD_GUIDED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"image": torch.zeros(2, 7, 7).double()}, "image"),
    "two images": ({"image": torch.zeros(2, 2, 7, 7).double()}, "image"),
    "colours": ({"image": torch.zeros(1, 3, 7, 7).double()}, "image"),
    "precision": ({"image": torch.zeros(1, 2, 7, 7)}, "image"),
    "nan": ({"image": torch.full((1, 2, 7, 7), torch.nan).double()}, "image"),
    "unit": ({"unit": "head"}, "unit"),
    "filter": ({"filter": 4}, "filter"),
    "negative": ({"filter": -1}, "filter"),
    "row": ({"row": torch.zeros(45).double()}, "row"),
    "row nan": ({"row": torch.full((46,), torch.nan).double()}, "row"),
}
BAD_PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "colours": ({"image": torch.zeros(1, 3, 7, 7).double()}, "image"),
    "empty": ({"image": torch.zeros(1, 2, 0, 7).double()}, "image"),
    "unit": ({"unit": "head"}, "unit"),
    "class": ({"target": 3}, "target"),
    "negative class": ({"target": -1}, "target"),
    "two classes": ({"target": torch.tensor([0, 1])}, "target"),
    "eps": ({"eps": 0.0}, "eps"),
    "c": ({"c": 0.9}, "c must"),
    "solver": ({"solver": "guess"}, "solver"),
    "loss": ({"loss_fn": lambda output, target: output}, "loss_fn"),
}


@pytest.mark.parametrize("case", BAD_GUIDED)
def test_guided_backpropagation_refuses_bad_arguments(case: str) -> None:
    changed, message = BAD_GUIDED[case]
    model = two_convolutions().train()
    image = data(1, 2, 7, 7)
    graph, before = s3d.trace(model, image), snapshot(model)
    with pytest.raises(ValueError, match=message):
        guided_backpropagation(model, **({"image": image, "graph": graph, "unit": "second", "filter": 0} | changed))
    assert_unchanged(model, before)


@pytest.mark.parametrize("case", BAD_PICTURES)
def test_filter_pictures_refuses_bad_arguments(case: str) -> None:
    changed, message = BAD_PICTURES[case]
    model = two_convolutions().train()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        filter_pictures(model, **({"image": data(1, 2, 7, 7), "target": 0} | changed))
    assert_unchanged(model, before)


def test_a_graph_of_another_model_is_refused() -> None:
    image = data(1, 2, 7, 7)
    graph = s3d.trace(two_convolutions(), image)
    with pytest.raises(ValueError, match="another model"):
        guided_backpropagation(two_convolutions(), image, graph, "second", 0)


def test_models_without_a_suitable_layer_are_refused() -> None:
    linear = net(lambda m, x: m.out(m.hidden(x.flatten(1)).relu()), hidden=nn.Linear(18, 3), out=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="no convolution"):
        filter_pictures(linear, data(1, 2, 3, 3), 0)
    assert len(filter_pictures(linear, data(1, 2, 3, 3), 0, "hidden")) == 4
    cloud = DGCNN([3] * 4, num_classes=3, k=4, embedding=6, hidden=(5, 4)).double().eval()
    points = data(1, 8, 3)
    graph = s3d.trace(cloud, points)
    with pytest.raises(ValueError, match="unit must be a convolution"):
        guided_backpropagation(cloud, data(1, 1, 8, 3), graph, "edgeconvs.0", 0)


def test_the_model_is_left_as_it_was() -> None:
    model, image = vgg(), data(1, 3, 32, 32)
    model.train()
    model.features[3].eval()
    model.features[0].weight.requires_grad_(False)
    model.classifier[0].weight.grad = torch.ones_like(model.classifier[0].weight)
    model.features[7].register_forward_hook(lambda module, inputs, output: None)
    before, seed = snapshot(model), torch.get_rng_state()
    with torch.no_grad():
        filter_pictures(model, image, 1)
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), seed)
    assert image.grad is None
    assert not image.requires_grad


def made_up_pictures(count: int) -> list[FilterPicture]:
    titles = list(interesting_filters(spectrum_of([0.0], [1.0])))
    grey = data(6, 12, 12).abs()
    greys = dict(zip(("before", "minus_min", "plus_min", "minus_max", "plus_max"), grey, strict=False))
    values = {"lambda_min": -1e-8, "lambda_max": 22.13, "gain": -1.0, "radius": 22.13}
    return [FilterPicture(title, "odd_$name", i, **values, **greys) for i, title in enumerate(titles[:count])]


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.mark.parametrize(("count", "channels"), [(1, 1), (4, 3), (8, 5)])
def test_draw_writes_a_picture(tmp_path: Path, count: int, channels: int) -> None:
    path = tmp_path / "filters.png"
    draw(data(1, channels, 12, 12), made_up_pictures(count), path)
    width, height = png_size(path)
    assert 700 < width < 3000
    assert 300 < height < 2000
    assert 10_000 < path.stat().st_size < 2_000_000


def test_dashed_boxes_mark_the_pictures_that_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plt = drawing.require_matplotlib()
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    before = torch.ones(8, 8)
    small, large = before + 0.14, before + 0.16
    picture = FilterPicture("smallest rho", "conv", 3, -29.2, 0.0, -1.0, 29.2, before, small, large, large, small)
    draw(data(1, 3, 8, 8), [picture], tmp_path / "filters.png")
    _, rest = figures[0].subfigs
    (panel,) = rest.subfigs
    boxes = {
        (round(axis.get_position().x0, 1), round(axis.get_position().y0, 1)): axis.spines["left"].get_linestyle()
        for axis in panel.axes
    }
    dashed = {place for place, style in boxes.items() if style not in ("-", "solid")}
    # theta + eps v_min is at the lower left, theta - eps v_max at the upper right.
    assert dashed == {(0.0, 0.2), (0.7, 0.7)}
    texts = " ".join(text.get_text() for text in panel.texts)
    assert r"\lambda_{\min} = -29.2" in texts
    assert r"\lambda_{\max} = 0" in texts
    assert "(b) smallest $\\rho" in texts
    monkeypatch.undo()
    plt.close(figures[0])


def test_changes_of_black_pictures_are_zero_or_infinite() -> None:
    black, grey = torch.zeros(2, 2), torch.ones(2, 2)
    picture = FilterPicture("", "conv", 0, 0.0, 0.0, 0.0, 0.0, black, black, grey, black, grey)
    assert picture.changes() == {"minus_min": 0, "plus_min": torch.inf, "minus_max": 0, "plus_max": torch.inf}


@pytest.mark.parametrize(
    ("value", "text"),
    [(22.13, "22.1"), (-0.5, "-0.5"), (1.2e-7, "10^{-7}"), (-1e-8, "-10^{-8}"), (0.0, "0"), (3e6, "10^{6}")],
)
def test_eigenvalues_are_written_as_in_the_paper(value: float, text: str) -> None:
    assert drawing._power(value) == text


def test_draw_refuses_bad_arguments(tmp_path: Path) -> None:
    plt = drawing.require_matplotlib()
    with pytest.raises(ValueError, match="pictures"):
        draw(data(1, 3, 8, 8), [], tmp_path / "filters.png")
    with pytest.raises(ValueError, match="image"):
        draw(data(3, 8, 8), made_up_pictures(1), tmp_path / "filters.png")
    with pytest.raises(ValueError, match="odd"):
        draw(data(1, 3, 8, 8), made_up_pictures(1), tmp_path / "filters.odd")
    with pytest.raises(FileNotFoundError):
        draw(data(1, 3, 8, 8), made_up_pictures(1), tmp_path / "no" / "filters.png")
    assert not plt.get_fignums()


def save_png(path: Path, pixels: Tensor) -> None:  # (H, W, 3), uint8
    Image.fromarray(pixels.numpy()).save(path)


def test_load_image_normalises_and_keeps_the_middle(tmp_path: Path) -> None:
    pixels = torch.zeros(6, 10, 3, dtype=torch.uint8)
    pixels[..., 0], pixels[:, 2:8, 1] = 255, 51
    save_png(tmp_path / "image.png", pixels)
    image = load_image(tmp_path / "image.png", size=6)
    assert image.shape == (1, 3, 6, 6)
    assert image.dtype == torch.float32
    for channel, value in enumerate(((1 - 0.485) / 0.229, (0.2 - 0.456) / 0.224, -0.406 / 0.225)):
        torch.testing.assert_close(image[0, channel], torch.full((6, 6), value))
    # Drawing restores the original colours.
    colours = drawing._as_colours(image)
    torch.testing.assert_close(colours, torch.tensor([1.0, 0.2, 0.0]).double().expand(6, 6, 3), atol=1e-6, rtol=0)
    assert load_image(tmp_path / "image.png").shape == (1, 3, 224, 224)


def test_load_image_refuses_files_that_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "image.png"
    with pytest.raises(FileNotFoundError):
        load_image(path)
    path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"image\.png"):
        load_image(path)
    save_png(path, torch.zeros(20, 20, 3, dtype=torch.uint8))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"image\.png"):
        load_image(path)
    with pytest.raises(ValueError, match="size"):
        load_image(path, size=0)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(RuntimeError, match=r"pip install 's3d_fast\[images\]'"):
        load_image(path)


def torchvision_state(batchnorm: bool, counters: bool = True) -> dict[str, Tensor]:
    """Return a state dict like torchvision's vgg19 or vgg19_bn, with pooling to 7 x 7 but small widths."""
    generator = torch.Generator().manual_seed(3)

    def weights(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (2 / max(1, torch.Size(shape[1:]).numel())) ** 0.5

    state: dict[str, Tensor] = OrderedDict()
    indices = NORMED_CONVOLUTIONS if batchnorm else PLAIN_CONVOLUTIONS
    for index, fan_in, width in zip(indices, (3, *WIDTHS[:-1]), WIDTHS, strict=True):
        state[f"features.{index}.weight"] = weights(width, fan_in, 3, 3)
        state[f"features.{index}.bias"] = weights(width)
        if batchnorm:
            norm = f"features.{index + 1}"
            state[f"{norm}.weight"], state[f"{norm}.bias"] = weights(width).abs(), weights(width)
            state[f"{norm}.running_mean"], state[f"{norm}.running_var"] = weights(width), weights(width).abs() + 0.1
            if counters:
                state[f"{norm}.num_batches_tracked"] = torch.tensor(7)
    for index, fan_in, width in ((0, WIDTHS[-1] * 49, 6), (3, 6, 5), (6, 5, 11)):
        state[f"classifier.{index}.weight"] = weights(width, fan_in)
        state[f"classifier.{index}.bias"] = weights(width)
    return state


def vgg19_by_hand(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the outputs of torchvision's VGG19 in eval mode."""
    batchnorm = "features.1.running_mean" in state
    for place, index in enumerate(NORMED_CONVOLUTIONS if batchnorm else PLAIN_CONVOLUTIONS):
        x = F.conv2d(x, state[f"features.{index}.weight"], state[f"features.{index}.bias"], padding=1)
        if batchnorm:
            names = ("running_mean", "running_var", "weight", "bias")
            x = F.batch_norm(x, *(state[f"features.{index + 1}.{name}"] for name in names))
        x = x.relu()
        if place in (1, 3, 7, 11, 15):
            x = F.max_pool2d(x, 2, 2)
    x = F.adaptive_avg_pool2d(x, 7).flatten(1)
    for index in (0, 3, 6):
        x = F.linear(x, state[f"classifier.{index}.weight"], state[f"classifier.{index}.bias"])
        x = x if index == 6 else x.relu()
    return x


@pytest.mark.parametrize("file", ["safetensors", "torch", "torch, before 1.6"])
@pytest.mark.parametrize("batchnorm", [True, False], ids=["vgg19_bn", "vgg19"])
def test_load_vgg19_reads_the_files_of_torchvision(tmp_path: Path, batchnorm: bool, file: str) -> None:
    # The published files of networks with BatchNorm have no counts of batches.
    state = torchvision_state(batchnorm, counters=file == "safetensors")
    path = tmp_path / "weights"
    if file == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=file == "torch")
    model = load_vgg19(path)
    assert not any(module.training for module in model.modules())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(x), vgg19_by_hand(state, x))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("batchnorm", [True, False])
def test_full_size_vgg19_has_the_parameters_of_torchvision(batchnorm: bool) -> None:
    with torch.device("meta"):
        model = VGG19(pool=7, hidden=(4096, 4096), batchnorm=batchnorm)
    assert set(torchvision_state(batchnorm)) == set(model.state_dict())
    # The numbers in torchvision's documentation.
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == (143_678_248 if batchnorm else 143_667_240)


def test_load_vgg19_reads_half_precision_and_grown_networks(tmp_path: Path) -> None:
    full = torchvision_state(True)
    state = {name: value.half() if value.is_floating_point() else value for name, value in full.items()}
    save_file(state, tmp_path / "half")
    assert {p.dtype for p in load_vgg19(tmp_path / "half").parameters()} == {torch.float32}
    grown = VGG19(WIDTHS, 3, pool=1, batchnorm=True).eval()
    s3d.save_grown(grown, tmp_path / "grown")
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(load_vgg19(tmp_path / "grown")(x), grown(x))


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_load_vgg19_runs_no_code(tmp_path: Path, kind: str) -> None:
    path, mark = tmp_path / "weights.pth", tmp_path / "mark"
    if kind == "torch":
        torch.save(torchvision_state(False) | {"attack": Attack(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(Attack(mark)))
    with pytest.raises(ValueError, match=r"weights\.pth"):
        load_vgg19(path)
    assert not mark.exists()


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


PLAIN = torchvision_state(False)
WRONG_STATES: dict[str, object] = {
    "a tensor": torch.zeros(3),
    "nested": {"state_dict": PLAIN},
    "nothing": {},
    "a layer too few": without(PLAIN, "features.34.weight"),
    "no classifier": {key: value for key, value in PLAIN.items() if key.startswith("features")},
    "no bias": without(PLAIN, "features.2.bias"),
    "something else besides": PLAIN | {"extra": torch.zeros(1)},
    "a wrong shape": PLAIN | {"features.2.weight": torch.zeros(3, 5, 3, 3)},
    "an empty layer": PLAIN | {"features.2.weight": torch.zeros(0, 2, 3, 3)},
    "not square": PLAIN | {"classifier.0.weight": torch.zeros(6, 4 * 48)},
    "integers": PLAIN | {"features.2.weight": torch.zeros(3, 2, 3, 3, dtype=torch.int64)},
    "another order": {key.replace("features.5.", "features.4."): value for key, value in PLAIN.items()},
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_load_vgg19_refuses_other_networks(tmp_path: Path, case: str) -> None:
    torch.save(WRONG_STATES[case], tmp_path / "weights.pth")
    with pytest.raises(ValueError, match=r"weights\.pth"):
        load_vgg19(tmp_path / "weights.pth")


def test_load_vgg19_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with pytest.raises(FileNotFoundError):
        load_vgg19(path)
    save_file(PLAIN, path)
    whole = path.read_bytes()
    torch.save(PLAIN, path)
    for content in (b"", b"nonsense", b"12345678{}", whole[:-10], whole[:30], path.read_bytes()[:-1000]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"weights\.pth"):
            load_vgg19(path)
