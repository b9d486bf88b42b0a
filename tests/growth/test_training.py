"""Training: rates that follow the schedule, precision, memory formats, and resuming after any epoch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from s3d_fast import schedules
from s3d_fast.base.batches import moved
from s3d_fast.base.random_state import random_state, seed_all, set_random_state
from s3d_fast.base.world import World
from s3d_fast.growth.training import EpochTrainer
from s3d_fast.models.mlp import MLP
from s3d_fast.records.record import Epoch

cross_entropy = nn.functional.cross_entropy


class RecordingSGD(torch.optim.SGD):
    """Records the learning rates of every step, and the gradients of the first parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[list[float]] = []
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append([group["lr"] for group in self.param_groups])
        gradient = self.param_groups[0]["params"][0].grad
        assert gradient is not None
        self.gradients.append(gradient.clone())
        return super().step(closure)


class WithoutLength:
    """Batches without a length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class ConvNet(nn.Module):
    """Two convolutions with a BatchNorm between them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


def points(count: int = 40, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return batches of eight points and their classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, generator=generator)
    return list(zip(x.split(8), (x[:, 0] > 0).long().split(8), strict=True))


def images(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 6, 6, generator=generator, dtype=dtype)
    return list(zip(x.split(4), (torch.arange(12) % 2).split(4), strict=True))


def mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP([3, 8, 2])


