"""Checkpoints: a loaded network equals the saved one bit for bit; a bad file changes nothing."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.growth import checkpoint
from s3d_fast.models.dgcnn import DGCNN
from s3d_fast.models.mlp import MLP
from s3d_fast.models.mobilenet import MobileNetV1

Snapshot = tuple[dict[str, Tensor], list[tuple[str, int]], str]


def mlp(width: int = 3) -> nn.Module:
    return MLP([4, width, width, 3], batchnorm=True)


def mobilenet(width: int = 2) -> nn.Module:
    return MobileNetV1([width] * 14, num_classes=3, stem_stride=1)


def dgcnn(width: int = 3) -> nn.Module:
    return DGCNN([width] * 4, num_classes=3, k=4, embedding=6, hidden=(5, 4), dropout=0.0)


MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "mlp-batchnorm": (mlp, (6, 4)),
    "mobilenet": (mobilenet, (2, 3, 8, 8)),
    "dgcnn": (dgcnn, (3, 12, 3)),
}
every_model = pytest.mark.parametrize("kind", MODELS)


def example(kind: str) -> Tensor:
    return torch.randn(MODELS[kind][1], generator=torch.Generator().manual_seed(7))


@functools.cache
def grown_once(kind: str) -> nn.Module:
    return grow(kind, lambda parameters: torch.optim.SGD(parameters, lr=0.05))[0]


def grown(kind: str) -> nn.Module:
    """Return a model after two rounds of training steps and splits."""
    return copy.deepcopy(grown_once(kind))


def grow(kind: str, optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after two rounds of training steps and splits, and its optimizer."""
    torch.manual_seed(0)
    model = MODELS[kind][0]()
    x = example(kind)
    target = torch.arange(len(x)) % 3
    stepper = optimizer(model.parameters())
    for _ in range(2):
        train(model, stepper, x, target, 2)
        graph = s3d.trace(model, x)
        before = graph.widths()
        operators = s3d.capture(model, nn.functional.cross_entropy, [(x, target)], graph, curvature="paper")
        plan = s3d.select(s3d.extremal_eigenpairs(operators, tol=1e-2), graph, m=2, c=1.3, fraction=0.5)
        s3d.apply_splits(model, plan, 0.05, stepper)
        assert sum(s3d.trace(model, x).widths().values()) > sum(before.values())
    return model, stepper


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, steps: int) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(x)


