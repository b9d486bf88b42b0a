"""Bank conflicts: how often shared memory has to be accessed for one instruction of a warp."""

from __future__ import annotations

import numpy as np

from s3d_fast.kernels.ptx.values import Array

BANKS = 32


def passes(addresses: Array, size: int) -> tuple[int, int]:
    """Return the passes over shared memory that an instruction takes, and how many it would take without conflicts.

    A pass reads or writes one word of 4 bytes in each of 32 banks. Threads with 8 bytes are served half a warp at a
    time, with 16 bytes a quarter.

    Args:
        addresses: (lanes,), whole warps; negative for threads that do not take part.
        size: the bytes of each thread.
    """
    per_thread = max(size // 4, 1)
    words = (addresses[:, None] >> 2) + np.arange(per_thread)
    words[addresses < 0] = -1
    groups = np.sort(words.reshape(-1, BANKS), axis=1)
    # Threads that want the same word get it in the same pass.
    is_new = groups >= 0
    is_new[:, 1:] &= groups[:, 1:] != groups[:, :-1]
    place = (np.arange(len(groups)) * BANKS)[:, None] + groups % BANKS
    by_bank = np.bincount(place[is_new], minlength=len(groups) * BANKS).reshape(len(groups), BANKS)
    most = by_bank.max(1)
    return int(most.sum()), int((most > 0).sum())
