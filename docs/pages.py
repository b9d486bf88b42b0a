"""What `make docs` adds to the pages in docs/: the front page, the reference, the examples, the output of tutorials.

MkDocs calls the functions named on_*. Set S3D_DOCS_QUICK=1 to leave the tutorials as they are, for a look at the rest.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

from execute import executed  # noqa: E402

# The public modules; each has a page of the reference.
MODULES = (
    "s3d_fast",
    *(f"s3d_fast.{room}" for room in ("models", "growth.schedules", "data", "recipes", "report", "visualize")),
    "s3d_fast.integrations.loggers",
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from other files."""
    pages = {
        "index.md": site_links((ROOT / "README.md").read_text()),
        "contributing.md": site_links((ROOT / "CONTRIBUTING.md").read_text()),
        "examples.md": examples(),
    }
    pages |= {f"reference/{module.rpartition('.')[2]}.md": reference(module) for module in MODULES}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Run the code of tutorials and of the page on the eigensolver."""
    path = DOCS / page.file.src_uri
    if (path.parent.name != "tutorials" and path.name != "eigensolver.md") or os.environ.get("S3D_DOCS_QUICK"):
        return markdown
    return executed(path)


def site_links(text: str) -> str:
    """Return a page of the repository with its links as the site has them."""
    pages = {"CONTRIBUTING.md": "contributing.md", "examples": "examples.md"}

    def link(found: re.Match[str]) -> str:
        target = found[1].removeprefix("docs/")
        return f"]({pages.get(target, target)})"

    return re.sub(r"\]\((?!\w+:)([^()\s]+)\)", link, text)


def examples() -> str:
    """Return a page with all scripts of examples/."""
    scripts = sorted((ROOT / "examples").glob("*.py"))
    head = "# Examples\n\nThe scripts of `examples/`; the tests run them.\n"
    return "\n".join([head, *(f"## {path.name}\n\n```python\n{path.read_text().rstrip()}\n```\n" for path in scripts)])


def reference(module: str) -> str:
    """Return a page with every public name of a module: signature with types and defaults, and docstring."""
    found = importlib.import_module(module)
    lines = [f"# {module}", "", (inspect.getdoc(found) or "").split("\n\n")[0], ""]
    for name in sorted(found.__all__, key=str.lower):
        item = getattr(found, name)
        if inspect.isclass(item) or inspect.isfunction(item):
            lines += [f"::: {item.__module__}.{item.__qualname__}", ""]
    return "\n".join(lines)
