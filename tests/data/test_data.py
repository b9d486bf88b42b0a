"""Data sets: every format gives the same data, and damaged files are refused with a reason."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch

from s3d_fast import data
from tests.data_cases import epoch, jpeg, random_bytes, samples_of, smooth_image


class Python2Pickler(pickle._Pickler):
    """Writes pickles as Python 2 did: strings are bytes."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)

    def save_string(self, value: Any) -> None:
        content = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_string


def python2_pickle(value: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    # The name of numpy's module at that time.
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def cifar_batch(count: int, **changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "filenames": [f"image_{number}.png" for number in range(count)],
        "batch_label": "training batch 1 of 1",
        "fine_labels": [number * 7 % 100 for number in range(count)],
        "coarse_labels": [number % 20 for number in range(count)],
        "data": random_bytes(count, 3072),
    }
    return values | changes


def write_cifar(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    arrays = {}
    for name, count in (("train", 12), ("test", 5)):
        batch = cifar_batch(count)
        pixels, labels = batch["data"], np.array(batch["fine_labels"])
        assert isinstance(pixels, np.ndarray)
        arrays |= {f"x_{name}": pixels.reshape(-1, 3, 32, 32), f"y_{name}": labels}
        if kind == "python2":
            (folder / name).write_bytes(python2_pickle(batch))
        elif kind == "python3":
            (folder / name).write_bytes(pickle.dumps(batch, protocol=4))
        elif kind == "fortran":
            (folder / name).write_bytes(python2_pickle(batch | {"data": np.asfortranarray(pixels)}))
        elif kind == "binary":
            header = np.stack([np.array(batch["coarse_labels"]), labels], 1).astype(np.uint8)
            (folder / f"{name}.bin").write_bytes(np.concatenate([header, pixels], 1).tobytes())
    if kind == "npz":
        np.savez(folder / "cifar100.npz", **arrays, classes=np.array(["apple"]))
    elif kind == "npz-channels-last":
        for name in ("train", "test"):
            arrays[f"x_{name}"] = arrays[f"x_{name}"].transpose(0, 2, 3, 1)
            arrays[f"y_{name}"] = arrays[f"y_{name}"].astype(np.uint8)
        np.savez_compressed(folder / "cifar100.npz", **arrays)
    return folder


class TestCifar:
    def test_a_path_to_a_file_reads_that_file(self, tmp_path: Path) -> None:
        place = write_cifar(tmp_path, "binary")
        folder = place if (place / "train.bin").exists() else place / "cifar-100-binary"
        (folder / "cifar100.npz").write_bytes(b"nonsense")
        assert len(data.cifar100(folder / "train.bin").train) == 12
        with pytest.raises(ValueError, match=r"cifar100\.npz"):
            data.cifar100(folder)

    @pytest.mark.parametrize("kind", ["python2", "python3", "fortran", "binary", "npz", "npz-channels-last"])
    def test_every_format_gives_the_same_data(self, tmp_path: Path, kind: str) -> None:
        dataset = data.cifar100(write_cifar(tmp_path, kind))
        assert (dataset.name, dataset.classes, dataset.input_shape) == ("cifar100", 100, (3, 32, 32))
        assert (len(dataset.train), len(dataset.test)) == (12, 5)
        x, y = epoch(dataset.train.batches(12))
        pixels = torch.from_numpy(random_bytes(12, 3072)).reshape(12, 3, 32, 32)
        mean, std = torch.tensor([0.5071, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2762])
        assert torch.allclose(x, (pixels / 255 - mean[:, None, None]) / std[:, None, None], atol=1e-5)
        assert y.tolist() == [number * 7 for number in range(12)]
        assert not torch.equal(epoch(dataset.train.batches(12, train=True))[0], x)

    def test_files_are_found_by_folder_and_by_path(self, tmp_path: Path) -> None:
        write_cifar(tmp_path / "cifar-100-python", "python2")
        npz = write_cifar(tmp_path / "other", "npz") / "cifar100.npz"
        for path in (tmp_path, tmp_path / "cifar-100-python" / "train", str(npz), npz.parent):
            assert len(data.cifar100(path).train) == 12

    def test_a_malicious_pickle_is_refused_and_not_executed(self, tmp_path: Path) -> None:
        class Malicious:
            def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
                return os.mkdir, (str(tmp_path / "executed"),)

        write_cifar(tmp_path, "python2")
        for content in (Malicious(), cifar_batch(3, data=Malicious()), [1, {2: Malicious()}]):
            for protocol in (0, 2, 5):
                (tmp_path / "train").write_bytes(pickle.dumps(content, protocol))
                with pytest.raises(ValueError, match=r"train: the pickle asks for (posix|nt)\.mkdir, .* not executed"):
                    data.cifar100(tmp_path)
        assert not (tmp_path / "executed").exists()

    @pytest.mark.parametrize("name", ["builtins.eval", "numpy.load", "numpy.core.multiarray.fromfile", "os.system"])
    def test_a_pickle_with_other_names_is_refused(self, tmp_path: Path, name: str) -> None:
        write_cifar(tmp_path, "python2")
        module, _, last = name.rpartition(".")
        (tmp_path / "train").write_bytes(f"c{module}\n{last}\n.".encode())
        with pytest.raises(ValueError, match=f"the pickle asks for {name}, "):
            data.cifar100(tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (cifar_batch(3, fine_labels=[1, 2]), "one label per sample, got 2 labels and 3 samples"),
            (cifar_batch(3, fine_labels=[1, 2, 100]), "labels must be from 0 to 99, got 1 to 100"),
            (cifar_batch(3, fine_labels=[0.5, 1, 2]), "labels must be integers"),
            (cifar_batch(3, data=random_bytes(3, 3071)), r"bytes of shape \(N, 3072\), got \(3, 3071\)"),
            (cifar_batch(3, data=np.zeros((3, 3072))), "data must be an array of bytes"),
            (cifar_batch(3, data=5), "data must be an array of bytes"),
            (cifar_batch(0), "there are no samples"),
            ({"labels": [1]}, "must hold data and fine_labels, got labels"),
            ([1], "must hold a dictionary, got list"),
        ],
    )
    def test_wrong_content_is_refused(self, tmp_path: Path, content: object, message: str) -> None:
        write_cifar(tmp_path, "python2")
        (tmp_path / "test").write_bytes(python2_pickle(content))
        with pytest.raises(ValueError, match=message):
            data.cifar100(tmp_path)

    def test_truncated_files_are_refused(self, tmp_path: Path) -> None:
        def cut(path: Path) -> None:
            path.write_bytes(path.read_bytes()[:-1000])

        cut(write_cifar(tmp_path / "a", "python2") / "train")
        with pytest.raises(ValueError, match="train is not a whole CIFAR-100 batch"):
            data.cifar100(tmp_path / "a")
        cut(write_cifar(tmp_path / "b", "binary") / "test.bin")
        with pytest.raises(ValueError, match=r"test\.bin must consist of records of 3074 bytes, got 14370 bytes"):
            data.cifar100(tmp_path / "b")
        cut(write_cifar(tmp_path / "c", "npz") / "cifar100.npz")
        with pytest.raises(ValueError, match=r"cifar100\.npz is not a whole npz file"):
            data.cifar100(tmp_path / "c")

    def test_a_wrong_npz_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.npz"
        np.savez(path, x_train=random_bytes(2, 8, 8, 3), y_train=[0, 1], x_test=random_bytes(2, 8, 8, 3), y_test=[0, 1])
        with pytest.raises(ValueError, match=r"train: images must be uint8 .*, got uint8 \(2, 8, 8, 3\)"):
            data.cifar100(path)
        np.savez(path, images=random_bytes(2, 8))
        with pytest.raises(ValueError, match=r"x\.npz must hold an array x_train, got images"):
            data.cifar100(path)
        np.savez(path, x_train=np.array([{}], dtype=object))
        with pytest.raises(ValueError, match="not a whole npz file, in its array x_train: ValueError: Object arrays"):
            data.cifar100(path)
        with path.open("wb") as stream:
            np.save(stream, random_bytes(2, 8))
        with pytest.raises(ValueError, match="must be an npz file, got a single array"):
            data.cifar100(path)

    def test_a_folder_without_the_data_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
            data.cifar100(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"expected cifar-100-python \(train and test\), .*, found nothing"):
            data.cifar100(tmp_path)
        for number in range(7):
            (tmp_path / f"file{number}").touch()
        with pytest.raises(FileNotFoundError, match="found file0, file1, file2, file3, file4 and 2 more"):
            data.cifar100(tmp_path)


def random_clouds(count: int, points: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, points, 3)).astype(np.float32)


