"""Files of tensors by name: safetensors, and what torch.save makes; read without trust, written reproducibly."""

from __future__ import annotations

import io
import json
import os
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

# A tensor may be a view that repeats a few stored numbers; beyond this it must be stored in full.
_EXPANDED = 1 << 20
# The one function that torch.load calls for any file, and that takes memory which the file need not have.
_FORBIDDEN = "builtins.bytearray"


def serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return tensors and metadata as the bytes of a safetensors file: the same bytes for the same content.

    The library writes metadata in an order that changes from call to call; here it is sorted.
    """
    data = save(dict(tensors), metadata=dict(metadata))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps({"__metadata__": header.pop("__metadata__"), **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(data)[start:]])


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        ValueError: the file is damaged or of another format.
        OSError: the file cannot be read.
    """
    # A file that cannot be opened is an OSError here; further below, anything wrong is the content.
    open(path, "rb").close()
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            names = file.keys()
            # Copied: the library's tensors are the mapped file, and end the process if somebody shortens it later.
            return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}
    # A header may ask for types that this version of torch lacks, which is not a SafetensorError.
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is not a safetensors file: {error}") from error


def is_pickled(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like one of torch.save, in its format of today or of before."""
    with open(path, "rb") as file:
        start = file.read(2)
    return start == b"PK" or start[:1] == b"\x80"


def read_pickled(path: str | os.PathLike[str]) -> Any:
    """Return what torch.save has put into a file, if that is tensors and plain data; nothing in it is executed.

    Raises:
        ValueError: the file is damaged, or holds more than that. Tensors must be stored in the file: its size then
            bounds the memory that they take.
        OSError: the file cannot be read.
    """
    # A file, since torch looks at the ending of a name.
    with open(path, "rb") as file:
        try:
            if _FORBIDDEN in _asked_for(file):
                raise ValueError(f"it asks for {_FORBIDDEN}")
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            _require_stored(loaded, os.fstat(file.fileno()).st_size)
            return loaded
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f"{os.fspath(path)} holds more than tensors and cannot be loaded safely: {lines[0]}"
            ) from error


def _asked_for(file: BinaryIO) -> Iterator[str]:
    """Yield the names that the pickles in a file ask for.

    Raises:
        ValueError: an entry of a zip is compressed; torch.save stores them as they are.
    """
    if file.read(2) != b"PK":
        file.seek(0)
        # Older files are a row of pickles, then numbers.
        for _ in range(5):
            yield from _names(file)
        return
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its entry {entry.filename!r} is compressed")
        for entry in archive.infolist():
            if entry.filename.endswith(".pkl"):
                yield from _names(io.BytesIO(archive.read(entry)))


def _names(stream: BinaryIO) -> Iterator[str]:
    for operation, argument, _ in pickletools.genops(stream):
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".")


def _require_stored(value: Any, size: int) -> None:
    """Raise ValueError unless every tensor in what was loaded is a plain one whose numbers the file can hold."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for inner in values:
        _require_stored(inner, size)
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.device.type != "cpu":
            raise ValueError(f"it has a tensor that is {value.layout} on {value.device}")
        if value.numel() * value.element_size() > size + _EXPANDED:
            raise ValueError(f"it has a tensor of shape {tuple(value.shape)} that is not stored in its {size} bytes")
