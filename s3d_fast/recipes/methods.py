"""The methods of a recipe's runs: ways to grow, ways to prune, and networks that keep their size."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from s3d_fast.recipes.recipe import Recipe


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


# What regrow does if it is not told: the factor of MACs per step, and a step that is large enough for removals to pay.
# By a step of 0.01 a split or a new filter gains so little that nothing would ever be removed for it.
REGROW: dict[str, Any] = {"growth": 1.5, "eps": "relative:0.3"}

METHODS: dict[str, Method] = {
    "s3d": Method("signed splits along eigenvectors, with the recipe's m and c", "grow"),
    "s2d": Method("positive splits along eigenvectors, with c = 1", "grow"),
    "net2net": Method("random neurons, split along random directions", "grow"),
    "new": Method("new filters in random directions, read with weight 0", "grow", _adding("random")),
    "firefly": Method("the best of many new filters, improved by gradient ascent", "grow", _adding("firefly")),
    "gradmax": Method("new filters along singular vectors of the gradient", "grow", _adding("gradmax")),
    "regrow": Method(
        "splits and new filters, paid for by the removal of neurons that matter least; by default steps of 1.5 times "
        "the MACs, and eps relative:0.3",
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


def as_method(recipe: Recipe, method: str, given: Collection[str] = ()) -> Recipe:
    """Return a recipe with the settings that a method has of its own, so that a run records what it used.

    Args:
        recipe: with the settings of its user.
        method: one of `METHODS`.
        given: the settings that the user has given, which stay.
    """
    if method in ("s2d", "net2net"):
        return recipe.with_settings({"m": 2, "c": 1.0})
    if method != "regrow":
        return recipe
    own = {} if "eps" in given else {"eps": REGROW["eps"]}
    return recipe.with_settings(own if recipe.has_budget else {**own, "growth": REGROW["growth"]})
