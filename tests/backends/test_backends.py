"""Backends: which one does the work, what is differentiable, solvers on each, and life without the extension."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import s3d_fast as s3d
from s3d_fast import (
    EdgeConvOperator,
    PointwiseOperator,
    Spectrum,
    SplittingOperator,
    SumOperator,
    activation,
    extremal_eigenpairs,
)
from s3d_fast.backends import choice, extension, operations
from s3d_fast.backends.choice import choose
from s3d_fast.maths.reference import Widening
from s3d_fast.operators.cost import prefers_exact
from tests.cases import CONVS, EDGES, EdgeCase, RowsCase, random_vectors, relative_error
from tests.extension_cases import good_calls
from tests.operators.test_operators import operator_of

compiled = pytest.mark.skipif(extension.module is None, reason=extension.why_not or "it is there")
ROOT = Path(__file__).parents[2]

X, C, V = *RowsCase(120, 9, 5).tensors(), random_vectors(5, 9)
POINTS, NEIGHBOURS, SLOT, POINTS_C = EdgeCase(2, 11, 4, 3, 5).tensors()
ROWS_INDEX = torch.tensor([0, 0, 4])

# The tensors that a gradient may be asked of, and the call.
CALLS: dict[str, tuple[tuple[Tensor, ...], Callable[..., Tensor]]] = {
    "splitting_matvec": ((X, C, V), lambda *t, backend: operations.splitting_matvec(*t, backend=backend)),
    "splitting_matvec_grouped": (
        (X, C, V),
        lambda *t, backend: operations.splitting_matvec_grouped(*([a, a] for a in t), backend=backend)[1],
    ),
    "splitting_matrices": ((X, C), lambda *t, backend: operations.splitting_matrices(*t, backend=backend)),
    "edgeconv_matvec": (
        (POINTS, POINTS_C, random_vectors(5, 8)),
        lambda x, c, v, backend: operations.edgeconv_matvec(x, NEIGHBOURS.gather(2, SLOT), c, v, backend=backend),
    ),
    "curvature_coefficients": (
        (X, X.sin(), X[0]),
        lambda g, z, s, backend: operations.curvature_coefficients(g, z, activation("silu"), s, backend=backend),
    ),
    "grow_weights": (
        (V, V[:3, 0], V[:3]),
        lambda w, s, d, backend: operations.grow_weights([Widening(w, ROWS_INDEX, s, d)] * 2, backend=backend)[1],
    ),
    "symmetric_extremes": (
        (X.T @ X * torch.ones(2, 1, 1),),
        lambda s, backend: choose(backend, s).symmetric_extremes(s)[0],
    ),
}
# Those that the CPU's operators have derivatives in.
DIFFERENTIABLE = {"splitting_matvec": {0, 1, 2}, "splitting_matvec_grouped": {0, 1, 2}, "edgeconv_matvec": {2}}
every_call = pytest.mark.parametrize("name", CALLS)


@compiled
@every_call
def test_auto_is_the_cpu_backend_to_the_last_bit(name: str) -> None:
    tensors, call = CALLS[name]
    assert torch.equal(call(*tensors, backend="auto"), call(*tensors, backend="cpu"))


@every_call
def test_auto_and_reference_agree(name: str) -> None:
    tensors, call = CALLS[name]
    assert relative_error(call(*tensors, backend="auto"), call(*tensors, backend="reference")) < 1e-12


@compiled
@every_call
def test_cpu_has_the_derivative_of_the_reference_or_refuses(name: str) -> None:
    tensors, call = CALLS[name]
    for position in range(len(tensors)):
        given = list(tensors)
        given[position] = given[position].clone().requires_grad_()
        if position in DIFFERENTIABLE.get(name, ()):
            found, expected = (
                torch.autograd.grad(call(*given, backend=backend).sin().sum(), given[position])[0]
                for backend in ("cpu", "reference")
            )
            assert relative_error(found, expected) < 1e-12
        else:
            with pytest.raises(RuntimeError, match=r"backend 'cpu' cannot be used: .*requires a gradient"):
                call(*given, backend="cpu")
        with torch.no_grad():
            assert torch.equal(call(*given, backend="cpu"), call(*tensors, backend="cpu"))


@every_call
def test_auto_lets_gradients_flow(name: str) -> None:
    tensors, call = CALLS[name]
    gradients = []
    for backend in ("auto", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        result = call(*leaves, backend=backend)
        gradients.append(torch.autograd.grad(result.sin().sum(), leaves))
    for auto, expected in zip(*gradients, strict=True):
        assert expected.any()
        assert relative_error(auto, expected) < 1e-12


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=compiled)])
@pytest.mark.parametrize("mixed", [False, True])
def test_coefficients_are_laid_out_as_their_gradient_is(backend: str, mixed: bool) -> None:
    g, z, scale = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), torch.rand(3)
    act = activation("silu")
    expected = operations.curvature_coefficients(g, z, act, scale, backend="reference")
    last = g.contiguous(memory_format=torch.channels_last)
    other = z if mixed else z.contiguous(memory_format=torch.channels_last)
    found = operations.curvature_coefficients(last, other, act, scale, backend=backend)
    assert relative_error(found, expected) < 1e-6
    assert mixed or found.is_contiguous(memory_format=torch.channels_last)
    assert operations.curvature_coefficients(last, other, act, scale, inplace=True, backend=backend) is last
    assert relative_error(last, expected) < 1e-6
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_auto_takes_the_reference_for_16_bits_and_for_activations_of_your_own(name: str) -> None:
    act = activation(name)
    own = s3d.Activation("own", act.function, act.first, act.curvature, act.kinks)
    expected = operations.curvature_coefficients(X, X.sin(), act, backend="reference")
    assert relative_error(operations.curvature_coefficients(X, X.sin(), own), expected) < 1e-12
    half = operations.curvature_coefficients(X.bfloat16(), X.sin().bfloat16(), act)
    assert half.dtype == torch.bfloat16
    assert relative_error(half, expected) < 0.05
    for g, chosen in ((X, own), (X.bfloat16(), act)):
        with pytest.raises(RuntimeError, match="backend 'cpu' cannot be used"):
            operations.curvature_coefficients(g, g, chosen, backend="cpu")


def layers() -> dict[str, SplittingOperator]:
    """Return layers of every kind and of unequal sizes, in float64."""
    return {
        "rows": PointwiseOperator(*RowsCase(700, 16, 9).tensors()),
        "rows-with-bias": PointwiseOperator(*RowsCase(131, 33, 7).tensors(1), bias=True),
        "few-rows": PointwiseOperator(*RowsCase(5, 40, 3).tensors(2)),
        "one-number": PointwiseOperator(*RowsCase(9, 1, 4).tensors(3)),
        "batches": SumOperator([PointwiseOperator(*RowsCase(300, 12, 6).tensors(k)) for k in range(3)], [0.5, -1, 2]),
        "mixed": SumOperator(
            [operator_of(EDGES[0]), PointwiseOperator(*RowsCase(50, 6, 5).tensors(4))],
        ),
        "edgeconv": operator_of(EDGES[1]),
        "conv": operator_of(CONVS[1]),
    }


def assert_same_ends(found: Spectrum, expected: Spectrum) -> None:
    radius = expected.radius.max()
    assert found.converged.all()
    assert ((found.lambda_min - expected.lambda_min).abs() / radius).max() < 1e-8
    assert ((found.lambda_max - expected.lambda_max).abs() / radius).max() < 1e-8


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=compiled), "auto"])
@pytest.mark.parametrize("solver", ["auto", "exact", "lanczos"])
def test_solvers_agree_on_every_backend(solver: str, backend: str) -> None:
    expected = extremal_eigenpairs(layers(), solver="exact", tol=1e-9, backend="reference")
    together = extremal_eigenpairs(layers(), solver=solver, tol=1e-9, backend=backend)
    listed = extremal_eigenpairs(list(layers().values()), solver=solver, tol=1e-9, backend=backend)
    assert list(together) == list(layers())
    for (name, operator), in_list in zip(layers().items(), listed, strict=True):
        S = operator.dense("reference")
        values = torch.linalg.eigvalsh(S)
        radius = values.abs().amax()
        assert (expected[name].lambda_min - values[:, 0]).abs().max() < 1e-12 * radius
        assert (expected[name].lambda_max - values[:, -1]).abs().max() < 1e-12 * radius
        alone = extremal_eigenpairs(operator, solver=solver, tol=1e-9, backend=backend)
        for found in (together[name], in_list, alone):
            assert_same_ends(found, expected[name])


@compiled
def test_auto_forms_the_matrix_where_that_is_cheaper() -> None:
    many = PointwiseOperator(*RowsCase(20000, 16, 8).tensors())
    wide = PointwiseOperator(*RowsCase(2000, 512, 2).tensors())
    assert prefers_exact(many, 1e-9)
    assert prefers_exact(SumOperator([many, many]), 1e-9)
    assert not prefers_exact(wide, 1e-3)
    assert not prefers_exact(operator_of(CONVS[0]), 1e-9)
    assert not prefers_exact(operator_of(EDGES[0]), 1e-9)
    assert not prefers_exact(SumOperator([operator_of(EDGES[0])]), 1e-9)
    found = extremal_eigenpairs([many, wide, operator_of(CONVS[0])], solver="auto", tol=1e-9)
    assert (found[0].matvecs == 0).all()
    assert (found[1].matvecs > 2).all()
    assert (found[2].matvecs > 2).all()
    assert_same_ends(found[0], extremal_eigenpairs(many, solver="lanczos", tol=1e-9))


def test_a_restricted_edgeconv_layer_runs_on_every_backend() -> None:
    # Columns of winner and C taken by an index: what Lanczos does when filters leave.
    operator = operator_of(EDGES[1])
    assert isinstance(operator, EdgeConvOperator)
    some = operator.restrict(torch.tensor([4, 1]))
    V = random_vectors(*some.shape)
    assert relative_error(some.matvec(V, "auto"), some.matvec(V, "reference")) < 1e-12


def python(*arguments: str, **variables: str) -> str:
    """Return what Python prints when run with the given arguments and variables in the folder of the sources."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


