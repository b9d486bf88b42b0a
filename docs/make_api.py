"""Write docs/api.md, the list of public names, from their docstrings: python docs/make_api.py."""

from __future__ import annotations

import inspect
from pathlib import Path

import s3d_fast
import s3d_fast.models as models


def api() -> str:
    """Return the text of docs/api.md."""
    lines = ["# Public names", "", "Made from the docstrings by `python docs/make_api.py`; `help(name)` says more.", ""]
    for title, module in (("s3d_fast", s3d_fast), ("s3d_fast.models", models)):
        lines += [f"## {title}", "", "| name | what it is |", "|---|---|"]
        for name in sorted(module.__all__, key=str.lower):
            item = getattr(module, name)
            first = (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            call = (
                ""
                if inspect.isclass(item) or inspect.ismodule(item)
                else f"({', '.join(inspect.signature(item).parameters)})"
            )
            lines.append(f"| `{name}{call}` | {first} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(api())
