"""Capture within a memory budget: the choice of a form, equal products in every form, and bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import s3d_fast as s3d
from s3d_fast.base import byte_counts
from s3d_fast.capture.budget import UnitNeed, decide, fits_as_it_comes, free_bytes, half_error
from s3d_fast.models import DGCNN, MobileNetV1
from s3d_fast.operators import DenseOperator, matvec_all
from s3d_fast.operators.streamed import DiskStream, RecomputedStream, StreamedOperator

BATCHES = 12
Batch = tuple[Tensor, Tensor]


def mobilenet() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    # Some layers are so wide that their matrices are not formed.
    model = MobileNetV1([8, 12, 40, 40, 48], 10, stem_stride=1, strides=(1, 2, 1, 2), activation=nn.SiLU)
    return model.double().eval(), [(torch.randn(2, 3, 8, 8).double(), torch.randint(10, (2,))) for _ in range(BATCHES)]


def dgcnn() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(1)
    model = DGCNN((6, 8), 5, k=4, embedding=16, hidden=(8,)).double().eval()
    return model, [(torch.randn(2, 12, 3).double(), torch.randint(5, (2,))) for _ in range(BATCHES)]


MODELS = {"mobilenet": mobilenet, "dgcnn": dgcnn}
# The budget as a share of a capture in memory, whether a scratch file is allowed, and the expected stream.
FORMS = {"memory": (1.5, True, None), "disk": (0.25, True, DiskStream), "recompute": (0.25, False, RecomputedStream)}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, list[Batch], s3d.Graph, s3d.Captured]:
    model, batches = MODELS[request.param]()
    graph = s3d.trace(model, batches[0][0])
    return model, batches, graph, s3d.capture(model, F.cross_entropy, batches, graph)


def vectors(operators: s3d.Captured, count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, *op.shape, dtype=op.dtype, generator=generator) for op in operators.values()]


def captured(
    case: Any, form: str, loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, **options: Any
) -> s3d.Captured:
    model, batches, graph, whole = case
    share, scratch, _ = FORMS[form]
    budget = int(share * sum(whole.memory().values()))
    return s3d.capture(model, loss_fn, batches, graph, memory_budget=budget, scratch=scratch, **options)


@pytest.fixture(scope="module")
def found(case: Any, request: pytest.FixtureRequest) -> s3d.Captured:
    """A capture in the form that the test asks for."""
    return captured(case, request.param)


@pytest.fixture(scope="module")
def exact(case: Any) -> dict[str, s3d.Spectrum]:
    """The spectra of the capture in memory."""
    return s3d.extremal_eigenpairs(case[3], solver="exact", tol=1e-6)


def in_form(*forms: str) -> Any:
    return pytest.mark.parametrize(("found", "form"), [(form, form) for form in forms], ids=forms, indirect=["found"])


@in_form(*FORMS)
def test_every_form_has_the_products_and_matrices_of_a_capture_in_memory(
    case: Any, found: s3d.Captured, form: str
) -> None:
    whole = case[3]
    kind = FORMS[form][2]
    assert found.stream is None if kind is None else type(found.stream) is kind
    assert list(found) == list(whole)
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    for name, operator in found.items():
        size, expected = operator.magnitude(), whole[name].magnitude()
        torch.testing.assert_close(size, expected, rtol=1e-9, atol=1e-12, msg=name)
    V = vectors(whole, 2)
    wanted, got = (matvec_all(list(ops.values()), V) for ops in (whole, found))
    for name, one, other in zip(whole, wanted, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12 * float(one.abs().max()), msg=name)
        alone = found[name].matvec(V[list(whole).index(name)])
        torch.testing.assert_close(alone, one, rtol=1e-9, atol=1e-12 * float(one.abs().max()), msg=name)
        dense = found[name].dense()
        reference = whole[name].dense()
        torch.testing.assert_close(dense, reference, rtol=1e-9, atol=1e-12 * float(reference.abs().max()), msg=name)


@pytest.mark.parametrize("solver", ["lanczos", "auto", "exact"])
@in_form("disk", "recompute")
def test_every_form_has_the_spectra_of_a_capture_in_memory(
    exact: dict[str, s3d.Spectrum], found: s3d.Captured, form: str, solver: str
) -> None:
    spectra = s3d.extremal_eigenpairs(found, solver=solver, tol=1e-6)
    for name, spectrum in exact.items():
        for end in ("lambda_min", "lambda_max"):
            error = (getattr(spectra[name], end) - getattr(spectrum, end)).abs() / spectrum.radius.clamp(min=1e-300)
            assert float(error.max()) < 1e-5, (name, end)


@in_form("disk", "recompute")
def test_streamed_operators_can_be_restricted(case: Any, found: s3d.Captured, form: str) -> None:
    whole = case[3]
    for name, operator in found.items():
        if isinstance(operator, StreamedOperator):
            filters = torch.arange(operator.shape[0] - 1, -1, -2)
            twice = torch.tensor([len(filters) - 1, 0])
            rest, wanted = (op.restrict(filters).restrict(twice) for op in (operator, whole[name]))
            assert rest.shape == wanted.shape
            V = torch.randn(wanted.shape, dtype=wanted.dtype)
            torch.testing.assert_close(rest.matvec(V), wanted.matvec(V), rtol=1e-9, atol=1e-14)
            assert operator.filters is None


def test_a_pass_over_the_disk_is_counted_and_reads_only_the_given_units(case: Any) -> None:
    found = captured(case, "disk")
    stream = found.stream
    assert isinstance(stream, DiskStream)
    streamed = [name for name, op in found.items() if isinstance(op, StreamedOperator)]
    assert streamed
    units = {unit for part in stream.parts(streamed[:1]) for unit, _ in part}
    assert units == {streamed[0]}
    before = stream.passes
    matvec_all(list(found.values()), vectors(found))
    assert stream.passes == before + 1
    assert 0 < stream.nbytes <= 2 * found.plan.part_bytes
    assert stream.size == sum(record.nbytes for record in stream.records)
    assert f"{stream.passes} passes" in found.report()


def test_a_scratch_file_has_no_name(case: Any, tmp_path: Path) -> None:
    model, batches, graph, whole = case
    budget = sum(whole.memory().values()) // 4
    found = s3d.capture(model, F.cross_entropy, batches, graph, memory_budget=budget, scratch=tmp_path)
    assert isinstance(found.stream, DiskStream)
    assert found.stream.size > budget // 4
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_has_changed_is_not_captured_again() -> None:
    model, batches = mobilenet()
    graph = s3d.trace(model, batches[0][0])
    budget = sum(s3d.capture(model, F.cross_entropy, batches, graph).memory().values()) // 4
    found = s3d.capture(model, F.cross_entropy, batches, graph, memory_budget=budget, scratch=False)
    s3d.extremal_eigenpairs(found, tol=1e-2)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(ValueError, match="has changed since it was captured"):
        s3d.extremal_eigenpairs(found, tol=1e-2)


def test_the_model_and_the_random_state_are_left_alone(case: Any) -> None:
    model = case[0]
    model.train()
    before, state = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    found = captured(case, "recompute")
    s3d.extremal_eigenpairs(found, tol=1e-2)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()


@pytest.mark.parametrize(("form", "more"), [("memory", 0), ("disk", 1)])
def test_one_pass_over_the_data_is_enough(case: Any, form: str, more: int) -> None:
    """The first batch is also measured; it is captured again only if its operators could not be kept."""
    model, batches, graph, whole = case
    read: list[int] = []
    losses: list[float] = []

    class Counted(Sequence[Batch]):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
            batch = batches[index]
            read.append(index)
            return batch

    def counted_loss(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        losses.append(float(loss.detach()))
        return loss

    found = captured((model, Counted(), graph, whole), form, counted_loss)
    assert read == list(range(len(batches)))
    assert len(losses) == len(batches) + more
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)


def test_every_sample_of_shuffled_data_counts_once(case: Any) -> None:
    model, batches, graph, whole = case
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=len(batches[0][1]), shuffle=True)
    found = captured((model, loader, graph, whole), "memory")
    assert found.plan is not None
    assert set(found.plan.places.values()) <= {"memory", "dense"}
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)


def test_a_wrong_length_is_an_error(case: Any) -> None:
    model, batches, graph, whole = case

    class Longer(list[Batch]):
        def __len__(self) -> int:
            return BATCHES + 1

    with pytest.raises(ValueError, match=f"a length of {BATCHES + 1}, and there were {BATCHES}"):
        captured((model, Longer(batches), graph, whole), "memory")


def test_bad_budgets_are_refused(case: Any) -> None:
    model, batches, graph, _ = case

    def capture(data: Any, **options: Any) -> s3d.Captured:
        return s3d.capture(model, F.cross_entropy, data, graph, **options)

    with pytest.raises(ValueError, match="memory_budget is too small"):
        capture(batches, memory_budget=100)
    with pytest.raises(ValueError, match=r"memory_budget must be a positive number of bytes.*'much'"):
        capture(batches, memory_budget="much")
    with pytest.raises(ValueError, match="batches must have a length"):
        capture(iter(batches), memory_budget="1GiB")
    with pytest.raises(ValueError, match="batches must have a length"):
        capture(DataLoader(Endless()), memory_budget="1GiB")
    with pytest.raises(ValueError, match="at least one batch"):
        capture([], memory_budget="1GiB")
    with pytest.raises(ValueError, match="dtype and memory_budget"):
        capture(batches, memory_budget="1GiB", dtype=torch.bfloat16)


class Endless(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(2)


@pytest.mark.parametrize(
    ("amount", "wanted"),
    [(10, 10), ("10", 10), ("4GiB", 4 * 2**30), ("1.5 MB", 1_500_000), ("2 kib", 2048), ("7TB", 7 * 10**12)],
)
def test_amounts_of_memory_are_read_as_bytes(amount: int | str, wanted: int) -> None:
    assert byte_counts.as_bytes("x", amount) == wanted


@pytest.mark.parametrize("amount", [0, -1, "", "GiB", "4 bytes", "-3MB", True, 1.5, None])
def test_bad_amounts_of_memory_are_refused(amount: Any) -> None:
    with pytest.raises(ValueError, match="x must be a positive number of bytes"):
        byte_counts.as_bytes("x", amount)


def need(name: str, nbytes: int, *, width: int = 100, dense: bool = False, half_error: float = 1e-4) -> UnitNeed:
    return UnitNeed(name, 10, width, 1000, 1000, nbytes, nbytes, half_error, dense, 2.0, 0.5)


def test_the_first_form_that_fits_is_chosen() -> None:
    needs = [need("a", 1000), need("b", 3000)]

    def places(budget: int, scratch: Any = True, of: list[UnitNeed] = needs) -> tuple[set[str], torch.dtype | None]:
        plan = decide(of, 10, budget, 1.0, scratch)
        assert plan.memory_bytes <= budget
        return set(plan.places.values()), plan.dtype

    assert places(40_000) == ({"memory"}, None)
    assert places(39_999) == ({"memory"}, torch.bfloat16)
    assert places(20_000) == ({"memory"}, torch.bfloat16)
    assert places(19_999) == ({"disk"}, torch.bfloat16)
    assert places(19_999, scratch=False) == ({"recompute"}, None)
    # If bfloat16 would change the products too much, the disk comes next.
    rough = [need("a", 1000), need("b", 3000, half_error=2e-3)]
    assert places(39_999, of=rough) == ({"disk"}, None)
    # The disk needs two buffers, each with room for the largest operator.
    assert places(3000) == ({"disk"}, torch.bfloat16)
    with pytest.raises(ValueError, match="memory_budget is too small"):
        decide(needs, 10, 1900, 1.0, True)
    # A recomputed batch is held as it comes, not in bfloat16.
    assert places(4000, scratch=False) == ({"recompute"}, None)
    with pytest.raises(ValueError, match="memory_budget is too small"):
        decide(needs, 10, 3999, 1.0, scratch=False)


def test_units_fit_as_they_come_until_the_budget_is_used_up() -> None:
    needs = [need("a", 1000), need("b", 100, width=5, dense=True), need("c", 3000)]
    assert [fits_as_it_comes(needs[:count], 10, 30_500) for count in range(4)] == [True, True, True, False]
    assert fits_as_it_comes(needs, 10, None)
    # bfloat16 is chosen only if its error has been measured.
    assert decide(needs, 10, 30_500, 1.0).dtype is torch.bfloat16
    unknown = [replace(one, half_error=None) for one in needs]
    assert decide(unknown, 10, 30_500, 1.0).dtype is None


def test_dead_filters_do_not_forbid_bfloat16() -> None:
    X, C = torch.rand(500, 6) + 1, torch.rand(500, 4) + 1
    alive = half_error(s3d.PointwiseOperator(X, C))
    C[:, 1] = 0
    assert 0 < alive < 0.01
    assert half_error(s3d.PointwiseOperator(X, C)) == pytest.approx(alive, rel=1)


def test_small_matrices_are_formed() -> None:
    # 10 matrices of 5 x 5 numbers take 1000 bytes.
    plan = decide([need("small", 1000, width=5, dense=True), need("large", 1000)], 10, 12_000, 1.0)
    assert plan.places == {"small": "dense", "large": "memory"}
    assert plan.memory_bytes == 1000 + 10_000
    assert plan.flops_per_step == 2 * 10 * 25 + 4 * 10_000 * 100 * 10
    assert plan.step_seconds == 5
    # Each batch takes a second, and adding to the matrices takes as long as two products of half a second.
    assert plan.capture_seconds == 10 * (1 + 2 * 0.5)
    # Matrices that are larger than their rows are not formed.
    assert decide([need("small", 50, width=5, dense=True)], 10, 12_000, 1.0).places == {"small": "memory"}


def test_plan_capture_predicts_the_capture(case: Any) -> None:
    _, batches, graph, whole = case
    budget = sum(whole.memory().values()) // 4
    plan = s3d.plan_capture(graph, batches[0], BATCHES, budget)
    found = captured(case, "disk")
    assert plan.places == found.plan.places
    assert plan.disk_bytes == found.plan.disk_bytes
    assert isinstance(found.stream, DiskStream)
    # The file may exceed the plan by the alignment of its tensors; some indices need only half the space.
    assert found.stream.size <= plan.disk_bytes + 64 * 3 * len(found.stream.records)
    assert plan.memory_bytes <= budget
    text = str(plan)
    assert all(name in text for name in graph.units)
    assert "on disk" in text
    assert plan.capture_seconds > 0
    assert plan.step_seconds > 0


def test_dense_operators_have_the_same_products(case: Any) -> None:
    for operator in case[3].values():
        formed = DenseOperator(operator.dense())
        V = torch.randn(3, *operator.shape, dtype=operator.dtype)
        torch.testing.assert_close(formed.matvec(V), operator.matvec(V), rtol=1e-9, atol=1e-14)
        filters = torch.tensor([operator.shape[0] - 1])
        torch.testing.assert_close(formed.restrict(filters).dense(), operator.dense()[-1:], rtol=1e-9, atol=1e-14)
        assert formed.nbytes == formed.dense().nbytes
    with pytest.raises(ValueError, match="matrices must have shape"):
        DenseOperator(torch.zeros(3, 4, 5))


# Prints what a capture without a budget takes, and what one within a tenth of that takes.
WORKER = """
import json, os, re, torch, torch.nn.functional as F
import s3d_fast as s3d
from s3d_fast.models import MLP


