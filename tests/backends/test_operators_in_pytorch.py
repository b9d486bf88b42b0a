"""The operators torch.ops.s3d_fast.* inside PyTorch: compilation, export, gradients, vmap, flop counts, shared memory.

`opcheck` of every operator is in `test_extension.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import s3d_fast as s3d
from s3d_fast.backends import derivatives, flops, operations
from s3d_fast.backends.batching import VECTORS
from s3d_fast.maths import reference
from tests.cases import random_tensor, relative_error
from tests.extension_cases import good_calls

pytest.importorskip("s3d_fast._C")
kernels = torch.ops.s3d_fast

# PyTorch's compiler and its vmap use what it has deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def _by_rows(N: int) -> tuple[Tensor, Tensor, Tensor]:
    return random_tensor(N, 5), random_tensor(N, 3, seed=1), random_tensor(3, 5, seed=2)


def _grouped(X: Tensor, C: Tensor, V: Tensor) -> list[Tensor]:
    return operations.splitting_matvec_grouped([X, 2 * X], [C, C], [V, V])


def _gated(X: Tensor, C: Tensor, V: Tensor) -> Tensor:
    return operations.gated_matvec(X, C, C.sin(), C.cos(), torch.cat([V, V], -1))


def _joint(X: Tensor, C: Tensor, V: Tensor) -> Tensor:
    return operations.joint_matvec([X, X.cos()], [C, C.sin(), C.cos()], torch.cat([V, V], -1), bias=[False, False])


def _edges(X: Tensor, C: Tensor, V: Tensor) -> Tensor:
    winner = torch.zeros_like(C, dtype=torch.int64)
    clouds = [tensor.unsqueeze(0) for tensor in (X, winner, C)]
    return operations.edgeconv_matvec(*clouds, torch.cat([V, V], -1))


def _depthwise(X: Tensor, C: Tensor, V: Tensor) -> Tensor:
    maps = C.unsqueeze(1).unsqueeze(1)
    weight = V.narrow(1, 0, 1).unsqueeze(2)
    return operations.depthwise_matvec(X, [maps, maps], [maps], [weight], V, stages=[reference.DepthwiseStage()])


def _coefficients(X: Tensor, C: Tensor, V: Tensor) -> Tensor:
    return operations.curvature_coefficients(X, X.sin(), s3d.activation("silu"), V.select(0, 0))


# Where PyTorch has no CUDA, tensors of a GPU cannot be indexed by [].
BY_ROWS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "splitting_matvec": operations.splitting_matvec,
    "splitting_matvec_grouped": _grouped,
    "gated_matvec": _gated,
    "joint_matvec": _joint,
    "edgeconv_matvec": _edges,
    "depthwise_matvec": _depthwise,
    "splitting_matrices": lambda X, C, V: operations.splitting_matrices(X, C, bias=True),
    "curvature_coefficients": _coefficients,
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_one_graph_serves_every_number_of_rows(name: str) -> None:
    graphs = []

    def count(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    # With fullgraph, a break of the graph is an error.
    compiled = torch.compile(BY_ROWS[name], dynamic=True, fullgraph=True, backend=count)
    for N in (7, 20, 33, 64, 129):
        found, expected = compiled(*_by_rows(N)), BY_ROWS[name](*_by_rows(N))
        lists = (found, expected) if isinstance(found, list) else ([found], [expected])
        assert all(torch.equal(a, b) for a, b in zip(*lists, strict=True))
    assert len(graphs) == 1
    assert "s3d_fast" in graphs[0].code


class _Module(torch.nn.Module):
    def forward(self, X: Tensor, C: Tensor, V: Tensor) -> Tensor:
        return operations.splitting_matvec(X, C, V)


def test_a_product_is_exported_for_every_number_of_rows() -> None:
    N = torch.export.Dim("N")
    exported = torch.export.export(_Module(), _by_rows(8), dynamic_shapes=({0: N}, {0: N}, None))
    assert "s3d_fast.splitting_matvec" in exported.graph_module.code
    assert torch.equal(exported.module()(*_by_rows(31)), operations.splitting_matvec(*_by_rows(31)))


def test_a_compiled_product_has_its_gradients() -> None:
    torch._dynamo.reset()
    leaves = [tensor.requires_grad_() for tensor in _by_rows(9)]
    compiled = torch.compile(operations.splitting_matvec, dynamic=True, fullgraph=True, backend="aot_eager")
    for N in (9, 14):
        leaves = [tensor.requires_grad_() for tensor in _by_rows(N)]
        found = torch.autograd.grad(compiled(*leaves).sin().sum(), leaves)
        expected = torch.autograd.grad(reference.splitting_matvec(*leaves).sin().sum(), leaves)
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", derivatives.RULES)
def test_gradients_are_those_of_finite_differences_twice(name: str) -> None:
    operator = getattr(kernels, name)
    parameters = [argument.name for argument in operator.default._schema.arguments]
    places = [parameters.index(parameter) for parameter in derivatives.RULES[name].differentiable]
    arguments = list(good_calls()[name])
    # gradcheck takes no lists: their items are arguments of their own.
    sizes = [len(arguments[place]) if isinstance(arguments[place], list) else 0 for place in places]
    leaves = [
        tensor.clone().requires_grad_()
        for place in places
        for tensor in (arguments[place] if isinstance(arguments[place], list) else [arguments[place]])
    ]

    def call(*given: Tensor) -> Tensor | tuple[Tensor, ...]:
        items = iter(given)
        changed = list(arguments)
        for place, size in zip(places, sizes, strict=True):
            changed[place] = [next(items) for _ in range(size)] if size else next(items)
        result = operator(*changed)
        return tuple(result) if isinstance(result, list) else result

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_gradients_of_16_bit_rows_are_in_16_bits() -> None:
    X, C, V = (tensor.float() for tensor in _by_rows(12))
    leaves = [X.bfloat16().requires_grad_(), C.bfloat16().requires_grad_(), V.requires_grad_()]
    gradients = torch.autograd.grad(operations.splitting_matvec(*leaves, backend="cpu").sum(), leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]
    expected = torch.autograd.grad(reference.splitting_matvec(*leaves).sum(), leaves)
    assert all(relative_error(a.float(), b.float()) < 0.02 for a, b in zip(gradients, expected, strict=True))


def test_gradients_exist_inside_torch_func() -> None:
    X, C, V = _by_rows(9)

    def loss(v: Tensor) -> Tensor:
        return operations.splitting_matvec(X, C, v, backend="cpu").sin().sum()

    def grouped_loss(v: Tensor) -> Tensor:
        first, second = operations.splitting_matvec_grouped([X, X], [C, C], [v, v.sin()], backend="cpu")
        return (first.sin() * second).sum()

    def expected_loss(v: Tensor) -> Tensor:
        return reference.splitting_matvec(X, C, v).sin().sum()

    def expected_grouped_loss(v: Tensor) -> Tensor:
        return (reference.splitting_matvec(X, C, v).sin() * reference.splitting_matvec(X, C, v.sin())).sum()

    grad, vmap = torch.func.grad, torch.vmap
    transforms: list[Callable[..., Tensor]] = [
        lambda f: grad(f)(V),
        lambda f: grad(lambda v: grad(f)(v).cos().sum())(V),
        lambda f: vmap(grad(f))(torch.stack([V, 2 * V])),
        lambda f: grad(lambda v: vmap(f)(torch.stack([v, v * v])).sum())(V),
        lambda f: torch.func.jacrev(grad(f))(V),
    ]
    for transform in transforms:
        assert relative_error(transform(loss), transform(expected_loss)) < 1e-10
        assert relative_error(transform(grouped_loss), transform(expected_grouped_loss)) < 1e-10
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (V,), (V,))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (V,), (V,))


@pytest.mark.parametrize("sets", [(), (3,)], ids=["M-D", "K-M-D"])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", VECTORS)
def test_vmap_over_vectors_is_a_loop_over_them(name: str, dim: int, sets: tuple[int, ...]) -> None:
    operator, place = getattr(kernels, name), VECTORS[name]
    arguments = list(good_calls()[name])
    is_list = isinstance(arguments[place], list)
    (M, D) = (arguments[place][0] if is_list else arguments[place]).shape[-2:]
    batch = random_tensor(4, *sets, M, D).movedim(0, dim)

    def product(v: Tensor) -> Tensor:
        given = [v, *arguments[place][1:]] if is_list else v
        result = operator(*arguments[:place], given, *arguments[place + 1 :])
        return result[0] if is_list else result

    found = torch.vmap(product, in_dims=dim)(batch)
    expected = torch.stack([product(v.contiguous()) for v in batch.unbind(dim)])
    assert relative_error(found, expected) < 1e-13


def test_vmap_over_rows_and_vectors_is_a_loop() -> None:
    X, C, V = random_tensor(4, 9, 5), random_tensor(4, 9, 3, seed=1), random_tensor(4, 3, 5, seed=2)
    expected = torch.stack([reference.splitting_matvec(*layer) for layer in zip(X, C, V, strict=True)])
    assert (
        relative_error(torch.vmap(partial(operations.splitting_matvec, check_finite=False))(X, C, V), expected) < 1e-13
    )
    grouped = torch.vmap(
        lambda x, c, v: tuple(kernels.splitting_matvec_grouped([x, X[0]], [c, C[0]], [v, V[0]], [0, 0]))
    )
    first, second = grouped(X, C, V)
    assert relative_error(first, expected) < 1e-13
    assert relative_error(second, expected[:1].expand_as(second)) < 1e-13


def test_gradients_pass_through_vmap() -> None:
    X, C, _ = _by_rows(9)
    V = random_tensor(4, 3, 5).requires_grad_()
    found, expected = (
        torch.autograd.grad(torch.vmap(partial(product, X, C))(V).sin().sum(), V)[0]
        for product in (operations.splitting_matvec, reference.splitting_matvec)
    )
    assert relative_error(found, expected) < 1e-12
    with torch.no_grad():
        assert torch.vmap(lambda v: operations.splitting_matvec(X, C, v))(V).shape == V.shape


def _flops(call: Callable[..., Any], *arguments: Any) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call(*arguments)
    return counter.get_total_flops()


def test_flop_counts_are_those_of_the_reference() -> None:
    X, C, V = _by_rows(9)
    K = torch.stack([V, V])
    assert _flops(operations.splitting_matvec, X, C, V) == _flops(reference.splitting_matvec, X, C, V) == 4 * 9 * 3 * 5
    assert _flops(operations.splitting_matvec, X, C, K) == _flops(reference.splitting_matvec, X, C, K)
    assert _flops(_grouped, X, C, V) == 2 * _flops(reference.splitting_matvec, X, C, V)
    halves = torch.cat([V, V], -1)
    assert _flops(_gated, X, C, V) == _flops(reference.gated_matvec, X, C, C, C, halves)
    assert _flops(_joint, X, C, V) == _flops(reference.joint_matvec, [X, X], [C, C, C], halves, [False, False])
    # The kernel computes one triangle of each matrix: (D + 1) / 2 D of the reference's work.
    dense = _flops(reference.splitting_matrices, X, C, False, X.dtype)
    assert _flops(operations.splitting_matrices, X, C) == dense * 6 // 10
    with torch.no_grad():
        assert _flops(operations.splitting_matvec, X, C, V) == 4 * 9 * 3 * 5


def test_every_flop_count_is_a_positive_number() -> None:
    for name in flops.FLOPS:
        assert _flops(getattr(kernels, name), *good_calls()[name]) > 0


def test_flops_are_counted_without_importing_triton_first() -> None:
    code = """
