"""Networks with one hidden layer, many trained as one batch: several seeds on each of several data sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from s3d_fast.maths.activations import Activation


class LayerBatch(nn.Module):
    """P x R networks f(x) = b + sum_i w_i act(theta_i . x); the R networks of a data set p read the same rows.

    The rows hold a column of ones, so theta has the bias of a neuron. Networks of unequal size share the tensors:
    `alive` is 0 where a network has no such neuron, and its parameters there never change.
    """

    alive: Tensor

    def __init__(
        self,
        theta: Tensor,  # (P, R, n, D)
        w: Tensor,  # (P, R, n)
        b: Tensor,  # (P, R)
        act: Activation,
        trained_outputs: bool,
        alive: Tensor | None = None,  # (P, R, n), 0 or 1
    ) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta)
        self.w = nn.Parameter(w, requires_grad=trained_outputs)
        self.b = nn.Parameter(b)
        self.act = act
        self.register_buffer("alive", torch.ones_like(w) if alive is None else alive)

    @property
    def trained_outputs(self) -> bool:
        """Whether the output weights w are trained."""
        return self.w.requires_grad

    @property
    def sizes(self) -> Tensor:  # (P, R)
        """The number of neurons of every network."""
        return self.alive.sum(-1).long()

    def preactivation(self, x: Tensor) -> Tensor:  # (P, N, D) -> (P, R, n, N)
        """Return z = theta . x of every neuron; the rows come last, where memory is contiguous."""
        sets, networks, neurons, width = self.theta.shape
        z = self.theta.reshape(sets, networks * neurons, width) @ x.mT
        return z.reshape(sets, networks, neurons, -1)

    def readout(self, h: Tensor) -> Tensor:  # (P, R, n, N) -> (P, R, N)
        """Return b plus the weighted sum of the neurons' outputs."""
        return self.b.unsqueeze(-1) + ((self.w * self.alive).unsqueeze(-2) @ h).squeeze(-2)

    def forward(self, x: Tensor) -> Tensor:  # (P, N, D) -> (P, R, N)
        """Return f(x) of every network on the rows of its data set."""
        return self.readout(self.act(self.preactivation(x)))

    def copy(self, dtype: torch.dtype) -> LayerBatch:
        """Return the same networks in another dtype, with parameters of their own."""
        theta, w, b, alive = (part.detach().to(dtype, copy=True) for part in (self.theta, self.w, self.b, self.alive))
        return LayerBatch(theta, w, b, self.act, self.trained_outputs, alive)
