"""matplotlib on demand, for the pictures that are not part of a report."""

from __future__ import annotations

from typing import Any


def require_matplotlib() -> Any:
    """Return matplotlib.pyplot, set to draw into files.

    Raises:
        RuntimeError: matplotlib is not installed; the message says how to install it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("figures need matplotlib, which is not installed: pip install 's3d_fast[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
