"""Pictures of filters before and after a split, by guided backpropagation: the figure of the paper's appendix."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, fx, nn

from s3d_fast import checks, fx_calls, layers
from s3d_fast.capture import capture
from s3d_fast.graph import Graph, Unit
from s3d_fast.models.vgg import vgg19_of
from s3d_fast.report import require_matplotlib
from s3d_fast.schemes import split_gain
from s3d_fast.solvers import Spectrum, extremal_eigenpairs
from s3d_fast.tracing import trace
from s3d_fast.undisturbed import undisturbed

# Activations that let positive inputs through and stop negative ones, all of them or nearly so.
RECTIFIERS = frozenset({"relu", "relu6", "leaky_relu", "elu", "hardswish", "silu", "gelu", "softplus"})
# A picture has changed significantly when |after - before| > SIGNIFICANT |before|, in the Euclidean norm.
SIGNIFICANT = 0.15
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PANELS_PER_ROW = 4
PANEL_SIZE = (3.4, 3.6)  # inches


@dataclass(frozen=True)
class FilterPicture:
    """A filter before a split and after it moved along each of its extreme eigenvectors: a panel of the figure."""

    title: str  # why this filter was chosen, such as "largest lambda_max"
    unit: str
    filter: int
    lambda_min: float
    lambda_max: float
    gain: float  # G_4, of the best split into four copies
    radius: float  # rho = max(|lambda_min|, |lambda_max|)
    before: Tensor  # (H, W), of the filter theta
    minus_min: Tensor  # (H, W), of theta - eps v_min
    plus_min: Tensor  # (H, W), of theta + eps v_min
    minus_max: Tensor  # (H, W), of theta - eps v_max
    plus_max: Tensor  # (H, W), of theta + eps v_max
    converged: bool = True  # whether the eigenpairs are as exact as was asked for

    def changes(self) -> dict[str, float]:
        """Return |after - before| / |before| of the four pictures by name; infinite where only `before` is black."""
        before = self.before.double()
        found = {}
        for name in ("minus_min", "plus_min", "minus_max", "plus_max"):
            change, size = float((getattr(self, name).double() - before).norm()), float(before.norm())
            found[name] = 0.0 if change == 0 else math.inf if size == 0 else change / size
        return found


def guided_backpropagation(
    model: nn.Module, image: Tensor, graph: Graph, unit: str, filter: int, row: Tensor | None = None
) -> Tensor:
    """Return a grey picture, (H, W), of what a filter responds to in an image (Springenberg et al., 2015).

    It is the sum over colours of |dA/d image|, where A is the sum of the filter's activation over all places, and every
    rectifier h = act(z) on the way, the filter's own among them, passes back

        dA/dz = act'(z) max(dA/dh, 0)  where z > 0,  0 elsewhere.

    Rectifiers are ReLU, ReLU6, LeakyReLU, ELU, SiLU, GELU, softplus and Hardswish; everything else passes its ordinary
    gradient. All places, not the strongest one alone, so that a small change of the filter cannot move the picture
    from one place to another. A filter that is nowhere active has a black picture. The model is evaluated in eval mode
    and left as it was, also after an error.

    Args:
        model: the model that was traced.
        image: (1, channels, H, W), as the model reads it.
        graph: from `trace`, of the model as it is now.
        unit: the name of the filter's layer; a convolution or a linear layer.
        filter: its index.
        row: (D,), stands in for the filter's parameters; the bias comes last where there is one.

    Raises:
        ValueError, TypeError: a bad argument.
    """
    _check_image(image)
    chosen = _check_unit(model, graph, unit)
    checks.is_count("filter", filter, at_least=0)
    if filter >= chosen.width:
        raise ValueError(f"filter must be below {chosen.width}, the filters of unit {unit!r}, got {filter}")
    if row is not None:
        checks.is_tensor("row", row)
        checks.has_shape("row", row, (chosen.fan_in,))
        checks.is_finite("row", row)
    with undisturbed(model), torch.enable_grad():
        pixels = image.detach().clone().requires_grad_()
        response = _Guided(graph.module, chosen, filter, row).response(pixels)
        if not response.requires_grad:
            return torch.zeros_like(image[0, 0])
        (gradient,) = torch.autograd.grad(response, pixels, allow_unused=True, materialize_grads=True)
    return gradient[0].abs().sum(0)


def interesting_filters(spectrum: Spectrum, c: float = 1.3) -> dict[str, int]:
    """Return which filter has the largest and the smallest eigenvalues, gain G_4 and radius rho.

    The first four are the paper's: "largest lambda_max", "smallest lambda_min", "smallest G_4", "smallest rho". The
    opposite ends follow in the same order. Of filters that are equal, the first is taken.

    Args:
        spectrum: of one layer.
        c: the bound on the sum of absolute weights, for G_4.

    Raises:
        ValueError: no filters, eigenvalues that are not finite, or c < 1.
    """
    if not len(spectrum):
        raise ValueError("spectrum must hold at least one filter, got none")
    measures = {
        "lambda_max": spectrum.lambda_max,
        "lambda_min": spectrum.lambda_min,
        "G_4": split_gain(spectrum.lambda_min, spectrum.lambda_max, m=4, c=c),
        "rho": spectrum.radius,
    }
    papers = {"lambda_max": "largest", "lambda_min": "smallest", "G_4": "smallest", "rho": "smallest"}
    opposite = {"largest": "smallest", "smallest": "largest"}
    ends = [*papers.items(), *((name, opposite[end]) for name, end in papers.items())]
    return {
        f"{end} {name}": int(measures[name].argmax() if end == "largest" else measures[name].argmin())
        for name, end in ends
    }


def filter_pictures(
    model: nn.Module,
    image: Tensor,
    target: Tensor | int,
    unit: str | None = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy,
    eps: float = 0.01,
    c: float = 1.3,
    solver: str | None = None,
    all_extremes: bool = False,
) -> list[FilterPicture]:
    """Return pictures of the filters of a layer whose splitting matrices, on one image, are the most remarkable.

    Each is shown before and after theta moves to theta +- eps v_min and theta +- eps v_max. The model is left as it
    was, also after an error. Every picture costs a forward and a backward pass; there are five per filter.

    Args:
        model: any model that `trace` understands.
        image: (1, channels, H, W), as the model reads it.
        target: what loss_fn compares the output with: a tensor, or the index of a class.
        unit: the name of the layer; by default the last convolution that can be split.
        loss_fn: as for `capture`.
        eps: the size of the step along a unit eigenvector.
        c: the bound on the sum of absolute weights, for G_4.
        solver: of `extremal_eigenpairs`; Lanczos by default.
        all_extremes: all eight filters of `interesting_filters`, not only the paper's four.

    Raises:
        ValueError, TypeError: a bad argument, a model that cannot be traced, or one without such a layer.
    """
    _check_image(image)
    checks.is_positive("eps", eps)
    checks.is_weight_bound(c)
    wanted = _as_target(target, image)
    try:
        graph = trace(model, image)
    except ValueError as error:
        raise ValueError(f"model or image: {error}") from error
    name = _last_convolution(graph) if unit is None else unit
    _check_unit(model, graph, name)
    try:
        operator = capture(model, loss_fn, [(image, wanted)], graph, units=[name])[name]
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"target does not go with the model's output and loss_fn: {error}") from error
    spectrum = extremal_eigenpairs(operator, "lanczos" if solver is None else solver)

    extremes = list(interesting_filters(spectrum, c).items())
    gains = split_gain(spectrum.lambda_min, spectrum.lambda_max, m=4, c=c)
    picture_of = partial(guided_backpropagation, model, image, graph, name)
    pictures = []
    for title, index in extremes if all_extremes else extremes[: len(extremes) // 2]:
        theta = _parameters(model.get_submodule(name), index)
        along_min, along_max = (eps * v[index].to(theta) for v in (spectrum.v_min, spectrum.v_max))
        pictures.append(
            FilterPicture(
                title=title,
                unit=name,
                filter=index,
                lambda_min=float(spectrum.lambda_min[index]),
                lambda_max=float(spectrum.lambda_max[index]),
                gain=float(gains[index]),
                radius=float(spectrum.radius[index]),
                before=picture_of(index),
                minus_min=picture_of(index, theta - along_min),
                plus_min=picture_of(index, theta + along_min),
                minus_max=picture_of(index, theta - along_max),
                plus_max=picture_of(index, theta + along_max),
                converged=bool(spectrum.converged[index]),
            )
        )
    return pictures


def draw(image: Tensor, pictures: Sequence[FilterPicture], path: str | os.PathLike[str]) -> None:
    """Draw the paper's figure: (a) the image, then a panel for every filter.

    In a panel the filter before the split is in the centre, theta -+ eps v_min on the left and theta -+ eps v_max on
    the right, minus above and plus below, with the eigenvalues between them. All five share one scale of grey. A dashed
    box marks a picture with |after - before| > 0.15 |before|.

    Args:
        image: (1, channels, H, W). One that is normalised as `load_image` does is shown in its own colours.
        pictures: from `filter_pictures`.
        path: of the file; its ending says which format.

    Raises:
        ValueError: no pictures, or a bad image or ending.
        RuntimeError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    _check_image(image)
    if not pictures:
        raise ValueError("pictures must hold at least one picture, got none")
    plt = require_matplotlib()
    rows = math.ceil(len(pictures) / PANELS_PER_ROW)
    columns = min(len(pictures), PANELS_PER_ROW)
    figure = plt.figure(figsize=(PANEL_SIZE[0] * (columns + 1), PANEL_SIZE[1] * rows))
    try:
        original, rest = figure.subfigures(1, 2, width_ratios=(1, columns))
        _draw_original(original, image)
        panels = rest.subfigures(rows, columns, squeeze=False).flat
        for place, (panel, picture) in enumerate(zip(panels, pictures, strict=False)):
            _draw_panel(panel, picture, chr(ord("b") + place))
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def load_image(path: str | os.PathLike[str], size: int = 224) -> Tensor:
    """Return an image as networks for ImageNet read it, (1, 3, size, size).

    Its shorter side is scaled to `size`, the middle of the longer one is kept, and colours are normalised.

    Raises:
        ValueError: the file is not an image, or size < 1.
        RuntimeError: Pillow is not installed; says how to get it.
        OSError: the file cannot be read.
    """
    checks.is_count("size", size)
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise RuntimeError("images need Pillow, which is not installed: pip install 's3d_fast[images]'") from error
    with open(path, "rb") as file:
        try:
            # A camera held upright notes that in the file, and does not turn the pixels.
            upright = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
        except Exception as error:
            raise ValueError(f"path: {os.fspath(path)} cannot be read as an image: {error}") from error
    square = ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, 3)
    return (pixels.permute(2, 0, 1).unsqueeze(0) / 255 - _colours(IMAGENET_MEAN)) / _colours(IMAGENET_STD)


