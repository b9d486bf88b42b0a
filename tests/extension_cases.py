"""What the tests of the compiled extension share: memory layouts, and one good call of every operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.cases import RowsCase, random_vectors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPUTE_DTYPES = DTYPES[:2]

# Which arguments of the operators are documented to change.
IN_PLACE = {"add_splitting_matrices": {0}, "curvature_coefficients_": {0}, "krylov_extend": {0, 2, 3, 4, 5}}

LAYOUTS = ("contiguous", "transposed", "stepped", "offset", "broadcast-first", "broadcast-last")


@dataclass(frozen=True)
class VectorsCase(RowsCase):
    """Rows with K vectors per filter; K = 0 stands for one vector without the leading dimension."""

    K: int = 0

    def vectors(self) -> Tensor:
        leading = (self.K,) if self.K else ()
        return random_vectors(*leading, self.M, self.D + self.bias, dtype=self.dtype)


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def embedded(tensor: Tensor, layout: str = "offset") -> tuple[Tensor, Tensor]:
    """Return a view with the entries of `tensor` and the larger buffer around it.

    The rest of the buffer is NaN, or an index that is out of every range.
    """
    step, before = (3, 0) if layout == "stepped" else (1, 2)
    sizes = [max(1, step * size + 2 * before) for size in tensor.shape]
    buffer = tensor.new_full(sizes, torch.nan if tensor.is_floating_point() else 10**9)
    view = buffer[tuple(slice(before, before + step * size, step) for size in tensor.shape)]
    return view.copy_(tensor), buffer


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor of the same shape in the given layout: of equal entries, or with one dimension broadcast."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout in ("stepped", "offset"):
        return embedded(tensor, layout)[0]
    if layout.startswith("broadcast") and tensor.numel():
        return tensor.narrow(0 if layout.endswith("first") else -1, 0, 1).expand_as(tensor)
    return tensor


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return standard normal entries."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def krylov_state(M: int, capacity: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """Return basis, alpha, beta, length and scale before the first step; NaN where nothing has been written."""
    basis = torch.full((M, capacity, D), torch.nan, dtype=dtype)
    basis[:, 0] = torch.nn.functional.normalize(random_tensor(M, D, dtype=dtype, seed=1), dim=-1)
    numbers = [torch.full((M, capacity), torch.nan, dtype=dtype) for _ in range(2)]
    return [basis, *numbers, torch.zeros(M, dtype=torch.int64), torch.zeros(M, dtype=dtype)]


def good_calls() -> dict[str, tuple]:
    """Return the arguments of one good call of every operator, by its name."""
    settings = (1, 1, 0.0, 0.0, [0.0], [1.0], 3.0)
    index = torch.tensor
    return {
        "splitting_matvec": (random_tensor(6, 4), random_tensor(6, 3), random_tensor(3, 5), True),
        "splitting_matvec_grouped": (
            [random_tensor(6, 4), random_tensor(5, 2)],
            [random_tensor(6, 3), random_tensor(5, 2)],
            [random_tensor(3, 5), random_tensor(3, 2, 2)],
            [True, False],
        ),
        "edgeconv_matvec": (
            random_tensor(2, 5, 3),
            torch.arange(40).reshape(2, 5, 4) % 5,
            random_tensor(2, 5, 4),
            random_tensor(4, 6),
            False,
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
        "symmetric_extremes": (torch.eye(3, dtype=torch.float64).expand(2, 3, 3).contiguous(),),
        "tridiagonal_extremes": (random_tensor(2, 3), random_tensor(2, 3, seed=1), index([3, 2])),
    }


def grow(*arguments: Tensor | None, shift_scale: float = 1.0) -> Tensor:
    """Return what the operator makes of one tensor, of the seven tensors that describe it."""
    return torch.ops.s3d_fast.grow_weights(*[[argument] for argument in arguments], [shift_scale])[0]


def tensors_of(arguments: tuple) -> list[Tensor]:
    """Return the tensors among the arguments, those inside lists included."""
    found = []
    for argument in arguments:
        found += [item for item in (argument if isinstance(argument, list) else [argument]) if isinstance(item, Tensor)]
    return found
