"""Count the calls between modules of s3d_fast in one splitting step: python -m benchmarks.calls.

The network is MobileNetV1 with 32 filters in every layer, at the size of CIFAR's images. A call counts if a function
of one module calls a function of another; calls inside a module, and of other packages, do not.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import torch
import torch.nn.functional as F

import s3d_fast as s3d
from s3d_fast.base.tables import text_table
from s3d_fast.models import MobileNetV1

ROWS = 20


def main() -> None:
    """Print the total, and the pairs of modules with the most calls."""
    torch.manual_seed(0)
    model = MobileNetV1((32,) * 14, 100, stem_stride=1)
    batch = torch.randn(16, 3, 32, 32), torch.randint(100, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, called = (str(one.f_globals.get("__name__", "")) for one in (frame.f_back, frame))
        if caller != called and caller.startswith("s3d_fast.") and called.startswith("s3d_fast."):
            calls[caller.removeprefix("s3d_fast."), called.removeprefix("s3d_fast.")] += 1

    sys.setprofile(count)
    graph = s3d.trace(model, batch[0][:2])
    operators = s3d.capture(model, F.cross_entropy, [batch], graph)
    plan = s3d.select(s3d.extremal_eigenpairs(operators, tol=1e-2), graph, m=2, c=1.3, fraction=0.35)
    s3d.apply_splits(model, plan, 0.01, optimizer)
    sys.setprofile(None)
    most = [[caller, called, str(number)] for (caller, called), number in calls.most_common(ROWS)]
    print(text_table([["caller", "called", "calls"], *most, ["all", "", str(sum(calls.values()))]]))


if __name__ == "__main__":
    main()