def peak_bytes():
    # Not getrusage, whose peak is inherited from the parent process.
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1])


def measured(budget):
    s3d.capture(model, F.cross_entropy, batches[:1], graph)
    own = peak_bytes()
    operators = s3d.capture(model, F.cross_entropy, batches, graph, memory_budget=budget)
    spectra = s3d.extremal_eigenpairs(operators, tol=1e-2, max_iters=16)
    peak = peak_bytes()
    places = sorted(set(operators.plan.places.values())) if budget else []
    sums = [float(s.lambda_min.sum() + s.lambda_max.sum()) for s in spectra.values()]
    return peak - own, sum(operators.memory().values()), places, sums


def forked(budget):
    # In a process of its own, since a peak is never forgotten.
    out, into = os.pipe()
    if os.fork() == 0:
        os.write(into, json.dumps(measured(budget)).encode())
        os._exit(0)
    os.close(into)
    with open(out) as file:
        return json.load(file)


torch.set_num_threads(1)
torch.manual_seed(0)
model = MLP([100, 120, 120, 10]).eval()
batches = [(torch.randn(4000, 100), torch.randint(10, (4000,))) for _ in range(20)]
graph = s3d.trace(model, batches[0][0][:2])
free = forked(None)
# Beside other processes, a peak is higher at times: the lower of two is what is needed.
print(json.dumps([free, min(forked(free[1] // 10) for _ in range(2))]))
"""


def test_resident_memory_stays_within_the_budget() -> None:
    command = [sys.executable, "-c", WORKER]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    (peak, held, _, wanted), (bounded, _, places, got) = json.loads(out)
    # The operators take most of the memory that the process adds.
    assert held > 100_000_000
    assert peak > 0.8 * held
    budget = held // 10
    assert "disk" in places
    # Outside the budget: the Lanczos basis, a vector per step and filter, and memory that malloc keeps.
    basis = 4 * (120 * 101 + 120 * 121) * 16
    assert bounded < budget + basis + 8_000_000
    assert got == pytest.approx(wanted, rel=1e-4)


def test_bfloat16_keeps_the_eigenvalues_where_nothing_cancels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Softplus(), nn.Linear(20, 1))
    batches = [(torch.randn(4000, 6), torch.zeros(4000, 1)) for _ in range(4)]
    graph = s3d.trace(model, batches[0][0][:2])

    # The gradient of this loss has one sign.
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean()

    found = [s3d.capture(model, loss, batches, graph, dtype=dtype) for dtype in (None, torch.bfloat16)]
    spectra = [s3d.extremal_eigenpairs(one, solver="exact") for one in found]
    for name, exact in spectra[0].items():
        error = (spectra[1][name].lambda_max - exact.lambda_max).abs() / exact.radius
        assert float(error.max()) < 1e-3


def test_processes_of_a_machine_share_its_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = free_bytes(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_bytes(tmp_path) == pytest.approx(whole / 8, rel=0.05)


@in_form(*FORMS)
def test_bad_vectors_are_refused_in_every_form(found: s3d.Captured, form: str) -> None:
    for operator in found.values():
        filters = operator.shape[0]
        for some in (operator, operator.restrict(torch.arange(filters - 1))):
            good = torch.zeros(some.shape, dtype=some.dtype)
            some.matvec(good)
            for bad in (good[:, 1:], good[1:], good[None, None], good[0]):
                with pytest.raises(ValueError, match="V must have shape"):
                    some.matvec(bad)
            with pytest.raises(TypeError, match=r"V must be torch\.float64"):
                some.matvec(good.float())
