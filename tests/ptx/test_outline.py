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


def test_branches_inside_of_branches_are_taken_again_until_all_sides_are_known() -> None:
    leave = "ld.global.b32 %r6, [%rd0]; setp.lt.s32 %p2, %r6, {}; @%p2 bra $END;"
    inside = " ".join(leave.format(number) for number in range(4))
    assert kinds(f"{WRITE} {BARRIER} {inside} {READ_NEIGHBOUR} $END:") == []
    assert kinds(f"{WRITE} {inside} {READ_NEIGHBOUR} $END:") == [UNORDERED_READ]


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
    unreached = "no run reached 1 instructions, first"
    assert kinds(f"bra $END; {WRITE} $END:") == [unreached]
    # A guard that never holds reaches nothing.
    assert kinds(f"setp.gt.u32 %p1, %r0, 64; {WRITE.replace('st.', '@%p1 st.')}") == [unreached]
    two_sides = f"{DATA} @%p1 bra $SECOND; bra $END; $SECOND: {WRITE} $END:"
    assert kinds(two_sides) == []
    monkeypatch.setattr(outlines, "_runs", lambda: [outlines._Ways()])
    assert kinds(two_sides) == [unreached, "no run went all ways of 1 branches, first"]


def test_a_jump_back_that_is_no_loop_is_taken_and_not() -> None:
    body = f"""
    bra $START;
$BEFORE: {WRITE} bra $END;
$START: {DATA} {WRITE} @%p1 bra $BEFORE;
    {READ_NEIGHBOUR}
$END:"""
    assert sorted(kinds(body)) == [UNORDERED_READ]


COMBINED = {
    "two branches": f"{WRITE} @%p1 bra $L; {BARRIER} $L: @%p2 bra $END; {READ_NEIGHBOUR} $END:",
    "loop left at its head": f"$LOOP: @%p1 bra $END; {WRITE} {BARRIER} {READ_NEIGHBOUR} {{0}} bra $LOOP; $END:",
    "two sides in a loop": f"""
        mov.b32 %r9, 0;
        $LOOP: @%p1 bra $ELSE; {WRITE} {BARRIER} {READ_NEIGHBOUR} bra $AGAIN; $ELSE: {BARRIER}
        $AGAIN: add.s32 %r9, %r9, 1; setp.lt.s32 %p3, %r9, 100; @%p3 bra $LOOP;""",
}


@pytest.mark.parametrize("body", COMBINED.values(), ids=COMBINED)
def test_combinations_of_ways_are_tried(body: str) -> None:
    second = "ld.global.b32 %r8, [%rd0]; setp.eq.s32 %p2, %r8, 1;"
    found = kinds(f"{DATA} {second} {body.format('')}")
    assert len(found) == 1
    assert found[0] in (UNORDERED_READ, UNORDERED_WRITE)
    if "{0}" in body:
        assert kinds(f"{DATA} {second} {body.format(BARRIER)}") == []


def test_threads_that_wait_behind_a_branch_do_not_move_with_others() -> None:
    # The first warp jumps to a label right behind the branch on data that the second takes.
    body = f"""
    {DATA} setp.lt.u32 %p2, %r0, 32; @%p2 bra $HERE;
    @%p1 bra $END;
$HERE: {WRITE} {READ_NEIGHBOUR}
$END:"""
    assert UNORDERED_READ in kinds(body)


def test_passes_of_an_inner_loop_are_counted_anew() -> None:
    body = f"""
    mov.b32 %r8, 0;
$OUTER: mov.b32 %r9, 0;
$INNER: setp.ge.s32 %p1, %r9, 9; @%p1 bra $OUT; {BARRIER} add.s32 %r9, %r9, 1; bra $INNER;
$OUT: add.s32 %r8, %r8, 1; setp.eq.s32 %p2, %r8, 2; @!%p2 bra $MORE;
    {WRITE}
$MORE: setp.lt.s32 %p3, %r8, 5; @%p3 bra $OUTER;"""
    assert kinds(body) == []


def test_ways_that_no_run_went_are_reported() -> None:
    # A barrier that is left out only on the way behind many others.
    for depth in (1, 12):
        leaving = "".join("@%p1 bra $END; ld.global.b32 %r4, [%rd0]; setp.eq.s32 %p1, %r4, 0; " for _ in range(depth))
        body = f"{DATA} {WRITE} {leaving} @%p1 bra $SKIP; {BARRIER} $SKIP: {READ_NEIGHBOUR} $END:"
        found = kinds(body)
        assert UNORDERED_READ in found or any(kind.startswith("no run went all ways") for kind in found), depth


BY_DATA = {
    "guard": "@%p1 st.shared.b32 [%r2], %r0;",
    "address": "and.b32 %r4, %r4, 3; shl.b32 %r4, %r4, 2; st.shared.b32 [%r4], %r0;",
    "copy": "shl.b32 %r4, %r4, 2; cp.async.ca.shared.global [%r4], [%rd0], 4;",
    "barrier": "@%p1 bar.sync 0;",
}


@pytest.mark.parametrize("body", BY_DATA.values(), ids=BY_DATA)
def test_accesses_that_data_decide_are_not_called_right(body: str) -> None:
    assert "shared memory whose use data decide" in kinds(f"{DATA} shl.b32 %r2, %r0, 2; {body}")
    # What is stored, and where a copy comes from, may be data.
    source = "mul.wide.s32 %rd9, %r4, 4; add.s64 %rd9, %rd9, %rd0;"
    copy = "cp.async.ca.shared.global [%r2], [%rd9], 4;"
    assert kinds(f"{DATA} shl.b32 %r2, %r0, 2; st.shared.b32 [%r2], %r4; {BARRIER} {source} {copy}") == []


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
