"""The list of experiments, in the order of the page."""

from __future__ import annotations

from benchmarks.results import convergence, equal_compute, shapes
from benchmarks.results.experiment import Experiment

_EVERY = (
    equal_compute.EXPERIMENT,
    shapes.EXPERIMENT,
    convergence.EXPERIMENT,
)
EXPERIMENTS: dict[str, Experiment] = {experiment.key: experiment for experiment in _EVERY}