import sys, torch, s3d_fast
assert "triton" not in sys.modules and "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    s3d_fast.splitting_matvec(torch.ones(4, 3), torch.ones(4, 2), torch.ones(2, 3))
print(counter.get_total_flops())
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == "96", run.stderr


def test_an_argument_in_the_memory_that_changes_is_refused() -> None:
    memory = random_tensor(200)
    out, X, C = memory[:48].view(3, 4, 4), memory[40:64].view(6, 4), random_tensor(6, 3)
    before = memory.clone()
    with pytest.raises(ValueError, match="X must not share memory with out"):
        kernels.add_splitting_matrices(out, X, C, False, 1.0)
    g, z, scale, *settings = good_calls()["curvature_coefficients_"]
    g = memory[:24].view(2, 3, 4)
    with pytest.raises(ValueError, match="z must not share memory with g"):
        kernels.curvature_coefficients_(g, memory[12:36].view(2, 3, 4), scale, *settings)
    with pytest.raises(ValueError, match="scale must not share memory with g"):
        kernels.curvature_coefficients_(g, z, memory[20:23], *settings)
    assert torch.equal(memory, before)
    # Entries of z are read before those of g change, and what is not contiguous is copied first.
    for same in (g, memory[:48].view(2, 3, 4, 2)[..., 0]):
        expected = kernels.curvature_coefficients(g, same.clone(), scale, *settings)
        copy = memory.clone()
        kernels.curvature_coefficients_(g, same, scale, *settings)
        assert torch.equal(g, expected)
        memory.copy_(copy)
