"""What a caller chooses about the Triton kernels, and what the backend refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast import activation
from s3d_fast.backends import choice, operations
from s3d_fast.backends.choice import choose
from s3d_fast.backends.reference import REFERENCE
from s3d_fast.kernels.options import TritonOptions, current, exact_products, triton_options
from s3d_fast.maths.reference import ConvGeometry, Widening
from tests.backends.agreement import krylov_state
from tests.cases import random_tensor

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def krylov_step(x: Tensor, backend: str) -> None:
    choose(backend, x).krylov_extend(krylov_state(3, 3, 4, torch.float64), x[:3, :4], 0)


WINNER = torch.zeros(2, 3, 4, dtype=torch.int64)
# One call of every operation that depends on one tensor, of shape (6, 4).
CALLS: dict[str, Callable[[Tensor, str], Any]] = {
    "splitting_matvec": lambda x, backend: operations.splitting_matvec(x, x[:, :3], x[:3], backend=backend),
    "splitting_matvec_grouped": lambda x, backend: operations.splitting_matvec_grouped(
        [x], [x], [x[:4]], backend=backend
    ),
    "edgeconv_matvec": lambda x, backend: operations.edgeconv_matvec(
        x.view(2, 3, 4), WINNER, x.view(2, 3, 4), x.repeat(1, 2)[:4], backend=backend
    ),
    "curvature_coefficients": lambda x, backend: operations.curvature_coefficients(
        x, x, activation("silu"), backend=backend
    ),
    "grow_weights": lambda x, backend: operations.grow_weights([Widening(x, torch.tensor([1, 0]))], backend=backend),
    "krylov_extend": krylov_step,
    "tridiagonal_extremes": lambda x, backend: choose(backend, x).tridiagonal_extremes(
        alpha=x, beta=x, length=torch.full((6,), 2)
    ),
    "certified_widths": lambda x, backend: choose(backend, x).certified_widths(
        alpha=x, beta=x, length=torch.full((6,), 2), values=x[:, :2].detach(), growth=x[:, 0].detach() ** 2 + 4
    ),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@every_call
def test_tensors_that_require_a_gradient_are_refused(call: Callable[[Tensor, str], Any]) -> None:
    x = random_tensor(6, 4)
    call(x, "triton")
    with pytest.raises(RuntimeError, match=r"'triton' cannot be used: it has no derivative"):
        call(x.requires_grad_(), "triton")
    with torch.no_grad():
        call(x, "triton")


@every_call
def test_a_cpu_tensor_is_not_interpreted_unless_that_is_asked_for(
    call: Callable[[Tensor, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "s3d_fast.backends.triton", raising=False)
    call(random_tensor(6, 4), "auto")
    assert "s3d_fast.backends.triton" not in sys.modules


@every_call
def test_without_the_interpreter_the_error_names_the_variable_to_set(
    call: Callable[[Tensor, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "is_interpreted", lambda: False)
    with pytest.raises(RuntimeError, match=r"'triton' cannot be used: .*TRITON_INTERPRET=1"):
        call(random_tensor(6, 4), "triton")


def test_triton_is_imported_at_its_first_use_and_refuses_cpu_tensors_without_the_interpreter() -> None:
    script = """
import sys
import torch
import s3d_fast
from s3d_fast.kernels.options import triton_options
X, C, V = torch.ones(5, 3), torch.ones(5, 2), torch.ones(2, 3)
with triton_options(precision="high"):
    s3d_fast.splitting_matvec(X, C, V)
s3d_fast.extremal_eigenpairs((X, C))
assert "triton" not in sys.modules
assert "s3d_fast.backends.triton" not in sys.modules
try:
    s3d_fast.splitting_matvec(X, C, V, backend="triton")
except RuntimeError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "backend 'triton' cannot be used" in run.stdout
    assert "TRITON_INTERPRET=1" in run.stdout


@pytest.mark.parametrize(
    "bad",
    [
        {"precision": "low"},
        {"precision": ""},
        {"precision": 3},
        {"precision": True},
        {"atomic": "yes"},
        {"atomic": 2},
        {"tune": "no"},
        {"tune": -1},
        {"scratch_bytes": 0},
        {"scratch_bytes": -1},
        {"scratch_bytes": 1.5},
        {"scratch_bytes": True},
        {"scratch_bytes": "1"},
    ],
    ids=str,
)
def test_an_option_with_a_bad_value_is_an_error_that_names_it(bad: dict[str, Any]) -> None:
    before = current()
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be .*got "), triton_options(**{"atomic": True, **bad}):
        pytest.fail("the block was entered")
    assert current() == before


