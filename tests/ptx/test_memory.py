"""What the simulator finds in memory: each kind of misuse on hand-written PTX, and its absence where all is well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from s3d_fast.base.padding import with_padding
from s3d_fast.kernels.ptx import wave
from s3d_fast.kernels.ptx.banks import passes
from s3d_fast.kernels.ptx.execute import Launch, execute
from s3d_fast.kernels.ptx.findings import Fault
from tests.ptx.programs import floats, program

# Every thread writes its number to its own word of shared memory, and reads that of its neighbour. The neighbour of the
# last thread of a warp belongs to the next warp.
WRITE = "shl.b32 %r2, %r0, 2; st.shared.b32 [%r2], %r0;"
NEIGHBOUR = "add.s32 %r3, %r0, 1; and.b32 %r3, %r3, 63; shl.b32 %r4, %r3, 2;"
READ = "ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd0], %r5;"
# Begin to copy a word of the second tensor to the own word of shared memory.
COPY = "shl.b32 %r2, %r0, 2; cp.async.ca.shared.global [%r2], [%rd1], 4; cp.async.commit_group;"


def launched(body: str, *tensors: Tensor, grid: int = 1) -> Launch:
    return execute(program(body, len(tensors), threads=64), tensors, (grid,), shared_memory=256)


def kinds(launch: Launch) -> list[str]:
    return [finding.kind for finding in launch.findings]


def test_a_barrier_between_write_and_read_is_all_that_is_needed() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    # Comments and directives, which are skipped, must not change the numbers of lines.
    lines = f'\n\n\t.loc 1 2 3 // here\n{WRITE} // there\n\n.pragma "nounroll";\n{NEIGHBOUR}\n'
    launch = launched(f"{lines} bar.sync 0; {READ}", out)
    assert kinds(launch) == []
    assert out.tolist() == [*range(1, 64), 0]
    # Ordered only inside of warps: threads 31 and 63 read what the other warp wrote.
    launch = launched(f"{lines} bar.warp.sync 0xffffffff; {READ}", out)
    (finding,) = launch.findings
    assert finding.kind == "race: shared memory read after a write, without a barrier"
    assert (finding.kernel, finding.thread, finding.program) == ("kernel", 31, (0, 0, 0))
    assert "ld.shared.b32 %r5, [%r4]" in finding.instruction
    assert "ld.shared.b32 %r5, [%r4]" in launch.ptx.splitlines()[finding.line - 1]
    (finding,) = launched(f"{WRITE} {NEIGHBOUR} {READ}", out).findings
    assert finding.thread == 0


def test_a_write_after_a_read_needs_a_barrier_too() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = f"{WRITE} {NEIGHBOUR} bar.sync 0; {READ}"
    again = "st.shared.b32 [%r2], %r5;"
    assert kinds(launched(f"{body} bar.sync 0; {again}", out)) == []
    expected = "race: shared memory written after another access, without a barrier"
    assert kinds(launched(f"{body} {again}", out)) == [expected]
    assert launched(f"{body} bar.warp.sync -1; {again}", out).findings[0].thread in (0, 32)


def test_threads_that_read_together_need_no_synchronisation_before_one_of_them_writes() -> None:
    # The first warp writes zero to one place and reads it.
    body = "setp.lt.u32 %p2, %r0, 32; mov.b32 %r2, 0; @%p2 st.shared.b32 [%r2], %r2; bar.sync 0;"
    body += "@%p2 ld.shared.b32 %r3, [%r2]; setp.eq.u32 %p1, %r0, {}; @%p1 st.shared.b32 [%r2], %r0;"
    assert kinds(launched(body.format(0))) == []
    assert kinds(launched(body.format(40))) == ["race: shared memory written after another access, without a barrier"]


def test_uninitialised_memory_and_registers_are_found() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    assert kinds(launched("mov.b32 %r2, 8; ld.shared.b32 %r5, [%r2];")) == ["uninitialised shared memory"]
    assert kinds(launched("add.s32 %r5, %r6, 1;")) == ["uninitialised register %r6"]
    partly = "setp.lt.u32 %p1, %r0, 9; @%p1 mov.b32 %r6, 1; {} add.s32 %r5, %r6, 1; st.global.b32 [%rd0], %r5;"
    (finding,) = launched(partly.format(""), out).findings
    assert (finding.kind, finding.thread) == ("uninitialised register %r6", 9)
    assert kinds(launched(partly.format("@!%p1 mov.b32 %r6, 2;"), out)) == []
    assert out.tolist() == [2] * 9 + [3] * 55


def test_conflicting_writes_are_found_unless_they_are_equal() -> None:
    body = "mov.b32 %r2, 16; and.b32 %r3, %r0, {}; st.shared.b32 [%r2], %r3;"
    assert kinds(launched(body.format(0))) == []
    assert kinds(launched(body.format(1))) == ["threads write different values to one place in shared memory"]


# Threads write 1 + i ulps, i = 0 or 1, to one place, from numbers and from other things.
ROUNDED = "mov.b32 %r2, 16; and.b32 %r3, %r0, 1; cvt.rn.f32.u32 %r4, %r3; fma.rn.f32 %r4, %r4, {}, 0f3F800000;"


@pytest.mark.parametrize(
    ("body", "is_ambiguous"),
    [
        (ROUNDED.format("0f34000000") + "st.shared.b32 [%r2], %r4;", True),
        (ROUNDED.format("0f3A000000") + "mov.b32 %r5, %r4; selp.b32 %r6, 0, %r5, %p9; st.shared.b32 [%r2], %r6;", True),
        (ROUNDED.format("0f3A080000") + "st.shared.b32 [%r2], %r4;", False),
        (ROUNDED.format("0fC0000000") + "st.shared.b32 [%r2], %r4;", False),
        (ROUNDED.format("0f34000000") + "sub.f32 %r4, %r4, 0f3F800000; st.shared.b32 [%r2], %r4;", False),
        (ROUNDED.format("0f34000000") + "add.s32 %r4, %r4, 0; st.shared.b32 [%r2], %r4;", False),
        ("mov.b32 %r2, 16; add.s32 %r3, %r0, 50000; st.shared.b32 [%r2], %r3;", False),
        ("mov.b32 %r2, 16; add.s32 %r3, %r0, 0x3F800000; st.shared.b32 [%r2], %r3;", False),
        (ROUNDED.format("0f3C000000") + "cvt.rn.bf16x2.f32 %r4, 0f3F800000, %r4; st.shared.b32 [%r2], %r4;", False),
        ("mov.b64 %rd2, 16; cvt.u64.u32 %rd3, %r0; st.shared.b64 [%rd2], %rd3;", False),
    ],
)  # fmt: skip
def test_only_the_last_bits_of_floating_point_numbers_may_be_open(body: str, is_ambiguous: bool) -> None:
    (finding,) = launched(f"mov.pred %p9, 0; {body}").findings
    assert finding.is_ambiguous == is_ambiguous
    assert "to one place in shared memory" in finding.kind


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s64 %rd0, %rd0, 4; ld.global.b32 %r1, [%rd0];", "outside of all tensors, 0 bytes beyond the end"),
        ("ld.global.b32 %r1, [%rd0+-8];", "outside of all tensors, 8 bytes before the start"),
        ("add.s64 %rd0, %rd0, 2; ld.global.b32 %r1, [%rd0];", "misaligned access of 4 bytes to global memory"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd0];", "misaligned access of 16 bytes to global memory"),
        ("mov.b32 %r2, 254; ld.shared.b32 %r5, [%r2];", "misaligned access of 4 bytes to shared memory"),
        ("mov.b32 %r2, 256; ld.shared.b32 %r5, [%r2];", "outside of shared memory, at 256 of 256 bytes"),
    ],
)
def test_accesses_that_no_gpu_allows_are_errors_that_name_the_thread(body: str, message: str) -> None:
    memory = torch.zeros(80)
    with pytest.raises(Fault, match=message) as error:
        launched(body, memory[8:72])
    assert "thread" in str(error.value)
    assert "program (0, 0, 0)" in str(error.value)


def test_programs_must_not_touch_what_another_writes() -> None:
    out, x = torch.zeros(64), floats(64)
    read, write = "ld.global.b32 %r1, [%rd0];", "st.global.b32 [%rd0], %r0;"
    own = "mov.u32 %r7, %ctaid.x; setp.eq.u32 %p1, %r7, 1;"
    assert kinds(launched(read, x, grid=2)) == []
    assert kinds(launched(write, out)) == []
    assert kinds(launched(write, out, grid=2)) == ["race: global memory written that another program writes"]
    assert kinds(launched(f"{read} {own} @%p1 {write}", out, grid=2)) == [
        "race: global memory written that another program reads"
    ]
    add = "atom.global.gpu.relaxed.add.f32 %r2, [%rd0], %r1;"
    assert kinds(launched(f"mov.b32 %r1, 0; {add}", out, grid=2)) == []
    assert kinds(launched(f"mov.b32 %r1, 0; {own} @!%p1 {add} @%p1 {write}", out, grid=2)) == [
        "race: global memory written that another program adds to"
    ]


def test_threads_of_a_program_need_a_barrier_in_global_memory_too() -> None:
    memory, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = f"st.global.b32 [%rd1], %r0; {NEIGHBOUR} cvt.u64.u32 %rd9, %r4; add.s64 %rd9, %rd9, %rd41; {{}}"
    body += "ld.global.b32 %r5, [%rd9]; st.global.b32 [%rd0], %r5;"
    assert kinds(launched(body.format("bar.sync 0;"), out, memory)) == []
    assert out.tolist() == [*range(1, 64), 0]
    assert kinds(launched(body.format(""), out, memory)) == [
        "race: global memory read after a write of another thread, no barrier"
    ]


def test_atomic_additions_and_other_accesses_need_a_barrier_between() -> None:
    sums, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    neighbour = f"{NEIGHBOUR} cvt.u64.u32 %rd9, %r4; add.s64 %rd9, %rd9, %rd40;"
    add, every = "red.global.gpu.relaxed.add.u32 [%rd9], %r0;", "red.global.add.u32 [%rd40], 1;"
    read, write = "ld.global.b32 %r5, [%rd0]; st.global.b32 [%rd1], %r5;", "st.global.b32 [%rd0], %r0;"
    after_add = "race: global memory {} after another thread added to it, no barrier"
    before_add = "race: global memory added to after an access of another thread, no barrier"
    for first, second, expected in (
        (add, read, after_add.format("read")),
        (add, write, after_add.format("written")),
        (read, add, before_add),
        (write, add, before_add),
        (every, "setp.eq.u32 %p1, %r0, 0; @%p1 ld.global.b32 %r5, [%rd40];", after_add.format("read")),
    ):
        assert kinds(launched(f"{neighbour} {first} {second}", sums, out)) == [expected]
        assert kinds(launched(f"{neighbour} {first} bar.sync 0; {second}", sums, out)) == []
    # Additions meet each other, and accesses of the own thread.
    own = "ld.global.b32 %r5, [%rd0]; red.global.add.u32 [%rd0], 1; ld.global.b32 %r5, [%rd0];"
    assert kinds(launched(f"{neighbour} {own} bar.sync 0; {add} {every}", sums, out)) == []


# A product of four warps, both of whose factors lie in the first 128 bytes: those of the first warp.
PRODUCT = """
    shl.b32 %r9, %r0, 2; mov.b32 %r10, 0; st.shared.b32 [%r9], %r10;
    {} bar.sync 0;
    mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0; mov.b64 %rd1, {}; mov.pred %p2, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r1, %r2, %r3, %r4}}, %rd1, %rd1, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""