def load_vgg19(path: str | os.PathLike[str]) -> nn.Module:
    """Return, in eval mode and float32, the VGG19 whose weights a file holds.

    The names must be those of torchvision's vgg19 or vgg19_bn, which are also those of `models.VGG19`: from
    features.0.weight to classifier.6.bias. Widths, classes and whether there are BatchNorms are read off the tensors,
    so that a grown network will do; the activation is taken to be ReLU.

    Args:
        path: of a safetensors file, or of one that torch.save made of a state dict. No code in it is ever run.

    Raises:
        ValueError: the file is neither, or holds another network.
        OSError: the file cannot be read.
    """
    tensors = _read_tensors(path)
    try:
        return vgg19_of(tensors).eval()
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"path: {os.fspath(path)} does not hold the weights of a VGG19: {error}") from error


class _Guided(fx.Interpreter):
    """Evaluates the traced model up to a unit's activation, with rectifiers that guide the gradient."""

    def __init__(self, module: fx.GraphModule, unit: Unit, filter: int, row: Tensor | None) -> None:
        super().__init__(module)
        self.unit, self.filter, self.row = unit, filter, row
        self.activation: Tensor | None = None
        # What is raised is raised again, with a message of our own.
        self.extra_traceback = False

    def response(self, pixels: Tensor) -> Tensor:
        """Return the sum of the filter's activation over all places."""
        try:
            # A copy: the model may begin with an operation in place.
            self.run(pixels.clone())
        except (RuntimeError, IndexError, TypeError) as error:
            raise ValueError(f"image cannot be evaluated by the model: {error}") from error
        assert self.activation is not None
        axis = self.unit.activation_axis
        # A flattened channel has several entries.
        entries = self.activation.shape[axis] // self.unit.width
        return self.activation.narrow(axis, self.filter * entries, entries).sum()

    def run_node(self, n: fx.Node) -> Any:
        if self.activation is not None:
            # Nothing behind the unit is of interest.
            return None
        if n.name == self.unit.producer_node and self.row is not None:
            return self._produce(n, self.row)
        result = self._rectify(n) if self._is_rectifier(n) else super().run_node(n)
        if n.name == self.unit.activation_node:
            self.activation = result
        return result

    def _produce(self, n: fx.Node, row: Tensor) -> Tensor:
        """Return the layer's output with another filter in the place of one of its own."""
        module = self.submodules[str(n.target)]
        tensors = {name: value.detach().clone() for name, value in module.named_parameters(recurse=False)}
        weight, row = tensors["weight"], row.to(tensors["weight"])
        weight[self.filter] = row[: weight[0].numel()].view_as(weight[0])
        if "bias" in tensors:
            tensors["bias"][self.filter] = row[-1]
        arguments, keywords = self.fetch_args_kwargs_from_env(n)
        return torch.func.functional_call(module, tensors, arguments, keywords)

    def _is_rectifier(self, n: fx.Node) -> bool:
        if n.op == "call_module":
            act = layers.activation_of(self.submodules[str(n.target)])
        else:
            act = fx_calls.functional_activation(n)
        return act is not None and act.name in RECTIFIERS

    def _rectify(self, n: fx.Node) -> Tensor:
        source = n.all_input_nodes[0]
        open_at = self.env[source] > 0
        h = super().run_node(n)
        # The values are those of h; a gradient gets through only where the input was positive, and is positive itself.
        guided = torch.where(open_at, h, h.detach())
        if guided.requires_grad:
            guided.register_hook(lambda g: g.clamp(min=0))
        if fx_calls.is_inplace(n, self.submodules):
            self.env[source] = guided
        return guided


