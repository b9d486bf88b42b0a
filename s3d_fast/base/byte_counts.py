"""Byte counts: parsing "4GiB", and printing it."""

from __future__ import annotations

import re

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def as_bytes(name: str, amount: int | str) -> int:
    """Return an amount such as 1_000_000, "512MB" or "4GiB" in bytes.

    Raises:
        ValueError: `amount` is not a number of bytes, or is not positive. The message names the argument.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(amount))
    unit = (match[2] or "B").upper() if match else ""
    if match is None or isinstance(amount, (bool, float)) or unit not in UNITS or float(match[1]) <= 0:
        raise ValueError(f"{name} must be a positive number of bytes, or a string such as '4GiB'; got {amount!r}")
    return int(float(match[1]) * UNITS[unit])


def as_text(amount: float) -> str:
    """Return a number of bytes as text, such as "3.5 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount:.0f} B"
