"""Every reader of the package: a whole file, the ways to damage it, and the call that reads it."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

import s3d_fast as s3d
from s3d_fast import data
from s3d_fast.base.tensor_files import serialized
from s3d_fast.base.world import World
from s3d_fast.commands import grow as grow_command
from s3d_fast.commands.parsing import Parser
from s3d_fast.data import Entry, JpegSource
from s3d_fast.growth import checkpoint
from s3d_fast.models.mlp import MLP
from s3d_fast.recipes import recipe
from s3d_fast.recipes.job import Job
from s3d_fast.recipes.running import run
from s3d_fast.recipes.saved import load_network, saved_network
from s3d_fast.records.run import read_run
from s3d_fast.records.run_folder import read_spectra
from s3d_fast.visualize import load_image, load_vgg19
from tests import grow_worker
from tests.data.test_data import cifar_batch, idx, python2_pickle, tar_of
from tests.data_cases import jpeg, random_bytes, smooth_image
from tests.hostile.mutations import as_json, damaged, other_record, program, text_or_record

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One reader at work in a folder.

    Attributes:
        file: the file that is damaged; it is whole at first.
        contents: strategies of what it may hold instead.
        read: reads it.
        state: returns what must be the same after an error.
        most: the bytes of memory that reading may take, besides what was in use.
        folder: an error may name this folder instead, if several files in it do not go together.
    """

    file: Path
    contents: SearchStrategy[bytes]
    read: Callable[[], object]
    state: Callable[[], Any] = lambda: None
    most: int = 64 * MIB
    folder: Path | None = None


Maker = Callable[[Path], Case]
READERS: dict[str, Maker] = {}


def reader(name: str) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        READERS[name] = make
        return make

    return register


def write_pickles(folder: Path) -> Path:
    for name, count in (("train", 3), ("test", 2)):
        (folder / name).write_bytes(python2_pickle(cifar_batch(count)))
    return folder / "train"


@reader("CIFAR-100, pickle")
def cifar_pickle(folder: Path) -> Case:
    file = write_pickles(folder)
    return Case(file, damaged(file.read_bytes()), lambda: data.cifar100(folder))


@reader("CIFAR-100, pickle of random operations")
def cifar_program(folder: Path) -> Case:
    return Case(write_pickles(folder), program(), lambda: data.cifar100(folder))


@reader("CIFAR-100, binary")
def cifar_binary(folder: Path) -> Case:
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(bytes([3, 5]) + random_bytes(3072).tobytes())
    file = folder / "train.bin"
    return Case(file, damaged(file.read_bytes()), lambda: data.cifar100(folder))


def cifar_arrays() -> dict[str, np.ndarray]:
    images, labels = random_bytes(2, 32, 32, 3), np.array([1, 2], np.uint8)
    return {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}


@reader("npz")
def npz(folder: Path) -> Case:
    file = folder / "cifar100.npz"
    contents = []
    for save in (np.savez, np.savez_compressed):
        save(file, **cifar_arrays())
        contents.append(damaged(file.read_bytes()))
    return Case(file, st.one_of(contents), lambda: data.cifar100(folder))


@reader("npz, array inside")
def npz_array(folder: Path) -> Case:
    file = folder / "cifar100.npz"
    np.savez(file, **cifar_arrays())
    arrays = zip_entries(file.read_bytes())
    first = damaged(arrays["x_train.npy"])
    return Case(file, first.map(lambda array: zipped(arrays | {"x_train.npy": array})), lambda: data.cifar100(folder))


@reader("ModelNet40, npz")
def modelnet_npz(folder: Path) -> Case:
    clouds, labels = np.zeros((2, 20, 3), np.float32), np.array([1, 2], np.uint8)
    for split in ("train", "test"):
        np.savez_compressed(folder / f"modelnet40_{split}.npz", x=clouds, y=labels)
    file = folder / "modelnet40_train.npz"
    return Case(file, damaged(file.read_bytes()), lambda: data.modelnet40(folder, points=16))