def _check_image(image: Tensor) -> None:
    checks.is_tensor("image", image)
    checks.has_shape("image", image, (1, "channels", "H", "W"))
    checks.is_not_empty("image", image)
    checks.is_finite("image", image)


def _check_unit(model: nn.Module, graph: Graph, unit: str) -> Unit:
    """Return the unit of that name, of a graph that is the model's."""
    chosen = graph.units.get(unit)
    if chosen is None:
        raise ValueError(f"unit must be one of {', '.join(graph.units) or 'none'}; got {unit!r}")
    if chosen.kind not in ("conv", "linear"):
        raise ValueError(f"unit must be a convolution or a linear layer, got {unit!r}, which is {chosen.kind}")
    graph.check(model)
    if model.get_submodule(unit) is not graph.module.get_submodule(unit):
        raise ValueError(f"graph belongs to another model: its {unit!r} is not that of the model given")
    return chosen


def _last_convolution(graph: Graph) -> str:
    names = [unit.name for unit in graph if unit.kind == "conv"]
    if not names:
        raise ValueError("model has no convolution that can be split: name another unit, or see trace(...).explain()")
    return names[-1]


def _as_target(target: Tensor | int, image: Tensor) -> Tensor:
    if isinstance(target, Tensor):
        return target
    checks.is_count("target", target, at_least=0)
    return torch.tensor([target], device=image.device)


