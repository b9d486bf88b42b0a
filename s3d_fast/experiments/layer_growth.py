"""Where positive splits are stuck: networks with one hidden layer, grown one split at a time on real data.

All seeds and all folds of the data train as one batch. Every phase is full-batch Adam on the mean squared error, with a
learning rate that falls to zero along a cosine: `steps` of it at first, then `steps` for every neuron added. A convex
activation with fixed output weights shows the paper's point: positive copies of one neuron can only add up to a convex
function (or a concave one), whatever their number; a signed split leaves that set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from s3d_fast.backends.operations import curvature_coefficients
from s3d_fast.base import require
from s3d_fast.capture.curvature import GROWTH_FLOOR, KINK, Curvature
from s3d_fast.experiments.rbf_growth import Method
from s3d_fast.maths.activations import activation
from s3d_fast.maths.schemes import Split, optimal_split
from s3d_fast.models.layer_batch import LayerBatch
from s3d_fast.operators import PointwiseOperator
from s3d_fast.solvers import extremal_eigenpairs

NET2NET, NEW, SCRATCH, LONGER = "net2net", "new", "scratch", "scratch, all steps"


@dataclass(frozen=True)
class Rule:
    """How networks grow.

    Attributes:
        kind: "split", along eigenvectors, into m copies with weights bounded by c; "net2net", a random neuron in two
            halves along a random direction; "new", a random neuron, read with weight 0, or, where output weights are
            fixed, with +1 or -1; "scratch", the final size from the start, for as much compute (neurons x steps) as
            growth by pairs takes; "scratch, all steps", for as many steps.
        m: the number of copies.
        c: the bound on their weights.
    """

    kind: str = "split"
    m: int = 2
    c: float = 1.0

    def __post_init__(self) -> None:
        require.choice("kind", self.kind, ("split", NET2NET, NEW, SCRATCH, LONGER))
        require.copy_count(self.m)
        require.weight_bound(self.c)

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        return Method(self.m, self.c).name if self.kind == "split" else self.kind


S2D = Rule()
SIGNED = tuple(Rule(m=m, c=c) for m in (2, 3) for c in (1.3, 2.0, 3.0))
RULES = (S2D, *SIGNED, Rule(NET2NET), Rule(NEW), Rule(SCRATCH), Rule(LONGER))


@dataclass(frozen=True)
class LayerSettings:
    """The numbers of the experiment.

    Attributes:
        activation: of the hidden layer.
        start: neurons at the start; the signs of their output weights alternate.
        added: neurons that growth adds.
        trained_outputs: whether output weights are trained; the output's bias always is.
        seeds: networks for each fold of the data.
        steps: gradient steps for each neuron.
        learning_rate: of Adam, at the start of each phase.
        eps: the size of a split.
        first_seed: the first seed.
    """

    activation: str = "softplus"
    start: int = 1
    added: int = 8
    trained_outputs: bool = False
    seeds: int = 16
    steps: int = 300
    learning_rate: float = 0.05
    eps: float = 0.05
    first_seed: int = 0

    def __post_init__(self) -> None:
        activation(self.activation)
        for name in ("start", "seeds", "steps"):
            require.count(name, getattr(self, name))
        for name in ("added", "first_seed"):
            require.count(name, getattr(self, name), at_least=0)
        require.positive("learning_rate", self.learning_rate)
        require.positive("eps", self.eps)

    @property
    def compute(self) -> int:
        """Neurons x steps that growth by one neuron at a time takes."""
        return self.steps * sum(range(self.start, self.start + self.added + 1))


@dataclass(frozen=True)
class Folds:
    """One data set, divided several times into a training and a test part; rows and targets are scaled."""

    x: Tensor  # (P, N, D), the last column is 1
    y: Tensor  # (P, N), mean 0, variance 1
    test_x: Tensor  # (P, N', D)
    test_y: Tensor  # (P, N'), scaled like y


@dataclass
class LayerStage:
    """All networks of a rule at one size, after training."""

    neurons: int  # the size of every network that did not run out of useful splits
    sizes: Tensor  # (P, R)
    steps: int  # gradient steps so far
    compute: int  # neurons x steps so far
    loss: Tensor  # (P, R), on the training part
    test: Tensor  # (P, R), on the test part; nan without one
    model: LayerBatch


@dataclass
class LayerRun:
    """The history of one rule; `signed` and `splits` count splits with a negative weight, and all splits."""

    rule: Rule
    stages: list[LayerStage] = field(default_factory=list)
    signed: int = 0
    splits: int = 0


def fold(x: Tensor, y: Tensor, parts: int = 5, seed: int = 0) -> Folds:  # (N, D), (N,)
    """Return the data divided `parts` times, so that every row is once in a test part; 1: all rows train, none tests.

    Rows are shuffled first; the N mod parts last of them are left out. Columns and targets are scaled to mean 0 and
    variance 1 on each training part.
    """
    require.count("parts", parts)
    require.count("rows", len(x), at_least=2 * parts)
    order = shuffled(len(x), seed)
    size = len(x) // parts
    columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for part in range(parts):
        test = order[part * size : (part + 1) * size] if parts > 1 else order[:0]
        train = torch.cat([order[: part * size], order[(part + 1) * size : parts * size]]) if parts > 1 else order
        shift, scale = x[train].mean(0), x[train].std(0).clamp(min=1e-12)
        middle, spread = y[train].mean(), y[train].std(unbiased=False)
        rows = ((x[one] - shift) / scale for one in (train, test))
        train_x, test_x = (torch.cat([one, torch.ones_like(one[:, :1])], 1) for one in rows)
        columns.append((train_x, (y[train] - middle) / spread, test_x, (y[test] - middle) / spread))
    return Folds(*(torch.stack(one).float() for one in zip(*columns, strict=True)))


def shuffled(rows: int, seed: int = 0) -> Tensor:
    """Return the order in which `fold` takes rows."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


