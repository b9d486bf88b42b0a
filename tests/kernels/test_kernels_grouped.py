"""S v of lists of layers by the Triton kernels, in Triton's interpreter, against the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from s3d_fast.backends import operations
from s3d_fast.kernels import grouped, launch, pointwise, pointwise_wide
from s3d_fast.kernels.options import triton_options
from s3d_fast.kernels.products import product_form
from s3d_fast.maths import reference
from tests.cases import TOLERANCE, RowsCase, random_vectors, relative_error
from tests.extension_cases import DTYPES, LAYOUTS, VectorsCase, doubles, embedded, laid_out, random_tensor
from tests.kernel_cases import (
    ARITHMETIC,
    every_dtype,
    every_vendor,
    poisoned,  # noqa: F401
    pretend,
    recorded,
    rounding_bound,
)

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned", "no_plans")]

Layer = tuple[Tensor, Tensor, Tensor, bool]


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without tables of earlier tests."""
    monkeypatch.setattr(grouped, "_TABLES", type(grouped._TABLES)())


def layer_of(case: VectorsCase, seed: int = 0) -> Layer:
    return (*case.tensors(seed), case.vectors(), case.bias)


def products(layers: Sequence[Layer]) -> list[Tensor]:
    """Return S v of every layer, in one call of the Triton backend."""
    X, C, V, bias = zip(*layers, strict=True) if layers else [[]] * 4
    return operations.splitting_matvec_grouped(X, C, V, bias=bias, backend="triton")


def assert_products(layers: Sequence[Layer], label: object = "") -> list[Tensor]:
    """Check S v of every layer against the reference in float64, and that the arguments stay as they were."""
    before = [[tensor.clone() for tensor in layer[:3]] for layer in layers]
    results = products(layers)
    assert len(results) == len(layers)
    for SV, (X, C, V, bias), old in zip(results, layers, before, strict=True):
        about = f"{label} N{len(X)}-D{X.shape[1]}-V{tuple(V.shape)}-{X.dtype}-bias{bias}"
        assert (SV.shape, SV.dtype) == (V.shape, V.dtype), about
        error = relative_error(SV, reference.splitting_matvec(*doubles(X, C, V), bias))
        assert error < TOLERANCE[X.dtype], f"{about}: error {error}"
        assert all(map(torch.equal, (X, C, V), old)), f"{about}: an argument was changed"
    return results


def unequal_cases(dtype: torch.dtype) -> list[VectorsCase]:
    """Return layers of every width class and kind, in no order."""
    return [
        VectorsCase(700, 16, 32, dtype),
        VectorsCase(70, 256, 5, dtype, bias=True),
        VectorsCase(0, 9, 3, dtype),
        VectorsCase(150, 20, 65, dtype, K=2),
        VectorsCase(1, 1, 1, dtype, bias=True, K=1),
        VectorsCase(30, 300, 4, dtype, bias=True),
        VectorsCase(63, 100, 7, dtype, bias=True, K=3),
        VectorsCase(0, 300, 3, dtype, bias=True, K=2),
        VectorsCase(300, 64, 16, dtype),
        VectorsCase(90, 33, 9, dtype),
        VectorsCase(40, 200, 16, dtype, K=1),
        VectorsCase(5, 3, 2, dtype),
    ]


@every_dtype
def test_unequal_layers_agree_with_the_reference(dtype: torch.dtype) -> None:
    layers = [layer_of(case) for case in unequal_cases(dtype)]
    # Columns that follow each other in memory.
    layers += [(X.mT.contiguous().mT, C, V, bias) for X, C, V, bias in layers[3:5]]
    layers += [(X, C.mT.contiguous().mT, V.mT.contiguous().mT, bias) for X, C, V, bias in layers[8:9]]
    first = assert_products(layers)
    assert all(map(torch.equal, products(layers), first))


def test_layers_of_different_dtypes_share_a_call() -> None:
    assert_products([layer_of(VectorsCase(70, 17, 6, dtype, bias, 2)) for dtype in DTYPES for bias in (False, True)])


def test_a_list_may_be_empty_or_hold_one_layer() -> None:
    assert products([]) == []
    for case in (VectorsCase(70, 17, 6), VectorsCase(0, 17, 6), VectorsCase(70, 270, 6)):
        assert_products([layer_of(case)], case)


