"""Print the table of mutants for docs/gpu.md: python -m tests.ptx.mutation_table, without TRITON_INTERPRET."""

from __future__ import annotations

import sys

from s3d_fast.kernels.ptx.mutation import Mutant, table
from tests.ptx.families import SMALL, mutate


def main(names: list[str]) -> None:
    """Mutate the kernels of the named calls, or of all, in bfloat16 where they have rows and else in float32."""
    found: list[Mutant] = []
    for name in names or SMALL:
        dtype = "bf16" if "bf16" in SMALL[name].dtypes else "fp32"
        for target in ("sm_80", "sm_90"):
            found += mutate(target, name, dtype)
    print(table(found), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
