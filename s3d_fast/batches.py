"""Batches as whoever iterates them sees them: how many, and whether the same at every pass."""

from __future__ import annotations


def length_of(batches: object) -> int | None:
    """Return the number of batches, or None where that is not known, as of a loader over an iterable data set."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def are_the_same(batches: object) -> bool:
    """Return whether every pass gives the same batches: those of a list or tuple, and of what says `same_every_pass`.

    A loader that shuffles does not, and nothing else can be seen from outside.
    """
    return isinstance(batches, (list, tuple)) or getattr(batches, "same_every_pass", False) is True
