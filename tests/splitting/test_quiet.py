"""The integer programme prints nothing, and other output is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import s3d_fast as s3d
from s3d_fast.splitting.quiet import quiet
from tests.splitting.test_selection import (
    mlp_graph,
    random_spectra,
)

# Seeds for which HiGHS prints a line without `quiet`.
LOUD = (0, 5, 59, 65, 89, 99)


def test_budgets_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    graph = mlp_graph(4, 4, 4)
    for seed in LOUD:
        spectra = random_spectra(graph, np.random.default_rng(seed))
        assert len(s3d.select(spectra, graph, m="knapsack", c=1.3, cost="params", budget=128)) > 0
    assert capfd.readouterr() == ("", "")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a programme; its output goes to a pipe, which C buffers until it is flushed."""
    root = Path(__file__).parents[2]
    # The file alone, without the package, which would import torch.
    head = (
        "import ctypes, os, runpy, sys, threading\n"
        "quiet = runpy.run_path('s3d_fast/splitting/quiet.py')['quiet']\n"
        "C = ctypes.CDLL(None)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=120,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


def test_only_lines_of_highs_are_lost() -> None:
    done = run(
        """
        print("python before")
        C.printf(b"C before\\n")
        with quiet():
            C.printf(b"HighsMipSolverData::transform tmpSolver.run();\\n")
            C.printf(b"C inside\\n")
            os.write(1, b"1 inside\\n")
            os.write(2, b"2 inside\\n")
            print("python inside")
        C.printf(b"C after\\n")
        C.fflush(None)
        print("python after")
        print("error after", file=sys.stderr)
        """
    )
    before, inside, after = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:-2], done.stdout.splitlines()[-2:]
    assert before == ["python before", "C before"]
    assert sorted(inside) == ["1 inside", "C inside", "python inside"]
    assert after == ["C after", "python after"]
    assert done.stderr == "2 inside\nerror after\n"


def test_streams_are_restored_after_errors_and_by_the_last_of_several_blocks() -> None:
    done = run(
        """
        try:
            with quiet():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("stopped", flush=True)
        entered, leave = threading.Event(), threading.Event()

        def other():
            with quiet():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=other)
        with quiet():
            thread.start()
            entered.wait()
        # The other block is still open.
        os.write(1, b"HighsMip::lost\\n")
        leave.set()
        thread.join()
        print("restored", flush=True)
        """
    )
    assert (done.stdout, done.stderr) == ("stopped\nrestored\n", "")


@pytest.mark.parametrize("closed", ["1", "0, 1, 2"])
def test_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    done = run(
        f"""
        closed = ({closed},)
        sys.stdout = sys.stderr = None
        for descriptor in closed:
            os.close(descriptor)
        before = sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else []
        with quiet():
            C.printf(b"inside\\n")
        after = sorted(os.listdir("/proc/self/fd")) if before else []
        with open({str(tmp_path / "found")!r}, "w") as file:
            file.write(str(before == after))
        """
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "found").read_text() == "True"


def test_the_block_runs_without_free_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("too many open files")

    entered = 0
    for name in ("dup",):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with quiet():
                entered += 1
    assert entered == 1
    os.fstat(1)
