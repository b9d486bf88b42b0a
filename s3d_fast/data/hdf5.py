"""Arrays of HDF5 files, of the kind that a data set needs and no other."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from s3d_fast.base import require
from s3d_fast.data.files import Refused, readable_whole, require_size, some

# HDF5's numbers of the filters that are undone here.
DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
# Bytes of everything in a file besides the arrays.
_STRUCTURE = 1 << 24


def read_h5(path: Path, wanted: Mapping[str, int]) -> list[np.ndarray]:
    """Return arrays of an HDF5 file by name; every name comes with the bytes that its array has at most.

    The array must be in the file itself: links to other files, storage in other files and virtual arrays would make any
    file that this process can read part of the data. It must be stored in full, so that a small file cannot pretend to
    be a large one. Its compression may be gzip, undone here within the array's own size, or none: HDF5 would inflate to
    any size, and would load a library for a filter that it does not know.

    Raises:
        ValueError: the file is damaged, lacks an array, or has one of another kind or size.
        RuntimeError: h5py is not installed.
    """
    h5py = require.library("h5py", "HDF5 files need h5py", "'s3d_fast[h5]'")
    require_size(path, sum(wanted.values()) + _STRUCTURE)
    with readable_whole(path, "HDF5 file"), h5py.File(path, "r") as file:
        names = list(file)
        if not wanted.keys() <= set(names):
            raise Refused(f"it must hold {' and '.join(wanted)}, got {some(names) or 'nothing'}")
        for name in wanted:
            if not isinstance(file.get(name, getlink=True), h5py.HardLink):
                raise Refused(f"{name!r} is a link to another place, which is not followed")
            if not isinstance(file[name], h5py.Dataset):
                raise Refused(f"{name!r} must be an array")
        return [_read(name, file[name], most) for name, most in wanted.items()]


def _read(name: str, dataset: Any, most: int) -> np.ndarray:
    plist = dataset.id.get_create_plist()
    if dataset.is_virtual or dataset.external:
        raise Refused(f"{name!r} is stored in other files, which are not read")
    if dataset.dtype.kind not in "iuf" or dataset.shape is None:
        raise Refused(f"{name!r} must hold numbers, got {dataset.dtype}")
    size = math.prod(dataset.shape) * dataset.dtype.itemsize
    if size > most:
        raise Refused(f"{name!r} must have at most {most} bytes, got shape {dataset.shape} of {dataset.dtype}")
    filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    if set(filters) - {DEFLATE, SHUFFLE, FLETCHER32}:
        raise Refused(f"{name!r} has the filters {filters}; store it with gzip, or without compression")
    if DEFLATE in filters:
        return _read_chunks(name, dataset, filters)
    if dataset.id.get_storage_size() < size:
        raise Refused(f"{name!r} has {size} bytes, but only {dataset.id.get_storage_size()} are stored")
    return dataset[()]


def _read_chunks(name: str, dataset: Any, filters: list[int]) -> np.ndarray:
    """Return a filtered array; no part of it is inflated beyond its own size."""
    shape, chunk, dtype = dataset.shape, dataset.chunks, dataset.dtype
    count = math.prod(-(-whole // part) for whole, part in zip(shape, chunk, strict=True))
    size = math.prod(chunk) * dtype.itemsize
    # A chunk may be larger than the array, but not by much: it would take more memory than the array may.
    if size > 2 * math.prod(shape) * dtype.itemsize + (1 << 20):
        raise Refused(f"{name!r} has chunks of shape {chunk}, which are larger than the array of shape {shape}")
    if dataset.id.get_num_chunks() != count:
        raise Refused(f"{name!r} has {dataset.id.get_num_chunks()} of its {count} parts")
    result = np.empty(shape, dtype)
    for start in product(*(range(0, whole, part) for whole, part in zip(shape, chunk, strict=True))):
        stored = dataset.id.get_chunk_info_by_coord(start).size
        # Deflate makes nothing much longer than it was.
        if stored > 2 * size + 1024:
            raise Refused(f"{name!r} has a part of {stored} bytes at {start}, for {size} bytes of numbers")
        mask, content = dataset.id.read_direct_chunk(start)
        part = np.frombuffer(_unfiltered(content, mask, filters, size, dtype.itemsize), dtype).reshape(chunk)
        place = tuple(slice(at, at + length) for at, length in zip(start, chunk, strict=True))
        kept = result[place]
        kept[...] = part[tuple(slice(0, length) for length in kept.shape)]
    return result


def _unfiltered(content: bytes, mask: int, filters: list[int], size: int, itemsize: int) -> bytes:
    """Return the bytes of a chunk; bit i of the mask says that filter i was left out."""
    for number, kind in reversed(list(enumerate(filters))):
        if mask >> number & 1:
            continue
        if kind == FLETCHER32:
            content = content[:-4]
        elif kind == DEFLATE:
            inflate = zlib.decompressobj()
            content = inflate.decompress(content, size + 4)
            if inflate.unconsumed_tail:
                raise ValueError(f"a part holds more than its {size} bytes")
        else:
            planes = np.frombuffer(content, np.uint8)[: len(content) // itemsize * itemsize].reshape(itemsize, -1)
            content = planes.T.tobytes()
    if len(content) != size:
        raise ValueError(f"a part holds {len(content)} bytes instead of {size}")
    return content
