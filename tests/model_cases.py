"""Small float64 instances of every model, with data and random plans, shared by several tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from s3d_fast.models import DGCNN, MLP, VGG19, MobileNetV1, PointNet, PointNet2, ResNet, TransformerBlock
from s3d_fast.network.graph import Graph
from s3d_fast.network.tracing import trace
from s3d_fast.splitting.plan import NeuronSplit, SplitPlan

MakeActivation = Callable[[], nn.Module]


@dataclass(frozen=True)
class ModelCase:
    """A model: how to build it with a given activation, the shape of its inputs, and its units.

    `uncaptured` names the units that can be split, but whose splitting matrices `capture` cannot compute.
    """

    name: str
    build: Callable[[MakeActivation], nn.Module]
    shape: tuple[int, ...]  # the shape of the inputs, batch first
    units: tuple[str, ...]
    smooth: MakeActivation = nn.SiLU
    kinked: MakeActivation = nn.ReLU
    uncaptured: tuple[str, ...] = ()

    @property
    def captured(self) -> tuple[str, ...]:
        """The units whose splitting matrices `capture` computes."""
        return tuple(name for name in self.units if name not in self.uncaptured)

    def model(self, activation: MakeActivation | None = None, seed: int = 0) -> nn.Module:
        """Return the model in eval mode with random BatchNorms; by default it has the smooth activation."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build(self.smooth if activation is None else activation).double()
            randomise_norms(model, self.inputs(seed=seed + 1))
        return model.eval()

    def inputs(self, batch: int | None = None, seed: int = 1) -> Tensor:
        """Return random inputs; by default as many as in `shape`."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.shape[0] if batch is None else batch, *self.shape[1:])
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def batch(self, model: nn.Module, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Return inputs, and random targets with the shape of the model's outputs."""
        inputs = self.inputs(seed=seed)
        with torch.no_grad():
            shape = model.eval()(inputs).shape
        targets = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
        return inputs, targets

    def __str__(self) -> str:
        return self.name


class Net(nn.Module):
    """Named layers, and a forward pass that is given as a function."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], object], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> object:
        return self._forward(self, x)


def net(forward: Callable[[nn.Module, Tensor], object], **parts: nn.Module) -> nn.Module:
    """Return a float64 model in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(forward, **parts).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        randomise_norms(model)
    return model.eval()