def snapshot(model: nn.Module) -> Snapshot:
    """Return everything that a failed load must not change."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state, [(name, id(parameter)) for name, parameter in model.named_parameters()], repr(model)


def assert_same_state(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_untouched(model: nn.Module, before: Snapshot) -> None:
    after = snapshot(model)
    assert_same_state(after[0], before[0])
    assert after[1:] == before[1:]


@every_model
def test_a_grown_network_is_restored_from_its_seed(kind: str, tmp_path: Path) -> None:
    model, x = grown(kind), example(kind)
    s3d.save_grown(model, tmp_path / "net.safetensors")
    torch.manual_seed(99)
    fresh = MODELS[kind][0]()
    s3d.load_grown(fresh, tmp_path / "net.safetensors")
    assert_same_state(fresh.state_dict(), model.state_dict())
    assert torch.equal(outputs(fresh, x), outputs(model, x))
    # The modules' size attributes match the grown model too.
    assert repr(fresh) == repr(model)
    assert s3d.trace(fresh, x).widths() == s3d.trace(model, x).widths()


@every_model
def test_a_restored_network_trains_and_grows_like_the_saved_one(kind: str, tmp_path: Path) -> None:
    model, x = grown(kind), example(kind)
    target = torch.arange(len(x)) % 3
    s3d.save_grown(model, tmp_path / "net.safetensors")
    other = MODELS[kind][0]()
    s3d.load_grown(other, tmp_path / "net.safetensors")
    for net in (model, other):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), x, target, 2)
        graph = s3d.trace(net, x)
        spectra = s3d.extremal_eigenpairs(
            s3d.capture(net, nn.functional.cross_entropy, [(x, target)], graph, curvature="paper")
        )
        s3d.apply_splits(net, s3d.select(spectra, graph, fraction=0.3), 0.05)
    assert_same_state(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("width", [1, 2, 7, 20])
def test_the_model_may_have_any_widths_before_a_load(width: int, tmp_path: Path) -> None:
    model, x = grown("mlp-batchnorm"), example("mlp-batchnorm")
    s3d.save_grown(model, tmp_path / "net.safetensors")
    other = mlp(width)
    s3d.load_grown(other, tmp_path / "net.safetensors")
    assert torch.equal(outputs(other, x), outputs(model, x))


def test_a_load_keeps_the_dtype_and_trainability_of_the_model(tmp_path: Path) -> None:
    model = grown("mlp-batchnorm")
    s3d.save_grown(model, tmp_path / "net.safetensors")
    other = mlp().double()
    other.get_parameter("layers.0.weight").requires_grad_(False)
    s3d.load_grown(other, tmp_path / "net.safetensors")
    assert all(parameter.dtype == torch.float64 for parameter in other.parameters())
    assert [name for name, p in other.named_parameters() if not p.requires_grad] == ["layers.0.weight"]
    assert torch.equal(other.get_parameter("layers.3.weight").float(), model.get_parameter("layers.3.weight"))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.shared = nn.Linear(width, width)
        self.again = self.shared
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.relu(self.shared(self.first(x)))))


@pytest.mark.parametrize("width", [4, 6])
def test_a_layer_under_two_names_stays_one_layer(width: int, tmp_path: Path) -> None:
    model, other, x = Twice(4), Twice(width), torch.ones(2, 3)
    s3d.save_grown(model, tmp_path / "net.safetensors")
    s3d.load_grown(other, tmp_path / "net.safetensors")
    assert other.again.weight is other.shared.weight
    assert torch.equal(outputs(other, x), outputs(model, x))


def test_the_file_is_safetensors_without_pickle(tmp_path: Path) -> None:
    model = grown("mlp-batchnorm")
    path = tmp_path / "net.safetensors"
    s3d.save_grown(model, path)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
        assert all(json.loads(value) is not None for key, value in file.metadata().items() if key == "record")
    data = path.read_bytes()
    # The file holds eight bytes of length, then JSON, then the bytes of the tensors, and nothing else.
    length = int.from_bytes(data[:8], "little")
    json.loads(data[8 : 8 + length])
    assert len(data) == 8 + length + sum(t.numel() * t.element_size() for t in model.state_dict().values())


def test_identical_weights_give_identical_files(tmp_path: Path) -> None:
    path, contents = tmp_path / "net.safetensors", set()
    for _ in range(20):
        contents.add(saved(path))
    assert len(contents) == 1
    # The metadata stand in the order of their names, and the numbers on whole words.
    header = contents.pop()[8:]
    assert header.index(b'"format"') < header.index(b'"record"')
    with safe_open(path, framework="pt") as file:
        assert set(file.metadata()) == {"format", "record"}
    assert (int.from_bytes(path.read_bytes()[:8], "little") + 8) % 8 == 0


def test_saving_leaves_the_model_alone(tmp_path: Path) -> None:
    model = grown("mlp-batchnorm")
    before = snapshot(model)
    s3d.save_grown(model, tmp_path / "net.safetensors")
    assert_untouched(model, before)
    assert os.listdir(tmp_path) == ["net.safetensors"]


def fail(*_: object, **__: object) -> None:
    raise OSError("no space left on device")


class Half(io.FileIO):
    """A file that fails in the middle of a write."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        raise OSError("no space left on device")


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_is_whole_or_not_there(
    where: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.safetensors"
    if exists:
        s3d.save_grown(mlp(), path)
    old = path.read_bytes() if exists else None
    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr("builtins.open", lambda file, mode="r", **_: Half(os.fspath(file), mode))
        else:
            patch.setattr(os, where, fail)
        with pytest.raises(OSError, match="no space left"):
            s3d.save_grown(grown("mlp-batchnorm"), path)
    assert (path.read_bytes() if exists else None) == old
    assert os.listdir(tmp_path) == (["net.safetensors"] if exists else [])


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        s3d.save_grown(mlp(), tmp_path / "net.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_missing_file_or_folder_is_an_os_error(tmp_path: Path) -> None:
    model = mlp()
    before = snapshot(model)
    with pytest.raises(OSError, match="net"):
        s3d.load_grown(model, tmp_path / "net.safetensors")
    with pytest.raises(OSError, match="nowhere"):
        s3d.save_grown(model, tmp_path / "nowhere" / "net.safetensors")
    assert_untouched(model, before)


def saved(path: Path) -> bytes:
    s3d.save_grown(grown("mlp-batchnorm"), path)
    return path.read_bytes()


def damage(name: str, data: bytes) -> bytes:
    half = len(data) // 2
    return {
        "empty": b"",
        "truncated": data[:half],
        "one byte short": data[:-1],
        "head only": data[:20],
        "too long": data + b"\0",
        "random": bytes(torch.randint(256, (500,), generator=torch.Generator().manual_seed(0)).tolist()),
        "huge header": (2**62).to_bytes(8, "little") + data[8:],
        "pickle": pickled(),
    }[name]


def pickled() -> bytes:
    file = io.BytesIO()
    torch.save({"layers.0.weight": torch.zeros(2)}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "name", ["empty", "truncated", "one byte short", "head only", "too long", "random", "huge header", "pickle"]
)
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(damage(name, saved(path)))
    model = mlp()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"net\.safetensors|the file"):
        s3d.load_grown(model, path)
    assert_untouched(model, before)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=["none", "empty", "foreign"])
