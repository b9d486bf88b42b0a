"""Settings that hold for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Triton's kernels run in its interpreter, which has to be settled before they are imported.
os.environ["TRITON_INTERPRET"] = "1"
# It computes with numpy, whose threads would wait for each other.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch

from s3d_fast.backends import extension

# The shapes here are small: handing work to a second thread costs more than it saves, and varies from run to run.
torch.set_num_threads(1)


@pytest.fixture(params=extension.module.available_isas() if extension.module else [], scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use one instruction set; memory that is not initialised holds NaN, so that an entry left out is noticed."""
    assert extension.module is not None
    best = extension.module.isa()
    extension.module.use_isa(request.param)
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)
    extension.module.use_isa(best)
