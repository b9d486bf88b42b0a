"""The operators torch.ops.s3d_fast.* on devices without C++ kernels: their schemas, their graphs, and their results.

The kernels for CUDA are those of `implementations`. Here they are operators of a library for tests, on CPU tensors: by
the Triton backend in the interpreter, and by the reference. Graphs are traced with fake tensors on a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from s3d_fast.backends import derivatives, implementations, operations
from s3d_fast.backends.choice import choose
from s3d_fast.backends.cuda import CUDA
from s3d_fast.backends.fakes import FAKES
from s3d_fast.backends.implementations import IMPLEMENTATIONS
from s3d_fast.backends.interface import Backend
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.backends.schemas import SCHEMAS
from s3d_fast.kernels import options, pointwise
from s3d_fast.maths import reference
from s3d_fast.maths.incoming import incoming_edges
from tests.backends.test_operators_in_pytorch import BY_ROWS, _by_rows
from tests.cases import relative_error
from tests.extension_cases import IN_PLACE, good_calls, tensors_of
from tests.kernel_cases import recorded

pytest.importorskip("triton")

OPERATORS = tuple(good_calls())
# The compiler uses what it has deprecated itself; the interpreter computes with masked entries.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::RuntimeWarning")


def names() -> list[str]:
    return [schema.partition("(")[0] for schema in SCHEMAS]


def test_every_operator_has_one_schema_a_fake_and_kernels() -> None:
    assert sorted(names()) == sorted(FAKES) == sorted(IMPLEMENTATIONS) == sorted(OPERATORS)
    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        assert str(getattr(torch.ops.s3d_fast, name).default._schema) == f"s3d_fast::{schema}"
        for key in ("CUDA", "CompositeExplicitAutograd", "Autograd", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"s3d_fast::{name}", key), (name, key)


def test_the_sources_of_the_extension_define_no_schema() -> None:
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "csrc").glob("*.cpp")]
    assert not any("LIBRARY_FRAGMENT" in source for source in sources)
    implemented = {name for source in sources for name in re.findall(r'm\.impl\("(\w+)"', source)}
    assert implemented == set(names())


@pytest.fixture(params=["triton", "reference"], scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The operators in a library of their own, with the kernels of one backend for CPU tensors."""
    own = choose(request.param)
    name = f"s3d_fast_{request.param}"
    made = torch.library.Library(name, "DEF")
    for schema in SCHEMAS:
        made.define(schema)
    for operator, fake in FAKES.items():
        made.impl(operator, implementations.kernel(operator, lambda _: own), "CPU")
        torch.library.register_fake(f"{name}::{operator}", fake, lib=made)
    yield getattr(torch.ops, name)
    made._destroy()


def _results(operators: Any, name: str) -> list[Tensor]:
    """Return the results of a good call and what it has changed."""
    arguments = good_calls()[name]
    result = getattr(operators, name)(*arguments)
    changed = [arguments[place] for place in sorted(IN_PLACE.get(name, ()))]
    return tensors_of(tuple(result) if isinstance(result, tuple | list) else (result,)) + changed


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_of_a_backend_agree_with_the_extension(library: Any, name: str) -> None:
    pytest.importorskip("s3d_fast._C")
    found, expected = _results(library, name), _results(torch.ops.s3d_fast, name)
    assert [(own.shape, own.dtype, own.stride()) for own in found] == [
        (own.shape, own.dtype, own.stride()) for own in expected
    ]
    for own, other in zip(found, expected, strict=True):
        if name.endswith("_extremes") and other.dim() == 3:
            # Eigenvectors have any sign.
            own, other = own.abs(), other.abs()
        assert relative_error(own, other) < 1e-9 if other.is_floating_point() else torch.equal(own, other)


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_of_a_backend_keep_pytorchs_rules(library: Any, name: str) -> None:
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    results = torch.library.opcheck(getattr(library, name).default, good_calls()[name], test_utils=tests)
    assert results == dict.fromkeys(tests, "SUCCESS")


def test_a_kernel_checks_its_arguments(library: Any) -> None:
    X, C, V = _by_rows(7)
    with pytest.raises(ValueError, match="V must have shape"):
        library.splitting_matvec(X, C, V[:, 1:], False)
    winner, edges = torch.zeros(1, 7, 3, dtype=torch.int64), torch.cat([V, V], -1)
    with pytest.raises(ValueError, match="incoming must be the 3 tensors of incoming_edges, got 1"):
        library.edgeconv_matvec(X[None], winner, C[None], edges, False, incoming=[winner])


def test_sorted_edges_may_be_given(library: Any) -> None:
    X, winner, C, V, bias, runner, *rest = good_calls()["edgeconv_matvec"]
    sorted_edges = [list(incoming_edges(index)) for index in (winner, runner)]
    plain = library.edgeconv_matvec(X, winner, C, V, bias, runner, *rest)
    assert torch.equal(library.edgeconv_matvec(X, winner, C, V, bias, runner, *rest, *sorted_edges), plain)
    assert (
        relative_error(torch.ops.s3d_fast.edgeconv_matvec(X, winner, C, V, bias, runner, *rest, *sorted_edges), plain)
        < 1e-12
    )