@pytest.mark.parametrize("sizes", [(5, 0, 3, 2), (5, 4, 3, 0), (5, 4, 0, 2)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_sizes_of_zero_are_allowed(sizes: tuple[int, int, int, int], bias: bool) -> None:
    N, M, D, K = sizes
    zero = (random_tensor(N, D), random_tensor(N, M), random_tensor(K, M, D + bias), bias)
    assert_products([zero, layer_of(VectorsCase(20, 5, 3, bias=bias)), zero])


def test_every_layout_agrees_with_the_reference() -> None:
    dtypes, v_layouts = cycle(DTYPES), cycle(LAYOUTS[1:])
    for x_layout in LAYOUTS:
        layers = []
        for c_layout in LAYOUTS:
            X, C, V, bias = layer_of(VectorsCase(70, 20, 9, next(dtypes), x_layout == c_layout, 2))
            layers.append((laid_out(X, x_layout), laid_out(C, c_layout), laid_out(V, next(v_layouts)), bias))
        assert_products(layers, x_layout)


@every_dtype
def test_what_surrounds_the_inputs_is_neither_used_nor_changed(dtype: torch.dtype) -> None:
    layers, buffers = [], []
    for case in (VectorsCase(70, 20, 9, dtype, bias=True), VectorsCase(600, 16, 32, dtype)):
        views, around = zip(*(embedded(tensor) for tensor in layer_of(case)[:3]), strict=True)
        layers.append((*views, case.bias))
        buffers += around
    before = [buffer.clone() for buffer in buffers]
    assert_products(layers)
    for buffer, old in zip(buffers, before, strict=True):
        torch.testing.assert_close(buffer, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stride", [grouped.FARTHEST - 1, grouped.FARTHEST])
def test_rows_may_be_far_apart(stride: int) -> None:
    X, C, V, bias = layer_of(VectorsCase(2, 3, 2, torch.float16))
    far = torch.zeros(stride + 3, dtype=torch.float16).as_strided(X.shape, (stride, 1)).copy_(X)
    assert_products([(far, C, V, bias), (X, C, V, bias)])


def test_layers_of_one_kind_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    sums = recorded(monkeypatch, grouped, "sum_layers_kernel")
    assert_products([layer_of(VectorsCase(20 + D, D, M)) for D, M in ((3, 2), (17, 70), (60, 5), (130, 3), (250, 1))])
    assert len(launches) == len(sums) == 1


def test_any_number_of_layers_shares_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    for count in (2, 33):
        launches.clear()
        assert_products([layer_of(VectorsCase(1 + i % 7, 1 + i % 15, 1 + i % 3), i) for i in range(count)], count)
        assert len(launches) == 1


def test_a_layer_with_many_rows_is_shared_out_over_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    layers = [layer_of(VectorsCase(N, D, 5)) for N, D in ((1700, 9), (40, 9), (1100, 20))]
    first = assert_products(layers)
    tiles = launches[0].arguments[3]
    assert tiles > max(len(layers), launches[0].grid[0])
    assert all(map(torch.equal, products(layers), first))


def test_what_a_launch_says_of_alignment_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    cases = [
        VectorsCase(40, D, M, torch.float32, bias) for D in (16, 20, 64) for M in (16, 7) for bias in (False, True)
    ]
    layers = [layer_of(case) for case in cases]
    # Addresses, strides or vectors that are not aligned where the sizes are.
    X, C, V, bias = layers[0]
    layers += [(laid_out(X, "offset"), C, V, bias), (X, laid_out(C, "offset"), V, bias)]
    layers += [(X, C, torch.cat([V.flatten()[:1], V.flatten()])[1:].view(V.shape), bias)]
    assert_products(layers)
    for claim, names in (("X_ALIGNED", ("X", "V", "D", "x_row")), ("C_ALIGNED", ("C", "F", "M", "c_row"))):
        columns = [grouped.FIELDS.index(name) for name in names]
        for entry in launches:
            is_multiple = (entry.arguments[0][:, columns] % 16 == 0).all(1)
            assert (is_multiple == entry.constants[claim]).all(), claim
        assert {entry.constants[claim] for entry in launches} == {False, True}


def test_the_same_list_has_one_table_and_the_same_bits() -> None:
    layers = [layer_of(VectorsCase(700, 20, 9)), layer_of(VectorsCase(63, 9, 5))]
    first = assert_products(layers)
    tables = list(grouped._TABLES.values())
    assert len(tables) == 1
    assert all(map(torch.equal, products(layers), first))
    assert list(grouped._TABLES.values()) == tables


def test_new_contents_at_the_same_address_are_seen() -> None:
    layers = [layer_of(VectorsCase(70, 20, 9)), layer_of(VectorsCase(63, 9, 5))]
    assert_products(layers)
    for position in (2, 1, 0):
        for layer in layers:
            layer[position].copy_(random_tensor(*layer[position].shape, seed=7 + position))
        assert_products(layers, position)
    assert len(grouped._TABLES) == 1


def test_other_tensors_of_the_same_shapes_are_seen() -> None:
    kept = []
    for seed in range(4):
        layers = [layer_of(VectorsCase(70, 20, 9), seed), layer_of(VectorsCase(63, 9, 5), seed)]
        kept.append((layers, assert_products(layers, seed)))
    for layers, results in kept:
        assert all(map(torch.equal, products(layers), results))


def test_vectors_that_have_to_be_copied_are_seen_anew_every_time() -> None:
    X, C, _, bias = layer_of(VectorsCase(70, 20, 9, K=2))
    for seed in range(4):
        assert_products([(X, C, random_tensor(2, 20, 9, seed=seed).mT, bias)], seed)


def test_a_view_of_other_strides_or_shape_at_the_same_address_has_a_table_of_its_own() -> None:
    X, C, V, bias = layer_of(VectorsCase(64, 16, 16))
    views = [(X, C), (X[::2], C[::2]), (X[:32], C[:32]), (X[::2], C[:32]), (X.view(128, 8)[:64], C)]
    for index, (x, c) in enumerate(views):
        assert_products([(x, c, V.flatten()[: 16 * x.shape[1]].view(16, -1), bias)], index)
    assert_products([(X, C[:, :8], V[:8], bias)])
    assert_products([(X[:, :15], C, V, True)])


def test_more_lists_than_tables_are_kept_for_agree_with_the_reference() -> None:
    lists = [[layer_of(VectorsCase(5, 3, 2), seed)] for seed in range(grouped.MOST_TABLES + 3)]
    for index, layers in enumerate(lists):
        assert_products(layers, index)
        assert len(grouped._TABLES) <= grouped.MOST_TABLES
    for index in (0, 1, len(lists) - 1):
        assert_products(lists[index], index)


@pytest.mark.parametrize("scale", [200.0, 1e-4], ids=["above", "below"])
def test_a_product_that_leaves_the_range_of_float16_is_right(scale: float) -> None:
    layers = []
    for D in (20, 300):
        X, C = (scale * tensor for tensor in RowsCase(130, D, 6).tensors())
        layers.append((X.half(), C.half(), random_vectors(6, D).float(), False))
    assert_products(layers)


def test_medium_precision_rounds_the_other_factor_and_no_more() -> None:
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        layers = [layer_of(VectorsCase(100, D, 6, dtype, bias)) for D in (16, 100) for bias in (False, True)]
        with triton_options(precision="medium"):
            results = products(layers)
        for SV, (X, C, V, bias) in zip(results, layers, strict=True):
            error = (SV.double() - reference.splitting_matvec(*doubles(X, C, V), bias)).abs()
            assert (error <= rounding_bound(X, C, V, bias, unit)).all(), (dtype, X.shape, bias)
            assert error.max() > 0


def test_sums_are_in_a_fixed_order_even_where_atomic_ones_are_allowed() -> None:
    layers = [layer_of(VectorsCase(1100, 20, 9)), layer_of(VectorsCase(30, 300, 4))]
    with triton_options(atomic=True):
        results = assert_products(layers)
    assert all(map(torch.equal, products(layers), results))


@pytest.mark.parametrize("fastest", [0, 1])
def test_tuning_times_every_configuration_once_and_keeps_the_fastest(
    fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def seconds(call: object) -> float:
        timed.append(call())
        return float(len(timed) != 1 + fastest)

    monkeypatch.setattr(launch, "_TUNED", {})
    monkeypatch.setattr(launch, "_seconds", seconds)
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    layers = [layer_of(VectorsCase(300, 20, 9)), layer_of(VectorsCase(63, 9, 5))]
    with triton_options(tune=True):
        first = assert_products(layers)
        assert all(map(torch.equal, assert_products(layers), first))
    assert len(timed) == 2
    tiles = [entry.constants["TILES"] for entry in launches]
    assert tiles[0] != tiles[1]
    assert tiles[2:] == [tiles[fastest]] * 2


@every_vendor
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_for_a_gpu_agrees_with_the_reference(
    vendor: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = pretend(monkeypatch, vendor)
    candidates, launches = grouped.configs, recorded(monkeypatch, grouped, "grouped_kernel")
    for is_aligned, (dtype, precision) in product([False, True], ARITHMETIC[arithmetic]):
        for config in candidates(gpu, product_form(dtype, precision, gpu), dtype, is_aligned):
            monkeypatch.setattr(grouped, "configs", lambda *_, config=config: [config])
            # One tile and a bit in every direction, for every width.
            less = 0 if is_aligned else 3
            layers = [
                layer_of(VectorsCase(rows + 3, width - less, 16, dtype, K=filters // 16 + 1))
                for width, (rows, filters) in zip(grouped.WIDTHS, config.tiles, strict=True)
            ]
            layers.append(layer_of(VectorsCase(9 * config.tiles[0][0] + 1, 16 - less, 16, dtype, K=2)))
            with triton_options(precision=precision):
                assert_products(layers, config)
            assert launches[-1].constants["X_ALIGNED"] == is_aligned


@every_vendor
@every_dtype
def test_there_is_a_configuration_for_every_list_on_every_gpu(
    vendor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = pretend(monkeypatch, vendor)
    for precision in ("highest", "high", "medium"):
        for is_aligned in (False, True):
            assert grouped.configs(gpu, product_form(dtype, precision, gpu), dtype, is_aligned), (precision, is_aligned)
    assert_products([layer_of(VectorsCase(40, 20, 9, dtype)), layer_of(VectorsCase(40, 64, 16, dtype))])


def test_wide_and_transposed_layers_go_through_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, wide = (
        recorded(monkeypatch, pointwise, "fused_kernel"),
        recorded(monkeypatch, pointwise_wide, "project_kernel"),
    )
    together = recorded(monkeypatch, grouped, "grouped_kernel")
    X, C, V, bias = layer_of(VectorsCase(9, 4, 3))
    assert_products([(X, C, V, bias), (X.mT.contiguous().mT, C, V, bias), layer_of(VectorsCase(9, 260, 3))])
    assert (len(together), len(alone), len(wide)) == (1, 1, 1)
