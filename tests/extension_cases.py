"""What the tests of the compiled extension share: one good call of every operator."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cases import random_tensor

# Which arguments of the operators are documented to change.
IN_PLACE = {"add_splitting_matrices": {0}, "curvature_coefficients_": {0}, "krylov_extend": {0, 2, 3, 4, 5}}


def good_calls() -> dict[str, tuple]:
    """Return the arguments of one good call of every operator, by its name."""
    settings = (1, 1, 0.0, 0.0, [0.0], [1.0], 3.0, random_tensor(8, seed=5).abs(), random_tensor(3, seed=6).abs())
    index = torch.tensor
    return {
        "splitting_matvec": (random_tensor(6, 4), random_tensor(6, 3), random_tensor(3, 5), True, False),
        "splitting_matvec_grouped": (
            [random_tensor(6, 4), random_tensor(5, 2)],
            [random_tensor(6, 3), random_tensor(5, 2)],
            [random_tensor(3, 5), random_tensor(3, 2, 2)],
            [True, False],
            True,
        ),
        "joint_matvec": (
            [random_tensor(6, 4), random_tensor(6, 2)],
            [random_tensor(6, 3, seed=seed) for seed in (1, 2, 3)],
            random_tensor(3, 7),
            [True, False],
            False,
        ),
        "gated_matvec": (
            random_tensor(6, 4),
            *(random_tensor(6, 3, seed=seed) for seed in (1, 2, 3)),
            random_tensor(3, 10),
            True,
        ),
        "depthwise_matvec_grouped": (
            [random_tensor(24, 4), random_tensor(8, 2)],
            [random_tensor(*shape) for shape in ((2, 3, 4, 3), (2, 2, 2, 3), (2, 1, 2, 3), (2, 2, 2, 5), (2, 2, 2, 5))],
            [random_tensor(*shape) for shape in ((2, 3, 4, 3), (2, 2, 2, 3), (2, 2, 2, 5))],
            [random_tensor(3, 3, 3), random_tensor(3, 2, 1), random_tensor(5, 3, 3)],
            [2, 1],
            [2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
            [random_tensor(3, 5), random_tensor(3, 5, 2)],
            [True, False],
        ),
        "depthwise_row_norms": (
            random_tensor(24, 4),
            random_tensor(2, 3, 4, 3),
            random_tensor(3, 3, 3),
            [2, 2, 1, 1, 1, 1],
            True,
        ),
        "edgeconv_matvec": (
            random_tensor(2, 5, 3),
            torch.arange(40).reshape(2, 5, 4) % 5,
            random_tensor(2, 5, 4),
            random_tensor(4, 6),
            False,
            (torch.arange(40).reshape(2, 5, 4) + 2) % 5,
            *(random_tensor(2, 5, 4, seed=seed) for seed in (1, 2, 3)),
        ),
        "tied_rows_matvec": (
            random_tensor(8, 4),
            random_tensor(8, 3),
            random_tensor(3, 5),
            torch.arange(12).reshape(2, 3, 2) % 4,
            (torch.arange(12).reshape(2, 3, 2) + 1) % 4,
            *(random_tensor(2, 3, 2, seed=seed) for seed in (1, 2, 3)),
            True,
            False,
        ),
        "tied_maps": (
            random_tensor(2, 6, 4, 5),
            random_tensor(2, 3, 4, 5),
            torch.arange(24).reshape(2, 3, 4) % 20,
            (torch.arange(24).reshape(2, 3, 4) + 3) % 20,
            *(random_tensor(2, 3, 4, seed=seed) for seed in (1, 2, 3)),
        ),
        "splitting_matrices": (random_tensor(6, 4), random_tensor(6, 3), True),
        "add_splitting_matrices": (random_tensor(3, 4, 4), random_tensor(6, 4), random_tensor(6, 3), False, 2.0),
        "curvature_coefficients": (random_tensor(2, 3, 4), random_tensor(2, 3, 4, seed=1), random_tensor(3), *settings),
        "curvature_coefficients_": (
            random_tensor(2, 3, 4),
            random_tensor(2, 3, 4, seed=1),
            random_tensor(3),
            *settings,
        ),
        "activation_slopes": (random_tensor(2, 3, 4), random_tensor(3), 1, 0, 0.0, 0.0, [0.0], [1.0]),
        "top_two": (random_tensor(3, 5, 4),),
        "gather_patches": (random_tensor(2, 3, 5, 4), index([[0, 1, -1], [1, 0, 2]]), [2, 3], [1, 1]),
        "grow_weights": (
            [random_tensor(3, 4), random_tensor(2)],
            [index([0, 2, 2]), index([1, 0])],
            [random_tensor(3), None],
            [random_tensor(1, 4), None],
            [index([-1, 0, 0]), None],
            [index([1, 0]), None],
            [random_tensor(2), None],
            [0.5, 1.0],
        ),
        "krylov_extend": (
            torch.eye(3, dtype=torch.float64)[None].expand(2, 3, 3).contiguous(),
            random_tensor(2, 3),
            torch.zeros(2, 3, dtype=torch.float64),
            torch.zeros(2, 3, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.float64),
            0,
        ),
        "symmetric_extremes": (torch.arange(1, 4, dtype=torch.float64).diag().expand(2, 3, 3).contiguous(),),
        "tridiagonal_extremes": (random_tensor(2, 3), random_tensor(2, 3, seed=1), index([3, 2])),
        "certified_widths": (
            random_tensor(2, 3),
            random_tensor(2, 3, seed=1),
            index([3, 2]),
            random_tensor(2, 2, seed=2),
            torch.full((2,), 1e6, dtype=torch.float64),
        ),
    }


def tensors_of(arguments: tuple) -> list[Tensor]:
    """Return the tensors among the arguments, those inside lists included."""
    found = []
    for argument in arguments:
        found += [item for item in (argument if isinstance(argument, list) else [argument]) if isinstance(item, Tensor)]
    return found


def on_meta(argument: object) -> object:
    """Return an argument with its tensors on the device "meta"."""
    if isinstance(argument, list):
        return [on_meta(item) for item in argument]
    return argument.to("meta") if isinstance(argument, Tensor) else argument