def grow(
    folds: Folds,
    rule: Rule,
    settings: LayerSettings,
    progress: Callable[[int], object] = lambda steps: None,
) -> LayerRun:
    """Grow every network by the rule, training between the splits.

    Raises:
        ValueError: splits into m copies cannot add exactly `settings.added` neurons.
    """
    run = LayerRun(rule)
    steps = compute = 0
    last = settings.start + settings.added
    if rule.kind in (SCRATCH, LONGER):
        model = _start(folds, settings, last)
        phases = [settings.compute // last if rule.kind == SCRATCH else settings.steps * (1 + settings.added)]
        sizes = [last]
    else:
        more = rule.m - 1
        if settings.added % more:
            raise ValueError(f"added must be a multiple of {more} for m = {rule.m}, got {settings.added}")
        model = _start(folds, settings, settings.start)
        phases = [settings.steps, *[settings.steps * more] * (settings.added // more)]
        sizes = list(range(settings.start, last + 1, more))
    draws = _draws(settings, 1)
    for size, phase in zip(sizes, phases, strict=True):
        if run.stages:
            model = _step(model, folds, rule, settings, run, draws)
        train(model, folds, phase, settings.learning_rate)
        progress(phase)
        steps += phase
        compute += phase * size
        with torch.no_grad():
            loss, test = _loss(model, folds.x, folds.y), _loss(model, folds.test_x, folds.test_y)
        run.stages.append(LayerStage(size, model.sizes, steps, compute, loss, test, model))
    return run


def train(model: LayerBatch, folds: Folds, steps: int, learning_rate: float) -> None:
    """Minimise the mean squared error of all networks by a fresh Adam, with a cosine from the learning rate to 0."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad(set_to_none=True)
        # The networks share no parameters, so the gradient of the sum holds each network's own gradient.
        _loss(model, folds.x, folds.y).sum().backward()
        optimizer.step()


def best_splits(
    model: LayerBatch, folds: Folds, m: int, c: float, eps: float
) -> tuple[Tensor, Tensor, Split]:  # (P, R), (P, R), (P, R, n, ...)
    """Return each network's best neuron, whether splitting it lowers the loss, and the best split of every neuron.

    The splitting matrices have the exact curvature, in float64; kinks have the scale of eps.
    """
    model = model.copy(torch.float64)
    x, y = folds.x.double(), folds.y.double()
    z = model.preactivation(x).detach()
    h = model.act(z).requires_grad_()
    loss = (model.readout(h) - y.unsqueeze(1)).square().mean(-1)
    (g,) = torch.autograd.grad(loss.sum(), h)
    width = Curvature(eps=eps, floor=GROWTH_FLOOR).bandwidth(model.theta.detach().norm(dim=-1), KINK)
    operators = []
    for p, rows in enumerate(x):
        # (R, n, N) -> (N, R n): the neurons of all networks are the filters of one operator.
        flat_g, flat_z = (one[p].flatten(0, 1).mT for one in (g, z))
        C = curvature_coefficients(flat_g, flat_z, model.act, row_norm=rows.norm(dim=1), bandwidth=width[p].flatten())
        operators.append(PointwiseOperator(rows, C))
    spectra = extremal_eigenpairs(operators, tol=1e-6)
    splits = [optimal_split(one.lambda_min, one.v_min, one.lambda_max, one.v_max, m, c) for one in spectra]
    shape = model.w.shape
    found = Split(*(torch.stack(one).reshape(*shape, *one[0].shape[1:]) for one in zip(*splits, strict=True)))
    gain, chosen = torch.where(model.alive > 0, found.gain, 0).min(-1)
    return chosen, gain < 0, found


def _step(
    model: LayerBatch,
    folds: Folds,
    rule: Rule,
    settings: LayerSettings,
    run: LayerRun,
    draws: Sequence[torch.Generator],
) -> LayerBatch:
    """Return the networks after one step of growth; random choices are the same on every fold."""
    sets, networks, neurons, width = model.theta.shape
    if rule.kind == "split":
        chosen, useful, splits = best_splits(model, folds, rule.m, rule.c, settings.eps)
        p, r = torch.arange(sets)[:, None], torch.arange(networks)
        weights, offsets = splits.weights[p, r, chosen], splits.offsets[p, r, chosen]
        run.splits += int(useful.sum())
        run.signed += int((useful & (weights < 0).any(-1)).sum())
        return split(model, chosen, useful, weights.float(), settings.eps * offsets.float())
    if rule.kind == NET2NET:
        chosen = torch.stack([torch.randint(neurons, (), generator=draw) for draw in draws]).expand(sets, -1)
        line = F.normalize(torch.cat([_neuron(width, draw) for draw in draws]), dim=-1).expand(sets, -1, -1)
        half = torch.full((sets, networks, 2), 0.5)
        return split(model, chosen, chosen >= 0, half, settings.eps * torch.stack([line, -line], 2))
    if rule.kind == NEW:
        theta = torch.stack([_neuron(width, draw) for draw in draws]).expand(sets, -1, -1, -1)
        w = torch.stack([_sign(draw) for draw in draws]).expand(sets, -1).unsqueeze(-1)
        pairs = ((model.theta, theta), (model.w, 0 * w if settings.trained_outputs else w), (model.alive, w.abs()))
        return _with(model, *(torch.cat([old.detach(), new], 2) for old, new in pairs))
    raise AssertionError(rule.kind)


def split(
    model: LayerBatch,
    chosen: Tensor,  # (P, R), the neuron of each network
    useful: Tensor,  # (P, R), whether it is split
    weights: Tensor,  # (P, R, m)
    offsets: Tensor,  # (P, R, m, D), eps included
) -> LayerBatch:
    """Return the networks with each chosen neuron replaced by its m copies."""
    sets, networks, neurons, width = model.theta.shape
    more = weights.shape[-1] - 1
    theta, w, alive = model.theta.detach(), model.w.detach(), model.alive
    theta = torch.cat([theta, theta.new_zeros(sets, networks, more, width)], 2)
    w, alive = (torch.cat([one, one.new_zeros(sets, networks, more)], 2) for one in (w, alive))
    p, r = useful.nonzero(as_tuple=True)
    j = chosen[p, r]
    # The first copy takes the place of the neuron, the others follow at the end.
    places = torch.cat([j[:, None], torch.arange(neurons, neurons + more).expand(len(j), -1)], 1)
    at = (p[:, None], r[:, None], places)
    theta[at] = theta[p, r, j].unsqueeze(1) + offsets[p, r]
    w[at] = w[p, r, j].unsqueeze(1) * weights[p, r]
    alive[at] = 1
    return _with(model, theta, w, alive)


def _with(model: LayerBatch, theta: Tensor, w: Tensor, alive: Tensor) -> LayerBatch:
    return LayerBatch(theta, w, model.b.detach().clone(), model.act, model.trained_outputs, alive)


def _loss(model: LayerBatch, x: Tensor, y: Tensor) -> Tensor:  # (P, R)
    return (model(x) - y.unsqueeze(1)).square().mean(-1)


def _start(folds: Folds, settings: LayerSettings, neurons: int) -> LayerBatch:
    """Return the first networks; a seed's network does not depend on the other seeds, and is the same on every fold."""
    sets, _, width = folds.x.shape
    thetas, outputs = [], []
    for draw in _draws(settings, 0):
        sign = _sign(draw)
        thetas.append(torch.cat([_neuron(width, draw) for _ in range(neurons)]))
        outputs.append(sign * (1 - 2 * (torch.arange(neurons) % 2)))
    theta, w = (torch.stack(one).expand(sets, *[-1] * (one[0].dim() + 1)).clone() for one in (thetas, outputs))
    b = torch.zeros(sets, settings.seeds)
    return LayerBatch(theta, w, b, activation(settings.activation), settings.trained_outputs)


def _draws(settings: LayerSettings, stream: int) -> list[torch.Generator]:
    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    return [torch.Generator().manual_seed(2 * seed + stream) for seed in seeds]


def _neuron(width: int, draw: torch.Generator) -> Tensor:  # (1, D)
    return torch.randn(1, width, generator=draw) / math.sqrt(width)


def _sign(draw: torch.Generator) -> Tensor:
    return 1.0 - 2.0 * torch.randint(2, (), generator=draw)
