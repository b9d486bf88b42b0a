"""What the simulator finds in memory: each kind of misuse on hand-written PTX, and its absence where all is well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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
    rounded = "mov.b32 %r2, 16; and.b32 %r3, %r0, 1; add.s32 %r3, %r3, 0x3F800000; st.shared.b32 [%r2], %r3;"
    (finding,) = launched(rounded).findings
    assert finding.is_ambiguous


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