def multiplied(fence: str, descriptor: int = 0) -> Launch:
    return execute(program(PRODUCT.format(fence, descriptor), threads=128), (), (1,), shared_memory=512)


def test_a_fence_is_of_shared_memory_and_of_those_who_wrote() -> None:
    missing = ["wgmma reads shared memory after a write, without fence.proxy.async"]
    for fence in ("fence.proxy.async;", "fence.proxy.async.shared::cta;"):
        assert kinds(multiplied(fence)) == []
    for fence in ("", "fence.proxy.async.global;", "fence.acq_rel.gpu;"):
        assert kinds(multiplied(fence)) == missing
    some = "setp.lt.u32 %p1, %r0, {}; @%p1 fence.proxy.async;"
    assert kinds(multiplied(some.format(32))) == []
    assert kinds(multiplied(some.format(31))) == missing


def test_descriptors_with_an_offset_of_their_base_are_refused() -> None:
    with pytest.raises(Fault, match="unknown descriptor of wgmma 0x2000000000000"):
        multiplied("fence.proxy.async;", 1 << 49)


@pytest.mark.parametrize("first", ["wgmma.fence", "wgmma.mma_async", "wgmma.commit_group", "wgmma.wait_group"])
def test_a_product_of_some_of_its_four_warps_is_refused(first: str) -> None:
    body = PRODUCT.format("fence.proxy.async;", 0)
    leave = f"setp.ge.u32 %p3, %r0, 96; @%p3 bra $END; {first}"
    with pytest.raises(Fault, match="a part of four warps executes wgmma"):
        execute(program(f"{body.replace(first, leave)} $END:", threads=128), (), (1,), shared_memory=512)


