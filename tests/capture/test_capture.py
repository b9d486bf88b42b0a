"""Capture: operators are the second derivative of the split model's loss, and the model does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from s3d_fast import (
    Captured,
    Graph,
    NeuronSplit,
    SplitPlan,
    SumOperator,
    activation,
    apply_splits,
    capture,
    register_layer,
    trace,
)
from s3d_fast.capture import one_batch as batch_capture
from s3d_fast.capture.folding import foldable
from s3d_fast.operators import StackedOperator
from tests.cases import random_vectors, relative_error
from tests.model_cases import (
    BY_NAME,
    MODELS,
    MakeActivation,
    ModelCase,
    data,
    net,
    outputs,
    random_plan,
    squared_error,
    traced,
)


def measured_curvature(
    model: nn.Module, graph: Graph, unit: str, V: Tensor, loss: Callable[[nn.Module], Tensor], eps: float, steps: int
) -> float:
    """Return the second derivative of the loss in eps if every filter j of a unit splits into halves theta +- eps v_j.

    The loss is even in eps, so Richardson extrapolation from eps, eps / 2, ... leaves an error of order eps^(2 steps).
    """
    halves = torch.tensor([0.5, 0.5], dtype=torch.float64)
    plan = SplitPlan(graph, [NeuronSplit(unit, j, halves, torch.stack([v, -v]), 0.0) for j, v in enumerate(V)])

    def quotient(step: float) -> float:
        split = copy.deepcopy(model)
        apply_splits(split, plan, eps=step)
        with torch.no_grad():
            return float(loss(split) - loss(model)) / (step * step / 2)

    found = [quotient(eps / 2**step) for step in range(steps)]
    for order in range(1, steps):
        found = [(4**order * half - whole) / (4**order - 1) for whole, half in pairwise(found)]
    return found[0]


def assert_is_second_derivative(
    model: nn.Module,
    x: Tensor,
    units: tuple[str, ...] | None = None,
    eps: float = 1e-3,
    tolerance: float = 1e-6,
    sharpness: float | None = None,
    steps: int = 2,
) -> None:
    """Assert that v^T S v of the captured operators is the second derivative of the split model's loss."""
    graph = trace(model, x)
    assert graph.units
    target = data(*outputs(model, x).shape, seed=5)
    captured = capture(model, squared_error, [(x, target)], graph, sharpness=sharpness)
    for index, name in enumerate(units or tuple(graph.units)):
        V = random_vectors(*captured[name].shape, seed=index)
        forms = (V * captured[name].matvec(V)).sum(-1)
        assert forms.abs().max() > 0
        measured = measured_curvature(model, graph, name, V, lambda m: squared_error(m(x), target), eps, steps)
        assert abs(measured - float(forms.sum())) <= tolerance * float(forms.abs().sum()), name


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_operators_are_the_second_derivative_of_the_true_loss(case: ModelCase) -> None:
    # Nearest neighbours and maxima must not change within a step: take small steps, and images without near ties.
    eps, tolerance = {"dgcnn": (1e-4, 1e-5), "vgg": (3e-4, 1e-5), "mobilenet": (3e-4, 1e-6)}.get(
        case.name, (1e-3, 1e-6)
    )
    # A unit of PointNet's has so little curvature that smaller steps lose it in the rounding of the loss.
    eps, steps = (4e-3, 3) if case.name == "pointnet" else (eps, 2)
    # So sharp that no tie between values counts.
    assert_is_second_derivative(case.model(), case.inputs(seed=6), case.units, eps, tolerance, 1e9, steps)


@pytest.mark.parametrize(
    "activation", [nn.Tanh, nn.GELU, partial(nn.GELU, approximate="tanh"), nn.Softplus, nn.Sigmoid]
)
def test_operators_are_exact_for_every_smooth_activation(activation: MakeActivation) -> None:
    case = BY_NAME["mlp-batchnorm"]
    assert_is_second_derivative(case.model(activation), case.inputs())


