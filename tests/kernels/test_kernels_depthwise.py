"""S v of layers with depthwise stages by the Triton kernels: launches, chunks of images, and configurations.

That they agree with the reference is in `tests/backends/test_agreement.py`.
"""

from __future__ import annotations

import pytest
import torch

from s3d_fast.backends.choice import choose
from s3d_fast.kernels import depthwise, pointwise_wide
from s3d_fast.kernels.options import triton_options
from tests.backends.agreement import assert_agrees, depthwise_of
from tests.cases import HALVED, SAME, UNEVEN, DepthwiseCase
from tests.kernel_cases import every_vendor, pretend, recorded

# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poisoned")]

CASE = DepthwiseCase(5, 7, 6, 5, 9, (((3, 3), HALVED), ((2, 1), UNEVEN), ((3, 3), SAME)), bias=True, K=2)


def test_a_stage_is_a_pass_forth_and_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forth = recorded(monkeypatch, depthwise, "stage_forth_kernel")
    back = recorded(monkeypatch, depthwise, "stage_back_kernel")
    assert_agrees(choose("triton"), "depthwise_matvec", **depthwise_of(CASE))
    assert [entry.arguments["LAST"] for entry in forth] == [False, False, True]
    # Back at the first stage, the result is no longer a map but a factor of the last product.
    assert [entry.arguments["out"].dim() for entry in back] == [2, 2, 3]
    assert all(entry.arguments["out"] is entry.arguments["maps"] for entry in back[:-1])


@pytest.mark.parametrize("images", [1, 2, 5])
def test_chunks_of_images_agree(monkeypatch: pytest.MonkeyPatch, images: int) -> None:
    launches = recorded(monkeypatch, pointwise_wide, "project_kernel")
    arguments = depthwise_of(CASE)
    sizes = [own.shape[1] * own.shape[2] for own in arguments["C"]]
    per_image = 32 * 8 * (sum(sizes) + sizes[0])
    with triton_options(scratch_bytes=images * per_image):
        assert_agrees(choose("triton"), "depthwise_matvec", **arguments)
    assert len(launches) == -(-5 // images)


@every_vendor
def test_every_gpus_configuration_agrees(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    pretend(monkeypatch, vendor)
    for dtype in (torch.float32, torch.bfloat16):
        case = DepthwiseCase(2, 5, 6, 17, 33, (((3, 3), HALVED),), dtype, bias=True)
        assert_agrees(choose("triton"), "depthwise_matvec", label=vendor, **depthwise_of(case))
