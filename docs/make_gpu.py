"""Write the tables of compiled kernels and models into docs/gpu.md and docs/scale.md: python docs/make_gpu.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from marked import filled  # noqa: E402

from benchmarks import roofline, scale  # noqa: E402
from s3d_fast.kernels import aot  # noqa: E402
from s3d_fast.kernels.compiled import Compiled  # noqa: E402


def documents() -> dict[Path, str]:
    """Return the text of both pages with up-to-date tables."""
    entries = json.loads((DOCS / "gpu.json").read_text())
    table = roofline.Table(DOCS / "gpu.json")
    model = roofline.report(table, ("fp32", "bf16"))
    parts = {"compiled": aot.table([Compiled(**entry) for entry in entries]), "model": f"```\n{model}\n```\n"}
    pages = {"gpu.md": parts, "scale.md": {"model": f"```\n{scale.report(table)}\n```\n"}}
    return {DOCS / name: filled(DOCS / name, parts) for name, parts in pages.items()}


if __name__ == "__main__":
    for page, text in documents().items():
        page.write_text(text)
