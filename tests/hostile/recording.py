"""Figures of long runs for docs/reliability.json, from which docs/make_reliability.py makes the page's tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s3d_fast.base.files import write_whole


def record(section: str, name: str, figures: Mapping[str, Any]) -> None:
    """Put figures into the file that S3D_RELIABILITY names, if it does, in place of those of the same name."""
    if not os.environ.get("S3D_RELIABILITY"):
        return
    path = Path(os.environ["S3D_RELIABILITY"])
    every = json.loads(path.read_text()) if path.exists() else {}
    every.setdefault(section, {})[name] = dict(sorted(figures.items()))
    write_whole(path, (json.dumps(every, indent=1) + "\n").encode())
