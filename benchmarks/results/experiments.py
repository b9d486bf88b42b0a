"""The list of experiments, in the order of the page."""

from __future__ import annotations

from benchmarks.results import (
    convergence,
    digits_regrow,
    equal_compute,
    point_clouds,
    samples,
    separation,
    shapes,
    stuck,
    transformer,
)
from benchmarks.results.experiment import Experiment

_EVERY = (
    stuck.EXPERIMENT,
    separation.EXPERIMENT,
    samples.IMAGES,
    samples.CLOUDS,
    equal_compute.EXPERIMENT,
    shapes.EXPERIMENT,
    digits_regrow.EXPERIMENT,
    convergence.EXPERIMENT,
    point_clouds.EXPERIMENT,
    transformer.EXPERIMENT,
)
EXPERIMENTS: dict[str, Experiment] = {experiment.key: experiment for experiment in _EVERY}
