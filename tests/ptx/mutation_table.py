"""Print the table of mutants for docs/gpu.md: python -m tests.ptx.mutation_table [CALL ...], without TRITON_INTERPRET.

The calls are those of tests/ptx/families.py, by default all small ones, with bfloat16 rows where they have such rows
and float32 otherwise; `--every-dtype` takes the last two dtypes of each call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tqdm.auto import tqdm

from s3d_fast.kernels.ptx.mutation import MISSED, Mutant, table
from tests.ptx.conftest import prepare
from tests.ptx.families import SMALL, mutate

Job = tuple[str, str, str]


def jobs(names: Sequence[str], every_dtype: bool) -> list[Job]:
    """Return targets, calls and dtypes to mutate."""
    found = []
    for name in names or SMALL:
        dtypes = SMALL[name].dtypes
        chosen = dtypes[-2:] if every_dtype else ["bf16" if "bf16" in dtypes else "fp32"]
        found += [(target, name, dtype) for dtype in chosen for target in ("sm_80", "sm_90")]
    return found


def mutants(job: Job) -> list[Mutant]:
    """Return the mutants of one call, in a process of its own."""
    return mutate(*job)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a mutant was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx.mutation_table", description=__doc__)
    parser.add_argument(
        "calls", nargs="*", choices=[*SMALL, []], metavar="CALL", help="calls to mutate; by default all"
    )
    parser.add_argument("--every-dtype", action="store_true", help="the last two dtypes of each call")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    if unknown := set(options.calls) - SMALL.keys():
        parser.error(f"unknown calls: {', '.join(sorted(unknown))}")
    chosen = jobs(options.calls, options.every_dtype)
    found: list[Mutant] = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"), initializer=prepare) as pool:
        for job, own in zip(chosen, tqdm(pool.map(mutants, chosen), total=len(chosen), disable=None), strict=True):
            found += own
            for mutant in own:
                if mutant.outcome == MISSED:
                    print(*job, mutant, file=sys.stderr)
    print(table(found), end="")
    return any(mutant.outcome == MISSED for mutant in found)


if __name__ == "__main__":
    sys.exit(main())
