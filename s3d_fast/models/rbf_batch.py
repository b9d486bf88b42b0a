"""The paper's toy network: one-dimensional RBF networks, several trained as one batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from s3d_fast.maths.activations import gaussian


class RBFBatch(nn.Module):
    """R networks f(x) = sum_i w_i exp(-(theta_i1 x + theta_i2)^2 / 2), each with its own inputs.

    Networks of unequal size share the tensors: `alive` is 0 where a network has no such neuron, and its parameters
    there never change.
    """

    alive: Tensor

    def __init__(
        self,
        theta: Tensor,  # (R, n, 2)
        w: Tensor,  # (R, n)
        alive: Tensor | None = None,  # (R, n), 0 or 1
    ) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)
        self.w = nn.Parameter(w)
        self.register_buffer("alive", torch.ones_like(w) if alive is None else alive)

    def preactivation(self, x: Tensor) -> Tensor:  # (R, N) -> (R, n, N)
        """Return z = theta_1 x + theta_2 for every neuron; the points come last, where memory is contiguous."""
        return torch.baddbmm(self.theta[:, :, 1:], self.theta[:, :, :1], x.unsqueeze(1))

    def readout(self, h: Tensor) -> Tensor:  # (R, n, N) -> (R, N)
        """Return the weighted sum of the neurons' outputs."""
        return ((self.w * self.alive).unsqueeze(1) @ h).squeeze(1)

    def forward(self, x: Tensor) -> Tensor:  # (R, N) -> (R, N)
        """Return f(x) of every network on its own inputs."""
        return self.readout(gaussian(self.preactivation(x)))


def random_rbf(networks: int, neurons: int, generator: torch.Generator, variance: float = 3.0) -> RBFBatch:
    """Return networks whose weights and parameters are drawn from a normal distribution of the given variance."""
    scale = variance**0.5
    theta = scale * torch.randn(networks, neurons, 2, generator=generator)
    return RBFBatch(theta, scale * torch.randn(networks, neurons, generator=generator))
