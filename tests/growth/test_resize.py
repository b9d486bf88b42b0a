"""Grown networks from checkpoints of every format, and into other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import s3d_fast as s3d
from s3d_fast.models import MobileNetV1
from tests.model_cases import random_plan, randomise_norms


def build(width: int = 4) -> nn.Module:
    """Return a small MobileNet in eval mode, float64."""
    torch.manual_seed(width)
    model = MobileNetV1((width,) * 14, num_classes=3, stem_stride=1).double()
    # With the statistics of a new network, its outputs would hardly depend on its inputs.
    randomise_norms(model, torch.randn(8, 3, 16, 16, dtype=torch.float64))
    return model.eval()


@pytest.fixture(scope="module")
def grown() -> tuple[nn.Module, Tensor, Tensor]:
    model, x = build(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    s3d.apply_splits(model, random_plan(s3d.trace(model, x), 2, every=2), eps=0.1)
    with torch.no_grad():
        assert not torch.allclose(model(x), model(-x), rtol=0.01)
        return model, x, model(x)


def test_resize_like_lets_a_fresh_model_load_the_weights(grown: Any) -> None:
    model, x, y = grown
    fresh = build(3)
    s3d.resize_like(fresh, model.state_dict())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), y, rtol=0, atol=0)
    assert s3d.layer_arguments(fresh) == s3d.layer_arguments(model)


def test_resize_like_needs_shapes_only(grown: Any) -> None:
    model, x, y = grown
    fresh = build(3)
    s3d.resize_like(fresh, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), y, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "form", ["ours", "safetensors", "pt", "ckpt", "compiled", "parallel", "nested", "state_dict", "distributed"]
)
def test_load_grown_takes_every_format(grown: Any, form: str, tmp_path: Path) -> None:
    model, x, y = grown
    state, path = model.state_dict(), tmp_path / "net"
    source: Any = path
    if form == "ours":
        s3d.save_grown(model, path)
    elif form == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    elif form == "pt":
        torch.save(state, path)
    elif form == "ckpt":
        torch.save({"epoch": 3, "state_dict": {f"model.{name}": tensor for name, tensor in state.items()}}, path)
    elif form == "compiled":
        torch.save({f"_orig_mod.{name}": tensor for name, tensor in state.items()}, path)
    elif form == "parallel":
        torch.save({f"module.{name}": tensor for name, tensor in state.items()}, path)
    elif form == "nested":
        torch.save({"model": state, "optimizer": {}}, path)
    elif form == "state_dict":
        source = state
    else:
        dcp.save(state, checkpoint_id=path)
        fresh = build(3)
        s3d.resize_like(fresh, state)
        dcp.load(loaded := fresh.state_dict(), checkpoint_id=path)
        source = loaded
    fresh = build(2)
    s3d.load_grown(fresh, source)
    torch.testing.assert_close(fresh(x), y, rtol=0, atol=0)


class Evil:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("evil").touch, ())


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, tmp_path / "net.ckpt")
    model = build()
    with pytest.raises(ValueError, match="cannot be loaded safely"):
        s3d.load_grown(model, tmp_path / "net.ckpt")
    assert not Path("evil").exists()


def test_a_checkpoint_without_weights_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build()
    torch.save({"epoch": 3}, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="holds no state_dict"):
        s3d.load_grown(model, tmp_path / "net.pt")
    with pytest.raises(ValueError, match="does not belong to this model"):
        s3d.load_grown(model, nn.Linear(3, 2).state_dict())
    with pytest.raises(ValueError, match="does not belong to this model"):
        s3d.resize_like(model, nn.Linear(3, 2).state_dict())


def test_shapes_that_contradict_one_another_are_refused(grown: Any) -> None:
    state = dict(grown[0].state_dict())
    state["stem.1.running_var"] = state["stem.1.running_var"][:-1]
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"stem\.1"):
        s3d.load_grown(model, state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_grown_network_is_exported_for_any_batch_size(grown: Any) -> None:
    model, x, _ = grown
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    more = torch.cat([x, x, x])
    torch.testing.assert_close(program.module()(more), model(more))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_grown_network_gives_the_same_numbers_in_onnx(grown: Any) -> None:
    pytest.importorskip("onnxscript", reason="the extra s3d_fast[onnx] is not installed")
    reference = pytest.importorskip("onnx.reference")
    model, x, _ = grown
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, dynamic_shapes=({0: batch},))
    assert program is not None
    evaluator = reference.ReferenceEvaluator(program.model_proto)
    more = torch.cat([x, 2 * x, -x])
    (found,) = evaluator.run(None, {evaluator.input_names[0]: more.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(more).detach(), rtol=1e-9, atol=1e-9)


def test_the_arguments_of_layers_are_plain_numbers(grown: Any) -> None:
    model = grown[0]
    found = s3d.layer_arguments(model)
    stem = model.get_submodule("stem.0")
    assert found["stem.0"] == {"in_channels": 3, "out_channels": stem.out_channels}
    assert found["stem.1"] == {"num_features": stem.out_channels}
    assert all(type(size) is int for sizes in found.values() for size in sizes.values())