def test_a_safetensors_file_of_others_is_loaded(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    path, model = tmp_path / "net.safetensors", mlp()
    wanted = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    save_file(wanted, path, metadata=metadata)
    s3d.load_grown(model, path)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "s3d_fast grown network 999", "record": "{}"},
        {"format": checkpoint.FORMAT},
        {"format": checkpoint.FORMAT, "record": "not JSON"},
        {"format": checkpoint.FORMAT, "record": "[]"},
        {"format": checkpoint.FORMAT, "record": '{"sizes": 3}'},
        {"format": checkpoint.FORMAT, "record": '{"sizes": {"layers.0": 3}}'},
    ],
    ids=["future", "no-record", "not-json", "list", "number", "number-of-layer"],
)
def test_a_file_of_another_format_is_refused(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file({name: t.clone() + 1 for name, t in mlp().state_dict().items()}, path, metadata=metadata)
    model = mlp()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"net\.safetensors|the file"):
        s3d.load_grown(model, path)
    assert_untouched(model, before)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "deeper": lambda: MLP([4, 3, 3, 3, 3], batchnorm=True),
    "shallower": lambda: MLP([4, 3, 3], batchnorm=True),
    "no-batchnorm": lambda: MLP([4, 3, 3, 3]),
    "other-kind": mobilenet,
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_file_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "net.safetensors")
    model = OTHERS[name]()
    before = snapshot(model)
    with pytest.raises(ValueError, match="model"):
        s3d.load_grown(model, tmp_path / "net.safetensors")
    assert_untouched(model, before)


def test_kernels_of_another_size_are_refused(tmp_path: Path) -> None:
    def net(kernel: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, kernel, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))

    s3d.save_grown(net(3), tmp_path / "net.safetensors")
    model = net(5)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"0\.weight"):
        s3d.load_grown(model, tmp_path / "net.safetensors")
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("layer", "attribute", "value"),
    [
        ("layers.0", "training", 1),
        ("layers.0", "forward", 1),
        ("layers.0", "__class__", 1),
        ("layers.0", "weight", 3),
        ("layers.0", "in_features", -1),
        ("layers.0", "in_features", 0),
        ("layers.0", "in_features", 4.0),
        ("layers.0", "in_features", True),
        ("layers.0", "in_features", "4"),
        ("layers.0", "in_features", None),
        ("layers.0", "in_features", [4]),
        ("layers.0", "in_features", 999),
        ("layers.0", "out_features", 10**30),
        ("layers.1", "num_features", 999),
        ("elsewhere", "in_features", 4),
    ],
    ids=str,
)
def test_sizes_that_no_growth_makes_are_refused(layer: str, attribute: str, value: Any, tmp_path: Path) -> None:
    source = grown("mlp-batchnorm")
    sizes: dict[str, dict[str, Any]] = copy.deepcopy(dict(checkpoint.layer_sizes(source)))
    sizes.setdefault(layer, {})[attribute] = value
    path = tmp_path / "net.safetensors"
    checkpoint.write(path, source.state_dict(), {"sizes": sizes})
    model = mlp()
    before = snapshot(model)
    with pytest.raises(ValueError, match=layer):
        s3d.load_grown(model, path)
    assert_untouched(model, before)


