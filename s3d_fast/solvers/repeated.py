"""Steps of a solver that are alike, recorded as a CUDA graph and repeated without the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from s3d_fast.operators import SplittingOperator


def why_not_repeat(operators: Sequence[SplittingOperator]) -> str:
    """Return why the products of these operators cannot be recorded; empty if they can."""
    devices = {operator.device for operator in operators}
    if len(devices) > 1 or any(device.type != "cuda" for device in devices):
        return f"operators must be on one GPU, got {', '.join(sorted(map(str, devices)))}"
    for operator in operators:
        for term, _ in operator.weighted_terms():
            if term.provider is not None or not term.ONLY_LAUNCHES:
                return f"a product with {type(term).__name__} does more than launch kernels"
    return ""


class RepeatedStep:
    """Runs a step; where the same tensors come again, as a CUDA graph.

    The first step with some tensors runs as usual, which compiles kernels and makes their tables. The second is
    recorded, and repeated from then on. A step must not read a tensor on the host, nor depend on anything but the
    tensors given.
    """

    def __init__(self, is_recorded: bool) -> None:
        self._is_recorded = is_recorded
        self._objects: list[object] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: Callable[[], None], objects: Sequence[object]) -> None:
        """Take a step; `objects` hold all tensors that it uses, and are replaced if one of their tensors is."""
        if not self._is_recorded:
            step()
            return
        if len(objects) != len(self._objects) or any(a is not b for a, b in zip(objects, self._objects, strict=True)):
            self._objects, self._graph = list(objects), None
            step()
            return
        if self._graph is None:
            self._graph = _recorded(step)
            if self._graph is None:
                self._is_recorded = False
                step()
                return
        self._graph.replay()


def _recorded(step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Return the graph of a step, or None, with a warning, if it cannot be recorded; nothing is computed yet."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        # A recording that fails at its end leaves its own stream current.
        torch.cuda.set_stream(stream)
        warnings.warn(f"cuda_graph: steps are launched one by one: {error}", stacklevel=4)
        return None
    return graph
