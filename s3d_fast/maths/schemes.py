"""Optimal splitting schemes: how much a split can gain, and the weights and offsets that attain it.

Splitting a neuron into m copies with weights w_k (sum 1, sum |w_k| <= c) and offsets eps * delta_k (|delta_k| <= 1,
sum w_k delta_k = 0) changes the loss by eps^2 / 2 * sum_k w_k delta_k^T S delta_k + O(eps^3). The smallest value of
that sum is the gain G <= 0. With r = (c - 1) / (c + 1):

    m  scheme    gain                                   copies (w, delta)
    2  positive  lmin                                   (1/2, +-vmin)
    2  negative  -r lmax                                (-(c-1)/2, vmax), ((c+1)/2, r vmax)
    3  positive  (c+1)/2 lmin                           ((c+1)/4, +-vmin), (-(c-1)/2, 0)
    3  negative  -(c-1)/2 lmax                          (-(c-1)/4, +-vmax), ((c+1)/2, 0)
    3  mixed     2c/(c+1) lmin - r lmax                 ((c+1)/4, +-sqrt(1-r^2) vmin + r vmax), (-(c-1)/2, vmax)
    4  quartet   (c+1)/2 min(lmin,0)-(c-1)/2 max(lmax,0)  ((c+1)/4, +-vmin), (-(c-1)/4, +-vmax)

The mixed triplet is not in the S3D paper: its Theorem 2 overlooks it. docs/math.md proves the full result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from s3d_fast.base import require

COPIES = (2, 3, 4)


class Split(NamedTuple):
    """The optimal split of each of several neurons into m copies.

    A neuron with gain 0 should not be split: its first copy has weight 1, the others have weight 0, all offsets are 0.
    """

    weights: Tensor  # (..., m)
    offsets: Tensor  # (..., m, D)
    gain: Tensor  # (...)


def split_gain(
    lambda_min: Tensor | float, lambda_max: Tensor | float, m: int = 2, c: float = 1.0, theorem: str = "true"
) -> Tensor:
    """Return G, the best possible sum_k w_k delta_k^T S delta_k over m copies; never positive.

    Args:
        lambda_min, lambda_max: the extreme eigenvalues of S; any shape, the same for both.
        m: the number of copies, 2, 3 or 4. A fifth copy gains nothing.
        c: the bound on the sum of absolute weights; 1 allows positive weights only (S2D).
        theorem: "true"; or "paper", three copies as in its Theorem 2, without the mixed scheme.

    Raises:
        ValueError: m or c is out of range; or eigenvalues are not finite, differ in shape, or lambda_min > lambda_max.
    """
    low, high = _eigenvalues(lambda_min, lambda_max)
    gains = _gains(low, high, m, c, theorem)
    return gains.amin(-1).clamp(max=0)


def optimal_split(
    lambda_min: Tensor,  # (...)
    v_min: Tensor,  # (..., D), unit vectors
    lambda_max: Tensor,  # (...)
    v_max: Tensor,  # (..., D), unit vectors
    m: int = 2,
    c: float = 1.0,
    theorem: str = "true",
) -> Split:
    """Return the weights and offsets that attain `split_gain`, for each neuron.

    Raises:
        ValueError: as `split_gain`; or the shape of the vectors does not match the eigenvalues.
    """
    low, high = _eigenvalues(lambda_min, lambda_max)
    for name, vector in (("v_min", v_min), ("v_max", v_max)):
        require.tensor(name, vector)
        width = v_min.shape[-1] if v_min.dim() else "D"
        require.shape(name, vector, (*low.shape, width))
        require.agreement(name, vector, "lambda_min", low)
        require.finite(name, vector)
    gains = _gains(low, high, m, c, theorem)
    gain, choice = gains.min(-1)
    gain = gain.clamp(max=0)

    weights, along_min, along_max = _tables(m, c, low.dtype, low.device)
    if m == 4:
        # A direction is used only if its eigenvalue has the right sign.
        v_min = v_min * (low < 0).unsqueeze(-1)
        v_max = v_max * (high > 0).unsqueeze(-1)
    w = weights[choice]
    offsets = along_min[choice].unsqueeze(-1) * v_min.unsqueeze(-2)
    offsets = offsets + along_max[choice].unsqueeze(-1) * v_max.unsqueeze(-2)

    if m == 3:
        # Without exactly orthogonal eigenvectors, a mixed offset could lie outside the unit ball.
        length = offsets.norm(dim=-1).amax(-1).clamp(min=1)
        offsets = offsets / torch.where(choice == 2, length, 1)[..., None, None]

    splits = (gain < 0).unsqueeze(-1)
    unsplit = torch.zeros_like(w)
    unsplit[..., 0] = 1
    return Split(torch.where(splits, w, unsplit), offsets * splits.unsqueeze(-1), gain)


def _eigenvalues(lambda_min: Tensor | float, lambda_max: Tensor | float) -> tuple[Tensor, Tensor]:
    like = next((value for value in (lambda_min, lambda_max) if isinstance(value, Tensor)), None)
    if like is None:
        low, high = torch.as_tensor(lambda_min), torch.as_tensor(lambda_max)
    else:
        low, high = (v if isinstance(v, Tensor) else like.new_tensor(v) for v in (lambda_min, lambda_max))
    if not low.is_floating_point() or not high.is_floating_point():
        low, high = low.to(torch.get_default_dtype()), high.to(torch.get_default_dtype())
    require.shape("lambda_max", high, tuple(low.shape))
    require.agreement("lambda_max", high, "lambda_min", low)
    require.finite("lambda_min", low)
    require.finite("lambda_max", high)
    if bool((low > high).any()):
        worst = int((low - high).argmax())
        raise ValueError(
            f"lambda_min must not exceed lambda_max, got {low.flatten()[worst].item():g} > "
            f"{high.flatten()[worst].item():g} at neuron {worst}"
        )
    return low, high


def _gains(low: Tensor, high: Tensor, m: int, c: float, theorem: str) -> Tensor:
    """Return the gain of every scheme with m copies, (..., schemes), in the order of `_tables`."""
    require.choice("theorem", theorem, ("true", "paper"))
    require.copy_count(m)
    require.weight_bound(c)
    r = (c - 1) / (c + 1)
    if m == 2:
        schemes = [low, -r * high]
    elif m == 3:
        schemes = [(c + 1) / 2 * low, -(c - 1) / 2 * high]
        # The paper overlooks that both directions can be mixed.
        schemes += [2 * c / (c + 1) * low - r * high] if theorem == "true" else []
    else:
        schemes = [(c + 1) / 2 * low.clamp(max=0) - (c - 1) / 2 * high.clamp(min=0)]
    return torch.stack(schemes, -1)


def _tables(m: int, c: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, and the offsets along v_min and v_max, of every scheme with m copies: each (schemes, m)."""
    r = (c - 1) / (c + 1)
    h = math.sqrt(1 - r * r)
    plus, minus = (c + 1) / 4, -(c - 1) / 4
    weights: list[list[float]]
    along_min: list[list[float]]
    along_max: list[list[float]]
    if m == 2:
        weights = [[0.5, 0.5], [2 * minus, 2 * plus]]
        along_min = [[1, -1], [0, 0]]
        along_max = [[0, 0], [1, r]]
    elif m == 3:
        weights = [[plus, plus, 2 * minus], [minus, minus, 2 * plus], [plus, plus, 2 * minus]]
        along_min = [[1, -1, 0], [0, 0, 0], [h, -h, 0]]
        along_max = [[0, 0, 0], [1, -1, 0], [r, r, 1]]
    else:
        weights = [[plus, plus, minus, minus]]
        along_min = [[1, -1, 0, 0]]
        along_max = [[0, 0, 1, -1]]
    return (
        torch.tensor(weights, dtype=dtype, device=device),
        torch.tensor(along_min, dtype=dtype, device=device),
        torch.tensor(along_max, dtype=dtype, device=device),
    )