class TestModelNet:
    def arrays(self, points: int = 20) -> dict[str, np.ndarray]:
        clouds = random_clouds(9, points)
        return {
            "x_train": clouds.astype(np.float16),
            "y_train": np.arange(9, dtype=np.uint8),
            "x_test": clouds[:4].astype(np.float16),
            "y_test": np.arange(4, dtype=np.uint8) + 36,
        }

    def check(self, dataset: data.Dataset, atol: float = 1e-2) -> None:
        assert (dataset.classes, dataset.input_shape) == (40, (16, 3))
        assert (len(dataset.train), len(dataset.test)) == (9, 4)
        expected = torch.from_numpy(random_clouds(9, 20))[:, :16]
        x, y = epoch(dataset.test.batches(3))
        assert x.dtype == torch.float32
        assert torch.allclose(x, expected[:4], atol=atol)
        assert y.tolist() == [36, 37, 38, 39]
        assert torch.allclose(epoch(dataset.train.batches(4))[0], expected, atol=atol)
        x, _ = epoch(dataset.train.batches(9, train=True))
        assert x.shape == (9, 16, 3)
        assert not torch.allclose(x, expected, atol=atol)

    def test_one_npz_is_read(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "modelnet40.npz", **self.arrays())
        self.check(data.modelnet40(tmp_path, points=16))
        self.check(data.modelnet40(tmp_path / "modelnet40.npz", points=16))

    @pytest.mark.parametrize("names", [("x", "y"), ("points", "labels"), ("x_{}", "y_{}")])
    def test_an_npz_per_split_is_read(self, tmp_path: Path, names: tuple[str, str]) -> None:
        arrays = self.arrays()
        for split in ("train", "test"):
            x, y = (name.format(split) for name in names)
            np.savez(tmp_path / f"modelnet40_{split}.npz", **{x: arrays[f"x_{split}"], y: arrays[f"y_{split}"]})
        self.check(data.modelnet40(tmp_path, points=16))
        self.check(data.modelnet40(tmp_path / "modelnet40_train.npz", points=16))

    def test_hdf5_files_are_read_and_checked(self, tmp_path: Path) -> None:
        clouds = random_clouds(9, 20)
        folder = tmp_path / "modelnet40_ply_hdf5_2048"
        folder.mkdir()
        parts = {
            "train0": (clouds[:5], range(5)),
            "train1": (clouds[5:], range(5, 9)),
            "test0": (clouds[:4], range(36, 40)),
        }
        for name, (points, labels) in parts.items():
            with h5py.File(folder / f"ply_data_{name}.h5", "w") as file:
                file["data"], file["label"] = points, np.array(labels, dtype=np.uint8)[:, None]
        self.check(data.modelnet40(tmp_path, points=16), atol=0)
        self.check(data.modelnet40(folder, points=16), atol=0)

        (folder / "ply_data_train1.h5").write_bytes((folder / "ply_data_train1.h5").read_bytes()[:600])
        with pytest.raises(ValueError, match=r"ply_data_train1\.h5 is not a whole HDF5 file"):
            data.modelnet40(tmp_path)
        with h5py.File(folder / "ply_data_train1.h5", "w") as file:
            file["normal"] = clouds
        with pytest.raises(ValueError, match=r"ply_data_train1\.h5: it must hold data and label, got normal"):
            data.modelnet40(tmp_path)
        with h5py.File(folder / "ply_data_train1.h5", "w") as file:
            file["data"], file["label"] = clouds[:, :7], np.arange(9)
        with pytest.raises(ValueError, match=r"same number of points in all files, got \[7, 20\]"):
            data.modelnet40(tmp_path)
        # A missing file is noticed by the data set's list of files, or by the numbers in the file names.
        (folder / "train_files.txt").write_text("a/ply_data_train0.h5\na/ply_data_train1.h5\na/ply_data_train2.h5\n")
        with pytest.raises(FileNotFoundError, match=r"expected ply_data_train2\.h5 too"):
            data.modelnet40(tmp_path, points=16)
        (folder / "train_files.txt").unlink()
        (folder / "ply_data_train0.h5").unlink()
        with pytest.raises(FileNotFoundError, match=r"expected ply_data_train0\.h5 too"):
            data.modelnet40(tmp_path, points=16)

    def test_the_error_without_h5py_says_how_to_install_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("train0", "test0"):
            (tmp_path / f"ply_data_{name}.h5").touch()
        monkeypatch.setitem(sys.modules, "h5py", None)
        with pytest.raises(RuntimeError, match=r"need h5py, which is not installed: pip install 's3d_fast\[h5\]'"):
            data.modelnet40(tmp_path)

    def test_training_draws_points_from_the_whole_cloud(self, tmp_path: Path) -> None:
        # All coordinates of a point equal its index.
        clouds = np.broadcast_to(np.arange(200, dtype=np.float32)[:, None], (9, 200, 3))
        np.savez(tmp_path / "modelnet40.npz", **(self.arrays() | {"x_train": clouds}))
        batches = data.modelnet40(tmp_path, points=16).train.batches(9, train=True)
        torch.manual_seed(0)
        for x, _ in [*batches, *batches]:
            assert x.shape == (9, 16, 3)
            # Augmentation keeps the first 16 points below 1.5 * 15 + 0.22.
            assert x.amax(1).min() > 40
        assert torch.equal(epoch(data.modelnet40(tmp_path, points=16).train.batches(9))[0][0, :, 0], torch.arange(16.0))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x_train": np.zeros((9, 20, 2), np.float32)}, r"floats of shape \(N, P, 3\), got float32 \(9, 20, 2\)"),
            ({"x_train": np.zeros((9, 20, 3), np.int64)}, "floats of shape"),
            ({"y_train": np.arange(8)}, "one label per sample, got 8 labels and 9 samples"),
            ({"y_test": np.array([0, 1, 2, 40])}, "test: labels must be from 0 to 39, got 0 to 40"),
            ({"y_test": np.array([0, -1, 2, 3])}, "labels must be from 0 to 39, got -1 to 3"),
            ({"x_test": np.full((4, 20, 3), np.nan, np.float32)}, "test: clouds must be finite, got 240 NaN or Inf"),
            (
                {"x_test": np.zeros((4, 15, 3), np.float32)},
                "points must be at most 15, which the test clouds have; got 16",
            ),
        ],
    )
    def test_wrong_arrays_are_refused(self, tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
        np.savez(tmp_path / "modelnet40.npz", **(self.arrays() | changes))
        with pytest.raises(ValueError, match=message):
            data.modelnet40(tmp_path, points=16)

    def test_a_folder_without_the_data_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "modelnet40_train.npz").touch()
        with pytest.raises(FileNotFoundError, match=r"expected ply_data_train\*\.h5 .*, found modelnet40_train\.npz"):
            data.modelnet40(tmp_path)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion(folder: Path, compressed: bool = False) -> Path:
    for name, count in (("train", 9), ("t10k", 4)):
        for kind, array in (
            ("images-idx3", random_bytes(count, 28, 28)),
            ("labels-idx1", np.arange(count, dtype=np.uint8)),
        ):
            content = idx(array)
            if compressed:
                (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{name}-{kind}-ubyte").write_bytes(content)
    return folder


class TestFashionMnist:
    @pytest.mark.parametrize("compressed", [False, True])
    def test_idx_files_are_read(self, tmp_path: Path, compressed: bool) -> None:
        dataset = data.fashion_mnist(write_fashion(tmp_path, compressed))
        assert (dataset.name, dataset.classes, dataset.input_shape) == ("fashion-mnist", 10, (1, 28, 28))
        assert (len(dataset.train), len(dataset.test)) == (9, 4)
        x, y = epoch(dataset.train.batches(4))
        pixels = torch.from_numpy(random_bytes(9, 1, 28, 28))
        assert torch.allclose(x, (pixels / 255 - 0.2860) / 0.3530, atol=1e-5)
        assert y.tolist() == list(range(9))
        assert epoch(dataset.train.batches(4, train=True))[0].shape == (8, 1, 28, 28)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("train-images-idx3", idx(random_bytes(9, 28, 28))[:-5], r"\(9, 28, 28\) bytes after its header, got 7051"),
            ("train-images-idx3", idx(random_bytes(9, 28, 27)), r"shape \(N, 28, 28\), got \(9, 28, 27\)"),
            ("train-images-idx3", b"\x89PNG", r"must begin like an idx file .*, got \[137, 80, 78, 71\]"),
            ("t10k-labels-idx1", b"", r"must begin like an idx file .*, got \[\]"),
            ("t10k-labels-idx1", idx(np.arange(5, dtype=np.uint8)), "got 5 labels and 4 samples"),
            ("t10k-labels-idx1", idx(np.full(4, 10, dtype=np.uint8)), "labels must be from 0 to 9, got 10 to 10"),
        ],
    )
    def test_wrong_content_is_refused(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (write_fashion(tmp_path) / f"{name}-ubyte").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.fashion_mnist(tmp_path)

    def test_a_truncated_gzip_file_is_refused(self, tmp_path: Path) -> None:
        file = write_fashion(tmp_path, compressed=True) / "train-images-idx3-ubyte.gz"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is not a whole gzip file"):
            data.fashion_mnist(tmp_path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        (write_fashion(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
        expected = (
            r"expected t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz, found t10k-images-idx3-ubyte, train-"
        )
        with pytest.raises(FileNotFoundError, match=expected):
            data.fashion_mnist(tmp_path)


class TestDigits:
    def test_digits_are_split_into_training_and_test_samples(self) -> None:
        dataset = data.digits()
        assert (dataset.classes, dataset.input_shape) == (10, (1, 8, 8))
        assert (len(dataset.train), len(dataset.test)) == (1437, 360)
        x, y = epoch(dataset.train.batches(500))
        assert x.shape == (1437, 1, 8, 8)
        assert (float(x.min()), float(x.max())) == (0, 1)
        assert int(y.bincount().min()) > 120
        assert int(epoch(dataset.test.batches(360))[1].bincount().min()) > 20
        assert torch.equal(epoch(data.digits().train.batches(500))[0], x)
        shuffled, _ = epoch(dataset.train.batches(1437, train=True))
        assert samples_of(shuffled) == samples_of(x)

    def test_the_error_without_scikit_learn_says_how_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(RuntimeError, match=r"which is not installed: pip install 's3d_fast\[digits\]'"):
            data.digits()


CLASSES = ("n01440764", "n01443537", "n02085620")


def tar_of(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_imagenet(folder: Path, layout: str, classes: tuple[str, ...] = CLASSES) -> Path:
    """Write two images per class and split; every layout has its classes in the same order."""
    for split in ("train", "val"):
        place = folder / split
        place.mkdir(parents=True)
        members = {}
        for number, name in enumerate(classes):
            encoded = [jpeg(smooth_image(70 + 5 * number + copy, 60, 5 * number + copy)) for copy in range(2)]
            if layout == "folders":
                (place / name).mkdir()
                for copy, suffix in enumerate((".JPEG", ".jpg")):
                    (place / name / f"{copy}{suffix}").write_bytes(encoded[copy])
                (place / name / "notes.txt").touch()
            elif layout == "tar-per-class":
                tar_of(place / f"{name}.tar", {f"{name}_{copy}.JPEG": encoded[copy] for copy in range(2)})
            elif layout == "tar-of-folders":
                members |= {f"./{name}/{copy}.jpeg": encoded[copy] for copy in range(2)}
            else:
                for copy in range(2):
                    members |= {
                        f"s{number}{copy}.jpg": encoded[copy],
                        f"s{number}{copy}.cls": f"{9 + number}\n".encode(),
                    }
        if members:
            names = sorted(members, key=lambda name: name.split(".cls")[0])
            half = len(names) // 2
            tar_of(place / "shard-0.tar", {name: members[name] for name in names[:half]})
            tar_of(place / "shard-1.tar", {name: members[name] for name in names[half:]})
    return folder


class TestImageNet:
    @pytest.mark.parametrize("layout", ["folders", "tar-per-class", "tar-of-folders", "tar-of-pairs"])
    def test_every_layout_gives_the_same_data(self, tmp_path: Path, layout: str) -> None:
        dataset = data.imagenet(write_imagenet(tmp_path, layout), size=32, workers=0)
        assert (dataset.name, dataset.classes, dataset.input_shape) == ("imagenet", 3, (3, 32, 32))
        for source in (dataset.train, dataset.test):
            x, y = epoch(source.batches(4))
            assert y.tolist() == [0, 0, 1, 1, 2, 2]
            blue = x[:, 2].mean((1, 2)) * 0.225 + 0.406
            assert torch.allclose(blue, torch.tensor([0, 1, 5, 6, 10, 11]) * 20 / 255, atol=0.01)
        assert epoch(dataset.train.batches(6, train=True))[0].shape == (6, 3, 32, 32)

    def test_folders_beside_tars_are_refused(self, tmp_path: Path) -> None:
        folder = write_imagenet(tmp_path, "folders")
        (folder / "train" / "left-over.tar").touch()
        with pytest.raises(ValueError, match="holds both"):
            data.imagenet(folder, workers=0)

    def test_class_numbers_are_ordered_as_numbers(self, tmp_path: Path) -> None:
        for split in ("train", "val"):
            (tmp_path / split).mkdir()
            members = {}
            for number in (10, 9, 2):
                members |= {f"a/{number}.x.jpg": jpeg(smooth_image(9, 9)), f"a/{number}.cls": str(number).encode()}
            tar_of(tmp_path / split / "0.tar", members)
        dataset = data.imagenet(tmp_path, size=8, workers=0)
        assert epoch(dataset.test.batches(3))[1].tolist() == [2, 1, 0]

    def test_the_error_without_pillow_says_how_to_install_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_imagenet(tmp_path, "folders")
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
        with pytest.raises(
            RuntimeError, match=r"need Pillow, which is not installed: pip install 's3d_fast\[images\]'"
        ):
            data.imagenet(tmp_path)

    def test_missing_folders_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "train").mkdir()
        with pytest.raises(FileNotFoundError, match=r"expected folders train and val, found train$"):
            data.imagenet(tmp_path)
        (tmp_path / "val").mkdir()
        (tmp_path / "train" / "a.JPEG").touch()
        with pytest.raises(ValueError, match=r"train must hold a folder per class, or tar files; found a\.JPEG"):
            data.imagenet(tmp_path)

    def test_a_class_without_images_is_refused(self, tmp_path: Path) -> None:
        write_imagenet(tmp_path, "folders")
        (tmp_path / "val" / "n0").mkdir()
        (tmp_path / "val" / "n0" / "a.png").touch()
        with pytest.raises(ValueError, match=r"n0 must hold JPEGs \(.*\), found a\.png"):
            data.imagenet(tmp_path)

    def test_classes_that_differ_between_splits_are_refused(self, tmp_path: Path) -> None:
        write_imagenet(tmp_path, "folders")
        (tmp_path / "val" / "n02085620").rename(tmp_path / "val" / "dog")
        with pytest.raises(ValueError, match="same classes; only in train: n02085620; only in val: dog"):
            data.imagenet(tmp_path)

    def test_damaged_tars_are_refused(self, tmp_path: Path) -> None:
        file = write_imagenet(tmp_path, "tar-per-class") / "train" / f"{CLASSES[1]}.tar"
        whole = file.read_bytes()
        for content in (whole[:1000], gzip.compress(whole), b"no tar"):
            file.write_bytes(content)
            with pytest.raises(ValueError, match=r"n01443537\.tar is not a whole, uncompressed tar file"):
                data.imagenet(tmp_path)
        tar_of(file, {"readme.txt": b"hello"})
        with pytest.raises(ValueError, match=r"n01443537\.tar must hold JPEGs \(.*\), found readme\.txt"):
            data.imagenet(tmp_path)

    def test_incomplete_pairs_are_refused(self, tmp_path: Path) -> None:
        file = write_imagenet(tmp_path, "tar-of-pairs") / "train" / "shard-0.tar"
        tar_of(file, {"a.jpg": b"", "b.cls": b"3"})
        with pytest.raises(ValueError, match=r"shard-0\.tar: a\.jpg has no a\.cls beside it"):
            data.imagenet(tmp_path)
        tar_of(file, {"a.jpg": b"", "a.cls": b"dog"})
        with pytest.raises(ValueError, match=r"a\.cls must hold a class number in ASCII, got b'dog'"):
            data.imagenet(tmp_path)

    def test_a_damaged_member_is_named(self, tmp_path: Path) -> None:
        file = write_imagenet(tmp_path, "tar-per-class") / "val" / f"{CLASSES[1]}.tar"
        tar_of(file, {"a.jpg": b"no image"})
        dataset = data.imagenet(tmp_path, size=8, workers=0)
        with pytest.raises(ValueError, match=r"cannot decode the JPEG .*n01443537\.tar at byte 512: "):
            epoch(dataset.test.batches(2))


def write_modelnet_npz(folder: Path) -> None:
    np.savez_compressed(folder / "modelnet40.npz", **TestModelNet().arrays())


def read_imagenet(folder: Path) -> None:
    dataset = data.imagenet(folder, size=8, workers=0)
    epoch(dataset.train.batches(6, train=True))


@pytest.mark.parametrize(
    ("write", "read", "name"),
    [
        (lambda folder: write_cifar(folder, "python2"), data.cifar100, "train"),
        (lambda folder: write_cifar(folder, "npz"), data.cifar100, "cifar100.npz"),
        (write_modelnet_npz, partial(data.modelnet40, points=16), "modelnet40.npz"),
        (write_fashion, data.fashion_mnist, "train-images-idx3-ubyte"),
        (partial(write_fashion, compressed=True), data.fashion_mnist, "t10k-labels-idx1-ubyte.gz"),
        (lambda folder: write_imagenet(folder, "tar-of-pairs"), read_imagenet, "train/shard-0.tar"),
    ],
    ids=["pickle", "npz", "compressed-npz", "idx", "gzip", "tar"],
)
def test_damage_is_a_value_error_or_goes_unnoticed(
    tmp_path: Path, write: Callable[[Path], object], read: Callable[[Path], object], name: str
) -> None:
    write(tmp_path)
    file, generator, refused = tmp_path / name, np.random.default_rng(0), 0
    content = file.read_bytes()
    for _ in range(60):
        damaged = np.frombuffer(content, dtype=np.uint8).copy()
        # Most formats keep their structure at the start and at the end.
        places = np.concatenate([generator.integers(0, 300, 2), -1 - generator.integers(0, min(900, len(content)), 2)])
        damaged[places % len(content)] = generator.integers(0, 256, 4)
        file.write_bytes(damaged.tobytes()[: None if generator.random() < 0.7 else generator.integers(len(content))])
        try:
            read(tmp_path)
        except ValueError:
            refused += 1
    assert refused >= 15


def test_data_sets_are_found_by_name() -> None:
    assert list(data.SETS) == ["cifar100", "modelnet40", "imagenet", "fashion-mnist", "digits"]
    assert data.SETS["digits"]().name == "digits"
