"""Pickles of plain data and arrays of bytes, read without executing anything in them."""

from __future__ import annotations

import io
import math
import pickletools
from pathlib import Path
from typing import Any, Literal

import numpy as np

from s3d_fast.data.files import Refused

# Operations that push their own argument.
_CONSTANTS = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE"}
    | {"SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
)
_NAMED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class PickledArray:
    """A stand-in for numpy's array: it stores the pickled state and executes nothing."""

    def __init__(self) -> None:
        self.state: Any = None

    def array(self) -> np.ndarray | None:
        """Return the array if it holds bytes, as many as its shape says; else None."""
        match self.state:
            case (_, tuple() as shape, PickledType(code=b"u1" | "u1"), fortran, bytes() as data):
                whole = all(type(n) is int and n >= 0 for n in shape) and math.prod(shape) == len(data)
                order: Literal["F", "C"] = "F" if fortran is True or fortran == 1 else "C"
                return np.frombuffer(data, dtype=np.uint8).reshape(shape, order=order) if whole else None
        return None


class PickledType:
    """A stand-in for numpy's dtype."""

    def __init__(self, code: object = None) -> None:
        self.code = code


def read_pickle(path: Path, most_operations: int) -> Any:
    """Return the content of a pickle; strings of Python 2 are bytes, arrays are `PickledArray`.

    A pickle is a program: it can import and call any function, and anybody may have made a downloaded file. This reader
    knows the operations of dictionaries, lists, tuples, numbers and strings, and the three numpy names that an array of
    bytes asks for. It refuses everything else. Python's own reader also lets 12 bytes reserve gigabytes for references
    that never come, and a hundred bytes hash a key for ever.

    Args:
        path: the file; it is read whole, so check its size before.
        most_operations: bounds the number of objects, which can take much more memory than their bytes in the file.

    Raises:
        Refused: the pickle needs more than that.
        Exception: it is damaged; the reader may raise anything.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    argument: Any
    for number, (operation, argument, _) in enumerate(pickletools.genops(io.BytesIO(path.read_bytes()))):
        if number > most_operations:
            raise Refused(f"the pickle has more than {most_operations} operations")
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case name if name in _CONSTANTS:
                stack.append(argument)
            case name if name in _NAMED:
                stack.append(_NAMED[name])
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                stack.append(_text(argument).encode("latin1"))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case name if name in _TUPLES:
                stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "LIST":
                stack.append(since_mark())
            case "DICT":
                stack.append(_filled({}, since_mark()))
            case "APPEND":
                value = stack.pop()
                _list(stack[-1]).append(value)
            case "APPENDS":
                values = since_mark()
                _list(stack[-1]).extend(values)
            case "SETITEM":
                pair = stack[-2:]
                del stack[-2:]
                _filled(stack[-1], pair)
            case "SETITEMS":
                pairs = since_mark()
                _filled(stack[-1], pairs)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL" | "INST":
                stack.append(_stand_in(*_text(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = _text(stack.pop()), _text(stack.pop())
                stack.append(_stand_in(module, name))
            case "REDUCE":
                arguments = stack.pop()
                stack[-1] = _made(stack[-1], arguments)
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], PickledArray):
                    stack[-1].state = state
                elif not isinstance(stack[-1], PickledType):
                    raise Refused("the pickle sets the state of something that is no array: it is not executed")
            case other:
                raise Refused(f"the pickle has the operation {other}, which plain data do not need: it is not executed")
    raise ValueError("it has no end")


def _stand_in(module: str, name: str) -> object:
    """Return the stand-in for a name in the pickle; a name that an array of bytes does not need is refused."""
    # numpy < 2 has the module numpy._core under the name numpy.core.
    if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")):
        return PickledArray
    if (module, name) == ("numpy", "dtype"):
        return PickledType
    if (module, name) == ("numpy", "ndarray"):
        return "ndarray"
    raise Refused(f"the pickle asks for {module}.{name}, which a CIFAR-100 batch does not need: it is not executed")


def _made(kind: object, arguments: object) -> object:
    if kind is PickledArray:
        return PickledArray()
    if kind is PickledType and isinstance(arguments, tuple) and arguments:
        return PickledType(arguments[0])
    raise Refused("the pickle calls something that is no array: it is not executed")


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"it appends to {type(value).__name__}")
    return value


def _filled(target: object, pairs: list[Any]) -> dict[str | bytes, Any]:
    """Return a dictionary with further entries; hashing other keys than strings could take for ever."""
    if not isinstance(target, dict) or len(pairs) % 2:
        raise TypeError("it sets an entry of something that is no dictionary")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(key, str | bytes):
            raise TypeError(f"a key must be a string, got {type(key).__name__}")
        target[key] = value
    return target


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name must be a string, got {type(value).__name__}")
    return value
