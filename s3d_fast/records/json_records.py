"""Dataclasses as JSON objects: strict when they are written, tolerant when they are read.

A number that is not finite is written as null. A reader ignores unknown fields, and gives fields that are missing, null
or not finite their defaults. It checks the value of every field: files are not trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar

Record = TypeVar("Record")
# (where, value, name) -> the value of a field
Reader = Callable[[str, Any, str], Any]


def number(where: str, value: Any, name: str) -> float | None:
    """Return a number of a record; None if it is null, not finite or too large.

    Raises:
        ValueError: it is neither a number nor null.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: {name} must be a number or null, got {shown(value)}")
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def count(where: str, value: Any, name: str) -> int:
    """Return a count of a record.

    Raises:
        ValueError: it is not an integer of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {name} must be an integer >= 0, got {shown(value)}")
    return value


def numbers(where: str, value: Any, name: str) -> dict[str, float]:
    """Return the numbers by name; null and numbers that are not finite are left out."""
    found = {key: number(f"{where}, {name}", part, key) for key, part in mapping(f"{where}: {name}", value).items()}
    return {key: part for key, part in found.items() if part is not None}


def counts(where: str, value: Any, name: str) -> dict[str, int]:
    """Return the counts by name."""
    return {key: count(f"{where}, {name}", part, key) for key, part in mapping(f"{where}: {name}", value).items()}


def mapping(where: str, value: Any) -> dict[str, Any]:
    """Return the value if it is a JSON object.

    Raises:
        ValueError: it is not a JSON object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {'nothing' if value is None else shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return a value as text for error messages."""
    return "nothing" if value is MISSING else repr(value)[:80]


def parse(where: str, data: bytes | str, constant: Callable[[str], Any] = lambda name: None) -> Any:
    """Return parsed JSON; what makes NaN and Infinity, which are not JSON but which Python writes, is `constant`.

    Raises:
        ValueError: it is not JSON in UTF-8, is nested too deeply, or has numbers of thousands of digits.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} must be UTF-8 text, but: {error}") from error
    try:
        return json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, but: {error}; got {text[:80]!r}") from error


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two records, such as "epochs is 3 there and 4 here"; mappings are compared inside."""
    found = []
    for name in dict.fromkeys([*was, *now]):
        there, here = was.get(name), now.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            found += differences(there, here)
        elif there != here:
            found.append(f"{name} is {shown(there)} there and {shown(here)} here")
    return found


READERS: Mapping[str, Reader] = {
    "int": count,
    "int | None": count,
    "float": number,
    "float | None": number,
    "dict[str, int]": counts,
    "dict[str, float]": numbers,
}


def read(kind: type[Record], where: str, value: Any, readers: Mapping[str, Reader] = READERS) -> Record:
    """Return a dataclass from a JSON object.

    Args:
        kind: the dataclass; fields without a default are required.
        where: the place of the object, for errors.
        value: the parsed object.
        readers: the function that reads a field, by the field's type as it is written in the class.

    Raises:
        ValueError: a field has a wrong value. The message says where, what was expected and what was found.
    """
    found = mapping(where, value)
    arguments = {}
    for one in fields(kind):  # type: ignore[arg-type]
        given = found.get(one.name, MISSING)
        optional = one.default is not MISSING or one.default_factory is not MISSING
        kind_of_field = str(one.type)
        # An empty value of any kind is an empty collection.
        is_empty = given in (None, MISSING) or (kind_of_field.startswith(("dict", "list")) and not given)
        if optional and is_empty:
            continue
        known = readers[kind_of_field](where, given, one.name)
        if known is not None:
            arguments[one.name] = known
    return kind(**arguments)


def to_json(record: Any) -> str:
    """Return a record as one line of strict JSON."""
    return json.dumps(_strict(asdict(record)), allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
