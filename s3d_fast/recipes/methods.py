"""The methods of a recipe's runs: ways to grow, ways to prune, and networks that keep their size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """One way to come to a network.

    Attributes:
        summary: what it does.
        kind: "grow", from the recipe's small widths; "prune", from its full widths; or "train", networks that keep
            their sizes.
        options: arguments of `Grower`.
    """

    summary: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _adding(kind: str) -> dict[str, Any]:
    return {"splits": False, "new_filters": {"kind": kind}}


METHODS: dict[str, Method] = {
    "s3d": Method("signed splits along eigenvectors, with the recipe's m and c", "grow"),
    "s2d": Method("positive splits along eigenvectors, with c = 1", "grow"),
    "net2net": Method("random neurons, split along random directions", "grow"),
    "new": Method("new filters in random directions, read with weight 0", "grow", _adding("random")),
    "firefly": Method("the best of many new filters, improved by gradient ascent", "grow", _adding("firefly")),
    "gradmax": Method("new filters along singular vectors of the gradient", "grow", _adding("gradmax")),
    "regrow": Method(
        "splits and new filters, paid for by the removal of neurons that matter least",
        "grow",
        {"new_filters": {"kind": "random"}, "removals": True},
    ),
    "l1": Method("removes filters with the smallest L1 norms", "prune"),
    "bn": Method("network slimming: removes channels with the smallest BatchNorm scales, under a penalty", "prune"),
    "morphnet": Method("removes channels by scale per MAC, under a penalty by MACs, then widens all layers", "prune"),
    "amc": Method(
        "an agent (actor and critic) learns the share that every layer keeps, with the loss as reward", "prune"
    ),
    "full": Method("the recipe's full widths, times --width-multiplier, trained from scratch", "train"),
    "uniform": Method("networks of the same sizes, all layers widened by one factor, trained from scratch", "train"),
    "scratch": Method("the grown networks of the run --like, trained from scratch", "train"),
}
