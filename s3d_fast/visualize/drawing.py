"""The figure of the paper's appendix: an image, and filters before and after a split."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from s3d_fast.data.images import IMAGENET_NORMALISE, Normalise
from s3d_fast.report import require_matplotlib
from s3d_fast.visualize.guided import check_image
from s3d_fast.visualize.pictures import FilterPicture

# A picture has changed significantly when |after - before| > SIGNIFICANT |before|, in the Euclidean norm.
SIGNIFICANT = 0.15
PANELS_PER_ROW = 4
PANEL_SIZE = (3.4, 3.6)  # inches


def draw(
    image: Tensor,
    pictures: Sequence[FilterPicture],
    path: str | os.PathLike[str],
    normalise: Normalise = IMAGENET_NORMALISE,
) -> None:
    """Draw the paper's figure: (a) the image, then a panel for every filter.

    A panel shows the filter before the split in the centre, theta -+ eps v_min on the left and theta -+ eps v_max on
    the right. Minus is above, plus is below, and the eigenvalues are between them. All five pictures share one grey
    scale. A dashed box marks a picture with |after - before| > 0.15 |before|.

    Args:
        image: (1, channels, H, W).
        pictures: from `filter_pictures`.
        path: the file to write; its suffix gives the format.
        normalise: the normalisation of the image, which the figure undoes.

    Raises:
        ValueError: no pictures, a bad image, or a bad suffix.
        RuntimeError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    check_image(image)
    if not pictures:
        raise ValueError("pictures must hold at least one picture, got none")
    plt = require_matplotlib()
    rows = math.ceil(len(pictures) / PANELS_PER_ROW)
    columns = min(len(pictures), PANELS_PER_ROW)
    figure = plt.figure(figsize=(PANEL_SIZE[0] * (columns + 1), PANEL_SIZE[1] * rows))
    try:
        original, rest = figure.subfigures(1, 2, width_ratios=(1, columns))
        _draw_original(original, image, normalise)
        panels = rest.subfigures(rows, columns, squeeze=False).flat
        for place, (panel, picture) in enumerate(zip(panels, pictures, strict=False)):
            _draw_panel(panel, picture, chr(ord("b") + place))
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def _draw_original(panel: Any, image: Tensor, normalise: Normalise) -> None:
    panel.subplots_adjust(left=0.05, right=0.95, bottom=0.12, top=0.98)
    axis = panel.subplots()
    axis.imshow(_as_colours(image, normalise).numpy(), cmap="gray", vmin=0, vmax=1)
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


def _as_colours(image: Tensor, normalise: Normalise = IMAGENET_NORMALISE) -> Tensor:
    """Return an image as matplotlib shows it, (H, W, 3) or (H, W), between 0 and 1."""
    pixels = image[0].detach().cpu().double()
    if len(pixels) != 3:
        pixels = pixels.mean(0, keepdim=True)
    if len(pixels) == 3 and not _is_between_0_and_1(pixels):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (normalise.mean, normalise.std))
        original = pixels * std + mean
        pixels = original if _is_between_0_and_1(original) else pixels
    if not _is_between_0_and_1(pixels):
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) / (high - low) if high > low else torch.zeros_like(pixels)
    return pixels.clamp(0, 1).permute(1, 2, 0).squeeze(-1)


def _is_between_0_and_1(pixels: Tensor) -> bool:
    return bool(pixels.min() >= -1e-3) and bool(pixels.max() <= 1 + 1e-3)