def test_options_hold_inside_their_block_and_what_is_not_named_stays() -> None:
    assert current() == TritonOptions()
    with triton_options(precision="high", scratch_bytes=7) as outer:
        assert outer == current() == TritonOptions(precision="high", scratch_bytes=7)
        with triton_options(atomic=True, precision="medium"):
            assert current() == TritonOptions("medium", True, False, 7)
            with triton_options(atomic=False, tune=True):
                assert current() == TritonOptions("medium", False, True, 7)
            assert current() == TritonOptions("medium", True, False, 7)
        assert current() == outer
    assert current() == TritonOptions()


def test_options_are_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), triton_options(precision="high", atomic=True, tune=True, scratch_bytes=1):
        raise KeyError
    assert current() == TritonOptions()
    with triton_options(precision="high"):
        with pytest.raises(ValueError, match="X must have shape"), triton_options(atomic=True):
            operations.splitting_matvec(torch.ones(3), torch.ones(3, 2), torch.ones(2, 3), backend="triton")
        assert current() == TritonOptions(precision="high")


def test_options_of_one_thread_are_not_those_of_another() -> None:
    seen = []
    with triton_options(atomic=True):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [TritonOptions()]


def test_the_precision_is_pytorchs_own_where_none_is_given() -> None:
    try:
        for precision in ("high", "medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert current().arithmetic == precision
            with triton_options(precision="high"):
                assert current().arithmetic == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


BACKENDS = torch.backends
SETTINGS = (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul)


def settings() -> list[Any]:
    """Return all settings of PyTorch's float32 products; None for those that it refuses to tell."""
    old = (told(torch.get_float32_matmul_precision), told(lambda: BACKENDS.cudnn.allow_tf32))
    return [*(setting.fp32_precision for setting in SETTINGS), *old]


def told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def _set_matmul() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"


def _set_convolutions() -> None:
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


def _set_processor() -> None:
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"


def _set_old() -> None:
    BACKENDS.cudnn.allow_tf32 = False


@pytest.mark.parametrize(
    ("change", "arithmetic"),
    [
        (lambda: None, "highest"),
        (lambda: torch.set_float32_matmul_precision("high"), "high"),
        (_set_matmul, "high"),
        (_set_convolutions, "highest"),
        (_set_processor, "highest"),
        (_set_old, "highest"),
    ],
)
def test_pytorchs_own_products_are_exact_inside_and_as_set_outside(change: Callable[[], None], arithmetic: str) -> None:
    first = settings()
    try:
        change()
        before = settings()
        assert current().arithmetic == arithmetic
        with exact_products():
            assert settings()[:4] == ["ieee"] * 4
            # Our kernels keep the precision that was asked for.
            assert current().arithmetic == arithmetic
        assert settings() == before
        assert current() == TritonOptions()
    finally:
        torch.set_float32_matmul_precision(first[4])
        BACKENDS.cudnn.allow_tf32 = first[5]
        for setting, value in zip(SETTINGS, first, strict=False):
            setting.fp32_precision = value
    assert settings() == first


def test_at_medium_precision_pytorchs_settings_apply() -> None:
    before = settings()
    with triton_options(precision="medium"), exact_products():
        assert settings() == before


def test_what_pytorch_multiplies_for_the_triton_backend_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []
    X, C, V = random_tensor(2, 3, 6, 6), random_tensor(2, 4, 6, 6), random_tensor(4, 27)
    original = REFERENCE.conv_matvec

    def noted(**arguments: Any) -> Tensor:
        seen.append(settings()[:4])
        return original(**arguments)

    monkeypatch.setattr(REFERENCE, "conv_matvec", noted)
    geometry = ConvGeometry((3, 3), padding=(1, 1))
    choose("triton").conv_matvec(X=X, C=C, V=V, geometry=geometry, bias=False)
    assert seen == [["ieee"] * 4]
