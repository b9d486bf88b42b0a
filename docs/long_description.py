"""What a package index shows of the project: the README with absolute links, and addresses. setup.py asks for it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# The address of the repository, such as https://host/owner/name. This is the only place that says it; the addresses of
# the project and the links of its readme on the package index follow from it. Empty: there is none yet.
REPOSITORY = ""
PAPER = "https://arxiv.org/abs/2003.10392"


def addresses(repository: str) -> dict[str, str]:
    """Return the addresses that a package index shows beside the readme."""
    found = {"Paper": PAPER}
    if repository:
        found |= {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
    return found


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose links to files of the repository work anywhere.

    Links and pictures point to the files of this version. Without an address of the repository, links become their
    text and pictures are left out. Only a target that is a file or a folder here counts as one: code stays as it is.
    """

    def is_file(target: str) -> bool:
        path = target.split("#")[0]
        return bool(path) and "://" not in path and (ROOT / path).exists()

    def address(target: str, kind: str) -> str:
        return f"{repository}/{kind}/v{version}/{target}"

    def markdown(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if not is_file(target):
            return match[0]
        if not repository:
            return "" if picture else words
        return f"{picture}[{words}]({address(target, 'raw' if picture else 'blob')})"

    def html(match: re.Match[str]) -> str:
        name, target = match.groups()
        if not is_file(target):
            return match[0]
        return f'{name}="{address(target, "blob" if name == "href" else "raw")}"'

    if not repository:
        text = re.sub(r"<picture>.*?</picture>\n*", "", text, flags=re.DOTALL)
        text = re.sub(r'<img\b[^>]*\bsrc="(?!\w+://)[^>]*>\n*', "", text)
        text = re.sub(r'<a\b[^>]*\bhref="(?!\w+://|#)[^>]*>(.*?)</a>', r"\1", text, flags=re.DOTALL)
    text = re.sub(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", markdown, text)
    return re.sub(r'\b(href|src|srcset)="([^"\s]+)"', html, text)


def metadata() -> dict[str, Any]:
    """Return the setup() arguments that depend on the address of the repository."""
    version = runpy.run_path(str(ROOT / "s3d_fast" / "base" / "version.py"))["VERSION"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return {
        "long_description": absolute_links(readme, REPOSITORY, version),
        "long_description_content_type": "text/markdown",
        "project_urls": addresses(REPOSITORY),
    }
