"""Steps of Lanczos that a CUDA graph can repeat: the same launches at the same addresses, and nothing that waits.

No GPU is here. A graph is played by one that records every launch and every operation of PyTorch with its tensors, and
repeats them in the same memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import s3d_fast as s3d
from s3d_fast.kernels.launch import Launch
from s3d_fast.kernels.options import triton_options
from s3d_fast.operators import MatrixFreeOperator, PointwiseOperator, SplittingOperator
from s3d_fast.solvers import lanczos, repeated
from tests.cases import RowsCase
from tests.kernels.test_triton import layers, waiting

pytest.importorskip("triton")
# The interpreter computes with masked entries too, which may overflow or be no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Recording(TorchDispatchMode):
    """Everything that a device would be asked to do: launches of kernels and operations of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def launch(self, own: Launch, run: Callable[[Launch], None]) -> None:
        # What the interpreter does in place of the device is no operation of its own.
        self._is_inside = True
        run(own)
        self._is_inside = False
        self.calls.append((run, (own,), {}, None))

    def repeat(self) -> None:
        """Do it all again, with results in the memory of the first time."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(result), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def described(self) -> list[tuple[Any, ...]]:
        """Return the calls by what they do and where, without the numbers in tensors."""
        found = []
        for func, args, _, _ in self.calls:
            if isinstance(args[0], Launch):
                own = args[0]
                found.append((own.name, own.grid, *map(_described, own.arguments.values())))
            else:
                found.append((str(func), *map(_described, tree_leaves(args))))
        return found


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Address(NamedTuple):
    """Where a tensor is, and its shape."""

    pointer: int
    shape: tuple[int, ...]


def _described(argument: Any) -> Any:
    return Address(argument.data_ptr(), argument.shape) if isinstance(argument, Tensor) else str(argument)


@contextmanager
def recording() -> Iterator[Recording]:
    mode, run = Recording(), Launch.run
    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(Launch, "run", lambda own: mode.launch(own, run))
        yield mode


class Graph:
    """A CUDA graph, played. Recording computes here, so that the first replay has been done already."""

    def __init__(self) -> None:
        self.recorded: Recording | None = None
        self.replays = 0

    def replay(self) -> None:
        assert self.recorded is not None
        self.replays += 1
        if self.replays > 1:
            self.recorded.repeat()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are made, on a GPU that is played as well."""
    made: list[Graph] = []

    def new() -> Graph:
        made.append(Graph())
        return made[-1]

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        with recording() as mode:
            yield
        graph.recorded = mode

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(repeated, "why_not_repeat", _why_not_but_for_the_device)
    return made


_WHY_NOT = repeated.why_not_repeat


def _why_not_but_for_the_device(operators: list[SplittingOperator]) -> str:
    reason = _WHY_NOT(operators)
    return "" if "must be on one GPU, got cpu" in reason else reason


def larger() -> list[SplittingOperator]:
    """Return layers whose filters take many steps, of several widths."""
    return [PointwiseOperator(*RowsCase(80, D, M).tensors(seed=M)) for D, M in ((40, 3), (33, 2), (60, 2))]


def test_steps_between_two_changes_are_the_same_launches_and_read_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[tuple[list[object], list[tuple[Any, ...]]]] = []

    class Watched(repeated.RepeatedStep):
        def run(self, step: Callable[[], None], objects: Any) -> None:
            with waiting(monkeypatch) as calls, recording() as mode:
                step()
            assert not calls, calls
            steps.append((list(objects), mode.described()))

    monkeypatch.setattr(lanczos, "RepeatedStep", Watched)
    s3d.extremal_eigenpairs(larger(), "lanczos", tol=1e-4, backend="triton")
    assert len(steps) > 10
    alike, before = 0, []
    for (objects, calls), (next_objects, next_calls) in itertools.pairwise(steps):
        names = [call[0] for call in calls]
        # One split, one product and one sum for all layers; then one copy and one orthogonalisation.
        assert [name for name in names if "aten" not in name] == [
            "grouped, split",
            "grouped",
            "grouped, sums",
            "krylov",
        ]
        assert [name for name in names if "copy" in name] == ["aten._foreach_copy_.default"]
        # The first step with some tensors makes their tables.
        same = [list(map(id, own)) for own in (before, objects, next_objects)]
        before = objects
        if same[0] == same[1] == same[2]:
            alike += 1
            kept = {tensor.data_ptr() for one in objects for tensor in vars(one).values() if isinstance(tensor, Tensor)}
            # The tables of both kernels stay as well, and the number of steps.
            kept |= {call[2].pointer for call in calls if call[0] in ("grouped", "krylov")}
            kept |= {call[3].pointer for call in calls if call[0] == "krylov"}
            assert _without_scratch(calls, kept) == _without_scratch(next_calls, kept)
    assert alike > 5


