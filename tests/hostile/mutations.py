"""Strategies that damage files: bytes, numbers, JSON records, and programs of pickles."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62)
NUMBERS += (2**63 - 1, 2**63, 2**64 - 1)


@st.composite
def damaged(draw: DrawFn, content: bytes) -> bytes:
    """Return the content with one to four edits, most of them near its start or its end, where formats say most."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        size = max(1, len(data))
        place = draw(
            st.one_of(
                st.integers(0, min(400, size) - 1),
                st.integers(max(0, size - 400), size - 1),
                st.integers(0, size - 1),
            )
        )
        match draw(st.sampled_from(("bytes", "number", "number", "cut", "delete", "insert", "repeat", "move"))):
            case "bytes":
                new = draw(st.binary(min_size=1, max_size=8))
                data[place : place + len(new)] = new
            case "number":
                width = draw(st.sampled_from((1, 2, 4, 8)))
                order = draw(st.sampled_from(("little", "big")))
                new = (draw(st.sampled_from(NUMBERS)) % 256**width).to_bytes(width, order)
                data[place : place + width] = new
            case "cut":
                del data[place:]
            case "delete":
                del data[place : place + draw(st.integers(1, 64))]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=64))
            case "repeat":
                data[place:place] = data[place : place + 64] * draw(st.integers(1, 8))
            case "move":
                other = draw(st.integers(0, size - 1))
                data[place : place + 16] = data[other : other + 16]
    return bytes(data)


_WORDS = ("", "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "../../etc/passwd", "\0", "\ud800", "${x}")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from((*NUMBERS, -1, 10**30, 10**400)),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(_WORDS),
)
JSON: SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def other_record(draw: DrawFn, record: Any) -> Any:
    """Return a record in which one to three values, at any depth, are others, missing, or under another name."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = None, None
        value = record
        while isinstance(value, dict | list) and value and draw(st.integers(0, 4)):
            holder = value
            key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
            value = value[key]
        if holder is None:
            if not draw(st.integers(0, 9)):
                return draw(JSON)
            continue
        match draw(st.sampled_from(("other", "other", "delete", "rename", "repeat"))):
            case "other":
                holder[key] = draw(JSON)
            case "delete":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.one_of(st.text(max_size=6), st.sampled_from(_WORDS)))] = holder.pop(key)
            case "repeat" if isinstance(holder, list):
                holder *= draw(st.integers(0, 3))
    return record


def as_json(record: Any) -> bytes:
    """Return a record as JSON, with NaN and Infinity as Python writes them; lone surrogates stay escaped."""
    return json.dumps(record).encode()


def text_or_record(record: Any, encode: Callable[[Any], bytes] = as_json) -> SearchStrategy[bytes]:
    """Return a strategy of damaged bytes, of well-formed files with other values, and of nesting without an end."""
    return st.one_of(
        other_record(record).map(encode),
        other_record(record).map(encode),
        damaged(encode(record)),
        st.integers(1, 100_000).map(lambda depth: b"[" * depth),
    )


_OPERATIONS = [bytes([value]) for value in range(256)]
_USEFUL = [
    *(pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE2, pickle.LIST),
    *(pickle.DICT, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.REDUCE, pickle.BUILD),
    *(pickle.NONE, pickle.NEWTRUE, pickle.DUP, pickle.POP, pickle.MEMOIZE, pickle.NEWOBJ, pickle.STACK_GLOBAL),
    *(pickle.BINPERSID, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EMPTY_SET, pickle.FROZENSET),
]
_NAMES = ("os system", "builtins eval", "builtins bytearray", "numpy ndarray", "numpy dtype", "collections OrderedDict")
_NAMES += ("numpy._core.multiarray _reconstruct", "torch._utils _rebuild_tensor_v2", "torch FloatStorage", "os mkdir")


@st.composite
def program(draw: DrawFn) -> bytes:
    """Return a pickle made of random operations: some useful, some that claim huge sizes, some calls."""
    numbers = st.sampled_from(NUMBERS)
    parts = [b"\x80\x02"]
    for _ in range(draw(st.integers(1, 30))):
        number = draw(numbers)
        match draw(st.integers(0, 9)):
            case 0 | 1 | 2 | 3:
                parts.append(draw(st.sampled_from(_USEFUL)))
            case 4:
                parts.append(draw(st.sampled_from(_OPERATIONS)))
            case 5:
                memo = (pickle.LONG_BINPUT, pickle.LONG_BINGET, pickle.BINBYTES, pickle.BINUNICODE, pickle.LONG4)
                parts.append(draw(st.sampled_from(memo)) + struct.pack("<I", number % 2**32))
            case 6:
                eight = (pickle.BINBYTES8, pickle.BINUNICODE8, pickle.BYTEARRAY8, pickle.FRAME)
                parts.append(draw(st.sampled_from(eight)) + struct.pack("<Q", number % 2**64))
            case 7:
                parts.append(pickle.GLOBAL + draw(st.sampled_from(_NAMES)).replace(" ", "\n").encode() + b"\n")
            case 8:
                parts.append(pickle.BININT + struct.pack("<I", number % 2**32))
            case 9:
                text = draw(st.sampled_from(("data", "fine_labels", "u1", "storage", "")))
                parts.append(pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode())
    return b"".join(parts) + draw(st.sampled_from((b".", b"")))