def test_accumulators_are_fenced_even_if_they_are_overwritten() -> None:
    body = PRODUCT.format("fence.proxy.async;", 0)
    fence = "wgmma.fence.sync.aligned;"
    without = execute(program(body.replace(fence, ""), threads=128), (), (1,), shared_memory=512)
    assert kinds(without)[0] == "wgmma before any wgmma.fence"
    late = execute(program(body.replace(fence, f"{fence} mov.b32 %r3, 1;"), threads=128), (), (1,), shared_memory=512)
    assert kinds(late) == ["wgmma uses register %r3 written after the last wgmma.fence"]


def test_a_copy_is_there_after_its_wait_and_a_barrier() -> None:
    out, x = torch.zeros(64), floats(64)
    waits = "cp.async.wait_group 0;"
    launch = launched(f"{COPY} {NEIGHBOUR} {waits} bar.sync 0; {READ}", out, x)
    assert kinds(launch) == []
    assert torch.equal(out, x.roll(-1))
    assert launch.instructions["asynchronous copy"] == 2
    in_flight = "race: shared memory read while cp.async writes it"
    assert kinds(launched(f"{COPY} {NEIGHBOUR} bar.sync 0; {READ}", out, x)) == [in_flight]
    assert kinds(launched(f"{COPY} {NEIGHBOUR} cp.async.wait_group 1; bar.sync 0; {READ}", out, x)) == [in_flight]
    without_barrier = kinds(launched(f"{COPY} {NEIGHBOUR} {waits} {READ}", out, x))
    assert without_barrier == ["race: shared memory read after a write, without a barrier"]


