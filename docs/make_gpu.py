"""Put what the compiler made of the kernels, and the roofline model, into docs/gpu.md: python docs/make_gpu.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from benchmarks import roofline  # noqa: E402
from s3d_fast.kernels import aot  # noqa: E402
from s3d_fast.kernels.compiled import Compiled  # noqa: E402


def document() -> str:
    """Return the text of docs/gpu.md with its two tables as they should be."""
    entries = json.loads((DOCS / "gpu.json").read_text())
    model = roofline.report(roofline.Table(DOCS / "gpu.json"), ("fp32", "bf16"))
    parts = {"compiled": aot.table([Compiled(**entry) for entry in entries]), "model": f"```\n{model}\n```\n"}
    text = (DOCS / "gpu.md").read_text()
    for name, part in parts.items():
        text = re.sub(
            f"(<!-- {name} -->\\n).*?(<!-- end -->)",
            lambda found, part=part: found[1] + part + found[2],
            text,
            flags=re.S,
        )
    return text


if __name__ == "__main__":
    (DOCS / "gpu.md").write_text(document())