def losses(trainer: EpochTrainer, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train and return the loss of every epoch."""
    epochs: list[Epoch] = []
    trainer(model, optimizer, 0, after_epoch=epochs.append)
    return [epoch.loss for epoch in epochs]


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    for (name, tensor), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name


def test_every_iteration_has_the_rate_of_its_fraction_of_an_epoch() -> None:
    def schedule(epoch: float) -> float:
        return 1 / (1 + epoch) ** 2

    model, batches = mlp(), points()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = RecordingSGD([{"params": first}, {"params": second, "lr": 0.5}], lr=0.1)
    EpochTrainer(batches, cross_entropy, 3, schedule=schedule)(model, optimizer, 0)
    factors = [schedule(epoch + index / len(batches)) for epoch in range(3) for index in range(len(batches))]
    assert optimizer.rates == [[0.1 * factor, 0.5 * factor] for factor in factors]


def test_without_a_schedule_the_rate_stays() -> None:
    model = mlp()
    optimizer = RecordingSGD(model.parameters(), lr=0.3)
    EpochTrainer(points(), cross_entropy, 2)(model, optimizer, 0)
    assert optimizer.rates == [[0.3]] * 10


def test_a_loader_without_length_has_the_rate_of_the_whole_epoch() -> None:
    model = mlp()
    optimizer = RecordingSGD(model.parameters(), lr=1.0)
    epochs: list[Epoch] = []
    trainer = EpochTrainer(WithoutLength(points()), cross_entropy, 2, schedule=lambda epoch: 1 / (1 + epoch))
    trainer(model, optimizer, 0, after_epoch=epochs.append)
    assert optimizer.rates == [[1.0]] * 5 + [[0.5]] * 5
    assert [epoch.samples for epoch in epochs] == [40, 40]


def test_epochs_are_recorded() -> None:
    x, target = torch.randn(20, 3, generator=torch.Generator().manual_seed(3)), torch.arange(20) % 2
    loader = DataLoader(TensorDataset(x, target), batch_size=8)
    model, begun = mlp(), []
    # At a rate of zero the loss does not change, so it can be computed by hand.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    epochs: list[Epoch] = []
    EpochTrainer(loader, cross_entropy, 2)(model, optimizer, 0, before_epoch=begun.append, after_epoch=epochs.append)
    by_hand = float(np.mean([cross_entropy(model(x[rows]), target[rows]).item() for rows in torch.arange(20).split(8)]))
    assert begun == [0, 1]
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    assert [epoch.samples for epoch in epochs] == [20, 20]
    assert [epoch.loss for epoch in epochs] == pytest.approx([by_hand] * 2, rel=1e-6)
    assert all(epoch.seconds > 0 for epoch in epochs)


def test_the_last_rate_of_an_epoch_is_recorded() -> None:
    model = mlp()
    optimizer = RecordingSGD(model.parameters(), lr=0.1)
    epochs: list[Epoch] = []
    trainer = EpochTrainer(points(), cross_entropy, 3, schedule=schedules.cosine(3))
    trainer(model, optimizer, 0, after_epoch=epochs.append)
    assert [epoch.learning_rate for epoch in epochs] == [optimizer.rates[last][0] for last in (4, 9, 14)]


def test_a_model_is_trained_in_train_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    measured = losses(EpochTrainer(points(), cross_entropy, 10), model, optimizer)
    assert measured[-1] < 0.9 * measured[0]
    assert model.training
    assert int(model[1].num_batches_tracked) == 50


class Shuffled:
    """Batches in an order drawn from the global random state; counts the epochs that began."""

    def __init__(self) -> None:
        self.x, self.target = (torch.cat(parts) for parts in zip(*points(), strict=True))
        self.begun = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.begun += 1
        for rows in torch.randperm(40).split(8):
            yield self.x[rows], self.target[rows]


@pytest.mark.parametrize("finished", [1, 3, 5])
def test_training_resumes_after_the_finished_epochs(finished: int) -> None:
    def trained(stops: list[int]) -> tuple[MLP, list[int], int]:
        model = mlp()
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader, seen, start = Shuffled(), [], 0
        trainer = EpochTrainer(loader, cross_entropy, 6, schedule=schedules.cosine(6))
        for stop in [*stops, 6]:
            # Only the states of the model, the optimizer and the random generators carry over.
            optimizer.param_groups[0]["lr"] = 0.1

            def after_epoch(epoch: Epoch, stop: int = stop) -> None:
                seen.append(epoch.epoch)
                if epoch.epoch + 1 == stop < 6:
                    raise KeyboardInterrupt

            try:
                trainer(model, optimizer, 0, start=start, after_epoch=after_epoch)
            except KeyboardInterrupt:
                start = stop
        return model, seen, loader.begun

    whole, resumed = trained([]), trained([finished])
    assert whole[1] == resumed[1] == [0, 1, 2, 3, 4, 5]
    assert whole[2] == resumed[2] == 6
    assert_same_weights(whole[0], resumed[0])


def test_nothing_is_left_to_train_after_the_last_epoch() -> None:
    model, loader = mlp(), Shuffled()
    optimizer = RecordingSGD(model.parameters(), lr=0.1)
    EpochTrainer(loader, cross_entropy, 3)(model, optimizer, 0, start=3)
    assert loader.begun == 0
    assert optimizer.rates == []


@pytest.mark.parametrize(
    ("precision", "computed"),
    [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_precision_affects_the_forward_pass_only(precision: str, computed: torch.dtype) -> None:
    seen = set()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.add(output.dtype)
        return cross_entropy(output, target)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    measured = losses(EpochTrainer(points(), loss_fn, 6, precision=precision), model, optimizer)
    assert seen == {computed}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert measured[-1] < 0.7 * measured[0]


def test_half_precision_scales_the_loss_and_not_the_step() -> None:
    def gradients(precision: str) -> tuple[Tensor, Tensor]:
        """Return the first gradient as computed by backpropagation, and as passed to the optimizer."""
        model = mlp()
        weight = next(model.parameters())
        propagated: list[Tensor] = []
        weight.register_hook(lambda gradient: propagated.append(gradient.clone()))
        optimizer = RecordingSGD([weight], lr=0.1)
        EpochTrainer(points(), cross_entropy, 1, precision=precision)(model, optimizer, 0)
        return propagated[0], optimizer.gradients[0]

    propagated, seen = gradients("fp16")
    assert torch.equal(propagated, 65536 * seen)
    propagated, true = gradients("fp32")
    assert torch.equal(propagated, true)
    # Half precision has 11 significant bits.
    torch.testing.assert_close(seen, true, rtol=2e-2, atol=1e-3)


def test_a_step_that_overflows_in_half_precision_is_skipped() -> None:
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = RecordingSGD(model.parameters(), lr=0.1)
    # 1e4 times the scale of 65536 overflows; there is one batch, so one step.
    trainer = EpochTrainer(points(8), lambda output, target: 1e4 * cross_entropy(output, target), 1, precision="fp16")
    trainer(model, optimizer, 0)
    assert optimizer.rates == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_channels_last_changes_the_memory_and_not_the_training() -> None:
    def trained(channels_last: bool) -> tuple[list[float], ConvNet, set[bool]]:
        torch.manual_seed(4)
        model, formats = ConvNet(), set()
        model.first.register_forward_pre_hook(
            lambda module, inputs: formats.add(inputs[0].is_contiguous(memory_format=torch.channels_last))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        trainer = EpochTrainer(images(), cross_entropy, 4, channels_last=channels_last)
        return losses(trainer, model, optimizer), model, formats

    plain, last = trained(False), trained(True)
    assert plain[0] == pytest.approx(last[0], rel=1e-5)
    assert plain[0][-1] != plain[0][0]
    assert (plain[2], last[2]) == ({False}, {True})
    for model, channels_last in ((plain[1], False), (last[1], True)):
        for layer in (model.first, model.second):
            assert layer.weight.is_contiguous(memory_format=torch.channels_last) == channels_last


# PyTorch's compiler warns about parts of PyTorch itself.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_training_ends_with_the_same_weights() -> None:
    def trained(compile: bool) -> MLP:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        EpochTrainer(points(), cross_entropy, 2, compile=compile)(model, optimizer, 0)
        return model

    compiled, eager = trained(True), trained(False)
    for (name, tensor), other in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5, msg=name)
    assert not torch.equal(next(eager.parameters()), next(mlp().parameters()))


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf], ids=str)
def test_a_loss_that_is_not_finite_names_phase_and_epoch(factor: float) -> None:
    model, seen = mlp(), []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        # One batch of the second epoch is bad.
        seen.append(len(seen))
        return cross_entropy(output, target) * (factor if seen[-1] == 7 else 1.0)

    finished: list[Epoch] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not finite in phase 4, epoch 1"):
        EpochTrainer(points(), loss_fn, 3)(model, optimizer, 4, after_epoch=finished.append)
    assert [epoch.epoch for epoch in finished] == [0]


class TwoInputs(nn.Module):
    """A linear layer over two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(left - right)


def loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"], batch["more"][0]), batch["target"])


def test_batches_of_every_shape_train_alike() -> None:
    plain = [((x, 0.5 * x), target) for x, target in points()]
    named = [{"x": x, "more": [y, "a note"], "target": target} for (x, y), target in plain]
    results = []
    for batches, loss_fn in ((plain, cross_entropy), (named, loss_of_model)):
        torch.manual_seed(0)
        model = TwoInputs()
        epochs: list[Epoch] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        EpochTrainer(batches, loss_fn, 2)(model, optimizer, 0, after_epoch=epochs.append)
        assert [epoch.samples for epoch in epochs] == [40, 40]
        results.append(model)
    assert_same_weights(*results)


def test_a_batch_that_is_no_pair_is_an_error() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pair"):
        EpochTrainer([points()[0][0]], cross_entropy, 1)(model, optimizer, 0)


def test_all_tensors_of_a_batch_are_moved() -> None:
    batch = {"x": torch.zeros(2, 3), "parts": (torch.zeros(2), [torch.zeros(1), {"deep": torch.zeros(4)}]), "note": "a"}
    there = moved(batch, torch.device("meta"))
    assert (there["x"].device.type, there["x"].shape) == ("meta", (2, 3))
    first, (second, third) = there["parts"]
    assert {tensor.device.type for tensor in (first, second, third["deep"])} == {"meta"}
    assert isinstance(there["parts"], tuple)
    assert isinstance(there["parts"][1], list)
    assert there["note"] == "a"
    assert batch["x"].device.type == "cpu"


def test_only_images_are_moved_to_channels_last() -> None:
    image, cloud = moved((torch.rand(2, 3, 4, 4), torch.rand(2, 5, 3)), torch.device("cpu"), channels_last=True)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert cloud.is_contiguous()


@pytest.mark.parametrize("progress", [False, True])
def test_a_progress_bar_is_shown_on_request(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    EpochTrainer(points(), cross_entropy, 2, progress=progress)(model, optimizer, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("phase 3" in captured.err and "80/80" in captured.err and "loss=" in captured.err) == progress
    assert bool(captured.err) == progress


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"epochs": 0}, "epochs"), ({"epochs": 1.5}, "epochs"), ({"epochs": 1, "precision": "fp64"}, "precision")],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        EpochTrainer(points(), cross_entropy, **options)