@pytest.mark.parametrize("change", ["dimension", "missing", "besides", "disagreeing"])
def test_tensors_that_do_not_fit_are_refused(change: str, tmp_path: Path) -> None:
    source = grown("mlp-batchnorm")
    tensors = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    last = list(tensors)[-1]
    if change == "dimension":
        tensors[last] = tensors[last].unsqueeze(0)
    elif change == "missing":
        del tensors[last]
    elif change == "besides":
        tensors["extra"] = torch.zeros(1)
    else:
        # The bias is longer than the number of rows of its weight.
        tensors[last] = torch.zeros(len(tensors[last]) + 5)
    path = tmp_path / "net.safetensors"
    checkpoint.write(path, tensors, {"sizes": checkpoint.layer_sizes(source)})
    model = mlp()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layers|extra"):
        s3d.load_grown(model, path)
    assert_untouched(model, before)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, betas=(0.8, 0.95)),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
}


def round_trip(model: nn.Module, optimizer: torch.optim.Optimizer, fresh: nn.Module, path: Path) -> Any:
    """Write model and optimizer to files; load the model into `fresh` and return the optimizer's state as read."""
    s3d.save_grown(model, path.with_name("net.safetensors"))
    tensors, groups = checkpoint.optimizer_tensors(model, optimizer)
    checkpoint.write(path, tensors, {"groups": groups})
    s3d.load_grown(fresh, path.with_name("net.safetensors"))
    tensors, record = checkpoint.read(path)
    return tensors, record["groups"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_after_a_round_trip_equal_steps_without_it(name: str, tmp_path: Path) -> None:
    make, x = OPTIMIZERS[name], example("mlp-batchnorm")
    target = torch.arange(len(x)) % 3
    model, optimizer = grow("mlp-batchnorm", make)
    # As after a schedule: it has changed the rate and stored an entry of its own.
    optimizer.param_groups[0]["lr"] *= 0.3
    optimizer.param_groups[0]["initial_lr"] = 0.5
    fresh = mlp()
    tensors, groups = round_trip(model, optimizer, fresh, tmp_path / "optimizer.safetensors")
    restored = make(fresh.parameters())
    checkpoint.restore_optimizer(fresh, restored, tensors, groups)

    before, after = optimizer.state_dict(), restored.state_dict()
    assert before["param_groups"] == after["param_groups"]
    train(model, optimizer, x, target, 3)
    train(fresh, restored, x, target, 3)
    assert_same_state(fresh.state_dict(), model.state_dict())


def test_parameter_groups_keep_their_own_options(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": others}], lr=0.1, momentum=0.9)

    model, x = grown("mlp-batchnorm"), example("mlp-batchnorm")
    target, optimizer, fresh = torch.arange(len(x)) % 3, make(model), mlp()
    train(model, optimizer, x, target, 2)
    optimizer.param_groups[1]["lr"] = 0.01
    tensors, groups = round_trip(model, optimizer, fresh, tmp_path / "optimizer.safetensors")
    restored = make(fresh)
    checkpoint.restore_optimizer(fresh, restored, tensors, groups)
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.01]
    train(model, optimizer, x, target, 2)
    train(fresh, restored, x, target, 2)
    assert_same_state(fresh.state_dict(), model.state_dict())

    plain = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="parameter groups"):
        checkpoint.restore_optimizer(fresh, plain, tensors, groups)
    assert not plain.state