@reader("ModelNet40, list of files")
def modelnet_list(folder: Path) -> Case:
    write_h5(folder / "ply_data_train0.h5", None)
    write_h5(folder / "ply_data_test0.h5", None)
    file = folder / "train_files.txt"
    file.write_text("data/ply_data_train0.h5\n")
    # A list that names other files, which are missing.
    contents = damaged(file.read_bytes())
    return Case(file, contents, lambda: data.modelnet40(folder, points=16), folder=folder)


def write_h5(path: Path, compression: str | None) -> None:
    clouds = np.random.default_rng(0).standard_normal((3, 20, 3)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=clouds, compression=compression, shuffle=compression is not None)
        file.create_dataset("label", data=np.array([[1], [2], [3]], np.uint8))


@reader("ModelNet40, HDF5")
def modelnet_h5(folder: Path) -> Case:
    file = folder / "ply_data_train0.h5"
    write_h5(folder / "ply_data_test0.h5", None)
    contents = []
    for compression in (None, "gzip"):
        write_h5(file, compression)
        contents.append(damaged(file.read_bytes()))
    return Case(file, st.one_of(contents), lambda: data.modelnet40(folder, points=16))


def write_idx(folder: Path, ending: str, pack: Callable[[bytes], bytes]) -> dict[str, bytes]:
    files = {}
    for name, count in (("train", 3), ("t10k", 2)):
        files[f"{name}-images-idx3-ubyte"] = idx(random_bytes(count, 28, 28))
        files[f"{name}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8))
    for name, content in files.items():
        (folder / f"{name}{ending}").write_bytes(pack(content))
    return files


@reader("Fashion-MNIST, idx")
def fashion_idx(folder: Path) -> Case:
    write_idx(folder, "", bytes)
    file = folder / "train-images-idx3-ubyte"
    return Case(file, damaged(file.read_bytes()), lambda: data.fashion_mnist(folder))


@reader("Fashion-MNIST, gzip")
def fashion_gzip(folder: Path) -> Case:
    files = write_idx(folder, ".gz", gzip.compress)
    file = folder / "train-labels-idx1-ubyte.gz"
    inner = damaged(files[file.stem]).map(lambda content: gzip.compress(content, 1))
    return Case(file, st.one_of(damaged(file.read_bytes()), inner), lambda: data.fashion_mnist(folder))


def write_tars(folder: Path) -> Path:
    image = jpeg(smooth_image(9, 9))
    for split in ("train", "val"):
        (folder / split).mkdir()
        long = "a" * 120
        tar_of(folder / split / "0.tar", {f"{long}.jpg": image, f"{long}.cls": b"1", "b.jpg": image, "b.cls": b"2"})
    return folder / "train" / "0.tar"


def read_tars(folder: Path) -> None:
    for _ in data.imagenet(folder, size=8, workers=0).train.batches(2):
        pass


@reader("tar")
def tar(folder: Path) -> Case:
    file = write_tars(folder)
    return Case(file, damaged(file.read_bytes()), lambda: read_tars(folder), folder=folder)


def resealed(content: bytes) -> bytes:
    """Return a tar in which every header has the right checksum."""
    blocks = [bytearray(content[start : start + 512]) for start in range(0, len(content), 512)]
    for block in blocks:
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


@st.composite
def other_headers(draw: DrawFn, content: bytes) -> bytes:
    """Return a tar whose headers say something else: sizes, types and names, with right checksums."""
    blocks = bytearray(content)
    headers = [start for start in range(0, len(content), 512) if content[start + 257 : start + 262] == b"ustar"]
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.sampled_from(headers))
        at, width = draw(st.sampled_from(((124, 12), (156, 1), (0, 100), (257, 8), (345, 155), (512, 64))))
        number = draw(st.integers(-(2**87), 2**87) | st.sampled_from((-512, -1024, -1, 0, 2**62, 2**33, 1536)))
        values = {
            1: draw(st.sampled_from((b"0", b"\0", b"1", b"5", b"7", b"L", b"K", b"x", b"g", b"S", b"V", b"\xff"))),
            12: draw(
                st.sampled_from((number.to_bytes(12, "big", signed=True), b"%011o\0" % (abs(number) % 8**11), b"-1000"))
            ),
        }
        new = values.get(width) or draw(st.binary(min_size=1, max_size=width))
        blocks[start + at : start + at + len(new)] = new
    return resealed(bytes(blocks))