WITHOUT_EXTENSION = """
import sys, warnings
{hide}
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import s3d_fast as s3d
print("warned:", *[warning.message for warning in caught])
from s3d_fast import env
from s3d_fast.backends import choice, extension, operations
from s3d_fast.backends.choice import choose
from s3d_fast.maths import reference

assert extension.module is None
X, C, V = torch.rand(6, 4), torch.rand(6, 3), torch.rand(3, 4)
assert torch.equal(operations.splitting_matvec(X, C, V), reference.splitting_matvec(X, C, V))
assert s3d.extremal_eigenpairs((X, C), solver="auto").converged.all()
(weight,) = operations.grow_weights([reference.Widening(V, torch.tensor([0, 0, 1, 2]))])
assert weight.shape == (4, 4)
try:
    operations.splitting_matvec(X, C, V, backend="cpu")
except RuntimeError as error:
    print("raised:", error)
for name, state in env.report().items():
    print(name + ":", state)
"""
HIDDEN = {
    "was not built": "sys.modules['s3d_fast._C'] = None",
    "does not load: undefined symbol": """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "s3d_fast._C":
            raise ImportError("undefined symbol")
sys.meta_path.insert(0, Broken())
""",
}


@pytest.mark.parametrize("why", HIDDEN)
def test_the_package_works_without_the_extension(why: str) -> None:
    lines = python("-W", "error", "-c", WITHOUT_EXTENSION.format(hide=HIDDEN[why])).splitlines()
    for start in ("raised:", "warned:"):
        (said,) = [line for line in lines if line.startswith(start)]
        assert why in said
        assert "pip install" in said
    assert any(line.startswith("extension: not available") and why in line for line in lines)
    assert any(line.startswith("backend cpu: ") and why in line for line in lines)
    assert "backend reference: available" in lines


