"""Measured against predicted loss changes of MobileNetV1's splits: python -m benchmarks.left_out_curvature.

If a depthwise convolution follows a layer, the layer's splitting matrix leaves out the curvature of the depthwise
layer's own activation. This measures the effect on a network trained on scikit-learn's digits, enlarged to 32 x 32.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import s3d_fast as s3d
from s3d_fast.base.tables import text_table
from s3d_fast.models import MobileNetV1

STEPS = (0.1, 0.03, 0.01, 0.003)


def main() -> None:
    """Print predicted and measured changes of the loss for splits of all units, and of the last unit alone."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64)[:, None] / 16
    x = F.interpolate(images, size=32, mode="nearest").expand(-1, 3, -1, -1).contiguous()
    y = torch.tensor(digits.target)
    rows = [["activation", "units", "eps", "predicted", "measured", "measured / predicted"]]
    for name, activation in (("SiLU", nn.SiLU), ("ReLU", nn.ReLU)):
        torch.manual_seed(0)
        model = MobileNetV1([8] * 14, 10, stem_stride=1, activation=activation).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(60):
            batch = slice(step % 12 * 100, step % 12 * 100 + 100)
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        model.eval()
        data = (x[:200], y[:200])
        graph = s3d.trace(model, x[:2])
        operators = s3d.capture(model, F.cross_entropy, [data], graph)
        spectra = s3d.extremal_eigenpairs(operators, tol=1e-4)
        last = list(graph.units)[-1]
        for which, chosen in (("all", spectra), ("last only", {last: spectra[last]})):
            plan = s3d.select(chosen, graph, m=2, c=1.3)
            for eps in STEPS:
                grown = copy.deepcopy(model)
                s3d.apply_splits(grown, plan, eps)
                with torch.no_grad():
                    change = F.cross_entropy(grown(data[0]), data[1]).item() - operators.loss
                predicted = plan.predicted_change(eps)
                rows.append([name, which, f"{eps:g}", f"{predicted:.3e}", f"{change:.3e}", f"{change / predicted:.3f}"])
    print(text_table(rows))


if __name__ == "__main__":
    main()
