"""S v of lists of layers by the Triton kernels: launches, tables, alignment, precision, tuning and configurations.

That they agree with the reference is in `tests/backends/test_agreement.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from s3d_fast.backends.choice import choose
from s3d_fast.kernels import configs, grouped, launch, pointwise, pointwise_wide, tables
from s3d_fast.kernels.aligned import is_near
from s3d_fast.kernels.compiled import TARGETS
from s3d_fast.kernels.device import INTERPRETER
from s3d_fast.kernels.options import triton_options
from s3d_fast.kernels.products import product_form
from s3d_fast.kernels.tiles import GROUPED, WIDTHS
from s3d_fast.maths import reference
from tests.backends.agreement import assert_agrees
from tests.cases import RowsCase, doubles, laid_out, random_tensor, random_vectors
from tests.kernel_cases import (
    ARITHMETIC,
    every_dtype,
    every_vendor,
    pretend,
    recorded,
    rounding_bound,
    with_strides,
)

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned", "no_plans")]

Layer = tuple[Tensor, Tensor, Tensor, bool]


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without tables of earlier tests."""
    monkeypatch.setattr(grouped, "_TABLES", tables.Tables())


def layer_of(case: RowsCase, seed: int = 0) -> Layer:
    return (*case.tensors(seed), case.vectors(), case.bias)