@pytest.mark.parametrize("name", ["mlp", "mlp-batchnorm", "resnet", "vgg", "dgcnn"])
@pytest.mark.parametrize("kind", [nn.SiLU, nn.ReLU, nn.ELU], ids=["silu", "relu", "elu"])
def test_inplace_activations_make_the_same_operators(name: str, kind: type[nn.Module]) -> None:
    case = BY_NAME[name]
    plain, inplace = case.model(kind), case.model(partial(kind, inplace=True))
    batch = case.batch(plain)
    expected = capture(plain, squared_error, [batch], trace(plain, batch[0]))
    actual = capture(inplace, squared_error, [batch], trace(inplace, batch[0]))
    assert list(actual) == list(expected)
    for unit, operator in expected.items():
        V = random_vectors(*operator.shape)
        assert relative_error(actual[unit].matvec(V), operator.matvec(V)) < 1e-12
    assert actual.loss == pytest.approx(expected.loss, rel=1e-13)


CONVOLUTIONS: dict[str, nn.Module] = {
    "plain": nn.Conv2d(3, 4, 3),
    "no bias": nn.Conv2d(3, 4, 3, bias=False),
    "stride": nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1),
    "uneven": nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=(0, 2)),
    "dilation": nn.Conv2d(3, 4, 3, dilation=(2, 1), padding=(1, 2)),
    "same": nn.Conv2d(3, 4, 3, padding="same"),
    "same, dilated": nn.Conv2d(3, 4, (3, 5), padding="same", dilation=(2, 1)),
    "same, even": nn.Conv2d(3, 4, (2, 4), padding="same"),
    "valid": nn.Conv2d(3, 4, 3, padding="valid"),
    "reflect": nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect", stride=2),
    "replicate": nn.Conv2d(3, 4, 3, padding="same", padding_mode="replicate"),
    "circular": nn.Conv2d(3, 4, (3, 2), padding="same", padding_mode="circular"),
    "1x1": nn.Conv2d(3, 4, 1),
    "1x1, stride": nn.Conv2d(3, 4, 1, stride=(2, 3), bias=False),
    "1x1, padding": nn.Conv2d(3, 4, 1, padding=1),
    "1x1, reflect": nn.Conv2d(3, 4, 1, padding=1, padding_mode="reflect"),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("which", CONVOLUTIONS)
def test_operators_are_exact_for_every_geometry_of_a_convolution(which: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norm(self.conv(x))).mean((2, 3)))

    conv = copy.deepcopy(CONVOLUTIONS[which])
    model = net(forward, conv=conv, norm=nn.BatchNorm2d(4), head=nn.Linear(4, 3))
    assert_is_second_derivative(model, data(2, 3, 7, 6))


BETWEEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda s, a: F.silu(a),
    "batchnorm": lambda s, a: F.silu(s.norm(a)),
    "batchnorm without affine": lambda s, a: F.silu(s.bare(a)),
    "identity and dropout": lambda s, a: F.silu(s.drop(s.identity(s.norm(a)))),
    "inplace": lambda s, a: F.silu(a, inplace=True),
    "batchnorm, inplace": lambda s, a: F.silu(s.norm(a), inplace=True),
    "inplace afterwards": lambda s, a: F.silu(s.norm(a)).mul_(2.0),
    "iadd afterwards": lambda s, a: s.bump(F.silu(s.norm(a))),
    "channels last": lambda s, a: F.silu(s.norm(a).permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
}


def bump(h: Tensor) -> Tensor:
    h += 1.0
    return h


@pytest.mark.parametrize("which", BETWEEN)
def test_operators_are_exact_with_operations_before_the_activation(which: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(BETWEEN[which](self, self.conv(x)).mean((2, 3)))

    model = net(
        forward,
        conv=nn.Conv2d(3, 4, 2),
        norm=nn.BatchNorm2d(4),
        bare=nn.BatchNorm2d(4, affine=False),
        drop=nn.Dropout(0.5),
        identity=nn.Identity(),
        head=nn.Linear(4, 3),
    )
    model.bump = bump
    assert_is_second_derivative(model, data(2, 3, 6, 6))


def test_operators_are_exact_for_a_batchnorm_over_flattened_channels() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norm(self.conv(x).flatten(1))))

    model = net(forward, conv=nn.Conv2d(3, 4, 2), norm=nn.BatchNorm1d(36), head=nn.Linear(36, 3))
    assert_is_second_derivative(model, data(5, 3, 4, 4))


