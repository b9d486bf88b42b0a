"""The rooms of the package: docs/design.md lists every room once, and imports follow the order of that list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "s3d_fast"
# The folder kernels/ is installed as s3d_fast.kernels.
FOLDERS = {"kernels": ROOT / "kernels"} | {
    path.name: path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()
}


def rooms_of_the_map() -> list[str]:
    """Return the rooms in the order of the map: the first cells of its rows."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text[text.index("| room |") :].split("\n\n")[0].splitlines()[2:]
    return [room for row in table for room in re.findall(r"`(\w+)/`", row.split("|")[1])]


ROOMS = rooms_of_the_map()


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the room of every import of this package, also inside functions; "" is the hall."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            package, *rest = module.split(".")
            if package == "s3d_fast":
                yield node.lineno, rest[0] if rest and rest[0] in FOLDERS else ""


def imports_against_the_order(room: str, path: Path) -> list[str]:
    """Return the imports of a file that point to the hall or to a later room."""
    allowed = {*ROOMS[: ROOMS.index(room) + 1]}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {target or 'the hall'}"
        for line, target in imported_rooms(path)
        if target not in allowed
    ]


def test_the_map_lists_every_room_once() -> None:
    assert sorted(ROOMS) == sorted(FOLDERS)


def test_the_hall_has_three_files() -> None:
    names = {"__init__.py", "__main__.py", "api.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == names


@pytest.mark.parametrize("room", sorted(FOLDERS))
def test_imports_follow_the_order_of_the_rooms(room: str) -> None:
    assert [line for path in FOLDERS[room].rglob("*.py") for line in imports_against_the_order(room, path)] == []


def test_an_import_against_the_order_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.py"
    lines = ["from s3d_fast.growth import Grower", "import s3d_fast", "def f():", "    from s3d_fast import report"]
    path.write_text("\n".join(lines))
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    found = imports_against_the_order("base", path)
    assert found == ["bad.py:1 imports growth", "bad.py:2 imports the hall", "bad.py:4 imports report"]


def test_only_the_backends_use_the_operators() -> None:
    files = [path for folder in FOLDERS.values() for path in folder.rglob("*.py")]
    folders = {path.parent.name for path in files if "torch.ops.s3d_fast" in path.read_text()}
    assert folders == {"backends"}
