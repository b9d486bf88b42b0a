"""Reports of runs: figures, the report of one run, and the comparison of several."""

from s3d_fast.records.record import PhaseRecord
from s3d_fast.records.run import Run, eigen_share, read_run
from s3d_fast.records.run_folder import read_spectra
from s3d_fast.report.comparison import comparison_table
from s3d_fast.report.demo_panels import demo_figure
from s3d_fast.report.drawing import require_matplotlib
from s3d_fast.report.html import write_comparison, write_report
from s3d_fast.report.rbf_panels import rbf_figure
from s3d_fast.report.theorem_panels import theorem_figure

__all__ = [
    "PhaseRecord",
    "Run",
    "comparison_table",
    "demo_figure",
    "eigen_share",
    "rbf_figure",
    "read_run",
    "read_spectra",
    "require_matplotlib",
    "theorem_figure",
    "write_comparison",
    "write_report",
]
