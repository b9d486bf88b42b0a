"""Completes the operators of the C++ extension: what PyTorch asks of an operator besides its kernel."""

from __future__ import annotations

import torch

from s3d_fast.backends import batching, derivatives, fakes, flops

# Registrations end with the object that made them.
_LIBRARY = torch.library.Library("s3d_fast", "FRAGMENT")


def register() -> None:
    """Register fake kernels, derivatives, batching rules and flop counts; once, when the extension is loaded."""
    fakes.register()
    derivatives.register(_LIBRARY)
    batching.register()
    flops.register()
