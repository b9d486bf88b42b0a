"""Split your own network, step by step: concatenation, a depthwise layer, and a layer that s3d_fast does not know."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import s3d_fast as s3d


class Scale(nn.Module):
    """A learned factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor[:, None, None]


class TwoBranches(nn.Module):
    """Two convolutions of different kernels, concatenated; a depthwise convolution; a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(1, 4, 3, padding=1)
        self.wide = nn.Conv2d(1, 4, 5, padding=2)
        self.scale = Scale(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([F.silu(self.narrow(x)), F.gelu(self.wide(x))], 1)
        x = F.avg_pool2d(self.depthwise(self.scale(x)), 2)
        return self.head(x.flatten(1))


# Scale treats every channel separately, has one parameter per channel, and adds no curvature.
s3d.register_layer(Scale, per_channel=["factor"], linear=True)

torch.manual_seed(0)
model = TwoBranches().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(64, 1, 8, 8, dtype=torch.float64), torch.randint(3, (64,))

for _ in range(20):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

graph = s3d.trace(model, x)
print(graph.explain(), "\n")
operators = s3d.capture(model, F.cross_entropy, [(x, y)], graph)
spectra = s3d.extremal_eigenpairs(operators, tol=1e-4)
plan = s3d.select(spectra, graph, m="knapsack", c=1.3, budget=1000, cost="params")
print(plan, "\n")

before = F.cross_entropy(model(x), y).item()
s3d.apply_splits(model, plan, eps=0.01, optimizer=optimizer)
after = F.cross_entropy(model(x), y).item()
print(f"the loss changed by {after - before:.4e}; predicted: {plan.predicted_change(0.01):.4e}")

optimizer.zero_grad()
F.cross_entropy(model(x), y).backward()
optimizer.step()
print(f"loss after another training step: {F.cross_entropy(model(x), y).item():.4f}")
