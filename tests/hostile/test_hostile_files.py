"""Files that were made to do harm: each once took a reader with it, or would have."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import s3d_fast as s3d
from s3d_fast import data
from s3d_fast.base.tensor_files import read_pickled, read_safetensors
from s3d_fast.data import Entry, JpegSource
from s3d_fast.data.images import MOST_BYTES
from s3d_fast.data.tars import regular_files
from s3d_fast.growth import checkpoint
from s3d_fast.models.mlp import MLP
from s3d_fast.visualize import load_image, load_vgg19
from tests.data.test_data import cifar_batch, idx, python2_pickle, tar_of
from tests.data_cases import jpeg, random_bytes, smooth_image
from tests.hostile.readers import begun_run, grower_state, resealed, with_record, write_h5, zipped
from tests.hostile.test_fuzz import bounded_time
from tests.hostile.watch import Memory

MIB = 1 << 20


def refused(call: Callable[[], object], *parts: str, most: int = 32 * MIB) -> str:
    """Return the message of a ValueError that has these parts; reading takes little time and memory."""
    memory = Memory()
    with bounded_time(), pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are checked below
        call()
    assert memory.growth() < most
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


class TestTar:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        for split in ("train", "val"):
            (tmp_path / split).mkdir()
            tar_of(tmp_path / split / "a.tar", {"x.jpg": jpeg(smooth_image(9, 9)), "y.jpg": b"yy"})
        return tmp_path / "train" / "a.tar"

    def change(self, file: Path, place: int, new: bytes) -> None:
        content = bytearray(file.read_bytes())
        content[place : place + len(new)] = new
        file.write_bytes(resealed(bytes(content)))

    @pytest.mark.parametrize("size", [-512, -1024, -1, -(2**80)])
    def test_a_negative_size_does_not_loop(self, file: Path, size: int) -> None:
        self.change(file, 124, size.to_bytes(12, "big", signed=True))
        refused(lambda: data.imagenet(file.parents[1]), "a.tar", "the header at byte 0 has a bad size")

    def test_a_size_beyond_the_file_is_refused(self, file: Path) -> None:
        self.change(file, 124, b"\x80" + (2**62).to_bytes(11, "big"))
        refused(lambda: data.imagenet(file.parents[1]), "a.tar", "it ends inside 'x.jpg'")

    @pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
    def test_a_long_name_is_not_longer_than_names_are(self, file: Path, kind: bytes) -> None:
        self.change(file, 124, b"%011o\0" % (1 << 30) + b"0" * 20 + kind)
        refused(lambda: data.imagenet(file.parents[1]), "a.tar", "bytes of names, more than 65536")

    def test_a_damaged_header_in_the_middle_does_not_end_the_tar(self, file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[content.rindex(b"y.jpg")] = 0
        file.write_bytes(content)
        refused(lambda: data.imagenet(file.parents[1]), "a.tar", "has a wrong checksum")

    def test_what_follows_the_end_is_not_left_out(self, file: Path) -> None:
        file.write_bytes(file.read_bytes() * 2)
        refused(lambda: data.imagenet(file.parents[1]), "a.tar", "more follows its end")

    def test_sparse_files_are_not_read_in_place(self, file: Path) -> None:
        self.change(file, 156, b"S")
        refused(lambda: data.imagenet(file.parents[1]), "a.tar", "'x.jpg' is a sparse file")

    @pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_members_are_where_the_standard_library_finds_them(self, tmp_path: Path, kind: int) -> None:
        path, long = tmp_path / "b.tar", "d" * 90
        with tarfile.open(path, "w", format=kind) as tar:
            folder = tarfile.TarInfo("folder")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "folder"
            tar.addfile(link)
            # Neither the old format nor POSIX's has room for the last of these without a further header.
            for name, size in (("a.jpg", 0), (f"{long}/{long}.jpg", 700), ("é.jpg", 512), ("x/" * 60 + "z.jpg", 1)):
                info = tarfile.TarInfo(name)
                info.size = size
                tar.addfile(info, io.BytesIO(b"1" * size))
        with tarfile.open(path) as tar:
            expected = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
        assert [tuple(member) for member in regular_files(path)] == expected


class TestImages:
    def test_a_jpg_that_is_eps_starts_no_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[object] = []
        monkeypatch.setattr(subprocess, "check_call", lambda *args, **options: started.append(args))
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args))
        file, stream = tmp_path / "a.jpg", io.BytesIO()
        smooth_image(9, 9).save(stream, "EPS")
        file.write_bytes(stream.getvalue())
        # With all formats, Pillow takes it for EPS.
        with Image.open(file) as opened:
            assert opened.format == "EPS"
        refused(lambda: list(JpegSource([Entry(str(file), 0, -1, 0)], 8, 0).batches(1)), "a.jpg", "cannot identify")
        refused(lambda: load_image(file), "a.jpg", "cannot identify")
        assert started == []

    def test_a_jpeg_of_imagenet_may_be_a_png(self, tmp_path: Path) -> None:
        smooth_image(20, 20).save(tmp_path / "a.JPEG", "PNG")
        ((x, _),) = JpegSource([Entry(str(tmp_path / "a.JPEG"), 0, -1, 0)], 8, 0).batches(1)
        assert x.shape == (1, 3, 8, 8)

    def test_a_picture_of_too_many_pixels_is_not_decoded(self, tmp_path: Path) -> None:
        file = tmp_path / "a.png"
        Image.new("1", (16_000, 6_000)).save(file)
        assert file.stat().st_size < MIB
        refused(lambda: load_image(file), "a.png", "16000 x 6000 pixels, more than")
        refused(lambda: list(JpegSource([Entry(str(file), 0, -1, 0)], 8, 0).batches(1)), "a.png", "pixels, more than")

    def test_a_file_that_is_too_large_for_a_photograph_is_not_read(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jpg"
        with file.open("wb") as stream:
            stream.truncate(MOST_BYTES + 1)
        refused(lambda: list(JpegSource([Entry(str(file), 0, -1, 0)], 8, 0).batches(1)), "a.jpg", "bytes, more than")


class TestHdf5:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for split in ("train", "test"):
            write_h5(tmp_path / f"ply_data_{split}0.h5", None)
        return tmp_path

    def rewrite(self, folder: Path, write: Callable[[h5py.File], object]) -> Path:
        path = folder / "ply_data_train0.h5"
        with h5py.File(path, "w") as file:
            file["label"] = np.array([[1], [2], [3]], np.uint8)
            write(file)
        return path

    def test_links_to_other_files_are_not_followed(self, folder: Path) -> None:
        for link in (h5py.ExternalLink(str(folder / "ply_data_test0.h5"), "data"), h5py.SoftLink("/label")):
            self.rewrite(folder, lambda file, link=link: file.__setitem__("data", link))
            refused(lambda: data.modelnet40(folder, 16), "train0.h5", "'data' is a link to another place")

    def test_storage_in_other_files_is_not_read(self, folder: Path) -> None:
        secret = folder / "secret"
        secret.write_bytes(bytes(3 * 20 * 3 * 4))
        external = [(str(secret), 0, h5py.h5f.UNLIMITED)]
        self.rewrite(folder, lambda file: file.create_dataset("data", (3, 20, 3), np.float32, external=external))
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "'data' is stored in other files")
        layout = h5py.VirtualLayout((3, 20, 3), np.float32)
        layout[:] = h5py.VirtualSource(folder / "ply_data_test0.h5", "data", (3, 20, 3))
        self.rewrite(folder, lambda file: file.create_virtual_dataset("data", layout))
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "'data' is stored in other files")

    def test_an_array_that_is_not_stored_is_not_made_up(self, folder: Path) -> None:
        path = self.rewrite(folder, lambda file: file.create_dataset("data", (12_000, 9_000, 3), np.float32))
        assert path.stat().st_size < 1 << 14
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "bytes, but only 0 are stored")
        options = {"compression": "gzip", "chunks": (10, 9_000, 3)}
        self.rewrite(folder, lambda file: file.create_dataset("data", (12_000, 9_000, 3), np.float32, **options))
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "'data' has 0 of its 1200 parts")

    def test_an_array_larger_than_the_set_is_refused(self, folder: Path) -> None:
        self.rewrite(folder, lambda file: file.create_dataset("data", (10**6, 10**4, 3), np.float32))
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "must have at most 1477320000 bytes")

    def test_a_part_is_not_inflated_beyond_its_size(self, folder: Path) -> None:
        def write(file: h5py.File) -> None:
            made = file.create_dataset("data", (3, 20, 3), np.float32, compression="gzip", chunks=(3, 20, 3))
            # A megabyte of zeros in a thousand bytes, where 720 bytes belong.
            made.id.write_direct_chunk((0, 0, 0), gzip.zlib.compress(bytes(MIB)))  # type: ignore[attr-defined]

        self.rewrite(folder, write)
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "a part holds more than its 720 bytes")

    @pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"fletcher32": True}, {"chunks": (2, 7, 3)}])
    def test_gzip_is_undone_as_hdf5_does(self, folder: Path, options: dict[str, object]) -> None:
        clouds = np.random.default_rng(1).standard_normal((3, 20, 3))
        for compression in (None, "gzip"):
            self.rewrite(
                folder,
                lambda file, how=compression: file.create_dataset("data", data=clouds, compression=how, **options),
            )
            found = data.modelnet40(folder, 16).train
            assert torch.equal(found.inputs, torch.from_numpy(clouds).float())

    def test_other_filters_are_refused(self, folder: Path) -> None:
        self.rewrite(folder, lambda file: file.create_dataset("data", data=np.zeros((3, 20, 3)), compression="lzf"))
        refused(lambda: data.modelnet40(folder, 16), "train0.h5", "store it with gzip, or without compression")


class TestPickle:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        for name in ("train", "test"):
            (tmp_path / name).write_bytes(python2_pickle(cifar_batch(2)))
        return tmp_path / "train"

    @pytest.mark.parametrize(
        "content",
        [
            # References that never come: Python's reader makes room for all that might.
            b"\x80\x02Nr\xff\xff\xff\x7f.",
            b"\x80\x02Nr\x00\x00\x00\x20.",
            # Strings of more bytes than there are, and a frame.
            b"\x80\x04B\xff\xff\xff\x7f.",
            b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
            b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b".",
        ],
    )
    def test_a_few_bytes_do_not_take_gigabytes(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        refused(lambda: data.cifar100(file.parent), "train")

    def test_a_key_that_takes_for_ever_to_hash_is_refused(self, file: Path) -> None:
        key: object = ()
        for _ in range(60):
            key = (key, key)
        file.write_bytes(b"\x80\x02})" + b"2\x86" * 60 + b"Ns.")
        refused(lambda: data.cifar100(file.parent), "train")
        tuples = b"".join(b"q%c" % place + b"h%c" % place + b"\x86" for place in range(60))
        file.write_bytes(b"\x80\x02})" + tuples + b"Ns.")
        refused(lambda: data.cifar100(file.parent), "train", "a key must be a string, got tuple")

    def test_lists_in_lists_are_not_expanded(self, file: Path) -> None:
        labels: list[object] = [1]
        for _ in range(40):
            labels = [labels, labels]
        file.write_bytes(pickle.dumps({"data": 0, "fine_labels": 0}, 2))
        refused(lambda: data.cifar100(file.parent), "train")
        content = python2_pickle(cifar_batch(2, fine_labels=labels))
        assert len(content) < 10_000
        file.write_bytes(content)
        refused(lambda: data.cifar100(file.parent), "train", "labels must be integers")

    def test_many_empty_objects_are_too_many(self, file: Path) -> None:
        file.write_bytes(b"\x80\x02(" + b"}" * 2_000_000 + b"l.")
        refused(lambda: data.cifar100(file.parent), "train", "more than 960000 operations", most=256 * MIB)


class TestBombs:
    def test_an_npz_is_not_decompressed_beyond_the_set(self, tmp_path: Path) -> None:
        path = tmp_path / "cifar100.npz"
        archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        with archive, archive.open("x_train.npy", "w") as member:
            np.lib.format.write_array_header_1_0(
                member, {"shape": (61_000, 32, 32, 3), "fortran_order": False, "descr": "|u1"}
            )
            for _ in range(61):
                member.write(bytes(1000 * 3072))
        assert path.stat().st_size < 2 * MIB
        refused(lambda: data.cifar100(path), "cifar100.npz", "at most 184320000 bytes in its array x_train")

    def test_a_shape_beyond_the_bytes_is_refused(self, tmp_path: Path) -> None:
        path, stream = tmp_path / "cifar100.npz", io.BytesIO()
        np.lib.format.write_array_header_1_0(
            stream, {"shape": (50_000, 32, 32, 3), "fortran_order": False, "descr": "|u1"}
        )
        path.write_bytes(zipped({"x_train.npy": stream.getvalue()}))
        refused(lambda: data.cifar100(path), "cifar100.npz", "does not go with its")

    def test_methods_whose_memory_the_file_chooses_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "cifar100.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
            archive.writestr("x_train.npy", b"0")
        refused(lambda: data.cifar100(path), "cifar100.npz", "compressed by method 14")

    def test_a_gzip_file_is_not_decompressed_beyond_the_set(self, tmp_path: Path) -> None:
        for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            (tmp_path / f"{name}-ubyte").write_bytes(idx(random_bytes(1, 28, 28)))
        file = tmp_path / "train-images-idx3-ubyte"
        file.unlink()
        with gzip.open(f"{file}.gz", "wb", 1) as stream:
            for _ in range(200):
                stream.write(bytes(MIB))
        refused(lambda: data.fashion_mnist(tmp_path), "train-images-idx3-ubyte.gz", "at most", most=160 * MIB)

    @pytest.mark.parametrize("name", ["train.bin", "train", "cifar100.npz", "train-images-idx3-ubyte"])
    def test_a_file_larger_than_the_set_is_not_read(self, tmp_path: Path, name: str) -> None:
        for other in ("train.bin", "test.bin") if name.endswith("bin") else ("train", "test"):
            (tmp_path / other).touch()
        with (tmp_path / name).open("wb") as stream:
            # A hole, which takes no room on the disk.
            stream.truncate(1 << 40)
        read = data.fashion_mnist if name.endswith("ubyte") else data.cifar100
        for other in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
            (tmp_path / other).touch()
        refused(lambda: read(tmp_path), name, "must have at most", "got 1099511627776")

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "cifar100.npz")
        refused(lambda: data.cifar100(tmp_path / "cifar100.npz"), "cifar100.npz", "must be a regular file")


class TestWeights:
    def network(self) -> MLP:
        torch.manual_seed(0)
        return MLP([4, 3, 2])

    def tensors(self, **changes: Tensor) -> dict[str, Tensor]:
        return {**self.network().state_dict(), **changes}

    def test_a_tensor_that_is_not_stored_is_refused(self, tmp_path: Path) -> None:
        path, model = tmp_path / "a.pt", self.network()
        huge = torch.zeros(1).expand(10**6, 10**6)
        torch.save(self.tensors(**{"layers.0.weight": huge}), path)
        refused(lambda: s3d.load_grown(model, path), "a.pt", "shape (1000000, 1000000) that is not stored in its")
        torch.save(self.tensors(**{"layers.0.weight": torch.empty(10**6, 10**6, device="meta")}), path)
        refused(lambda: s3d.load_grown(model, path), "a.pt")

    def test_bytes_out_of_nowhere_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        torch.save({"a": torch.zeros(2)}, path)
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        name = next(name for name in entries if name.endswith("data.pkl"))
        # bytearray(2**34), which torch.load would call.
        program = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x04\x85R."
        path.write_bytes(zipped(entries | {name: program}))
        refused(lambda: read_pickled(path), "a.pt", "it asks for builtins.bytearray")
        refused(lambda: load_vgg19(path), "a.pt", "it asks for builtins.bytearray")

    def test_compressed_entries_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.pt"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data/0", bytes(64 * MIB))
        refused(lambda: read_pickled(path), "a.pt", "its entry 'a/data/0' is compressed")

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
    def test_numbers_of_another_kind_are_refused(self, tmp_path: Path, dtype: torch.dtype) -> None:
        path, model = tmp_path / "a.pt", self.network()
        torch.save(self.tensors(**{"layers.0.bias": torch.zeros(3, dtype=dtype)}), path)
        refused(lambda: s3d.load_grown(model, path), "a.pt", "'layers.0.bias' must hold floating-point numbers")

    def test_tensors_do_not_change_with_their_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        s3d.save_grown(self.network(), path)
        tensors, _ = read_safetensors(path)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        # In place, as cp does: the tensors of a mapped file would change, and end the process where it is shorter.
        with path.open("r+b") as stream:
            stream.write(b"\xff" * path.stat().st_size)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())

    def test_a_refused_checkpoint_leaves_the_run_as_it_was(self, tmp_path: Path) -> None:
        grower, path = begun_run(tmp_path)
        before, put = grower_state(grower), with_record(path)
        unfinished = b'{"index": 1, "widths": {}, "params": 1, "macs": 1}'
        for text, part in (
            (b"{}", "history must be a list, got None"),
            (b'{"history": [], "settings": 3}', "settings must be a JSON object"),
            (b'{"history": [3], "settings": {}}', "history must be a JSON object, got 3"),
            (
                b'{"history": [], "settings": {}, "unfinished": %b}' % unfinished,
                "random holds states",
            ),
        ):
            path.write_bytes(put(text))
            refused(lambda: grower._restore(path, *checkpoint.read(path)), path.name, part)
            assert grower_state(grower) == before
