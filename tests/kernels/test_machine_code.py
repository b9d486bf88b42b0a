"""Listings are read as the model of GPUs needs them: loops and the rest, by the unit that is kept busy."""

from __future__ import annotations

from benchmarks import machine_code

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   FADD R2, R2, R3 ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0040*/                   FMUL R5, R5, R6 ;
        /*0050*/              @!P0 FFMA R5, R5, R6, R7 ;
        /*0060*/                   IADD3 R9, R9, 0x1, RZ ;
        /*0070*/              @P1  BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
        /*0090*/                   NOP ;
"""
PTX = """
$L__BB0_1:
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
\t@%p1 bra $L__BB0_1;
"""


def test_a_listing_is_parted_into_its_loop_and_the_rest() -> None:
    code = machine_code.nvidia(SASS, PTX.replace("%f1};", "%f1};\n\tmma.sync.aligned.m16n8k16 {%f1};", 1))
    assert code.loop == {"instructions": 6, "fp32": 2}
    # NOP fills the end and is never executed.
    assert code.outside == {"instructions": 3, "fp32": 1}


def test_a_loop_that_the_assembler_unrolled_counts_once_for_every_pass() -> None:
    assert machine_code.nvidia(SASS, PTX).loop == {"instructions": 3, "fp32": 1}


AMD = """
\tv_mov_b32_e32 v1, 0
\tglobal_store_dwordx2 v[1:2], v[3:4], off
.LBB0_1:
\tds_read_b128 v[0:3], v9
\tds_read2_b64 v[4:7], v9 offset1:8
\tds_write_b16 v9, v1
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tbuffer_load_ushort v4, v5, s[0:3], 0 offen
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
\tv_mul_f32_e32 v1, v2, v3
\ts_barrier
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""


def test_assembly_of_amd_is_counted_by_unit() -> None:
    code = machine_code.amd(AMD)
    assert code.loop == {
        "shared bytes": 64 * (16 + 16 + 4),
        "requested bytes": 64 * (16 + 2),
        "tensor": 32 * 32 * 8,
        "instructions": 1,
        "barriers": 1,
    }
    assert code.outside == {"instructions": 1, "requested bytes": 64 * 8}


def test_passes_that_the_compiler_moves_out_of_a_loop_of_amd_count_as_passes() -> None:
    start, loop, end = AMD.partition(".LBB0_1:\n")[0], AMD.partition(".LBB0_1:\n")[2], "\ts_endpgm\n"
    body = "".join(line for line in loop.splitlines(keepends=True) if "branch" not in line and "endpgm" not in line)
    moved = start + ".LBB0_1:\n" + loop.removesuffix(end) + 2 * body + end
    assert machine_code.amd(moved) == machine_code.amd(AMD)
