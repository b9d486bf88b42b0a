"""S v of rows by the Triton kernels: chunks, far offsets, precision, atomic sums, tuning and configurations.

That they agree with the reference is in `tests/backends/test_agreement.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
import triton
from torch import Tensor

from s3d_fast.backends import operations
from s3d_fast.kernels import configs, device, launch, pointwise, pointwise_wide, tiles
from s3d_fast.kernels.aligned import aligned, copied_at_once, is_near
from s3d_fast.kernels.options import TritonOptions, triton_options
from s3d_fast.kernels.products import product_form
from s3d_fast.kernels.tiles import Config
from s3d_fast.maths import reference
from tests.cases import DTYPES, TOLERANCE, RowsCase, doubles, random_tensor, random_vectors, relative_error
from tests.kernel_cases import (
    ARITHMETIC,
    GPUS,
    Matvec,
    assert_matvec,
    every_dtype,
    every_vendor,
    matvec,
    pretend,
    recorded,
    rounding_bound,
    with_strides,
)

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

FAMILIES: dict[str, Matvec] = {
    "fused": lambda X, C, V, bias: pointwise.splitting_matvec(X=X, C=C, V=V, bias=bias),
    "wide": lambda X, C, V, bias: pointwise_wide.splitting_matvec(X=X, C=C, V=V, bias=bias),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
KERNELS = {"fused": (pointwise, "fused_kernel"), "wide": (pointwise_wide, "accumulate_kernel")}


@pytest.mark.parametrize("slices", [2, launch.SUM_SLICES, launch.SUM_SLICES + 1, 2 * launch.SUM_SLICES + 7])
@pytest.mark.parametrize("number", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_sums_of_slices(number: torch.dtype, slices: int) -> None:
    for size in (1, launch.SUM_BLOCK, launch.SUM_BLOCK + 1):
        partial = random_tensor(slices, size, dtype=number)
        total = launch.summed([], partial).run()
        assert relative_error(total, partial.double().sum(0)) < TOLERANCE[number], (slices, size)
        assert torch.equal(launch.summed([], partial).run(), total)


def test_parts_are_even() -> None:
    for total, most, step in product((1, 7, 64, 100, 1001), (1, 6, 63, 64, 500), (1, 4, 64)):
        size = launch.part_size(total, most, step)
        parts = math.ceil(total / size)
        assert size <= max(step, most) or size == total <= most, (total, most, step)
        assert size == total or size % step == 0, (total, most, step)
        # No other number of parts that fits is smaller, and the last part lacks less than a step for each part.
        assert parts == 1 or parts == math.ceil(total / max(step, most // step * step)), (total, most, step)
        assert parts * size - total < parts * step, (total, most, step)


@every_dtype
def test_the_wide_kernels_agree_with_the_reference_in_several_chunks_of_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, pointwise_wide, "project_kernel")
    for D, M, K, bias in ((1, 1, 0, True), (3, 65, 1, False), (33, 7, 2, False), (130, 5, 2, True)):
        case = RowsCase(300, D, M, dtype, bias, K)
        launches.clear()
        with triton_options(scratch_bytes=1):
            assert_matvec(*case.tensors(), case.vectors(), bias, case, FAMILIES["wide"])
        assert len(launches) > 1, case


@every_dtype
def test_the_wide_kernels_store_no_more_than_they_may(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, pointwise_wide, "project_kernel")
    X, C = RowsCase(700, 9, 5, dtype).tensors()
    for scratch_bytes in (8 * 2 * 5 * 256, 8 * 2 * 5 * 300):
        with triton_options(scratch_bytes=scratch_bytes):
            assert_matvec(X, C, random_vectors(2, 5, 9, dtype=dtype), call=FAMILIES["wide"])
        assert max(entry.arguments["U"].nbytes for entry in launches) <= scratch_bytes


@every_family
@pytest.mark.parametrize("transposed", [False, True], ids=["rows-apart", "columns-apart"])
def test_entries_may_be_so_far_apart_that_offsets_leave_32_bits(
    family: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, *KERNELS[family])
    X, C = RowsCase(2, 2, 2, torch.float32).tensors()
    # What is a bit too far for a tile of 256 rows, or for two columns.
    distance = 2**31 if transposed else 2**31 // 255 + 1
    strides = (1, distance) if transposed else (distance, 1)
    far = [with_strides(x, strides) for x in (X, C)]
    V = random_vectors(2, 2, dtype=torch.float32)
    assert_matvec(*far, V, call=FAMILIES[family])
    assert_matvec(X, far[1], V, call=FAMILIES[family])
    assert_matvec(far[0], C, V, call=FAMILIES[family])
    seen = [entry.arguments[name] for entry in launches for name in ("X", "C") if name in entry.arguments]
    assert len(seen) >= 3
    assert all(is_near(own) for own in seen if own is not None)


def test_rows_are_near_up_to_where_offsets_leave_32_bits() -> None:
    def rows(shape: tuple[int, int], *strides: int) -> Tensor:
        return torch.empty_strided(shape, strides, device="meta")

    most = 2**31 - 1
    assert is_near(rows((300, 64), (most - 63) // 255, 1))
    assert not is_near(rows((300, 64), (most - 63) // 255 + 1, 1))
    assert is_near(rows((300, 65), 1, (most - 255) // 64))
    assert not is_near(rows((300, 65), 1, (most - 255) // 64 + 1))
    assert not is_near(rows((2, 2), 2, 1), rows((2, 2), 2**31, 1))


def test_rows_that_are_far_even_as_a_copy_are_refused() -> None:
    X = torch.empty(2, 2**23 + 1, device="meta")
    with pytest.raises(ValueError, match="take rows of at most 8388608 columns, got 8388609"):
        aligned("ieee", X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_far_samples_are_copied_within_the_scratch_memory(dtype: torch.dtype) -> None:
    far = torch.empty_strided((64, 16, 3), (2**28, 2**24, 1), dtype=dtype, device="meta")
    assert copied_at_once("ieee", far, TritonOptions(scratch_bytes=10 * 16 * 16 * dtype.itemsize)) == 10
    assert copied_at_once("ieee", torch.zeros(64, 16, 3, dtype=dtype), TritonOptions(scratch_bytes=1)) == 64


@every_family
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=["fp64", "fp32", "bf16"])
def test_magnitudes_that_the_arithmetic_holds_do_no_harm(family: str, dtype: torch.dtype) -> None:
    X, C = RowsCase(70, 19, 6, torch.float64).tensors()
    V = random_vectors(6, 19)
    number = torch.float64 if dtype == torch.float64 else torch.float32
    scales = [(1e12, 1e10, 1), (1e-12, 1e-5, 1), (1e18, 1e-30, 1), (1e-15, 1e30, 1e3), (1, 1, 1e-25)]
    scales += [(1e100, 1e100, 1), (1e-100, 1e-90, 1)] * (dtype == torch.float64)
    for x, c, v in scales:
        assert_matvec((x * X).to(dtype), (c * C).to(dtype), (v * V).to(number), label=(x, c, v), call=FAMILIES[family])


@every_family
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("scale", [200.0, 1e-4], ids=["above", "below"])
def test_a_product_that_leaves_the_range_of_float16_is_right(family: str, precision: str, scale: float) -> None:
    X, C = (scale * tensor for tensor in RowsCase(130, 40, 6).tensors())
    U = (X @ random_vectors(6, 40).mT) * C
    outside = torch.finfo(torch.float16).max if scale > 1 else torch.finfo(torch.float16).smallest_normal
    assert ((U.abs() > outside) if scale > 1 else (U.abs() < outside)).any()
    with triton_options(precision=precision):
        assert_matvec(X.half(), C.half(), random_vectors(6, 40).float(), call=FAMILIES[family])


@every_family
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_medium_precision_rounds_the_other_factor_and_no_more(family: str, bias: bool) -> None:
    X, C = RowsCase(300, 40, 6).tensors()
    V = random_vectors(6, 40 + bias).float()
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        rows = (X.to(dtype), C.to(dtype), V, bias)
        with triton_options(precision="medium"):
            found = FAMILIES[family](*rows)
        error = (found.double() - reference.splitting_matvec(*doubles(*rows[:3]), bias)).abs()
        assert (error <= rounding_bound(*rows, unit)).all(), dtype
        assert error.max() > 0


@every_family
def test_sixteen_bit_rows_are_as_exact_at_high_precision_as_at_the_highest(family: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        X, C = RowsCase(300, 40, 6, dtype).tensors()
        V = random_vectors(6, 40, dtype=dtype)
        with triton_options(precision="high"):
            high = assert_matvec(X, C, V, call=FAMILIES[family])
        with triton_options(precision="highest"):
            assert torch.equal(high, FAMILIES[family](X, C, V, False)), dtype


@every_family
def test_the_precision_is_pytorchs_own_unless_another_is_asked_for(family: str) -> None:
    X, C = RowsCase(60, 40, 6, torch.bfloat16).tensors()
    V = random_vectors(6, 40).float()
    results = {}
    for precision in ("highest", "medium"):
        with triton_options(precision=precision):
            results[precision] = FAMILIES[family](X, C, V, False)
    assert not torch.equal(results["highest"], results["medium"])
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(FAMILIES[family](X, C, V, False), results["medium"])
        with triton_options(precision="highest"):
            assert torch.equal(FAMILIES[family](X, C, V, False), results["highest"])
    finally:
        torch.set_float32_matmul_precision("highest")


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_shared_out_over_programs_give_the_same_bits_every_time(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = recorded(monkeypatch, *KERNELS[family])
    case = RowsCase(1040, 17, 5, dtype, bias=True, K=2)
    X, C, V = *case.tensors(), case.vectors()
    first = assert_matvec(X, C, V, True, call=FAMILIES[family])
    assert launches[0].grid[-1] > 1
    assert torch.equal(FAMILIES[family](X, C, V, True), first)


@every_family
@every_dtype
def test_atomic_sums_agree_with_the_reference(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, pointwise, "fused_kernel")
    with triton_options(atomic=True):
        for N in (40, 1040):
            case = RowsCase(N, 17, 5, dtype, bias=True, K=2)
            assert_matvec(*case.tensors(), case.vectors(), True, case, FAMILIES[family])
    assert [entry.arguments["ATOMIC"] for entry in launches] == [False, True] * (family == "fused")


@every_family
@pytest.mark.parametrize("fastest", [0, 1])
def test_tuning_times_every_configuration_once_and_keeps_the_fastest(
    family: str, fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def seconds(call: object) -> float:
        timed.append(call())
        return float(len(timed) != 1 + fastest)

    monkeypatch.setattr(launch, "_TUNED", {})
    monkeypatch.setattr(launch, "_seconds", seconds)
    launches = recorded(monkeypatch, *KERNELS[family])
    X, C = RowsCase(300, 17, 40, torch.float32).tensors()
    V = random_vectors(40, 17, dtype=torch.float32)
    with triton_options(tune=True):
        first = assert_matvec(X, C, V, call=FAMILIES[family])
        assert len(timed) == 2
        assert relative_error(timed[0], timed[1]) < TOLERANCE[torch.float32]
        assert torch.equal(assert_matvec(X, C, V, call=FAMILIES[family]), first)
    assert len(timed) == 2
    tiles = [(entry.grid, entry.arguments["BM"]) for entry in launches]
    per_call = len(tiles) // 4
    chosen = tiles[fastest * per_call :][:per_call]
    assert tiles[2 * per_call :] == 2 * chosen
    assert family == "wide" or tiles[0] != tiles[1]


def test_nothing_is_timed_without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_seconds", lambda call: pytest.fail("timed"))
    X, C = RowsCase(30, 17, 4).tensors()
    assert_matvec(X, C, random_vectors(4, 17))


def test_a_configuration_that_does_not_launch_is_left_out_of_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_TUNED", {})
    result = torch.ones(1)

    def make(candidate: str) -> launch.Plan:
        if candidate != "good":
            raise triton.runtime.errors.OutOfResources(300000, 166912, "shared memory")
        return launch.Plan([], result)

    with triton_options(tune=True):
        assert launch.choose("key", ["too large", "good", "too large as well"], make) is result
        with pytest.raises(RuntimeError, match="no configuration of the kernel launches"):
            launch.choose("other", ["too large", "too large as well"], make)


def test_six_bfloat16_products_are_as_exact_as_float32() -> None:
    case = RowsCase(600, 60, 20, torch.float32)
    X, C, V = *case.tensors(), case.vectors()
    errors = {}
    for precision in ("highest", "high", "medium"):
        with triton_options(precision=precision):
            errors[precision] = relative_error(matvec(X, C, V), reference.splitting_matvec(*doubles(X, C, V)))
    assert errors["high"] < 2 * errors["highest"]
    assert errors["high"] < 1e-6
    assert errors["medium"] > 1e-4


@every_family
def test_float16_rows_do_not_overflow_at_medium_precision(family: str) -> None:
    X, C = (200 * tensor for tensor in RowsCase(130, 40, 6).tensors())
    V = random_vectors(6, 40).float()
    assert ((X @ V.double().mT) * C).abs().max() > torch.finfo(torch.float16).max
    with triton_options(precision="medium"):
        found = FAMILIES[family](X.half(), C.half(), V, False)
    expected = reference.splitting_matvec(*doubles(X.half(), C.half(), V), False)
    assert relative_error(found, expected) < 2.0**-6


def test_a_device_that_no_configuration_fits_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no configuration of the kernel fits this device"):
        launch.choose("key", [], lambda config: None)


@every_vendor
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_for_a_gpu_agrees_with_the_reference(
    vendor: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    ((dtype, precision),), biases = ARITHMETIC[arithmetic], cycle([False, True, True])
    for width, entries in tiles.POINTWISE.get((vendor, arithmetic), {}).items():
        for rows, filters, *others in entries:
            bias, config = next(biases), Config(rows, filters, width, *others)
            monkeypatch.setattr(configs, "pointwise", lambda *_, config=config: [config])
            case = RowsCase(4 * rows + 3, width - 5 * bias, filters // 4 + 1, dtype, bias, K=2)
            with triton_options(precision=precision):
                assert_matvec(*case.tensors(), case.vectors(), bias, (case, config))


@every_vendor
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_of_the_wide_kernels_for_a_gpu_agrees_with_the_reference(
    vendor: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    ((dtype, precision),), biases = ARITHMETIC[arithmetic], cycle([False, True])
    for pair in tiles.WIDE.get((vendor, arithmetic), ()):
        monkeypatch.setattr(configs, "wide", lambda *_, pair=pair: [pair])
        bias = next(biases)
        case = RowsCase(140, 140, 9, dtype, bias, K=2)
        with triton_options(precision=precision, scratch_bytes=1):
            assert_matvec(*case.tensors(), case.vectors(), bias, (case, pair), FAMILIES["wide"])


@every_vendor
@every_dtype
def test_there_is_a_configuration_for_every_layer_on_every_gpu(
    vendor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = pretend(monkeypatch, vendor)
    for precision in ("highest", "high", "medium"):
        form = product_form(dtype, precision, gpu)
        assert configs.wide(gpu, form, dtype, 1000)
        assert configs.wide(gpu, form, dtype, 10)
        for width, filters in product([16, 32, 64, 128, 256], [1, 16, 33, 1000]):
            chosen = configs.pointwise(gpu, form, dtype, width, filters)
            # Wider rows may need the two launches of the wide kernels.
            widest = 16 if vendor == "blackwell" and form == "bf16x6" else 64
            assert chosen or width > widest, (precision, width, filters)
            assert len(set(chosen)) == len(chosen)
            for config in chosen:
                assert config.depth == width
                assert 16 <= config.filters <= max(16, 2 * filters)
                assert not config.turned or config.filters >= 16 * config.warps or vendor == "amd"


@every_vendor
@every_dtype
def test_the_configurations_that_a_gpu_would_use_agree_with_the_reference(
    vendor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, vendor)
    for case in (RowsCase(70, 20, 9, dtype, True), RowsCase(50, 256, 16, dtype), RowsCase(20, 260, 3, dtype)):
        assert_matvec(*case.tensors(), case.vectors(), case.bias, case)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_gpu_without_bfloat16_agrees_with_the_reference(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "amd")
    monkeypatch.setattr(device, "INTERPRETER", replace(GPUS["amd"], has_bf16=False))
    for dtype, D in product(DTYPES, [20, 260]):
        case = RowsCase(30, D, 5, dtype, bias=True)
        X, C, V = *case.tensors(), case.vectors()
        with triton_options(precision=precision):
            SV = assert_matvec(X, C, V, True, case)
            if D == 20:
                (grouped,) = operations.splitting_matvec_grouped([X], [C], [V], bias=[True], backend="triton")
                assert relative_error(grouped, SV) < TOLERANCE[dtype], case


def share_cases() -> list[tuple[int, int, int, int]]:
    rows = (1, 15, 16, 17, 511, 512, 513, 1000, 4095, 4097, 65536, 10**7 + 1)
    return list(product(rows, (1, 2, 7, 64, 10**4), (16, 128), (1, 3, 132)))


@pytest.mark.parametrize(("vendor", "warps", "at_once"), [("nvidia", 4, 2), ("amd", 4, 2), ("amd", 1, 4)])
def test_rows_are_shared_out_in_whole_blocks_and_no_program_has_none(vendor: str, warps: int, at_once: int) -> None:
    for rows, count, block, processors in share_cases():
        gpu = replace(GPUS[vendor], processors=processors)
        per_slice, slices = launch.share_rows(rows, count, block, gpu, warps)
        label = (rows, count, block, processors)
        assert per_slice % block == 0, label
        assert (slices - 1) * per_slice < rows <= slices * per_slice, label
        assert count * slices <= max(2 * at_once * processors, count), label
        # No program but the last has fewer than four blocks.
        assert slices == 1 or per_slice >= 4 * block, label


def test_sizes_of_tiles_are_powers_of_two_within_bounds() -> None:
    for size in range(300):
        found = launch.power_of_two(size, 16, 128)
        wanted = 2 ** math.ceil(math.log2(max(size, 1)))
        assert found == min(max(wanted, 16), 128), size


def test_matvec_takes_the_fused_kernel_up_to_256_inputs_and_the_wide_ones_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, wide = (recorded(monkeypatch, *KERNELS[family]) for family in FAMILIES)
    for D, counts in ((256, (1, 0)), (257, (1, 1))):
        X, C = RowsCase(4, D, 2).tensors()
        matvec(X, C, random_vectors(2, D))
        assert (len(fused), len(wide)) == counts
