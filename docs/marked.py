"""Pages with parts that are computed: each stands between <!-- name --> and <!-- end -->."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Return the text of a page with its computed parts as they should be.

    Raises:
        ValueError: the page has no place for a part.
    """
    text = page.read_text()
    for name, part in parts.items():
        marked = f"(<!-- {name} -->\\n).*?(<!-- end -->)"
        if not re.search(marked, text, flags=re.S):
            raise ValueError(f"{page.name} has no place for {name!r}")
        text = re.sub(marked, lambda found, part=part: found[1] + part + found[2], text, flags=re.S)
    return text
