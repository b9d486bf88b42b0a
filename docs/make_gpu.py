"""Write the tables of kernels and models into the pages of docs/ about GPUs: python docs/make_gpu.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from marked import filled  # noqa: E402

from benchmarks import gpus, loops_table, roofline, scale  # noqa: E402
from s3d_fast.kernels import aot  # noqa: E402
from s3d_fast.kernels.compiled import Compiled  # noqa: E402


def documents() -> dict[Path, str]:
    """Return the text of the pages with up-to-date tables."""
    entries = json.loads((DOCS / "gpu.json").read_text())
    compiled = [Compiled(**entry) for entry in entries]
    record = roofline.load()
    before = json.loads(loops_table.RECORD.read_text())
    pages = {
        "gpu.md": {
            "summary": aot.summary(compiled),
            "conclusion": roofline.conclusion(record),
            "comparison": roofline.comparison(record),
            "constants": gpus.table(),
            "model": f"```\n{roofline.details(record)}\n```\n",
        },
        "compiled.md": {"compiled": aot.table(compiled)},
        "loops.md": {"loops": loops_table.tables(before, entries)},
        "scale.md": {"model": f"```\n{scale.report(record)}\n```\n"},
    }
    return {DOCS / name: filled(DOCS / name, parts) for name, parts in pages.items()}


if __name__ == "__main__":
    for page, text in documents().items():
        page.write_text(text)
