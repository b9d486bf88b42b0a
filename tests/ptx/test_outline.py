"""Kernels executed in outline, without data: what is wrong in shared memory is found, and nothing else.

That it finds what the simulator finds with data is in `test_mutation.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from s3d_fast.kernels.ptx import outline as outlines
from s3d_fast.kernels.ptx.findings import Fault
from s3d_fast.kernels.ptx.outline import outline
from tests.ptx.kernels import outlined
from tests.ptx.programs import program

WRITE = "shl.b32 %r2, %r0, 2; st.shared.b32 [%r2], %r0;"
READ_NEIGHBOUR = "xor.b32 %r3, %r2, 128; ld.shared.b32 %r5, [%r3];"
BARRIER = "bar.sync 0;"
UNORDERED_READ = "race: shared memory read after a write, without a barrier"
UNORDERED_WRITE = "race: shared memory written after another access, without a barrier"


def kinds(body: str, tensors: int = 1, shared_memory: int = 256) -> list[str]:
    found = outline(program(body, tensors, threads=64), [0] * tensors, (7,), shared_memory)
    return [finding.kind for finding in found]


def test_a_barrier_between_write_and_read_is_all_that_is_needed() -> None:
    assert kinds(WRITE + BARRIER + READ_NEIGHBOUR) == []
    assert kinds(WRITE + READ_NEIGHBOUR) == [UNORDERED_READ]


def test_global_memory_is_not_looked_at() -> None:
    address = "mul.wide.u32 %rd9, %r0, 1048576; add.s64 %rd9, %rd9, %rd0;"
    access = "ld.global.b32 %r4, [%rd9]; st.global.b32 [%rd9], %r4; atom.global.add.u32 %r5, [%rd9], 1;"
    assert kinds(f"{address} {access}") == []


def test_shared_memory_ends_where_the_launch_says() -> None:
    with pytest.raises(Fault, match="outside of shared memory"):
        kinds(WRITE, shared_memory=128)


DATA = "ld.global.b32 %r4, [%rd0]; setp.eq.s32 %p1, %r4, 0;"


@pytest.mark.parametrize("guard", ["@%p1", "@!%p1"])
def test_both_sides_of_a_branch_on_data_are_taken(guard: str) -> None:
    body = f"{DATA} {WRITE} {guard} bra $READ; {BARRIER} $READ: {READ_NEIGHBOUR}"
    assert kinds(body) == [UNORDERED_READ]
    assert kinds(f"{DATA} {WRITE} {BARRIER} {guard} bra $END; {READ_NEIGHBOUR} $END:") == []


def test_both_sides_of_nested_branches_are_taken() -> None:
    body = f"""
    {DATA} {WRITE} {BARRIER} @%p1 bra $OUTER;
    ld.global.b32 %r6, [%rd0]; setp.lt.s32 %p2, %r6, 7; @%p2 bra $INNER;
    {WRITE}
$INNER: {READ_NEIGHBOUR}
$OUTER:"""
    assert kinds(body) == [UNORDERED_READ]


def test_every_target_of_an_indexed_branch_is_taken() -> None:
    jump = "ld.global.b32 %r4, [%rd0]; $table: .branchtargets $A, $B, $C; brx.idx %r4, $table;"
    body = f"{WRITE} {jump} $A: {BARRIER} bra $READ; $B: {BARRIER} bra $READ; $C: nop_; $READ: {READ_NEIGHBOUR}"
    assert kinds(body.replace("nop_;", "mov.b32 %r7, 0;")) == [UNORDERED_READ]
    assert kinds(body.replace("nop_;", BARRIER)) == []


def test_what_a_branch_on_the_thread_does_is_known() -> None:
    first_warp = "setp.lt.u32 %p1, %r0, 32; @!%p1 bra $END;"
    assert kinds(f"{first_warp} {WRITE} xor.b32 %r3, %r2, 4; bar.warp.sync -1; ld.shared.b32 %r5, [%r3]; $END:") == []


LOOP = """
    mov.b32 %r9, 0;
$LOOP:
    and.b32 %r6, %r9, 3; shl.b32 %r6, %r6, 8; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r6;
    st.shared.b32 [%r2], %r0; {between}
    xor.b32 %r3, %r2, 128; ld.shared.b32 %r5, [%r3];
    add.s32 %r9, %r9, 1; {condition}
    @%p1 bra $LOOP;
"""
ENDS = {
    "long": "setp.lt.s32 %p1, %r9, 100000000;",
    "data": "ld.global.b32 %r8, [%rd0]; setp.lt.s32 %p1, %r9, %r8;",
    "short": "setp.lt.s32 %p1, %r9, 6;",
}


@pytest.mark.parametrize("condition", ENDS.values(), ids=ENDS)
def test_loops_of_any_length_go_through_all_slots_of_a_buffer(condition: str) -> None:
    ordered = LOOP.format(between=BARRIER, condition=condition)
    # Four slots: who writes a slot again has passed three barriers since it was read.
    assert kinds(ordered, shared_memory=1024) == []
    # With one barrier in all, outside of the loop, the fifth pass writes what the first has read.
    unordered = f"{BARRIER} {LOOP.format(between='', condition=condition)}"
    assert set(kinds(unordered, shared_memory=1024)) == {UNORDERED_READ, UNORDERED_WRITE}


def test_code_behind_a_long_loop_is_reached() -> None:
    loop = LOOP.format(between=BARRIER, condition=ENDS["long"])
    # Another thread has read this in the last pass.
    again = "st.shared.b32 [%r2], %r0;"
    assert kinds(loop + again, shared_memory=1024) == [UNORDERED_WRITE]
    assert kinds(loop + BARRIER + again, shared_memory=1024) == []


def test_a_loop_that_is_left_in_its_middle_ends() -> None:
    body = f"""
    mov.b32 %r9, 0;
$LOOP:
    setp.ge.s32 %p1, %r9, 100000000; @%p1 bra $END;
    {WRITE} {BARRIER} {READ_NEIGHBOUR} {BARRIER}
    add.s32 %r9, %r9, 1;
    bra $LOOP;
$END: {WRITE}"""
    assert kinds(body) == []
    assert kinds(body.replace(f"{READ_NEIGHBOUR} {BARRIER}", READ_NEIGHBOUR)) == [UNORDERED_WRITE] * 2


def test_what_no_run_reaches_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(f"bra $END; {WRITE} $END:") == ["not reached in outline"]
    two_sides = f"{DATA} @%p1 bra $SECOND; bra $END; $SECOND: {WRITE} $END:"
    assert kinds(two_sides) == []
    monkeypatch.setattr(outlines, "MOST_RUNS", 1)
    assert kinds(two_sides) == ["not reached in outline"]


# The compiler overlaps the second product with the next pass, and copies the tile after the next into the third buffer:
# with 32 rows, where it does not wait for the product that still reads it (Triton's issue 6691).
@pytest.mark.parametrize(
    ("target", "rows", "width", "is_right"),
    [
        ("sm_90", 32, 16, False),
        ("sm_90", 32, 64, False),
        ("sm_90", 64, 16, True),
        ("sm_90", 64, 64, True),
        ("sm_80", 32, 16, True),
        ("sm_80", 64, 64, True),
    ],
)
def test_a_product_that_the_compiler_does_not_wait_for_is_found(
    target: str, rows: int, width: int, is_right: bool, compiled: Callable[..., list[str]]
) -> None:
    wrong = "race: shared memory written while wgmma reads it"
    assert compiled(outlined, target, rows, width) == ([] if is_right else [wrong])