def test_a_rounded_product_is_one_of_medium_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watching(type(REFERENCE)):  # type: ignore[misc]
        def splitting_matvec(self, **arguments: Any) -> Tensor:
            seen.append(options.current().precision)
            return super().splitting_matvec(**arguments)

    own = implementations.kernel("splitting_matvec", lambda _: Watching())
    for rounded in (False, True):
        own(*_by_rows(7), False, rounded)
    assert seen == [None, "medium"]


@pytest.fixture
def on_gpu() -> Iterator[Callable[[Tensor], Tensor]]:
    """Tensors on a GPU that is not there, without contents."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda own: torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="cuda")


@pytest.mark.parametrize("name", BY_ROWS)
def test_an_operation_on_gpu_tensors_compiles_to_one_graph_of_operators(name: str, on_gpu: Any) -> None:
    graphs = []

    def keep(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(BY_ROWS[name], fullgraph=True, backend=keep)
    result = compiled(*map(on_gpu, _by_rows(9)))
    assert all(tensor.is_cuda for tensor in (result if isinstance(result, list) else [result]))
    (graph,) = graphs
    assert re.search(rf"s3d_fast\.{name}", graph.code), graph.code


class _Module(nn.Module):
    def forward(self, X: Tensor, C: Tensor, V: Tensor) -> Tensor:
        return operations.splitting_matvec(X, C, V)


def test_a_product_on_gpu_tensors_is_exported(on_gpu: Any) -> None:
    exported = torch.export.export(_Module(), tuple(map(on_gpu, _by_rows(9))))
    assert "s3d_fast.splitting_matvec" in exported.graph_module.code


@pytest.mark.parametrize("name", OPERATORS)
def test_the_trace_of_an_operator_on_gpu_tensors_contains_it(name: str, on_gpu: Any) -> None:
    arguments = torch.utils._pytree.tree_map_only(Tensor, on_gpu, good_calls()[name])
    graph = make_fx(getattr(torch.ops.s3d_fast, name))(*arguments)
    assert f"s3d_fast.{name}.default" in graph.code


@pytest.fixture
def by_triton() -> Iterator[None]:
    """CPU tensors go to the kernels of CUDA tensors, in the interpreter."""
    own = torch.library.Library("s3d_fast", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns that these take the place of others.
        warnings.simplefilter("ignore")
        for name in derivatives.RULES:
            own.impl(name, implementations.kernel(name, lambda _: choose("triton")), "CPU")
    yield
    own._destroy()


@pytest.mark.usefixtures("by_triton")
def test_products_by_triton_have_gradients_and_flop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, pointwise, "fused_kernel")
    leaves = [tensor.requires_grad_() for tensor in _by_rows(9)]
    result = torch.ops.s3d_fast.splitting_matvec(*leaves, False)
    assert len(launches) == 1
    found = torch.autograd.grad(result.sin().sum(), leaves)
    # dV is one more product.
    assert len(launches) == 2
    expected = torch.autograd.grad(reference.splitting_matvec(*leaves).sin().sum(), leaves)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.ops.s3d_fast.splitting_matvec(*leaves, False)
    assert counter.get_total_flops() == 4 * 9 * 3 * 5
    V = leaves[2].detach()
    batch = torch.vmap(lambda v: torch.ops.s3d_fast.splitting_matvec(*leaves[:2], v, False))(torch.stack([V, 2 * V]))
    assert relative_error(batch[1], 2 * result) < 1e-12


def test_gpu_tensors_go_to_the_operators(monkeypatch: pytest.MonkeyPatch, on_gpu: Any) -> None:
    monkeypatch.setattr("s3d_fast.backends.choice.is_interpreted", lambda: False)
    X, C, V = map(on_gpu, _by_rows(9))
    # No GPU is here, and nothing is compiled.
    assert choose("auto", X) is REFERENCE
    monkeypatch.setattr("s3d_fast.backends.choice.why_not_on", lambda device: "")
    assert choose("auto", X, C, V) is CUDA
    assert choose("auto", X, differentiable=(V.requires_grad_(),)) is CUDA
    assert choose("auto", V) is REFERENCE


def test_a_gpu_without_triton_computes_by_the_reference_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    implementations._for_cuda.cache_clear()
    with pytest.warns(UserWarning, match="computes on cuda:0 without its kernels: .*TRITON_INTERPRET"):
        chosen: Backend = implementations._for_cuda(torch.device("cuda:0"))
    assert chosen is REFERENCE
    implementations._for_cuda.cache_clear()


def test_operators_exist_without_the_extension() -> None:
    code = """
import sys, warnings
sys.modules["s3d_fast._C"] = None
warnings.simplefilter("ignore")
import torch, s3d_fast
from s3d_fast.backends import extension
assert extension.module is None
X, C, V = torch.randn(9, 5), torch.randn(9, 3), torch.randn(3, 5)
found = torch.ops.s3d_fast.splitting_matvec(X, C, V, False)
assert torch.allclose(found, s3d_fast.splitting_matvec(X, C, V), atol=1e-4)
print("same")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "same", run.stderr