def test_operators_are_exact_if_a_view_of_the_activation_changes_in_place() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(F.silu(self.conv(x)).flatten(1).mul_(2.0))

    model = net(forward, conv=nn.Conv2d(3, 4, 2), head=nn.Linear(36, 3))
    assert_is_second_derivative(model, data(2, 3, 4, 4))


# What happens to the input h of the layer `down` after it was read.
CHANGED_LATER: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "not at all": lambda s, h, y: y,
    "itself": lambda s, h, y: y + h.mul_(3.0).sum(),
    "a view of it": lambda s, h, y: y + h.flatten().add_(1.0).sum(),
    "through dropout": lambda s, h, y: y + F.dropout(h, 0.5, s.training).mul_(2.0).sum(),
}


@pytest.mark.parametrize("which", CHANGED_LATER)
def test_a_change_in_place_of_the_input_of_a_layer(which: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = x * 2.0
        return CHANGED_LATER[which](self, h, self.head(F.silu(self.down(h))))

    model = net(forward, down=nn.Linear(4, 5), head=nn.Linear(5, 3))
    x = data(6, 4)
    found = capture(model, squared_error, [(x, data(6, 3))], trace(model, x))["down"]
    assert torch.equal(found.X, 2.0 * x)  # type: ignore[attr-defined]


def test_an_activation_that_changes_its_shape_is_refused() -> None:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(x).mean((2, 3), keepdim=True)

    register_layer(Pooled, activation=replace(activation("silu"), name="own", formula=None))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Pooled(), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(5, 3)).double()
    x = data(2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"unit '0': its activation must keep shape"):
        capture(model, squared_error, [(x, data(2, 3))], trace(model, x))


