"""Runs scripts in forked processes of one that has imported what they need: python -m tests.script_worker FOLDER LISTS.

LISTS is JSON: for every script its path and its arguments. What the script number i prints goes to the files i.out and
i.err in FOLDER. A line for each script tells its exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

import s3d_fast as s3d


def run(script: str, arguments: list[str], output: Path) -> int:
    """Run a script as `python script arguments` would; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for descriptor, suffix in ((1, ".out"), (2, ".err")):
                os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), descriptor)
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    # PyTorch imports modules on first use: import them once here instead of once in every child.
    s3d.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.zeros(2, 2))
    for number, (path, *rest) in enumerate(json.loads(sys.argv[2])):
        print(run(path, rest, Path(sys.argv[1]) / str(number)), flush=True)
