"""The paper's experiments, and some of our own, each as a short typed configuration that `s3d-fast grow` runs."""

from __future__ import annotations

from s3d_fast.base import require
from s3d_fast.recipes import (
    cifar100_mobilenet,
    digits,
    imagenet_mobilenet,
    modelnet40_dgcnn,
    modelnet40_pointnet,
    modelnet40_pointnet2,
)
from s3d_fast.recipes.recipe import Recipe

# By name, then by preset: the whole experiment first, then one scaled down to two CPU cores.
RECIPES: dict[str, dict[str, Recipe]] = {
    digits.FULL.name: {"full": digits.FULL, "cpu": digits.CPU},
    cifar100_mobilenet.PAPER.name: {
        "paper": cifar100_mobilenet.PAPER,
        "cpu": cifar100_mobilenet.CPU,
        "energy": cifar100_mobilenet.ENERGY,
        "energy-cpu": cifar100_mobilenet.ENERGY_CPU,
    },
    **{
        module.PAPER.name: {"paper": module.PAPER, "cpu": module.CPU}
        for module in (modelnet40_dgcnn, imagenet_mobilenet)
    },
    # The paper compares with these networks, but does not grow them.
    **{
        module.FULL.name: {"full": module.FULL, "cpu": module.CPU}
        for module in (modelnet40_pointnet, modelnet40_pointnet2)
    },
}
PRESETS = ("paper", "full", "cpu", "energy", "energy-cpu")


def recipe(name: str, preset: str | None = None) -> Recipe:
    """Return a recipe by name: the whole experiment, or scaled down to two CPU cores (preset "cpu").

    Args:
        name: a name in `RECIPES`.
        preset: "paper" for the paper's numbers, "full" for experiments that the paper does not have, or "cpu". By
            default the whole experiment. MobileNet on CIFAR-100 also has "energy", the paper's energy-aware setting
            (Figure 3(b)), and "energy-cpu".

    Raises:
        ValueError: there is no such recipe or preset.
    """
    require.choice("recipe", name, tuple(RECIPES))
    if preset is None:
        return next(iter(RECIPES[name].values()))
    require.choice(f"preset of {name}", preset, tuple(RECIPES[name]))
    return RECIPES[name][preset]


def preset_for(name: str, has_gpu: bool) -> str:
    """Return the preset that fits a machine: the whole experiment with a GPU, "cpu" without."""
    return next(iter(RECIPES[name])) if has_gpu else "cpu"


def preset_today(name: str, preset: str) -> str:
    """Return the name of a preset that a run has recorded: that of digits was once called the paper's."""
    return "full" if (name, preset) == (digits.FULL.name, "paper") else preset


__all__ = ["PRESETS", "RECIPES", "Recipe", "preset_for", "recipe"]
