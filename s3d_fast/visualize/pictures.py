"""The filters of a layer with extreme eigenvalues, and their pictures before and after a split."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast.base import require
from s3d_fast.capture.all_batches import capture
from s3d_fast.maths.schemes import split_gain
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.solvers import Spectrum, extremal_eigenpairs
from s3d_fast.visualize.guided import check_image, check_unit, guided_backpropagation


@dataclass(frozen=True)
class FilterPicture:
    """A panel of the figure: a filter before a split, and after moving along each of its extreme eigenvectors."""

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
    converged: bool = True  # whether the eigenpairs reached the tolerance

    def changes(self) -> dict[str, float]:
        """Return |after - before| / |before| of the four pictures by name; infinite where only `before` is black."""
        before = self.before.double()
        found = {}
        for name in ("minus_min", "plus_min", "minus_max", "plus_max"):
            change, size = float((getattr(self, name).double() - before).norm()), float(before.norm())
            found[name] = 0.0 if change == 0 else math.inf if size == 0 else change / size
        return found


def interesting_filters(spectrum: Spectrum, c: float = 1.3) -> dict[str, int]:
    """Return the filters with the largest and the smallest eigenvalues, gain G_4 and radius rho, by name.

    The first four are the paper's: "largest lambda_max", "smallest lambda_min", "smallest G_4", "smallest rho". The
    opposite ends follow in the same order. Among equal filters the first is taken.

    Args:
        spectrum: the spectrum of one layer.
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
    """Return pictures of the filters of a layer whose splitting matrices, on one image, are extreme.

    Each filter is shown before and after theta moves to theta +- eps v_min and theta +- eps v_max. The model is left as
    it was, even after an error. Every picture costs a forward and a backward pass; there are five per filter.

    Args:
        model: any model that `trace` understands.
        image: (1, channels, H, W), as the model reads it.
        target: what loss_fn compares the output with: a tensor, or the index of a class.
        unit: the name of the layer; by default the last convolution that can be split.
        loss_fn: as for `capture`.
        eps: the size of the step along a unit eigenvector.
        c: the bound on the sum of absolute weights, for G_4.
        solver: as for `extremal_eigenpairs`; Lanczos by default.
        all_extremes: draw all eight filters of `interesting_filters`, not only the paper's four.

    Raises:
        ValueError, TypeError: a bad argument, a model that cannot be traced, or one without such a layer.
    """
    check_image(image)
    require.positive("eps", eps)
    require.weight_bound(c)
    wanted = _as_target(target, image)
    try:
        graph = trace(model, image)
    except ValueError as error:
        raise ValueError(f"model or image: {error}") from error
    name = _last_convolution(graph) if unit is None else unit
    check_unit(model, graph, name)
    try:
        operator = capture(model, loss_fn, [(image, wanted)], graph, units=[name])[name]
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"target does not fit the model's output and loss_fn: {error}") from error
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


def _last_convolution(graph: Graph) -> str:
    names = [unit.name for unit in graph if unit.kind == "conv"]
    if not names:
        raise ValueError("model has no convolution that can be split: name another unit, or see trace(...).explain()")
    return names[-1]


def _as_target(target: Tensor | int, image: Tensor) -> Tensor:
    if isinstance(target, Tensor):
        return target
    require.count("target", target, at_least=0)
    return torch.tensor([target], device=image.device)


def _parameters(module: nn.Module, filter: int) -> Tensor:
    """Return the parameters theta, (D,), of a filter: its weights, then its bias if there is one."""
    stored = dict(module.named_parameters(recurse=False))
    parts = [stored[name].detach()[filter].flatten() for name in ("weight", "bias") if name in stored]
    return torch.cat(parts)