def _parameters(module: nn.Module, filter: int) -> Tensor:
    """Return theta, (D,), of a filter: its weights, and its bias where there is one."""
    stored = dict(module.named_parameters(recurse=False))
    parts = [stored[name].detach()[filter].flatten() for name in ("weight", "bias") if name in stored]
    return torch.cat(parts)


def _draw_original(panel: Any, image: Tensor) -> None:
    panel.subplots_adjust(left=0.05, right=0.95, bottom=0.12, top=0.98)
    axis = panel.subplots()
    axis.imshow(_as_colours(image).numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_axis_off()
    axis.text(0.5, -0.05, "(a) original image", ha="center", va="top", fontsize=12, transform=axis.transAxes)


def _draw_panel(panel: Any, picture: FilterPicture, letter: str) -> None:
    width, height = 0.31, 0.31 * PANEL_SIZE[0] / PANEL_SIZE[1]
    places = {
        "minus_min": (0.03, 0.68),
        "plus_min": (0.03, 0.17),
        "minus_max": (0.66, 0.68),
        "plus_max": (0.66, 0.17),
        "before": (0.345, 0.425),
    }
    greys = {name: getattr(picture, name).detach().cpu().double() for name in places}
    pixels = torch.cat([grey.flatten() for grey in greys.values()])
    # A few strong pixels must not darken the rest.
    scale = float(pixels.kthvalue(math.ceil(0.99 * len(pixels))).values) or float(pixels.max()) or 1.0
    changes = picture.changes()
    for name, (left, bottom) in places.items():
        axis = panel.add_axes((left, bottom, width, height))
        axis.imshow(greys[name].numpy(), cmap="gray", vmin=0, vmax=scale)
        axis.set(xticks=[], yticks=[])
        if name == "before":
            continue
        sign, colour = "-" if name.startswith("minus") else "+", "tab:blue" if name.endswith("min") else "tab:red"
        axis.text(0.04, 0.95, f"${sign}$", color="yellow", va="top", fontsize=12, transform=axis.transAxes)
        if changes[name] > SIGNIFICANT:
            for spine in axis.spines.values():
                spine.set(linestyle=(0, (4, 2)), linewidth=2.5, edgecolor=colour)
    for x, end, value in ((0.17, "min", picture.lambda_min), (0.83, "max", picture.lambda_max)):
        label = rf"$\theta \pm \epsilon v_{{\{end}}}$" + "\n" + rf"$\lambda_{{\{end}}} = {_power(value)}$"
        panel.text(x, 0.57, label, ha="center", va="center", fontsize=9)
    panel.text(0.5, 0.08, f"({letter}) {_as_mathematics(picture.title)}", ha="center", fontsize=12)
    below = f"{picture.unit}, filter {picture.filter}" + ("" if picture.converged else ", not converged")
    panel.text(0.5, 0.03, below, ha="center", fontsize=8, color="dimgray", parse_math=False)


def _as_mathematics(title: str) -> str:
    symbols = {
        "lambda_max": r"$\lambda_{\max}$",
        "lambda_min": r"$\lambda_{\min}$",
        "G_4": "$G_4^{-c}$",
        "rho": r"$\rho(S(\theta))$",
    }
    return re.sub("|".join(symbols), lambda found: symbols[found[0]], title)


def _power(value: float) -> str:
    """Return an eigenvalue as the paper writes it: -29.2, or 10^{-7}."""
    if value == 0 or 0.05 <= abs(value) < 1e4:
        return f"{value:.1f}" if value else "0"
    return f"{'-' if value < 0 else ''}10^{{{round(math.log10(abs(value)))}}}"


def _as_colours(image: Tensor) -> Tensor:
    """Return an image as matplotlib shows it, (H, W, 3) or (H, W), between 0 and 1."""
    pixels = image[0].detach().cpu().double()
    if len(pixels) != 3:
        pixels = pixels.mean(0, keepdim=True)
    if len(pixels) == 3 and not _is_between_0_and_1(pixels):
        original = (pixels * _colours(IMAGENET_STD) + _colours(IMAGENET_MEAN))[0]
        pixels = original if _is_between_0_and_1(original) else pixels
    if not _is_between_0_and_1(pixels):
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low) if high > low else torch.zeros_like(pixels)
    return pixels.clamp(0, 1).permute(1, 2, 0).squeeze(-1)


def _is_between_0_and_1(pixels: Tensor) -> bool:
    return bool(pixels.min() >= -1e-3) and bool(pixels.max() <= 1 + 1e-3)


def _colours(values: Sequence[float]) -> Tensor:
    return torch.tensor(values).view(1, 3, 1, 1)


def _read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of one that torch.save made of a dict of tensors."""
    with open(path, "rb") as file:
        # The header of a safetensors file is JSON, behind eight bytes with its length.
        is_safetensors = file.read(9)[8:] == b"{"
    try:
        if is_safetensors:
            with safe_open(os.fspath(path), framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"path: {os.fspath(path)} is not a file of weights that is safe to read: {error}") from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"path: {os.fspath(path)} must hold a state dict, tensors by name, and nothing else")
    return {str(name): tensor for name, tensor in tensors.items()}
