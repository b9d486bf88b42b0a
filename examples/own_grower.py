"""A grower with its own surgery that takes its eigenpairs from s3d_fast: no tracing, layers by name.

The grower widens the hidden layers of a small network in which swish is written by hand. `add_neurons` is what such a
grower has anyway; `eigenpairs` is all that is new.

    python examples/own_grower.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d


class Network(nn.Module):
    """Two hidden layers of any width; swish is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for every sample."""
        for layer in (self.first, self.second):
            x = layer(x)
            x = x * torch.sigmoid(x)
        return self.head(x)


def eigenpairs(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return, for every hidden layer, the smallest eigenvalues, and their vectors shaped like its weight and bias."""
    operators = s3d.capture_layers(model, {"first": "silu", "second": "silu"}, F.mse_loss, batches)
    spectra = s3d.extremal_eigenpairs(operators)
    return {name: (spectrum.lambda_min, *spectrum.as_weights("v_min")) for name, spectrum in spectra.items()}


def add_neurons(model: Network, name: str, row: int, weight: Tensor, bias: Tensor, eps: float) -> None:
    """Split one neuron of a hidden layer into two: the grower's own surgery."""
    layer, reader = getattr(model, name), model.second if name == "first" else model.head
    with torch.no_grad():
        rows = torch.cat([layer.weight, layer.weight[row : row + 1] - eps * weight])
        rows[row] += eps * weight
        biases = torch.cat([layer.bias, layer.bias[row : row + 1] - eps * bias])
        biases[row] += eps * bias
        columns = torch.cat([reader.weight, reader.weight[:, row : row + 1] / 2], dim=1)
        columns[:, row] /= 2
    layer.weight, layer.bias, reader.weight = nn.Parameter(rows), nn.Parameter(biases), nn.Parameter(columns)
    layer.out_features, reader.in_features = len(rows), columns.shape[1]


def main() -> None:
    """Train, split the neuron that promises most, and train on."""
    torch.manual_seed(0)
    x = torch.rand(512, 2) * 4 - 2
    y = torch.sin(2 * x[:, :1]) * x[:, 1:]
    model = Network()
    for _ in range(4):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(400):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found = eigenpairs(model, [(x, y)])
        name = min(found, key=lambda name: float(found[name][0].min()))
        values, weight, bias = found[name]
        best = int(values.argmin())
        add_neurons(model, name, best, weight[best], bias[best], eps=0.1)
        print(f"loss {loss.item():.4f}; now {model.first.out_features} and {model.second.out_features} neurons")


if __name__ == "__main__":
    main()