@reader("tar, right checksums")
def tar_headers(folder: Path) -> Case:
    file = write_tars(folder)
    content = file.read_bytes()
    contents = st.one_of(other_headers(content), damaged(content).map(resealed))
    return Case(file, contents, lambda: read_tars(folder), folder=folder)


def encoded(kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    smooth_image(23, 17).save(stream, kind, **options)
    return stream.getvalue()


@reader("JPEG")
def photograph(folder: Path) -> Case:
    file = folder / "a.jpg"
    whole = [encoded("JPEG"), encoded("JPEG", progressive=True), encoded("PNG")]
    file.write_bytes(whole[0])

    def read() -> None:
        list(JpegSource([Entry(str(file), 0, -1, 0)], 16, 0).batches(1, train=True))

    # Pillow keeps four bytes for each of at most 89 million pixels, and libjpeg may keep its coefficients too.
    return Case(file, st.one_of([damaged(one) for one in whole]), read, most=1024 * MIB)


@reader("pictures")
def picture(folder: Path) -> Case:
    file = folder / "picture"
    whole = [encoded(kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "PPM")]
    file.write_bytes(whole[0])
    return Case(file, st.one_of([damaged(one) for one in whole]), lambda: load_image(file, 16), most=1024 * MIB)


def small_network(width: int) -> torch.nn.Module:
    torch.manual_seed(width)
    return MLP([4, width, 3, 2], batchnorm=True)


def weights(folder: Path, contents: Callable[[bytes], SearchStrategy[bytes]], save: Callable[[Path], object]) -> Case:
    """Return a case that loads a grown network into a small one."""
    file, model = folder / "network.weights", small_network(3)
    save(file)
    return Case(file, contents(file.read_bytes()), lambda: s3d.load_grown(model, file), lambda: tensors_of(model))


def tensors_of(model: torch.nn.Module) -> tuple[list[tuple[str, int, bytes]], dict[str, Any]]:
    state = model.state_dict(keep_vars=True)
    found = [(name, id(tensor), tensor.detach().numpy().tobytes()) for name, tensor in state.items()]
    return found, checkpoint.layer_sizes(model)


def parts_of_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def safetensors_of(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


@reader("safetensors")
def safetensors(folder: Path) -> Case:
    return weights(folder, damaged, lambda file: s3d.save_grown(small_network(5), file))


@reader("safetensors, header")
def safetensors_header(folder: Path) -> Case:
    def contents(whole: bytes) -> SearchStrategy[bytes]:
        header, body = parts_of_safetensors(whole)
        return text_or_record(header).map(lambda text: safetensors_of(text, body))

    return weights(folder, contents, lambda file: s3d.save_grown(small_network(5), file))


def with_record(file: Path) -> Callable[[bytes], bytes]:
    """Return a function that puts the text of a record into a file of ours."""
    tensors, _ = checkpoint.read(file)

    def put(text: bytes) -> bytes:
        return serialized(tensors, {"format": checkpoint.FORMAT, "record": text.decode(errors="replace")})

    return put


@reader("record of a grown network")
def record_of_network(folder: Path) -> Case:
    file, model = folder / "network.safetensors", small_network(3)
    s3d.save_grown(small_network(5), file)
    _, record = checkpoint.read(file)
    contents = text_or_record(record).map(with_record(file))
    return Case(file, contents, lambda: s3d.load_grown(model, file), lambda: tensors_of(model))


def torch_saved(new: bool) -> Callable[[Path], object]:
    return lambda file: torch.save(small_network(5).state_dict(), file, _use_new_zipfile_serialization=new)


@reader("torch.save, zip")
def torch_zip(folder: Path) -> Case:
    return weights(folder, damaged, torch_saved(True))


@reader("torch.save, pickle inside")
def torch_pickle(folder: Path) -> Case:
    def contents(whole: bytes) -> SearchStrategy[bytes]:
        entries = zip_entries(whole)
        name = next(name for name in entries if name.endswith("data.pkl"))
        inner = st.one_of(damaged(entries[name]), program())
        return inner.map(lambda content: zipped(entries | {name: content}))

    return weights(folder, contents, torch_saved(True))


@reader("torch.save, before zip")
def torch_legacy(folder: Path) -> Case:
    return weights(folder, lambda whole: st.one_of(damaged(whole), program()), torch_saved(False))


def zip_entries(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(entries: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return stream.getvalue()


@reader("VGG-19")
def vgg19(folder: Path) -> Case:
    file = folder / "vgg19.weights"
    widths = (2, 2, 2, 2, *(2,) * 12)
    state: dict[str, Tensor] = {}
    places = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)
    for place, fan_in, width in zip(places, (3, *widths[:-1]), widths, strict=True):
        state |= {
            f"features.{place}.weight": torch.zeros(width, fan_in, 3, 3),
            f"features.{place}.bias": torch.zeros(width),
        }
    for place, fan_in, width in ((0, 2 * 49, 4), (3, 4, 4), (6, 4, 3)):
        state |= {
            f"classifier.{place}.weight": torch.zeros(width, fan_in),
            f"classifier.{place}.bias": torch.zeros(width),
        }
    contents = []
    for write in (lambda: torch.save(state, file), lambda: file.write_bytes(serialized(state, {"a": "b"}))):
        write()
        contents.append(damaged(file.read_bytes()))
    return Case(file, st.one_of(contents), lambda: load_vgg19(file))


def digits_run(folder: Path) -> Path:
    """Write the smallest run of a recipe."""
    settings = {"widths": (2, 2, 2), "steps": 1, "epochs": 1, "train_samples": 32, "test_samples": 16}
    settings |= {"batch_size": 32, "split_samples": 16, "split_batch": 16}
    run(Job(recipe("digits", "cpu").with_settings(settings), data.digits(), out=folder, preset="cpu"))
    return folder


@reader("run.json")
def run_json(folder: Path) -> Case:
    file = digits_run(folder) / "run.json"

    def read() -> None:
        read_run(folder)
        load_network(*saved_network(folder, None))

    return Case(file, text_or_record(json.loads(file.read_text())), read)


@reader("history.jsonl")
def history(folder: Path) -> Case:
    file = digits_run(folder) / "history.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]

    def lines(records: Any) -> bytes:
        return b"".join(as_json(record) + b"\n" for record in (records if isinstance(records, list) else [records]))

    return Case(file, text_or_record(records, lines), lambda: read_run(folder))


@reader("spectra")
def spectra(folder: Path) -> Case:
    file = digits_run(folder) / "spectra-000.safetensors"
    header, body = parts_of_safetensors(file.read_bytes())
    contents = st.one_of(
        damaged(file.read_bytes()), other_record(header).map(lambda record: safetensors_of(as_json(record), body))
    )
    return Case(file, contents, lambda: read_spectra(folder, 0))


def grower_state(grower: s3d.Grower) -> Any:
    moments = [
        (key, value.numpy().tobytes() if isinstance(value, Tensor) else value)
        for state in grower.optimizer.state.values()
        for key, value in state.items()
    ]
    return tensors_of(grower.model), id(grower.optimizer), moments, list(grower.history), grower.stopped


def begun_run(folder: Path) -> tuple[s3d.Grower, Path]:
    """Return a Grower that writes nothing, and the checkpoint of an epoch of a run like it."""
    with stopped_at(3):
        grow_worker.grower(folder).run()
    return grow_worker.grower(folder, world=World(rank=1)), folder / "epoch-001.safetensors"


@contextmanager
def stopped_at(saves: int) -> Iterator[None]:
    """Let a Grower end after so many checkpoints of epochs."""
    whole, count = s3d.Grower._save, [0]

    def save(self: s3d.Grower, kind: str, index: int, unfinished: Any = None) -> None:
        whole(self, kind, index, unfinished)
        count[0] += kind == "epoch"
        if count[0] > saves:
            raise KeyboardInterrupt

    s3d.Grower._save = save  # type: ignore[method-assign]
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        s3d.Grower._save = whole  # type: ignore[method-assign]


@reader("checkpoint of a run")
def run_checkpoint(folder: Path) -> Case:
    grower, file = begun_run(folder)
    header, body = parts_of_safetensors(file.read_bytes())
    contents = st.one_of(
        damaged(file.read_bytes()), other_record(header).map(lambda record: safetensors_of(as_json(record), body))
    )
    return Case(
        file,
        contents,
        lambda: grower._restore(file, *checkpoint.read(file)),
        lambda: grower_state(grower),
        folder=folder,
    )


@reader("record of a checkpoint of a run")
def run_record(folder: Path) -> Case:
    grower, file = begun_run(folder)
    _, record = checkpoint.read(file)
    # The states of generators are thousands of numbers: without them, other entries are met more often.
    short = record | {"random": record["random"] | {"python": [3, [1, 2], None]}}
    contents = st.one_of(
        text_or_record(record), other_record(short).map(lambda one: as_json(restored(one, short, record)))
    ).map(with_record(file))
    return Case(
        file,
        contents,
        lambda: grower._restore(file, *checkpoint.read(file)),
        lambda: grower_state(grower),
        folder=folder,
    )


def restored(changed: Any, short: Any, whole: Any) -> Any:
    """Return a changed record with the whole states of generators, where these were not changed."""
    if isinstance(changed, dict) and changed.get("random") == short["random"]:
        return changed | {"random": whole["random"]}
    return changed


def read_config(file: Path) -> Callable[[], object]:
    """Return a function that parses the options of a file, as `s3d-fast grow --config` does, and makes the recipe."""

    def read() -> None:
        command = Parser("grow")
        grow_command.add(command)
        arguments = ["--config", str(file), "--quiet"]
        options = command.parse_args(arguments, argparse.Namespace(arguments=arguments))
        chosen = grow_command.configured(command, options)
        chosen.preset = chosen.preset or "cpu"
        grow_command.made_recipe(chosen)

    return read


CONFIG = {"recipe": "digits", "preset": "cpu", "method": "s3d", "seeds": [0, 1], "quiet": True, "precision": "fp32"}
CONFIG |= {"settings": {"epochs": 3, "widths": [2, 3, 4], "eps": 0.02, "optimizer": "sgd", "memory_budget": "1GB"}}


@reader("options, JSON")
def config_json(folder: Path) -> Case:
    file = folder / "options.json"
    file.write_bytes(as_json(CONFIG))
    return Case(file, text_or_record(CONFIG), read_config(file))


@reader("options, run.json")
def config_run(folder: Path) -> Case:
    file = folder / "run.json"
    settings = json.loads(json.dumps(recipe("digits", "cpu").as_settings())) | {"eps": 0.02}
    about = {"recipe": "digits", "preset": "cpu", "method": "s3d", "seed": 1, "settings": settings, "like": None}
    about |= {"environment": {"torch": "2"}, "command": ["s3d-fast"], "precision": "auto"}
    file.write_bytes(as_json(about))
    return Case(file, text_or_record(about), read_config(file))


@reader("options, TOML")
def config_toml(folder: Path) -> Case:
    file = folder / "options.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in CONFIG.items() if name != "settings"]
    settings: Any = CONFIG["settings"]
    lines += ["[settings]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    file.write_text("\n".join(lines) + "\n")
    # Before Python 3.11 it takes a library to read it at all.
    read = read_config(file) if sys.version_info >= (3, 11) else lambda: None
    nested = st.integers(1, 20_000).map(lambda depth: b"a = " + b"[" * depth)
    return Case(file, st.one_of(damaged(file.read_bytes()), nested), read)