def arguments_of(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the arguments of a grouped product, one entry for every layer."""
    X, C, V, bias = map(list, zip(*layers, strict=True))
    return {"X": X, "C": C, "V": V, "bias": bias}


def products(layers: Sequence[Layer]) -> list[Tensor]:
    """Return S v of every layer, in one call of the Triton backend."""
    return choose("triton").splitting_matvec_grouped(**arguments_of(layers))


def assert_products(layers: Sequence[Layer], label: object = "") -> list[Tensor]:
    """Check S v of every layer against the reference in float64, and that the arguments stay as they were."""
    return assert_agrees(choose("triton"), "splitting_matvec_grouped", label=label, **arguments_of(layers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=["fp16", "fp32", "fp64"])
def test_rows_may_be_far_apart(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[grouped.Layer] = []
    make_table = grouped.make_table
    monkeypatch.setattr(grouped, "make_table", lambda layers, *rest: listed.extend(layers) or make_table(layers, *rest))
    # The last row of a tile is more than 2^31 entries behind the first one.
    X, C, V, bias = layer_of(RowsCase(256, 3, 2, dtype))
    far, far_too = (with_strides(own, (2**31 // 255 + 1, 1)) for own in (X, C))
    by_columns = with_strides(C, (1, 256))
    assert_products([(far, C, V, bias), (X, far_too, V, bias), (X, C, V, bias), (far, by_columns, V, bias)])
    assert listed
    assert all(is_near(layer.X, layer.C) and layer.C.stride(1) == 1 for layer in listed)


def test_layers_of_one_kind_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    sums = recorded(monkeypatch, grouped, "sum_layers_kernel")
    assert_products([layer_of(RowsCase(20 + D, D, M)) for D, M in ((3, 2), (17, 70), (60, 5), (130, 3), (250, 1))])
    assert len(launches) == len(sums) == 1


def test_any_number_of_layers_shares_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    for count in (2, 33):
        launches.clear()
        assert_products([layer_of(RowsCase(1 + i % 7, 1 + i % 15, 1 + i % 3), i) for i in range(count)], count)
        assert len(launches) == 1


def test_a_layer_with_many_rows_is_shared_out_over_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    layers = [layer_of(RowsCase(N, D, 5)) for N, D in ((1700, 9), (40, 9), (1100, 20))]
    first = assert_products(layers)
    assert launches[0].grid[0] > len(layers)
    assert all(map(torch.equal, products(layers), first))


def test_rows_have_no_more_slices_than_fill_the_processors() -> None:
    # Every slice writes sums: MobileNetV1 at ImageNet size had 82 MB of them on H100, for 145 MB of rows and C.
    device = TARGETS["sm_90"].device
    config = configs.grouped(device, "bf16x2", torch.bfloat16)[0]
    layers = []
    for N, D, M in ((100352, 64, 128), (100352, 128, 128), (25088, 128, 256), (25088, 256, 256), (6272, 256, 512)):
        X, C = (torch.empty(N, width, dtype=torch.bfloat16, device="meta") for width in (D, M))
        layers.append(grouped.Layer(X[None], C, torch.empty(M, D, device="meta"), False))
    table = grouped.make_table(layers, "bf16x2", config, device)
    assert launch.fullness(table.tiles, config.per_processor * device.processors) >= launch.FULL_ENOUGH
    assert table.tiles <= 3 * config.per_processor * device.processors
    assert 4 * table.partial_size < 40e6


def test_what_a_launch_says_of_alignment_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded(monkeypatch, grouped, "grouped_kernel")
    cases = [RowsCase(40, D, M, torch.float32, bias) for D in (16, 20, 64) for M in (16, 7) for bias in (False, True)]
    layers = [layer_of(case) for case in cases]
    # Addresses, strides or vectors that are not aligned where the sizes are.
    X, C, V, bias = layers[0]
    layers += [(laid_out(X, "offset"), C, V, bias), (X, laid_out(C, "offset"), V, bias)]
    layers += [(X, C, torch.cat([V.flatten()[:1], V.flatten()])[1:].view(V.shape), bias)]
    assert_products(layers)
    columns = [grouped.FIELDS.index(name) for name in ("X", "D", "x_row", "C", "F", "M", "c_row")]
    for entry in launches:
        is_multiple = (entry.arguments["table"][:, columns] % 16 == 0).all(1)
        assert (is_multiple == entry.arguments["WHOLE"]).all()
    assert {entry.arguments["WHOLE"] for entry in launches} == {False, True}


def test_the_same_list_has_one_table_and_the_same_bits() -> None:
    layers = [layer_of(RowsCase(700, 20, 9)), layer_of(RowsCase(63, 9, 5))]
    first = assert_products(layers)
    made = list(grouped._TABLES.recent.values())
    assert len(made) == 1
    assert all(map(torch.equal, products(layers), first))
    assert list(grouped._TABLES.recent.values()) == made


def test_new_contents_at_the_same_address_are_seen() -> None:
    layers = [layer_of(RowsCase(70, 20, 9)), layer_of(RowsCase(63, 9, 5))]
    assert_products(layers)
    for position in (2, 1, 0):
        for layer in layers:
            layer[position].copy_(random_tensor(*layer[position].shape, seed=7 + position))
        assert_products(layers, position)
    assert len(grouped._TABLES.recent) == 1


def test_other_tensors_of_the_same_shapes_are_seen() -> None:
    kept = []
    for seed in range(4):
        layers = [layer_of(RowsCase(70, 20, 9), seed), layer_of(RowsCase(63, 9, 5), seed)]
        kept.append((layers, assert_products(layers, seed)))
    for layers, results in kept:
        assert all(map(torch.equal, products(layers), results))


def test_vectors_that_have_to_be_copied_are_seen_anew_every_time() -> None:
    X, C, _, bias = layer_of(RowsCase(70, 20, 9, K=2))
    for seed in range(4):
        assert_products([(X, C, random_tensor(2, 20, 9, seed=seed).mT, bias)], seed)


def test_a_view_of_other_strides_or_shape_at_the_same_address_has_a_table_of_its_own() -> None:
    X, C, V, bias = layer_of(RowsCase(64, 16, 16))
    views = [(X, C), (X[::2], C[::2]), (X[:32], C[:32]), (X[::2], C[:32]), (X.view(128, 8)[:64], C)]
    for index, (x, c) in enumerate(views):
        assert_products([(x, c, V.flatten()[: 16 * x.shape[1]].view(16, -1), bias)], index)
    assert_products([(X, C[:, :8], V[:8], bias)])
    assert_products([(X[:, :15], C, V, True)])


def test_more_lists_than_tables_are_kept_for_agree_with_the_reference() -> None:
    lists = [[layer_of(RowsCase(5, 3, 2), seed)] for seed in range(tables.MOST_TABLES + 3)]
    for index, layers in enumerate(lists):
        assert_products(layers, index)
        assert len(grouped._TABLES.recent) <= tables.MOST_TABLES
    for index in (0, 1, len(lists) - 1):
        assert_products(lists[index], index)


@pytest.mark.parametrize("scale", [200.0, 1e-4], ids=["above", "below"])
def test_a_product_that_leaves_the_range_of_float16_is_right(scale: float) -> None:
    layers = []
    for D in (20, 300):
        X, C = (scale * tensor for tensor in RowsCase(130, D, 6).tensors())
        layers.append((X.half(), C.half(), random_vectors(6, D).float(), False))
    assert_products(layers)


def test_medium_precision_rounds_to_bfloat16_and_no_more() -> None:
    # Rows that are not bfloat16 are rounded, too.
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-7), (torch.float32, 2.0**-7)):
        layers = [layer_of(RowsCase(100, D, 6, dtype, bias)) for D in (16, 100) for bias in (False, True)]
        with triton_options(precision="medium"):
            results = products(layers)
        for SV, (X, C, V, bias) in zip(results, layers, strict=True):
            error = (SV.double() - reference.splitting_matvec(*doubles(X, C, V), bias)).abs()
            assert (error <= rounding_bound(X, C, V, bias, unit)).all(), (dtype, X.shape, bias)
            assert error.max() > 0


def test_sums_are_in_a_fixed_order_even_where_atomic_ones_are_allowed() -> None:
    layers = [layer_of(RowsCase(1100, 20, 9)), layer_of(RowsCase(30, 300, 4))]
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
    layers = [layer_of(RowsCase(300, 20, 9)), layer_of(RowsCase(63, 9, 5))]
    with triton_options(tune=True):
        first = assert_products(layers)
        assert all(map(torch.equal, assert_products(layers), first))
    assert len(timed) == 2
    tiles = [entry.arguments["TILES"] for entry in launches]
    assert tiles[0] != tiles[1]
    assert tiles[2:] == [tiles[fastest]] * 2


@every_vendor
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_for_a_gpu_agrees_with_the_reference(
    vendor: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = pretend(monkeypatch, vendor)
    candidates, launches = configs.grouped, recorded(monkeypatch, grouped, "grouped_kernel")
    ((dtype, precision),) = ARITHMETIC[arithmetic]
    form = product_form(dtype, precision, gpu)
    for is_aligned, has_few_filters in ((False, False), (True, False), (True, True)):
        for config in candidates(gpu, form, dtype, is_aligned, has_few_filters):
            monkeypatch.setattr(configs, "grouped", lambda *_, config=config: [config])
            # One tile and a bit in every direction, for every width.
            less = 0 if is_aligned else 3
            layers = [
                layer_of(RowsCase(rows + 3, width - less, 16, dtype, K=filters // 16 + 1))
                for width, (rows, filters, *_) in zip(WIDTHS, config.tiles, strict=False)
            ]
            layers.append(layer_of(RowsCase(9 * config.tiles[0][0] + 1, 16 - less, 16, dtype, K=2)))
            with triton_options(precision=precision):
                assert_products(layers, config)
            # On tensor cores, rows that are not aligned are copied.
            assert launches[-1].arguments["WHOLE"] == (is_aligned or form != "ieee")


@every_vendor
@every_dtype
def test_there_is_a_configuration_for_every_list_on_every_gpu(
    vendor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = pretend(monkeypatch, vendor)
    for precision in ("highest", "high", "medium"):
        form = product_form(dtype, precision, gpu)
        assert all(configs.grouped(gpu, form, dtype, is_aligned) for is_aligned in (False, True)), precision
    assert_products([layer_of(RowsCase(40, 20, 9, dtype)), layer_of(RowsCase(40, 64, 16, dtype))])


def test_wide_and_transposed_layers_go_through_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, wide = (
        recorded(monkeypatch, pointwise, "fused_kernel"),
        recorded(monkeypatch, pointwise_wide, "project_kernel"),
    )
    together = recorded(monkeypatch, grouped, "grouped_kernel")
    X, C, V, bias = layer_of(RowsCase(9, 4, 3))
    assert_products([(X, C, V, bias), (X.mT.contiguous().mT, C, V, bias), layer_of(RowsCase(9, 260, 3))])
    assert (len(together), len(alone), len(wide)) == (1, 1, 1)


class Cuda:
    """CPU tensors that say they are on a GPU, and a stream that may be capturing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        self.device = torch.device("cuda", 0)

    def table_of(self, layers: Sequence[Layer]) -> grouped.Table:
        """Return the table of these layers, as if they were on the GPU."""
        members = [grouped.Layer(X[None], C, V, bias) for X, C, V, bias in layers]
        config = GROUPED["interpreter", "fp64"][0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped, "on_device", lambda rows, where: torch.tensor(rows))
            return grouped._table(members, "ieee", config, INTERPRETER, self.device)


def test_a_graph_captures_what_another_stream_has_warmed_up_and_keeps_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    lists = [[layer_of(RowsCase(5, 3, 2), seed)] for seed in range(tables.MOST_TABLES + 2)]
    cuda.is_capturing = True
    with pytest.raises(RuntimeError, match="once with these tensors before a CUDA graph captures it"):
        cuda.table_of(lists[0])
    cuda.is_capturing = False
    warm = cuda.table_of(lists[0])
    cuda.is_capturing = True
    assert cuda.table_of(lists[0]) is warm
    cuda.is_capturing = False
    for layers in lists[1:]:
        cuda.table_of(layers)
    assert cuda.table_of(lists[0]) is warm
    assert len(grouped._TABLES.recent) <= tables.MOST_TABLES
