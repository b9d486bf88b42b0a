"""Slots: the places along a tensor's axis that hold a channel, and which of them hold the same channel."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

Array = np.ndarray


class Slots:
    """Numbers every entry of every axis that may hold a channel, and collects what is learned about them.

    Slots that are tied hold the same channel, so they are split together. Blocked slots, and those tied to them, are
    never split.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ties: list[tuple[Array, Array]] = []
        self._blocks: list[tuple[Array, str]] = []
        self._apart: list[tuple[int, int]] = []

    def fresh(self, count: int) -> Array:
        """Return new slots."""
        first, self.count = self.count, self.count + count
        return np.arange(first, self.count)

    def tie(self, a: Array, b: Array) -> None:
        """Record that a[i] and b[i] hold the same channel for every i."""
        if a is not b:
            self._ties.append((a, b))

    def block(self, slots: Array, reason: str) -> None:
        """Record why these slots must not be split; the first reason counts."""
        self._blocks.append((slots, reason))

    def keep_apart(self, a: int, b: int) -> None:
        """Record that two neighbouring slots are copied one after the other, never as one run."""
        self._apart.append((a, b))

    def channels(self) -> Channels:
        """Return what is known of every slot, now that all ties are recorded."""
        if self._ties:
            ties = np.concatenate([np.stack(pair) for pair in self._ties], axis=1)
            graph = coo_matrix((np.ones(ties.shape[1], np.int8), tuple(ties)), shape=(self.count, self.count))
            _, of_slot = connected_components(graph, directed=False)
        else:
            of_slot = np.arange(self.count)
        reasons: dict[int, str] = {}
        for slots, reason in self._blocks:
            for channel in np.unique(of_slot[slots]).tolist():
                reasons.setdefault(channel, reason)
        for a, b in self._apart:
            if of_slot[a] == of_slot[b]:
                reasons.setdefault(int(of_slot[a]), "it stands beside a copy of itself in a concatenation")
        return Channels(of_slot, reasons)


class Channels:
    """The channel of every slot, and why channels must not be split."""

    def __init__(self, of_slot: Array, reasons: dict[int, str]) -> None:
        self.of_slot, self.reasons = of_slot, reasons

    def is_free(self) -> Array:
        """Return, for every channel, whether nothing blocks it."""
        free = np.ones(int(self.of_slot.max(initial=-1)) + 1, bool)
        free[list(self.reasons)] = False
        return free
