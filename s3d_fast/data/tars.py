"""Where the files inside a tar are, found without unpacking anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from s3d_fast.data.files import require_size

BLOCK = 512
# Bytes of a long name, or of the extended headers of one member.
LONGEST = 1 << 16
# Types of members: regular files; links, devices and folders, which have no data; and headers of the next member.
REGULAR, EMPTY = b"0\x007", b"123456"
LONG_NAME, LONG_LINK, EXTENDED, EXTENDED_ALL, SPARSE = b"L", b"K", b"xX", b"g", b"S"


class Member(NamedTuple):
    """A regular file inside a tar: `size` bytes at `offset`."""

    name: str
    offset: int
    size: int


def regular_files(path: Path) -> list[Member]:
    """Return the regular files of an uncompressed tar, in the order of the tar.

    Every header must have its checksum, every size must lie within the file, and nothing but zeros may follow the end:
    a damaged tar is refused, not read in part.

    Raises:
        ValueError: the file is damaged, compressed, or has sparse members.
    """
    end = require_size(path, 1 << 62)
    try:
        with path.open("rb") as stream:
            return list(_members(stream, end))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole, uncompressed tar file: {error}") from error


def _members(stream: BinaryIO, end: int) -> Iterator[Member]:
    place, extended = 0, {}
    while block := _header(stream, place, end):
        kind, size, name = block[156:157], _number(block[124:136], "size", place), _name(block)
        if kind in EXTENDED or kind in (LONG_NAME, LONG_LINK, EXTENDED_ALL):
            if size > LONGEST:
                raise ValueError(f"the header at byte {place} has {size} bytes of names, more than {LONGEST}")
            content = stream.read(size)
            if kind == LONG_NAME:
                extended["path"] = _text(content)
            elif kind != LONG_LINK:
                records = _records(content, place)
                if kind == EXTENDED_ALL and records.keys() & {"path", "size"}:
                    raise ValueError(f"the header at byte {place} gives all members one name or size")
                extended |= records if kind in EXTENDED else {}
        else:
            name = extended.get("path", name)
            if kind == SPARSE or any(key.startswith("GNU.sparse") for key in extended):
                raise ValueError(f"{name!r} is a sparse file, which cannot be read in place")
            if "size" in extended:
                size = _decimal(extended["size"], place)
            size = 0 if kind in EMPTY else size
            # Before POSIX, a folder was a regular file whose name ends with a slash.
            if kind in REGULAR and not (kind == b"\0" and name.endswith("/")):
                yield Member(name, place + BLOCK, size)
            extended = {}
        if place + BLOCK + size > end:
            raise ValueError(f"it ends inside {name!r}; is it truncated?")
        place += BLOCK + -(-size // BLOCK) * BLOCK
    if extended:
        raise ValueError("it ends after an extended header")


def _header(stream: BinaryIO, place: int, end: int) -> bytes:
    """Return the header at a place, checked; empty at the end of the tar."""
    stream.seek(place)
    block = stream.read(BLOCK)
    # Not every program writes the blocks of zeros at the end.
    if not block and place > 0:
        return b""
    if len(block) == BLOCK and not any(block):
        while rest := stream.read(1 << 20):
            if any(rest):
                raise ValueError(f"more follows its end at byte {place}; join tars by name, not by their bytes")
        return b""
    if len(block) < BLOCK:
        raise ValueError(f"it ends inside the header at byte {min(place, end)}")
    blank = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blank) if max(blank) > 127 else sum(blank)
    if _number(block[148:156], "checksum", place) not in (sum(blank), signed):
        raise ValueError(f"the header at byte {place} has a wrong checksum")
    return block


def _number(field: bytes, what: str, place: int) -> int:
    # Sizes of 8 GiB and more have the first bit set, and are not octal.
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0")[0].strip(b" ")
    if field[0] > 0x80 or not re.fullmatch(rb"[0-7]*", digits):
        raise ValueError(f"the header at byte {place} has a bad {what}: {field!r}")
    return int(digits or b"0", 8)


def _name(block: bytes) -> str:
    name, prefix = _text(block[:100]), _text(block[345:500])
    # GNU's older format keeps times where POSIX has the beginning of the name.
    return f"{prefix}/{name}" if prefix and block[257:263] == b"ustar\0" else name


def _text(field: bytes) -> str:
    return os.fsdecode(field.split(b"\0")[0])


def _records(content: bytes, place: int) -> dict[str, str]:
    """Return the records of an extended header, each "LENGTH KEY=VALUE" and a newline."""
    records = {}
    while content.rstrip(b"\0"):
        digits, _, _ = content[:8].partition(b" ")
        length = _decimal(digits.decode("latin1"), place)
        key, equals, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or content[length - 1 : length] != b"\n":
            raise ValueError(f"the extended header at byte {place} has a bad record: {content[:40]!r}")
        records[key.decode("latin1")] = _text(value)
        content = content[length:]
    return records


def _decimal(text: str, place: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise ValueError(f"the extended header at byte {place} has a bad number: {text[:40]!r}")
    return int(text)
