"""The rows of experiment D: ways to come to a network at equal compute, the most important first."""

from __future__ import annotations

from typing import Any

from benchmarks.results.rows import Row

RATES = (0.1, 0.2, 0.4)
# Some rows of one seed show that the best rate lies between these.
OUTER_RATES, OUTER_ROWS, OUTER_SEEDS = (0.05, 0.8), ("s2d", "net2net", "new", "uniform"), 1
SEEDS = 8


def selected(m: int | str = 2, c: float = 1.0, by: str = "fraction") -> dict[str, Any]:
    """Return settings of `Growing`: options of `select`, and whether filters or MACs limit the growth."""
    return {"select": {"m": m, "c": c, "by": by}}


S2D, NEW = selected(), {"splits": False, "new": {"kind": "random"}, **selected()}
# The most important come first.
ROWS = (
    Row("s2d", "S2D, exact S, 0.3 relative", S2D),
    Row("new", "new filters, random", NEW),
    Row("s2d scratch", "scratch, widths of S2D", like="s2d"),
    Row("new scratch", "scratch, widths of new filters", like="new"),
    Row("s2d paper", "S2D, the paper's S, 0.3 relative", {**S2D, "curvature": "paper"}),
    Row("net2net", "random splits (net2net), 0.3 relative", {"plan": "random splits", **S2D}),
    Row("s3d", "S3D, m = 2, c = 1.3", selected(2, 1.3)),
    Row("s3d scratch", "scratch, widths of S3D, m = 2, c = 1.3", like="s3d"),
    Row("new macs", "new filters by gradient per MAC", {**NEW, **selected(by="macs")}),
    Row("new macs scratch", "scratch, widths of new filters per MAC", like="new macs"),
    Row("firefly", "Firefly", {**NEW, "new": {"kind": "firefly"}}),
    Row("firefly scratch", "scratch, widths of Firefly", like="firefly"),
    Row("uniform", "scratch, uniform blocks"),
    Row("both", "S3D and new filters compete", {"new": {"kind": "random"}, **selected(2, 1.3)}),
    Row("s2d 8000", "S2D, exact S of all 8,000 images", {**S2D, "samples": 8000}),
    Row("s2d macs", "S2D, exact S, gain per MAC", selected(by="macs")),
    Row("s3d c3", "S3D, m = 2, c = 3", selected(2, 3.0)),
    Row("s3d m3 c3", "S3D, m = 3, c = 3", selected(3, 3.0, "filters")),
    Row("s3d knapsack", "S3D, knapsack, c = 3", selected("knapsack", 3.0, "filters")),
    Row("gradmax", "GradMax", {**NEW, "new": {"kind": "gradmax"}}),
    Row("new alike", "new filters, all layers alike", {"plan": "alike", **S2D}),
    Row("s2d 1", "S2D, exact S, 1.0 relative", {**S2D, "eps": "relative:1"}),
    Row("s2d 0.01", "S2D, exact S, 0.01", {**S2D, "eps": 0.01}),
    Row("net2net 0.01", "random splits (net2net), 0.01", {"plan": "random splits", **S2D, "eps": 0.01}),
    Row(
        "regrow",
        "prune and regrow",
        {"new": {"kind": "random"}, "removals": True, **selected(2, 1.3, "filters")},
    ),
    Row("l1", "pruned by L1 norms", {"prune": "l1"}),
    Row("bn", "pruned by BatchNorm scales", {"prune": "bn"}),
    Row("s2d phases", "S2D, a cosine per phase", {**S2D, "schedule": "phases"}),
    Row("new phases", "new filters, a cosine per phase", {**NEW, "schedule": "phases"}),
    Row("s2d reset", "S2D, optimizer state reset", {**S2D, "optimizer": "reset"}),
    Row("new reset", "new filters, optimizer state reset", {**NEW, "optimizer": "reset"}),
    Row("s2d recalibrated", "S2D, BatchNorm recalibrated", {**S2D, "batchnorm": "recalibrated"}),
    Row("new recalibrated", "new filters, BatchNorm recalibrated", {**NEW, "batchnorm": "recalibrated"}),
    Row("s2d scratch epochs", "scratch, widths of S2D, as many epochs", {"equal": "epochs"}, like="s2d"),
)