def test_a_copy_must_not_overwrite_what_others_still_read() -> None:
    out, x = torch.zeros(64), floats(64)
    body = f"{COPY} {NEIGHBOUR} cp.async.wait_group 0; bar.sync 0; {READ}"
    assert kinds(launched(f"{body} bar.sync 0; {COPY}", out, x)) == []
    assert "race: shared memory written after another access, without a barrier" in kinds(
        launched(f"{body} {COPY}", out, x)
    )


def test_a_copy_of_no_bytes_fills_with_zeros_and_reads_nothing() -> None:
    out, x = torch.zeros(64), floats(40)
    body = f"setp.lt.u32 %p1, %r0, 40; selp.b32 %r7, 4, 0, %p1; {COPY.replace('4;', '4, %r7;', 1)}"
    assert "4, %r7;" in body
    launch = launched(f"{body} {NEIGHBOUR} cp.async.wait_group 0; bar.sync 0; {READ}", out, x)
    assert kinds(launch) == []
    assert torch.equal(out, torch.cat([x, torch.zeros(24)]).roll(-1))


def test_threads_that_wait_in_vain_are_an_error() -> None:
    parted = "setp.lt.u32 %p1, %r0, {}; @%p1 bra $L1; bar.sync 0; bra.uni $L2; $L1: {}; $L2:"
    with pytest.raises(Fault, match="wait at different barriers"):
        launched(parted.format(32, "bar.sync 1"))
    with pytest.raises(Fault, match="wait for others that never come"):
        launched(parted.format(16, "shfl.sync.idx.b32 %r9, %r0, 0, 31, -1"))


def test_an_endless_loop_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wave, "MOST_STEPS", 1000)
    with pytest.raises(Fault, match="more than 1000 instructions"):
        launched("$L1: bra.uni $L1;")


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [
        (4, 4, (1, 1)), (0, 4, (1, 1)), (8, 4, (2, 1)), (128, 4, (32, 1)), (132, 4, (1, 1)), (2, 2, (1, 1)),
        (8, 8, (2, 2)), (16, 16, (4, 4)), (128, 16, (32, 4)),
    ],
)  # fmt: skip
def test_bank_conflicts_are_counted(stride: int, size: int, expected: tuple[int, int]) -> None:
    assert passes(torch.arange(32).mul(stride).numpy(), size) == expected