class DropPath(nn.Module):
    """Returns its argument in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x


register_layer(DropPath, linear=True)

# Calls that return their argument itself in eval mode.
RETURNING: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "dropout": lambda s, h: F.dropout(h, 0.5, s.training),
    "dropout1d": lambda s, h: F.dropout1d(h, 0.5, s.training),
    "alpha_dropout": lambda s, h: F.alpha_dropout(h, 0.5, s.training),
    "feature_alpha_dropout": lambda s, h: F.feature_alpha_dropout(h, 0.5, s.training),
    "AlphaDropout": lambda s, h: s.alpha(h),
    "registered": lambda s, h: s.path(h),
    "Identity": lambda s, h: s.identity(h),
    "chain": lambda s, h: s.identity(F.alpha_dropout(s.path(h), 0.5, s.training)).contiguous(),
}


@pytest.mark.parametrize("which", RETURNING)
def test_operators_are_exact_if_a_returned_argument_changes_in_place(which: str) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(RETURNING[which](self, F.silu(self.up(x))).mul_(2.0))

    modules = {"alpha": nn.AlphaDropout(0.5), "path": DropPath(), "identity": nn.Identity()}
    model = net(forward, up=nn.Linear(4, 5), head=nn.Linear(5, 3), **modules)
    assert_is_second_derivative(model, data(6, 4))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_operators_are_exact_for_a_linear_layer_on_sequences(bias: bool) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    model = net(forward, up=nn.Linear(4, 5, bias=bias), down=nn.Linear(5, 3))
    assert_is_second_derivative(model, data(2, 6, 4))


def test_operators_are_exact_for_a_transposed_batchnorm_on_sequences() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.down(F.silu(self.norm(self.up(x).transpose(1, 2))).transpose(1, 2))

    model = net(forward, up=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), down=nn.Linear(5, 3))
    assert_is_second_derivative(model, data(2, 6, 4))


def test_operators_are_exact_for_a_unit_with_several_consumers() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.silu(self.up(x))
        return self.a(h) * torch.tanh(self.b(h))

    model = net(forward, up=nn.Linear(4, 5), a=nn.Linear(5, 3), b=nn.Linear(5, 3))
    assert_is_second_derivative(model, data(6, 4), units=("up",))


def test_kinked_activations_use_a_softplus_of_the_given_sharpness() -> None:
    case = BY_NAME["mlp"]
    model = case.model(nn.ReLU)
    x, target = case.batch(model)
    graph = trace(model, x)
    for sharpness, options in ((3.0, {"curvature": "paper"}), (1.5, {"sharpness": 1.5})):
        captured = capture(model, squared_error, [(x, target)], graph, **options)  # type: ignore[arg-type]
        beta = sharpness
        with torch.enable_grad():
            z = model.layers[:3](x)
            h = torch.relu(z).detach().requires_grad_()
            (g,) = torch.autograd.grad(squared_error(model.layers[4](h), target), h)
            s = torch.sigmoid(beta * z)
            C = (g * beta * s * (1 - s)).detach()
            X = torch.cat([model.layers[:2](x), torch.ones(len(x), 1, dtype=torch.float64)], 1).detach()
        S = torch.einsum("nd,nj,ne->jde", X, C, X)
        assert relative_error(captured["layers.2"].dense(), S) < 1e-12


def small() -> tuple[nn.Module, Graph, list[tuple[Tensor, Tensor]]]:
    """Return a small model with BatchNorm, its graph, and three batches; tests do not change the model."""
    case = BY_NAME["mlp-batchnorm"]
    model, graph = traced(case)
    return model, graph, [case.batch(model, seed=seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("name", ["mlp-batchnorm", "resnet", "dgcnn"])
def test_operators_are_averaged_over_the_batches(name: str) -> None:
    case = BY_NAME[name]
    model, graph = traced(case)
    batches = [case.batch(model, seed=seed) for seed in (1, 2, 3)]
    together = capture(model, squared_error, iter(batches), graph)
    alone = [capture(model, squared_error, [batch], graph) for batch in batches]
    for unit in case.captured:
        assert isinstance(together[unit], (SumOperator, StackedOperator))
        mean = sum(one[unit].dense() for one in alone) / 3
        assert relative_error(together[unit].dense(), mean) < 1e-12
    assert together.loss == pytest.approx(sum(one.loss for one in alone) / 3, rel=1e-13)
    for one, (x, target) in zip(alone, batches, strict=True):
        assert one.loss == pytest.approx(float(squared_error(outputs(model, x), target)), rel=1e-13)


@pytest.mark.parametrize("first", ["model", "net", "network", "module"])
def test_both_forms_of_the_loss_function_agree(first: str) -> None:
    model, graph, batches = small()
    forms: dict[str, Callable] = {
        "model": lambda model, batch: squared_error(model(batch["x"]), batch["y"]),
        "net": lambda net, batch: squared_error(net(batch["x"]), batch["y"]),
        "network": lambda network, batch: squared_error(network(x=batch["x"]), batch["y"]),
        "module": lambda module, batch: squared_error(module(batch["x"]), batch["y"]),
    }
    expected = capture(model, squared_error, batches, graph)
    actual = capture(model, forms[first], [{"x": x, "y": y} for x, y in batches], graph)
    for unit in graph.units:
        assert torch.equal(actual[unit].dense(), expected[unit].dense())
    assert actual.loss == expected.loss


def test_a_loss_function_may_use_attributes_of_the_model() -> None:
    model, graph, batches = small()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert not model.training
        return squared_error(model(batch[0]), batch[1]) + 0.1 * model.layers[0].weight.square().sum()

    captured = capture(model, loss, batches[:1], graph)
    x, target = batches[0]
    penalty = 0.1 * model.layers[0].weight.square().sum()
    assert captured.loss == pytest.approx((squared_error(model(x), target) + penalty).item(), rel=1e-13)


def test_a_penalty_over_all_parameters_is_part_of_the_loss() -> None:
    model, graph, batches = small()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squared_error(model(batch[0]), batch[1]) + sum(p.square().sum() for p in model.parameters())

    captured = capture(model, loss, batches[:1], graph)
    with torch.no_grad():
        assert captured.loss == pytest.approx(float(loss(model, batches[0])), rel=1e-13)


def test_only_the_units_asked_for_are_captured() -> None:
    case = BY_NAME["vgg"]
    model = case.model(partial(nn.SiLU, inplace=True))
    graph = trace(model, case.inputs())
    batch = case.batch(model)
    everything = capture(model, squared_error, [batch], graph)
    chosen = ("features.10", "classifier.0", "features.3")
    some = capture(model, squared_error, [batch], graph, units=chosen)
    assert set(some) == set(chosen)
    for unit in chosen:
        assert relative_error(some[unit].dense(), everything[unit].dense()) < 1e-12
    assert some.loss == everything.loss
    assert capture(model, squared_error, [batch], graph, units=[]) == {}


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "resnet", "mobilenet", "dgcnn"])
def test_operators_are_kept_in_the_dtype_asked_for(name: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    model, graph = traced(case)
    captured = capture(model, squared_error, [case.batch(model)], graph, dtype=dtype)
    for operator in captured.values():
        assert {value.dtype for value in vars(operator).values() if is_float(value)} == {dtype}
        assert operator.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_operators_keep_the_dtype_of_the_model_by_default() -> None:
    case = BY_NAME["resnet"]
    model = case.model().float()
    x, target = (tensor.float() for tensor in case.batch(copy.deepcopy(model).double()))
    captured = capture(model, squared_error, [(x, target)], trace(model, x))
    for operator in captured.values():
        assert {value.dtype for value in vars(operator).values() if is_float(value)} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, "float32"])
def test_other_dtypes_are_refused(dtype: object) -> None:
    model, graph, batches = small()
    with pytest.raises(ValueError, match="dtype"):
        capture(model, squared_error, batches, graph, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "resnet", "mobilenet", "dgcnn"])
def test_memory_is_the_size_of_the_tensors(name: str, count: int) -> None:
    case = BY_NAME[name]
    model, graph = traced(case)
    captured = capture(model, squared_error, [case.batch(model)] * count, graph)
    memory = captured.memory()
    assert list(memory) == list(case.captured)
    for unit, operator in captured.items():
        terms = [term for term, _ in operator.weighted_terms()]
        held = [value for term in terms for value in vars(term).values() if isinstance(value, Tensor)]
        assert len(held) >= 2
        assert memory[unit] == sum(tensor.numel() * tensor.element_size() for tensor in held)


class Fingerprint:
    """The state of a model, and the random state, which must not change."""

    def __init__(self, model: nn.Module) -> None:
        self.modes = [module.training for module in model.modules()]
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.identities = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
        self.versions = {name: value._version for name, value in model.state_dict(keep_vars=True).items()}
        self.grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        self.requires = {name: p.requires_grad for name, p in model.named_parameters()}
        self.hooks = [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ]
        self.random_state = torch.get_rng_state()
        self.modules = [id(module) for module in model.modules()]
        self.grad_enabled = torch.is_grad_enabled()

    def assert_equal(self, model: nn.Module) -> None:
        now = Fingerprint(model)
        for attribute in ("modes", "identities", "versions", "requires", "hooks", "modules", "grad_enabled"):
            assert getattr(now, attribute) == getattr(self, attribute), attribute
        assert all(torch.equal(value, now.state[name]) for name, value in self.state.items())
        for name, grad in self.grads.items():
            other = now.grads[name]
            assert (grad is None and other is None) or torch.equal(grad, other)  # type: ignore[arg-type]
        assert torch.equal(now.random_state, self.random_state)


@cache
def disturbed(case: ModelCase) -> tuple[nn.Module, Graph, list[tuple[Tensor, Tensor]]]:
    """Return a model with mixed modes, gradients and hooks, its graph, and two batches; the same ones for all tests."""
    model = case.model()
    batches = [case.batch(model, seed=seed) for seed in (1, 2)]
    graph = trace(model, case.inputs())
    squared_error(model(batches[0][0]), batches[0][1]).backward()
    next(model.parameters()).grad = None
    for index, module in enumerate(model.modules()):
        module.training = index % 3 != 0
    model.register_forward_hook(lambda *arguments: None)
    return model, graph, batches


def failing_losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return loss functions that fail at the second batch, except "fine"."""
    counts: dict[str, int] = {}

    def second(name: str, bad: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            counts[name] = counts.get(name, 0) + 1
            torch.rand(3)
            return squared_error(output, target) if counts[name] == 1 else bad(output, target)

        return loss

    def raises(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("half-way")

    return {
        "fine": second("fine", squared_error),
        "raises": second("raises", raises),
        "nan": second("nan", lambda output, target: squared_error(output, target) * float("nan")),
        "infinite": second("infinite", lambda output, target: output.sum() + float("inf")),
        "gradient": second("gradient", lambda output, target: (output - output.detach()).abs().sum().sqrt()),
        "vector": second("vector", lambda output, target: output),
    }


@pytest.mark.parametrize("outcome", ["fine", "raises", "nan", "infinite", "gradient", "vector"])
@pytest.mark.parametrize("name", ["mlp-batchnorm", "resnet", "dgcnn", "transformer", "mobilenet"])
def test_the_model_is_left_as_it_was(name: str, outcome: str) -> None:
    model, graph, batches = disturbed(BY_NAME[name])
    before = Fingerprint(model)
    loss = failing_losses()[outcome]
    if outcome == "fine":
        capture(model, loss, batches, graph)
    else:
        with pytest.raises(KeyError if outcome == "raises" else ValueError):
            capture(model, loss, batches, graph)
    before.assert_equal(model)


def test_the_model_is_left_as_it_was_when_the_data_fail() -> None:
    model, graph, batches = disturbed(BY_NAME["mlp-batchnorm"])

    def broken():
        yield batches[0]
        raise OSError("the disk is gone")

    before = Fingerprint(model)
    with pytest.raises(OSError, match="the disk is gone"):
        capture(model, squared_error, broken(), graph)
    before.assert_equal(model)


def test_capture_works_where_gradients_are_off_and_leaves_them_off() -> None:
    model, graph, batches = small()
    expected = capture(model, squared_error, batches, graph)
    with torch.no_grad():
        captured = capture(model, squared_error, batches, graph)
        assert not torch.is_grad_enabled()
    for unit in graph.units:
        assert torch.equal(captured[unit].dense(), expected[unit].dense())


@pytest.mark.parametrize("name", ["mlp-batchnorm", "resnet", "dgcnn", "vgg"])
def test_frozen_models_are_captured_too(name: str) -> None:
    case = BY_NAME[name]
    model = case.model(partial(nn.SiLU, inplace=True))
    batch = case.batch(model)
    graph = trace(model, batch[0])
    expected = capture(model, squared_error, [batch], graph)
    model.requires_grad_(False)
    before = Fingerprint(model)
    captured = capture(model, squared_error, [batch], graph)
    before.assert_equal(model)
    assert list(captured) == list(case.captured)
    for unit in case.captured:
        assert relative_error(captured[unit].dense(), expected[unit].dense()) < 1e-12


def test_a_loss_that_is_not_finite_names_the_batch() -> None:
    model, graph, batches = small()
    batches[1] = (batches[1][0], batches[1][1] * float("nan"))
    with pytest.raises(ValueError, match=r"batch 1 .*not finite"):
        capture(model, squared_error, batches, graph)


def test_a_gradient_that_is_not_finite_names_the_batch_and_the_unit() -> None:
    model, graph, batches = small()
    loss = failing_losses()["gradient"]
    with pytest.raises(ValueError, match=r"batch 1 .*'layers\.(0|3)'.*not finite"):
        capture(model, loss, batches, graph)


@pytest.mark.parametrize("batches", [[], iter(())], ids=["list", "iterator"])
def test_no_batches_is_an_error(batches: object) -> None:
    model, graph, _ = small()
    with pytest.raises(ValueError, match="batches"):
        capture(model, squared_error, batches, graph)  # type: ignore[arg-type]


def test_a_batch_without_samples_is_an_error() -> None:
    model, graph, _ = small()
    with pytest.raises(ValueError, match=r"batch 0|empty"):
        capture(
            model,
            lambda output, target: (output - target).square().sum(),
            [(data(0, 4), data(0, 3))],
            graph,
        )


def test_a_batch_that_is_no_pair_is_an_error() -> None:
    model, graph, batches = small()
    with pytest.raises(ValueError, match=r"batch 1 must be a pair .*got Tensor"):
        capture(model, squared_error, [batches[0], batches[1][0]], graph)


def test_the_error_for_an_unknown_unit_lists_the_units() -> None:
    model, graph, batches = small()
    with pytest.raises(ValueError, match=r"'layers\.9'.*layers\.0, layers\.3"):
        capture(model, squared_error, batches, graph, units=["layers.9"])


def test_a_loss_function_that_does_not_call_the_model_is_an_error() -> None:
    model, graph, batches = small()
    with pytest.raises(ValueError, match="exactly once"):
        capture(model, lambda model, batch: batch[0].sum(), batches, graph)


def test_a_loss_that_does_not_depend_on_the_model_is_an_error() -> None:
    model, graph, batches = small()
    with pytest.raises(ValueError, match=r"batch 0 does not depend"):
        capture(model, lambda output, target: target.sum(), batches, graph)


@pytest.mark.parametrize("units", [None, ["layers.0"], ["layers.3"]], ids=["all", "the split one", "its consumer"])
def test_a_stale_graph_is_an_error(units: list[str] | None) -> None:
    model = BY_NAME["mlp-batchnorm"].model()
    batches = [BY_NAME["mlp-batchnorm"].batch(model)]
    graph = trace(model, batches[0][0])
    apply_splits(model, random_plan(graph, 2, units=["layers.0"]), eps=0.0)
    with pytest.raises(ValueError, match=r"stale.*'layers\.0'.*trace"):
        capture(model, squared_error, batches, graph, units=units)
    capture(model, squared_error, batches, trace(model, batches[0][0]), units=units)


def test_the_graph_of_another_model_is_an_error() -> None:
    model, graph, batches = small()
    with pytest.raises(ValueError, match="another model"):
        capture(copy.deepcopy(model), squared_error, batches, graph)


def test_a_capture_is_a_dictionary_in_the_order_of_the_graph() -> None:
    model, graph, batches = small()
    captured = capture(model, squared_error, batches, graph)
    assert isinstance(captured, Captured)
    assert list(captured) == list(graph.units)
    assert all(captured[unit.name].shape == (unit.width, unit.fan_in) for unit in graph)


class Folds(nn.Module):
    """Convolutions with BatchNorms of several kinds, with and without biases, and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1, bias=True)
        self.first_norm = nn.BatchNorm2d(3)
        self.depthwise = nn.Conv2d(3, 3, 3, padding="same", groups=3, bias=False, padding_mode="reflect")
        self.depthwise_norm = nn.BatchNorm2d(3, affine=False)
        self.second = nn.Conv2d(3, 4, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first_norm(self.first(x)))
        x = F.silu(self.depthwise_norm(self.depthwise(x)))
        return self.head(self.act(self.second_norm(self.second(x)))).mean((2, 3))


def folding_case() -> tuple[nn.Module, Graph, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Folds().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, -1, 1)
                nn.init.uniform_(module.bias, -1, 1)
    x = data(5, 2, 6, 6)
    return model.eval(), trace(model, x), [(x, data(5, 2, seed=1))]


class Maps(nn.Module):
    """Convolutions, a view of their outputs that only contiguous maps have, and maps as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 6, 1)
        self.depthwise, self.last = nn.Conv2d(6, 6, 3, stride=2, groups=6), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = h.view(h.shape[0], h.shape[1], -1).view(h.shape)
        return self.last(F.silu(self.depthwise(torch.relu(self.second(h)))))


def test_convolutions_are_captured_in_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Maps(), torch.randn(4, 3, 9, 9)
    graph = trace(model, x)
    contiguous: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        contiguous.append(output.is_contiguous())
        return output.view(-1).square().mean()

    def captured(is_last: bool) -> Captured:
        monkeypatch.setattr(batch_capture._Taps, "_is_faster_in_channels_last", lambda self: is_last)
        return capture(model, loss, [(x, x)], graph)

    assert batch_capture._Taps(graph.module, model, list(graph))._is_faster_in_channels_last()
    plain, last = captured(False), captured(True)
    assert contiguous == [True, True]
    for name, operator in last.items():
        V = torch.randn(operator.shape, generator=torch.Generator().manual_seed(0))
        assert relative_error(operator.matvec(V), plain[name].matvec(V)) <= 1e-4
    monkeypatch.undo()
    model, x = model.double(), x.double()
    graph = trace(model, x)
    assert not batch_capture._Taps(graph.module, model, list(graph))._is_faster_in_channels_last()


def test_folded_norms_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, batches = folding_case()
    folded = capture(model, squared_error, batches, graph)
    assert len(foldable(graph.module)) == 3
    monkeypatch.setattr(batch_capture, "foldable", lambda module: {})
    plain = capture(model, squared_error, batches, graph)
    assert folded.loss == pytest.approx(plain.loss, rel=1e-12)
    for name, operator in plain.items():
        assert relative_error(folded[name].dense(), operator.dense()) < 1e-12, name


def test_layers_whose_outputs_a_hook_changes_are_not_folded() -> None:
    model, _, batches = folding_case()
    model.get_submodule("first").register_forward_hook(lambda module, inputs, output: torch.tanh(output))
    graph = trace(model, batches[0][0])
    assert len(foldable(graph.module)) == 2
    captured = capture(model, squared_error, batches, graph)
    assert captured.loss == pytest.approx(float(squared_error(outputs(model, batches[0][0]), batches[0][1])), rel=1e-12)


def test_layers_with_batch_statistics_are_not_folded() -> None:
    model, _, batches = folding_case()
    # Without running statistics, a BatchNorm uses the statistics of the batch in eval mode too.
    model.second_norm = nn.BatchNorm2d(4, track_running_stats=False).double()  # type: ignore[assignment]
    assert len(foldable(trace(model, batches[0][0]).module)) == 2


def test_a_hook_that_was_registered_after_the_trace_is_not_passed_over() -> None:
    model, graph, batches = folding_case()
    model.get_submodule("first").register_forward_hook(lambda module, inputs, output: torch.tanh(output))
    # It is an error, or part of what is captured.
    try:
        loss = capture(model, squared_error, batches, graph).loss
    except ValueError:
        return
    assert loss == pytest.approx(float(squared_error(outputs(model, batches[0][0]), batches[0][1])), rel=1e-12)


class Rounding(torch.autograd.Function):
    """Rounds; its derivative is taken to be 1, as in training with quantised activations."""

    @staticmethod
    def forward(ctx: object, h: Tensor) -> Tensor:
        return torch.round(4 * h) / 4

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g


# The same function and the same derivative, in two forms.
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda h: h + (torch.round(4 * h) / 4 - h).detach(),
    "function": Rounding.apply,
}


