"""What runs look like: figures, the report of a run, and the comparison of several."""

from s3d_fast.report.comparison import comparison_table
from s3d_fast.report.drawing import require_matplotlib
from s3d_fast.report.html import write_comparison, write_report
from s3d_fast.report.rbf import rbf_figure
from s3d_fast.report.runs import PhaseRecord, Run, eigen_share, read_run, read_spectra

__all__ = [
    "PhaseRecord",
    "Run",
    "comparison_table",
    "eigen_share",
    "rbf_figure",
    "read_run",
    "read_spectra",
    "require_matplotlib",
    "write_comparison",
    "write_report",
]
