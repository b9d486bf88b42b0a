"""The list of experiments, in the order of the page."""

from __future__ import annotations

from benchmarks.results import equal_compute, separation, stuck, transformer
from benchmarks.results.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.key: experiment
    for experiment in (stuck.EXPERIMENT, separation.EXPERIMENT, equal_compute.EXPERIMENT, transformer.EXPERIMENT)
}
