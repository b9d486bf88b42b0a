"""Rows by sampling: a few positions of every sample stand for all of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from s3d_fast.base import require
from s3d_fast.maths.reference import ConvGeometry
from s3d_fast.operators import ConvOperator, GatedOperator, PointwiseOperator, SplittingOperator, TiedConvOperator


@dataclass(frozen=True)
class Positions:
    """The positions that were drawn of every sample."""

    index: Tensor  # (B, r), int64
    weight: Tensor  # (r,), for how many positions each stands

    def rows(self, length: int) -> Tensor:  # (B r,)
        """Return the drawn rows among those of all samples, `length` each."""
        first = torch.arange(len(self.index), device=self.index.device)[:, None] * length
        return (first + self.index).flatten()

    def weights(self, C: Tensor) -> Tensor:  # (B r, 1)
        """Return the weight of every drawn row, in the dtype of C."""
        return self.weight.to(C.dtype).repeat(len(self.index)).unsqueeze(1)


@dataclass(frozen=True)
class Sampling:
    """Keeps at most `rows_per_sample` rows of every sample; the expectation of S is that of all rows.

    The positions of a map, in their order in memory, are divided into strips of equal length, and one position of each
    is drawn. The draw depends on the batch and the unit alone, so a batch that is captured again gives the same rows.
    """

    rows_per_sample: int

    def __post_init__(self) -> None:
        require.count("rows_per_sample", self.rows_per_sample)

    def draw(self, samples: int, length: int, device: torch.device, seed: int) -> Positions | None:
        """Return positions of maps with `length` entries; None if all are kept."""
        count = self.rows_per_sample
        if length <= count:
            return None
        generator = torch.Generator().manual_seed(seed)
        edges = torch.arange(count + 1) * length // count
        sizes = edges[1:] - edges[:-1]
        drawn = (torch.rand(samples, count, generator=generator) * sizes).long()
        index = edges[:-1] + torch.minimum(drawn, sizes - 1)
        return Positions(index.to(device), sizes.to(device))

    def __call__(self, operator: SplittingOperator, samples: int, unit: str, batch: int) -> SplittingOperator:
        """Return the operator on the drawn rows; forms whose rows are not shared by all filters keep all of them."""
        seed = zlib.crc32(f"{batch} {unit}".encode())
        if isinstance(operator, (PointwiseOperator, GatedOperator)):
            return self._of_rows(operator, samples, seed)
        if isinstance(operator, ConvOperator) and not isinstance(operator, TiedConvOperator):
            return self._of_patches(operator, seed)
        return operator

    def _of_rows(
        self, operator: PointwiseOperator | GatedOperator, samples: int, seed: int
    ) -> PointwiseOperator | GatedOperator:
        length, rest = divmod(len(operator.X), samples)
        drawn = None if rest else self.draw(samples, length, operator.device, seed)
        if drawn is None:
            return operator
        rows = drawn.rows(length)
        X = operator.X.index_select(0, rows)

        def kept(C: Tensor) -> Tensor:
            return C.index_select(0, rows).mul_(drawn.weights(C))

        if isinstance(operator, PointwiseOperator):
            return PointwiseOperator(X, kept(operator.C), bias=operator.bias, check_finite=False)
        c22 = None if operator.c22 is None else kept(operator.c22)
        return GatedOperator(X, kept(operator.c11), kept(operator.c12), c22, bias=operator.bias, check_finite=False)

    def _of_patches(self, operator: ConvOperator, seed: int) -> SplittingOperator:
        samples, _, height, width = operator.C.shape
        drawn = self.draw(samples, height * width, operator.device, seed)
        if drawn is None:
            return operator
        C = operator.C.flatten(2).mT.flatten(0, 1).index_select(0, drawn.rows(height * width))
        patches = patches_at(operator.X, drawn.index, operator.geometry, width)
        return PointwiseOperator(patches, C * drawn.weights(C), bias=operator.bias, check_finite=False)


def patches_at(X: Tensor, index: Tensor, geometry: ConvGeometry, width: int) -> Tensor:
    """Return the patches of X (B, I, H, W) at positions (B, r) of an output that is `width` wide: (B r, I kh kw)."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry
    # With channels last, a patch is kh kw rows of I numbers.
    maps = F.pad(X, (pw, pw, ph, ph)).permute(0, 2, 3, 1).contiguous()
    samples, padded_height, padded_width, channels = maps.shape
    y, x = index // width * sh, index % width * sw
    down = torch.arange(kh, device=X.device)[:, None] * dh
    right = torch.arange(kw, device=X.device)[None, :] * dw
    corner = torch.arange(samples, device=X.device)[:, None] * padded_height * padded_width + y * padded_width + x
    places = corner[:, :, None] + (down * padded_width + right).flatten()
    rows = maps.view(-1, channels).index_select(0, places.flatten())
    return rows.view(index.numel(), kh * kw, channels).mT.reshape(index.numel(), -1)
