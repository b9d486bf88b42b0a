"""S v of gated units by the Triton kernel: configurations, far offsets, programs that share rows, and tuning.

That it agrees with the reference is in `tests/backends/test_agreement.py`.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from s3d_fast.backends.choice import choose
from s3d_fast.kernels import configs, gated, launch, tiles
from s3d_fast.kernels.aligned import is_near
from s3d_fast.kernels.options import triton_options
from s3d_fast.kernels.tiles import Config
from tests.backends.agreement import assert_agrees, gated_of
from tests.cases import RowsCase
from tests.kernel_cases import ARITHMETIC, every_dtype, every_vendor, pretend, recorded, with_strides

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]


@every_vendor
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_for_a_gpu_agrees_with_the_reference(
    vendor: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    ((dtype, precision),), biases = ARITHMETIC[arithmetic], cycle([False, True, True])
    for width, entries in tiles.GATED.get((vendor, arithmetic), {}).items():
        for rows, filters, *others in entries:
            bias, config = next(biases), Config(rows, filters, width, *others)
            monkeypatch.setattr(configs, "gated", lambda *_, config=config: [config])
            case = RowsCase(4 * rows + 3, width - 5 * bias, filters // 4 + 1, dtype, bias, K=2)
            with triton_options(precision=precision):
                assert_agrees(choose("triton"), "gated_matvec", label=(case, config), **gated_of(case, full=bias))


@every_vendor
@every_dtype
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_rows_that_are_too_wide_for_one_launch_agree_too(
    vendor: str, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    launches, wide = (recorded(monkeypatch, gated, name) for name in ("gated_kernel", "gated_project_kernel"))
    for scratch_bytes, chunks in ((1, 2), (1 << 20, 1)):
        wide.clear()
        case = RowsCase(150, 257, 5, dtype, bias, K=2)
        with triton_options(scratch_bytes=scratch_bytes):
            assert_agrees(choose("triton"), "gated_matvec", label=case, **gated_of(case, full=bias))
        assert len(wide) >= chunks
    assert not launches


def test_entries_may_be_so_far_apart_that_offsets_leave_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, gated, "gated_kernel")
    given = gated_of(RowsCase(2, 2, 2, torch.float32))
    for name in ("X", "c11", "c12", "c22"):
        far = with_strides(given[name], (2**24, 1))
        assert_agrees(choose("triton"), "gated_matvec", label=name, **{**given, name: far})
        assert is_near(launches[-1].arguments[name])


def test_rows_shared_out_over_programs_give_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, gated, "gated_kernel")
    given = gated_of(RowsCase(1100, 9, 5, torch.float32, bias=True, K=2))
    first = assert_agrees(choose("triton"), "gated_matvec", **given)
    assert launches[0].grid[-1] > 1
    assert torch.equal(choose("triton").gated_matvec(**given), first)


def test_tuning_times_every_configuration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    monkeypatch.setattr(launch, "_TUNED", {})
    monkeypatch.setattr(launch, "_seconds", lambda call: timed.append(call()) or float(len(timed)))
    given = gated_of(RowsCase(300, 17, 40, torch.float32))
    with triton_options(tune=True):
        for _ in range(2):
            assert_agrees(choose("triton"), "gated_matvec", **given)
    assert len(timed) == 2
