"""Makes the operators torch.ops.s3d_fast.*: their schemas, kernels, and what else PyTorch asks of an operator."""

from __future__ import annotations

import torch

from s3d_fast.backends import batching, derivatives, fakes, flops, implementations
from s3d_fast.backends.schemas import SCHEMAS

# Registrations end with the object that made them.
_LIBRARY = torch.library.Library("s3d_fast", "FRAGMENT")


def register() -> None:
    """Define every operator and register all but the kernels of the extension; once."""
    for schema in SCHEMAS:
        _LIBRARY.define(schema)
    fakes.register()
    implementations.register(_LIBRARY)
    derivatives.register(_LIBRARY)
    batching.register()
    flops.register()