def test_a_derivative_that_the_user_has_defined_is_not_passed_over() -> None:
    x, target = data(6, 4), data(6, 2)
    found = []
    for rounded in ROUNDED.values():
        model = net(lambda s, x, f=rounded: s.down(f(F.silu(s.up(x)))), up=nn.Linear(4, 5), down=nn.Linear(5, 2))  # type: ignore[misc]
        # It is an error, or part of what is captured.
        try:
            found.append(capture(model, squared_error, [(x, target)], trace(model, x))["up"].dense())
        except ValueError:
            assert rounded == Rounding.apply
    assert all(relative_error(one, found[0]) < 1e-12 for one in found)
    assert found[0].abs().max() > 0


def test_units_that_cannot_be_captured_are_left_out_and_named() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.first(x).relu())).sort(1).values.sum(1))

    model = net(forward, first=nn.Linear(4, 6), up=nn.Linear(6, 5), down=nn.Linear(5, 2))
    x, target = data(3, 7, 4), data(3, 2)
    graph = trace(model, x)
    assert [unit.name for unit in graph.captured()] == ["first"]
    assert list(capture(model, squared_error, [(x, target)], graph)) == ["first"]
    with pytest.raises(ValueError, match=r"'up' cannot be captured: .* chooses among its values"):
        capture(model, squared_error, [(x, target)], graph, units=["up"])
    assert "capture leaves it out: " in graph.explain()


def test_a_model_without_units_is_an_error() -> None:
    model = nn.Linear(3, 2).double()
    with pytest.raises(ValueError, match="nothing to split"):
        capture(model, squared_error, [(data(4, 3), data(4, 2))], trace(model, data(4, 3)))