def test_executed_instructions_are_counted_by_class() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    launch = launched(f"{WRITE} {NEIGHBOUR} bar.sync 0; {READ}", out, grid=1)
    assert launch.instructions["shared store"] == launch.instructions["shared load"] == 2
    assert launch.instructions["barrier"] == launch.instructions["global store"] == 2
    assert launch.bytes == {"st.shared": 256, "ld.shared": 256, "st.global": 256}
    assert launch.bank_conflicts == {"st.shared": 1.0, "ld.shared": 1.0}


def test_copies_belong_to_their_threads() -> None:
    """The wait, or the end of a group, of one thread is not that of its warp."""
    out, x = torch.zeros(64, dtype=torch.int32), floats(64)
    first = "and.b32 %r6, %r0, 31; setp.eq.u32 %p1, %r6, 0;"
    reading = ["race: shared memory read while cp.async writes it"]
    for wait in ("@%p1 cp.async.wait_group 0;", "@%p1 cp.async.wait_all;"):
        assert kinds(launched(f"{COPY} {NEIGHBOUR} {first} {wait} bar.sync 0; {READ}", out, x)) == reading
    some = COPY.replace("cp.async.commit_group", "@%p1 cp.async.commit_group")
    rest = f"{NEIGHBOUR} cp.async.wait_group 0; bar.sync 0; {READ}"
    assert kinds(launched(f"{first} {some} {rest}", out, x)) == reading
    assert kinds(launched(f"{first} {COPY} {rest}", out, x)) == []


def test_the_source_of_a_copy_stays_until_it_has_arrived() -> None:
    out, x = torch.zeros(64), floats(64)
    race = ["race: global memory written while cp.async reads it"]
    # Another thread's part of the source, behind a barrier.
    write = "xor.b32 %r7, %r2, 128; cvt.u64.u32 %rd9, %r7; add.s64 %rd9, %rd9, %rd41; st.global.b32 [%rd9], %r0;"
    add = write.replace("st.global.b32 [%rd9], %r0", "red.global.add.f32 [%rd9], %r0")
    for change in (write, add):
        assert kinds(launched(f"{COPY} bar.sync 0; {change}", out, x)) == race
        assert kinds(launched(f"{COPY} cp.async.wait_all; bar.sync 0; {change}", out, x)) == []


@pytest.mark.parametrize("writer", [0, 63])
@pytest.mark.parametrize("place", ["shared", "global"])
def test_who_writes_what_others_write_as_well_stands_for_none_of_them(place: str, writer: int) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    where = "[%r2]" if place == "shared" else "[%rd40]"
    all_write = f"mov.b32 %r2, 16; mov.b32 %r3, 7; st.{place}.b32 {where}, %r3;"
    one_writes = f"setp.eq.u32 %p1, %r0, {writer}; mov.b32 %r4, 99; @%p1 st.{place}.b32 {where}, %r4;"
    (found,) = kinds(launched(f"{all_write} {one_writes}", out))
    assert found.startswith(f"race: {place} memory written after")
    assert kinds(launched(f"{all_write} bar.sync 0; {one_writes}", out)) == []


def test_between_the_rows_of_a_view_is_outside() -> None:
    whole = torch.zeros(8, 16)
    view = whole[:, :8]
    read = "shl.b32 %r1, %r0, 2; and.b32 %r1, %r1, {}; cvt.u64.u32 %rd9, %r1; add.s64 %rd9, %rd9, %rd40; {}"
    load, store = "ld.global.b32 %r2, [%rd9];", "st.global.b32 [%rd9], 0;"
    for access in (load, store, "red.global.add.f32 [%rd9], 0;"):
        with pytest.raises(Fault, match="access between the rows of a tensor"):
            launched(read.format(63, access), view)
    assert kinds(launched(read.format(31, load), view)) == []
    assert kinds(launched(read.format(63, load), with_padding(torch.ones(8, 3)))) == []
    with pytest.raises(Fault, match="access between"):
        launched(read.format(63, load), whole[:, :3])