def test_a_constant_schedule_is_one_everywhere() -> None:
    assert [schedules.constant()(epoch) for epoch in (0, 0.5, 1000)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("epoch", "factor"),
    [(0, 1), (79.99, 1), (80, 0.1), (80.5, 0.1), (119.99, 0.1), (120, 0.01), (159.99, 0.01), (1000, 0.01)],
)
def test_step_decay_divides_by_ten_after_each_share(epoch: float, factor: float) -> None:
    assert schedules.step_decay(160)(epoch) == pytest.approx(factor, rel=1e-12)


def test_step_decay_takes_other_shares_and_factors() -> None:
    schedule = schedules.step_decay(10, at=(0.3, 0.5, 1), factor=0.5)
    assert [schedule(epoch) for epoch in (0, 2.9, 3, 4.9, 5, 9.9, 10)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert schedules.step_decay(10, at=())(9) == 1


def test_cosine_falls_from_one_to_zero() -> None:
    schedule = schedules.cosine(4)
    expected = [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0, 0]
    assert [schedule(epoch) for epoch in (0, 1, 2, 3, 4, 5)] == pytest.approx(expected, abs=1e-15)
    assert schedule(1.5) == pytest.approx((1 + math.cos(0.375 * math.pi)) / 2)


def test_warm_up_rises_linearly_from_zero() -> None:
    schedule = schedules.warmed_up(schedules.constant(), 5)
    assert [schedule(epoch) for epoch in (0, 1, 2.5, 5, 7)] == pytest.approx([0, 0.2, 0.5, 1, 1])
    over_cosine = schedules.warmed_up(schedules.cosine(10), 5)
    assert [over_cosine(epoch) for epoch in (2.5, 5, 7.5)] == pytest.approx(
        [0.5 * (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]
    )
    assert schedules.warmed_up(schedules.constant(), 0)(0) == 1


@pytest.mark.parametrize(
    ("make", "options", "argument"),
    [
        ("step_decay", {"epochs": 0}, "epochs"),
        ("step_decay", {"epochs": 2.5}, "epochs"),
        ("step_decay", {"epochs": 10, "at": (0,)}, "at"),
        ("step_decay", {"epochs": 10, "at": (0.5, 1.5)}, "at"),
        ("step_decay", {"epochs": 10, "at": (math.nan,)}, "at"),
        ("step_decay", {"epochs": 10, "factor": 0}, "factor"),
        ("step_decay", {"epochs": 10, "factor": math.inf}, "factor"),
        ("cosine", {"epochs": 0}, "epochs"),
        ("warmed_up", {"schedule": schedules.constant, "epochs": -1}, "epochs"),
        ("warmed_up", {"schedule": schedules.constant, "epochs": math.nan}, "epochs"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_bad_schedules_are_refused(make: str, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} "):
        getattr(schedules, make)(**options)


def draws() -> list[list[float]]:
    """Return numbers from all generators; after an odd count of normal numbers, a generator holds one in reserve."""
    return [
        torch.randn(5).tolist(),
        [random.random(), random.gauss(0, 1), random.randrange(1000)],
        [*np.random.normal(size=3), np.random.randint(1000)],  # noqa: NPY002
    ]


def test_a_restored_state_draws_the_same(tmp_path: Path) -> None:
    seed_all(3, 1)
    draws()
    tensors, record = random_state()
    # Save the state as a checkpoint does.
    save_file(tensors, tmp_path / "state.safetensors")
    text = json.dumps(record)
    first, second = draws(), draws()
    assert first != second
    seed_all(99)
    set_random_state(load_file(tmp_path / "state.safetensors"), json.loads(text))
    assert [draws(), draws()] == [first, second]


def test_reading_the_state_changes_nothing() -> None:
    seed_all(5)
    expected = draws()
    seed_all(5)
    random_state()
    assert draws() == expected


def test_a_key_determines_the_states_of_all_generators() -> None:
    drawn = []
    for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 3), (0, 0, 1)):
        seed_all(*key)
        drawn.append(draws())
    assert drawn[1] == drawn[5]
    for generator in range(3):
        assert len({tuple(every[generator]) for every in drawn}) == 5


def test_named_tuples_stay_named_tuples_when_moved() -> None:
    class Pair(NamedTuple):
        x: Tensor
        y: list[Tensor]

    found = moved(Pair(torch.zeros(1, 2, 3, 4), [torch.ones(2)]), torch.device("cpu"), channels_last=True)
    assert isinstance(found, Pair)
    assert found.x.is_contiguous(memory_format=torch.channels_last)
    assert isinstance(found.y, list)


@pytest.mark.parametrize(
    ("epochs", "share", "at"), [(100, 0.55, 55), (100, 0.07, 7), (100, 0.14, 14), (160, 0.75, 120)]
)
def test_a_rate_decays_exactly_when_its_share_has_passed(epochs: int, share: float, at: int) -> None:
    schedule = schedules.step_decay(epochs, (share,))
    assert schedule(at - 1e-3) == 1
    assert schedule(float(at)) == pytest.approx(0.1)


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, target in points():
            yield from zip(x, target, strict=True)


def test_a_loader_without_length_can_train() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Epoch] = []
    EpochTrainer(DataLoader(Stream(), batch_size=8), cross_entropy, 2)(model, optimizer, 0, after_epoch=seen.append)
    assert [epoch.samples for epoch in seen] == [40, 40]


def test_an_exhausted_loader_is_an_error() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="loader has no batches in epoch 1"):
        EpochTrainer(iter(points()), cross_entropy, 3)(model, optimizer, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_rates_are_restored_after_training(fails: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = EpochTrainer(points(), cross_entropy, 3, schedule=schedules.cosine(3))

    def after_epoch(epoch: Epoch) -> None:
        if fails and epoch.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        trainer(model, optimizer, 0, after_epoch=after_epoch)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_processes_with_different_numbers_of_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test plays the first of two processes; the second has one batch less."""
    x, target = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    batches = [(x[:2], target[:2]), (x[2:], target[2:])]
    model = MLP([2, 3, 2])
    before = [parameter.clone() for parameter in model.parameters()]
    monkeypatch.setattr(World, "sum", lambda self, *values: [values[0] + 1, values[1] + 1])
    trainer = EpochTrainer(batches, cross_entropy, 1, world=World(size=2))
    with pytest.raises(ValueError, match="as many batches in every process"):
        trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
