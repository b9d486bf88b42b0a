"""The speed of loading batches, next to the speed of training a small network on them, on one thread.

python -m benchmarks.loading [--data PATH], with > docs/results/loading.txt for docs/results.md.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from s3d_fast.base.tables import text_table
from s3d_fast.data import ArraySource, Dataset, Entry, JpegSource, Source, cifar100, imagenet, modelnet40
from s3d_fast.data.augment import pad_crop_flip, scale_and_jitter
from s3d_fast.data.cifar import NORMALISE
from s3d_fast.data.modelnet import FirstPoints
from s3d_fast.recipes import recipe

ROUNDS = 3
POINTS = 128
# JPEGs per epoch.
IMAGES = 256


@dataclass
class Feed:
    """The sources of one network's training data; rates are samples per second, one per round."""

    network: str
    model: nn.Module
    shape: tuple[int, ...]
    batch_size: int
    sources: dict[str, Source]
    loaded: dict[str, list[float]] = field(default_factory=dict)
    trained: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Time an epoch of every source, and a few training steps on the last batch."""
        for name, source in self.sources.items():
            x, y, rate = self._load(source)
            self.loaded.setdefault(name, []).append(rate)
        self.trained.append(self._train(x, y))

    def rows(self) -> Iterator[list[str]]:
        """Yield a row of the table per source."""
        for name, rates in self.loaded.items():
            ratio = statistics.median(loaded / trained for loaded, trained in zip(rates, self.trained, strict=True))
            loaded, trained = statistics.median(rates), statistics.median(self.trained)
            yield [name, f"{loaded:,.0f}", self.network, f"{trained:,.0f}", f"{ratio:.2f}"]

    def _load(self, source: Source) -> tuple[Tensor, Tensor, float]:
        # Time a whole epoch: it includes starting and stopping the workers, and every batch they made is used.
        batches = source.batches(self.batch_size, train=True)
        start = time.perf_counter()
        for batch in batches:
            x, y = batch
        rate = len(batches) * self.batch_size / (time.perf_counter() - start)
        assert x.shape == (self.batch_size, *self.shape)
        assert x.dtype == torch.float32
        assert bool(x.isfinite().all())
        assert 0.1 < float(x.std()) < 3
        return x, y, rate

    def _train(self, x: Tensor, y: Tensor, steps: int = 5) -> float:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        start = 0.0
        # The first step is not counted.
        for step in range(steps + 1):
            start = time.perf_counter() if step == 1 else start
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            optimizer.step()
        return steps * len(x) / (time.perf_counter() - start)


def cifar_feed(path: Path | None) -> Feed:
    """Return CIFAR-100, or random bytes of the same shape."""
    dataset = _if_there(cifar100, path)
    source: Source = ArraySource(
        torch.randint(0, 256, (20_000, 3, 32, 32), dtype=torch.uint8),
        torch.randint(0, 100, (20_000,)),
        NORMALISE,
        pad_crop_flip,
    )
    sources = {"images 32 x 32, in memory": source if dataset is None else dataset.train}
    seed = recipe("cifar100-mobilenet", "cpu")
    return Feed("seed of cifar100-mobilenet, cpu", seed.network(seed.widths, 100), (3, 32, 32), 128, sources)


def modelnet_feed(path: Path | None) -> Feed:
    """Return ModelNet40, or random clouds of the same shape."""
    dataset = _if_there(partial(modelnet40, points=POINTS), path)
    source: Source = ArraySource(
        torch.randn(2000, 1024, 3),
        torch.randint(0, 40, (2000,)),
        FirstPoints(POINTS),
        partial(scale_and_jitter, points=POINTS),
    )
    sources = {f"clouds, {POINTS} of 1024 points": source if dataset is None else dataset.train}
    seed = recipe("modelnet40-dgcnn", "cpu")
    return Feed("seed of modelnet40-dgcnn, cpu", seed.network(seed.widths, 40), (POINTS, 3), 16, sources)


def jpeg_feed(path: Path | None, folder: Path) -> Feed:
    """Return ImageNet with one and two workers, or synthetic JPEGs in files and in a tar."""
    datasets = [_if_there(partial(imagenet, workers=workers), path) for workers in (1, 2)]
    if datasets[0] is not None and datasets[1] is not None:
        sources = {
            f"JPEG, {workers} workers": dataset.train.take(IMAGES)
            for workers, dataset in enumerate(datasets, 1)
            if dataset
        }
    else:
        files, members = write_jpegs(folder)
        sources = {
            "JPEG 500 x 375, this process": JpegSource(files, num_workers=0),
            "JPEG 500 x 375, 1 worker": JpegSource(files, num_workers=1),
            "JPEG 500 x 375, 2 workers": JpegSource(files, num_workers=2),
            "JPEG 500 x 375 in a tar, 2 workers": JpegSource(members, num_workers=2),
        }
    seed = recipe("imagenet-mobilenet")
    return Feed("seed of imagenet-mobilenet", seed.network(seed.widths, 1000), (3, 224, 224), 16, sources)


def write_jpegs(folder: Path, different: int = 64, entries: int = IMAGES) -> tuple[list[Entry], list[Entry]]:
    """Write synthetic photographs to files and to a tar; return as many entries of each as a run needs."""
    generator = np.random.default_rng(0)
    files = []
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(different):
            file = folder / f"{number}.jpg"
            _photograph(generator).save(file, quality=90)
            tar.add(file, file.name)
            files.append(Entry(str(file), 0, -1, number))
    with tarfile.open(folder / "images.tar") as tar:
        members = [Entry(str(folder / "images.tar"), member.offset_data, member.size, 0) for member in tar]
    return files * (entries // different), members * (entries // different)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, help="a folder with CIFAR-100, ModelNet40 or ImageNet; synthetic data by default"
    )
    path = parser.parse_args().data
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        feeds = [cifar_feed(path), modelnet_feed(path), jpeg_feed(path, folder)]
        for _ in range(ROUNDS):
            for feed in feeds:
                feed.run()
    head = ["source", "loaded/s", "network", "trained/s", "ratio"]
    print(text_table([head, *(row for feed in feeds for row in feed.rows())]))
    print(f"Samples per second on one thread, or one per worker; medians of {ROUNDS} rounds.")


def _if_there(read: Callable[[Path], Dataset], path: Path | None) -> Dataset | None:
    try:
        return None if path is None else read(path)
    except FileNotFoundError:
        return None


def _photograph(generator: np.random.Generator) -> Image.Image:
    # Noise at several scales, strongest at the coarsest, compresses to about the size of a photograph.
    total = np.zeros((375, 500, 3))
    for across in (4, 16, 64, 256):
        noise = generator.integers(0, 256, (max(2, across * 3 // 4), across, 3), dtype=np.uint8)
        total += np.asarray(Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)) / across**0.5
    total = (total - total.min()) / (total.max() - total.min()) * 255
    return Image.fromarray(total.astype(np.uint8))


if __name__ == "__main__":
    main()