def _without_scratch(calls: list[tuple[Any, ...]], kept: set[int]) -> list[tuple[Any, ...]]:
    """Return calls with all addresses numbered in their order but those of tensors that stay.

    A step allocates the others for itself; the memory of a graph has them where it was recorded.
    """
    numbers: dict[int, int] = {}

    def numbered(argument: Any) -> Any:
        if isinstance(argument, Address) and argument.pointer not in kept:
            return numbers.setdefault(argument.pointer, len(numbers)), argument.shape
        return argument

    return [tuple(map(numbered, call)) for call in calls]


def test_a_solver_that_repeats_a_recorded_step_finds_the_same(graphs: list[Graph]) -> None:
    expected = s3d.extremal_eigenpairs(larger(), "lanczos", tol=1e-4, backend="triton")
    assert not graphs
    with triton_options(cuda_graph=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanczos, "why_not_repeat", _why_not_but_for_the_device)
        found = s3d.extremal_eigenpairs(larger(), "lanczos", tol=1e-4, backend="triton")
    # Spaces outgrow their memory, and filters leave: each time a new graph is recorded.
    assert len(graphs) > 1
    assert sum(graph.replays for graph in graphs) > 5
    for own, truth in zip(found, expected, strict=True):
        assert torch.equal(own.lambda_min, truth.lambda_min)
        assert torch.equal(own.v_max, truth.v_max)
        assert torch.equal(own.iterations, truth.iterations)


def test_layers_of_all_kinds_are_repeated(graphs: list[Graph]) -> None:
    expected = s3d.extremal_eigenpairs(layers(), "lanczos", tol=1e-4, backend="triton")
    with triton_options(cuda_graph=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanczos, "why_not_repeat", _why_not_but_for_the_device)
        found = s3d.extremal_eigenpairs(layers(), "lanczos", tol=1e-4, backend="triton")
    assert sum(graph.replays for graph in graphs) > 2
    for own, truth in zip(found, expected, strict=True):
        assert torch.equal(own.lambda_max, truth.lambda_max)


def test_a_step_that_cannot_be_recorded_is_launched_and_that_is_said(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def refuse(graph: Graph) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    streams: list[str] = []
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    done: list[int] = []
    step = repeated.RepeatedStep(True)
    step.run(lambda: done.append(0), [graphs])
    with pytest.warns(UserWarning, match="launched one by one: operation not permitted"):
        step.run(lambda: done.append(1), [graphs])
    step.run(lambda: done.append(2), [graphs])
    # Recording computes here, as it does not on a GPU.
    assert done == [0, 1, 1, 2]
    assert len(graphs) == 1
    assert streams == ["the caller's stream"]


def test_what_does_more_than_launch_is_not_recorded() -> None:
    rows = PointwiseOperator(*RowsCase(9, 4, 3).tensors())
    assert repeated.why_not_repeat([rows]) == "operators must be on one GPU, got cpu"
    free = MatrixFreeOperator(lambda V: V, (3, 4), torch.float64)
    for operator in (rows, free):
        operator.device = torch.device("cuda", 0)
    assert repeated.why_not_repeat([rows]) == ""
    assert "MatrixFreeOperator does more than launch kernels" in repeated.why_not_repeat([rows, free])
    with triton_options(cuda_graph=True), pytest.warns(UserWarning, match="one by one: operators must be on one GPU"):
        s3d.extremal_eigenpairs([PointwiseOperator(*RowsCase(9, 4, 3).tensors())], "lanczos", backend="triton")
