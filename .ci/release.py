"""Check that a release says the same everywhere: python .ci/release.py TAG ADDRESS.

TAG is v and the version; ADDRESS is where the repository lies. Both are compared with what the files say.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def disagreements(tag: str, address: str) -> list[str]:
    """Return a sentence for every file that says something else than the tag and the address."""
    version = runpy.run_path(str(ROOT / "s3d_fast" / "base" / "version.py"))["VERSION"]
    repository = runpy.run_path(str(ROOT / "docs" / "long_description.py"))["REPOSITORY"]
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and s3d_fast/base/version.py has the version {version}")
    if address != repository:
        found.append(f"the repository is at {address}, and REPOSITORY in docs/long_description.py is {repository!r}")
    if not re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE):
        found.append(f"CITATION.cff has another version than {version}")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        found.append(f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    problems = disagreements(sys.argv[1], sys.argv[2])
    if problems:
        sys.exit("\n".join(problems))
