"""Write docs/api.md, the list of public names, from their docstrings: python docs/make_api.py."""

from __future__ import annotations

import inspect
from pathlib import Path

import s3d_fast
from s3d_fast import data, models, recipes, report, schedules, visualize
from s3d_fast.integrations import loggers


def api() -> str:
    """Return the text of docs/api.md."""
    lines = ["# Public names", "", "Made from the docstrings by `python docs/make_api.py`; `help(name)` says more.", ""]
    rooms = {"models": models, "schedules": schedules, "data": data, "recipes": recipes, "report": report}
    rooms |= {"visualize": visualize, "integrations.loggers": loggers}
    for title, module in {"": s3d_fast, **rooms}.items():
        lines += [f"## {'.'.join(filter(None, ('s3d_fast', title)))}", "", "| name | what it is |", "|---|---|"]
        for name in sorted(module.__all__, key=str.lower):
            item = getattr(module, name)
            if not callable(item) and not inspect.ismodule(item):
                # A constant has no docstring of its own.
                continue
            first = (inspect.getdoc(item) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            is_function = callable(item) and not inspect.isclass(item)
            call = f"({', '.join(inspect.signature(item).parameters)})" if is_function else ""
            lines.append(f"| `{name}{call}` | {first} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(api())