def data(*shape: int, seed: int = 1) -> Tensor:
    """Return random numbers of the given shape, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mlp(activation: MakeActivation, batchnorm: bool) -> nn.Module:
    return MLP((4, 5, 4, 3), activation=activation, batchnorm=batchnorm)


def _vgg(activation: MakeActivation) -> nn.Module:
    widths = (3, 2, 3, 2, 3, 2, 2, 3, 2, 3, 2, 2, 3, 2, 3, 4)
    return VGG19(widths, num_classes=3, pool=2, hidden=(5,), activation=activation)


def _resnet(activation: MakeActivation) -> nn.Module:
    return ResNet((2, 1), stream=(3, 4), inner=(2, 5, 3), num_classes=3, activation=activation)


def _mobilenet(activation: MakeActivation) -> nn.Module:
    widths = (3, 4, 3, 4, 3, 2, 3, 4, 3, 2, 3, 4, 3, 5)
    return MobileNetV1(widths, num_classes=3, stem_stride=1, activation=activation)


def _dgcnn(activation: MakeActivation) -> nn.Module:
    return DGCNN((4, 3, 4, 3), num_classes=3, k=3, embedding=5, hidden=(4, 3), activation=activation)


def _pointnet(activation: MakeActivation) -> nn.Module:
    model = PointNet(
        (4, 3, 4, 3, 5),
        num_classes=3,
        hidden=(4, 3),
        transform_widths=(3, 4, 5),
        transform_hidden=(4, 3),
        activation=activation,
        dropout=0.0,
    )
    for transform in (model.input_transform, model.feature_transform):
        # The maps are the identity for every cloud at first: nothing would depend on the layers that predict them.
        nn.init.normal_(transform.head[-1].weight, std=0.5)  # type: ignore[index, union-attr, arg-type]
    return model


def _pointnet2(activation: MakeActivation) -> nn.Module:
    return PointNet2(
        (4, 3, 4, 3, 4, 3, 4, 3, 5),
        num_classes=3,
        centres=(8, 4),
        radii=(1.5, 2.5),
        neighbours=(4, 3),
        hidden=(4, 3),
        activation=activation,
        dropout=0.0,
    )


def _transformer(activation: MakeActivation) -> nn.Module:
    return TransformerBlock(4, heads=2, hidden=5, activation=activation)


VGG_CONVOLUTIONS = (0, 3, 7, 10, 14, 17, 20, 23, 27, 30, 33, 36, 40, 43, 46, 49)
TRANSFORM = ("shared.0", "shared.3", "shared.6", "head.0", "head.4")

MODELS = (
    ModelCase("mlp", partial(_mlp, batchnorm=False), (7, 4), ("layers.0", "layers.2")),
    ModelCase("mlp-batchnorm", partial(_mlp, batchnorm=True), (7, 4), ("layers.0", "layers.3")),
    ModelCase("vgg", _vgg, (2, 3, 32, 32), (*(f"features.{i}" for i in VGG_CONVOLUTIONS), "classifier.0")),
    ModelCase(
        "resnet",
        _resnet,
        (3, 3, 6, 6),
        # The two streams are a unit each: the first begins at the stem, the second in the last block.
        ("stem.0", *(f"blocks.{i}.conv1" for i in range(3)), "blocks.2.conv2"),
    ),
    ModelCase("mobilenet", _mobilenet, (3, 3, 16, 16), ("stem.0", *(f"blocks.{i}.3" for i in range(13)))),
    ModelCase(
        "dgcnn",
        _dgcnn,
        (3, 8, 3),
        (*(f"edgeconvs.{i}" for i in range(4)), "embed", "head.0", "head.4"),
        kinked=partial(nn.LeakyReLU, 0.2),
    ),
    ModelCase(
        "pointnet",
        _pointnet,
        (8, 8, 3),
        (
            *(f"input_transform.{name}" for name in TRANSFORM),
            "local.0",
            *(f"feature_transform.{name}" for name in TRANSFORM),
            *("deep.0", "deep.3", "deep.6", "head.0", "head.4"),
        ),
    ),
    ModelCase(
        "pointnet2",
        _pointnet2,
        (8, 12, 3),
        (
            *(f"{part}.{i}" for part in ("levels.0.shared", "levels.1.shared", "shared") for i in (0, 3, 6)),
            *("head.0", "head.4"),
        ),
    ),
    ModelCase("transformer", _transformer, (2, 5, 4), ("up",), smooth=nn.GELU),
)
BY_NAME = {case.name: case for case in MODELS}


@cache
def traced(case: ModelCase, kinked: bool = False) -> tuple[nn.Module, Graph]:
    """Return a model and its graph, the same ones for all tests: copy the model to change it."""
    model = case.model(case.kinked if kinked else None)
    return model, trace(model, case.inputs())


def randomise_norms(model: nn.Module, inputs: Tensor | None = None) -> None:
    """Give the norms of a model random affine parameters, and random statistics near the statistics of `inputs`."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)) and module.weight is not None:
                # Weights have either sign and stay away from zero, so that no channel is switched off.
                module.weight.uniform_(0.8, 1.6).mul_(torch.randn_like(module.weight).sign())
                module.bias.uniform_(-0.5, 0.5)
        if inputs is not None and norms:
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.momentum = 1.0
            model.train()(inputs)
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.add_(0.3 * torch.randn_like(norm.running_mean))
            norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.7, 1.4)).add_(1e-3)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return half the mean squared error: a loss whose second derivative in the outputs is not zero."""
    return 0.5 * (output - target).square().mean()


def random_plan(
    graph: Graph, m: int, units: Sequence[str] | None = None, seed: int = 0, every: int = 1, signed: bool = True
) -> SplitPlan:
    """Return a plan that splits every `every`-th filter of the units into m copies with random weights and offsets."""
    generator = torch.Generator().manual_seed(seed)
    splits = []
    for name in graph.units if units is None else units:
        unit = graph.units[name]
        for neuron in range(0, unit.width, every):
            weights = torch.rand(m, generator=generator, dtype=torch.float64) + 0.2
            if signed:
                weights[0] *= -0.4
            offsets = torch.randn(m, unit.fan_in, generator=generator, dtype=torch.float64)
            splits.append(NeuronSplit(name, neuron, weights / weights.sum(), offsets, 0.0))
    return SplitPlan(graph, splits)


def unseen_plan(graph: Graph, name: str, neurons: Iterable[int], seed: int = 0) -> SplitPlan:
    """Return a plan whose splits the outputs must not show at any step: the only copy that moves has weight zero."""
    generator = torch.Generator().manual_seed(seed)
    fan_in = graph.units[name].fan_in
    splits = []
    for neuron in neurons:
        share = 0.3 + 0.4 * float(torch.rand(1, generator=generator))
        offsets = torch.zeros(3, fan_in, dtype=torch.float64)
        offsets[2] = torch.randn(fan_in, generator=generator, dtype=torch.float64)
        weights = torch.tensor([share, 1 - share, 0.0], dtype=torch.float64)
        splits.append(NeuronSplit(name, neuron, weights, offsets, 0.0))
    return SplitPlan(graph, splits)


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the model's outputs in eval mode, without changing its mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        result = model(inputs)
    for module, training in modes.items():
        module.training = training
    return result
