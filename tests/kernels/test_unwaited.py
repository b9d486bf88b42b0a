"""The check of compiled loops for products that may still read what a copy overwrites."""

from __future__ import annotations

import pytest

from s3d_fast.kernels.unwaited import unwaited_reads

COPY = "      %copied{n} = ttg.async_copy_global_to_local %pointer, %into{n} mask %m : tensor<32x64x!tt.ptr<bf16>>"
SLOT = "      %{name} = ttg.memdesc_index %buffer[%at] : !ttg.memdesc<{slots}x32x64xbf16, #s> -> !ttg.memdesc<32x64>"
PRODUCT = (
    "      %sum = ttng.warp_group_dot %u, %x, %before {isAsync = true} : tensor<64x32xbf16> * !ttg.memdesc<32x64xbf16>"
)
WAIT = "      %done = ttng.warp_group_dot_wait %sum {{pendings = {left} : i32}} : tensor<64x64xf32>"


def loop(slots: int, ahead: int, *, wait_before_copy: int | None, wait_first: int | None = None) -> str:
    """Return a loop that copies `ahead` slots ahead, and waits until so many products are left."""
    lines = [f"    %buffer = ttg.local_alloc : () -> !ttg.memdesc<{slots}x32x64xbf16, #s>"]
    for n in range(ahead):
        lines += [SLOT.format(name=f"into{n}", slots=slots), COPY.format(n=n)]
    lines.append("    %result = scf.for %i = %first to %last step %one : i32 {")
    if wait_first is not None:
        lines.append(WAIT.format(left=wait_first))
    lines += [SLOT.format(name="x", slots=slots), PRODUCT]
    if wait_before_copy is not None:
        lines.append(WAIT.format(left=wait_before_copy))
    lines += [SLOT.format(name="into9", slots=slots), COPY.format(n=9), "      scf.yield %sum", "    }"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("slots", "ahead", "wait", "is_found"),
    [
        (2, 2, None, True),  # the slot of this iteration
        (2, 2, 1, True),
        (2, 2, 0, False),
        (3, 2, None, True),  # the slot of the iteration before, whose product nobody waits for
        (3, 2, 1, False),
        (4, 2, None, False),
        (2, 1, 1, False),
        (2, 1, None, True),
    ],
)
def test_a_copy_into_a_slot_that_is_read_is_found(slots: int, ahead: int, wait: int | None, is_found: bool) -> None:
    found = unwaited_reads(loop(slots, ahead, wait_before_copy=wait))
    assert bool(found) == is_found
    if is_found:
        assert found[0].buffer == "%buffer"
        assert "copies into %buffer" in str(found[0])


def test_a_wait_at_the_start_of_an_iteration_covers_the_one_before() -> None:
    assert unwaited_reads(loop(3, 2, wait_before_copy=None, wait_first=0)) == []
    assert unwaited_reads(loop(2, 2, wait_before_copy=None, wait_first=0)) != []


def test_code_without_loops_or_products_has_none() -> None:
    assert unwaited_reads("") == []
    assert unwaited_reads(loop(2, 2, wait_before_copy=None).replace("isAsync = true", "isAsync = false")) == []
