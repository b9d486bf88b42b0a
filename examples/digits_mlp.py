"""Grow an MLP on scikit-learn's digits by S3D, from four neurons per hidden layer; each phase splits a third."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import s3d_fast as s3d
from s3d_fast.models import MLP

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--phases", type=int, default=5)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--c", type=float, default=1.3, help="1 is S2D")
options = parser.parse_args()

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:], y[1400:])


def accuracy(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        return {"accuracy": float((model(test[0]).argmax(1) == test[1]).float().mean())}


torch.manual_seed(0)
model = MLP([64, 4, 4, 10], batchnorm=True)
grower = s3d.Grower(
    model,
    x[:2],
    F.cross_entropy,
    batches=[train[:700], train[700:]],
    train=s3d.EpochTrainer(DataLoader(train, batch_size=100, shuffle=True), F.cross_entropy, options.epochs),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
    phases=options.phases,
    selection={"m": 2, "c": options.c, "fraction": 0.35},
    evaluate=accuracy,
    progress=True,
)
for phase in grower.run():
    widths = "-".join(map(str, phase.widths.values()))
    print(f"phase {phase.index}: hidden {widths}, {phase.params} parameters, accuracy {phase.metrics['accuracy']:.3f}")