def test_the_reason_of_a_failed_build_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "_C.txt"
    note.write_text("command 'c++' failed: No such file or directory\n")
    monkeypatch.setattr(extension, "_NOTE", note)
    monkeypatch.setitem(sys.modules, "s3d_fast._C", None)
    module, why_not = extension._load()
    assert module is None
    assert why_not.endswith("was not built: command 'c++' failed: No such file or directory")


def test_an_import_error_inside_another_module_is_not_hidden() -> None:
    code = """
import sys, torch
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "s3d_fast._C":
            raise ModuleNotFoundError("No module named 'other'", name="other")
sys.meta_path.insert(0, Broken())
try:
    import s3d_fast
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert python("-c", code).strip() == "other"


def test_env_prints_every_backend() -> None:
    printed = python("-m", "s3d_fast.env")
    assert all(f"backend {name}" in printed for name in choice.NAMES if name != "auto")
    if extension.module is not None:
        assert all(name in printed for name in extension.module.compiled_isas())
        assert f"{extension.module.available_isas()[0]} (in use)" in printed


@compiled
def test_the_environment_chooses_the_instruction_set() -> None:
    assert "portable (in use)" in python("-m", "s3d_fast.env", S3D_FAST_ISA="portable")
    with pytest.raises(AssertionError, match=r"S3D_FAST_ISA must be one of 'auto', .*'portable'.*; got 'sse9'"):
        python("-m", "s3d_fast.env", S3D_FAST_ISA="sse9")


@compiled
def test_every_registered_operator_is_tested() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("s3d_fast::")}
    assert names == set(good_calls())


@compiled
def test_strides_and_sizes_of_zero_do_not_end_the_process() -> None:
    """In a process of its own, which a division by zero would end."""
    code = """
import torch, s3d_fast
from torch import ones, zeros
ops = torch.ops.s3d_fast
calls = {
    "rows with stride zero": lambda: ops.splitting_matvec(ones(1, 3).expand(5, 3), ones(5, 2), ones(2, 3), False),
    "vectors of size zero": lambda: ops.krylov_extend(
        ones(2, 4, 0), ones(2, 0), ones(2, 4), ones(2, 4), zeros(2).long(), ones(2), 0
    ),
    "no filters": lambda: ops.krylov_extend(
        ones(0, 4, 3), ones(0, 3), ones(0, 4), ones(0, 4), zeros(0).long(), ones(0), 0
    ),
}
for name, call in calls.items():
    print(name, flush=True)
    try:
        call()
    except ValueError:
        pass
print("alive")
"""
    assert python("-c", code).splitlines()[-1] == "alive"
