"""Sources of batches: order, augmentation and decoding, with one worker and with several."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, JpegImagePlugin

from s3d_fast.data import ArraySource, Entry, JpegSource, Source, augment, images, sources
from s3d_fast.data.sources import IMAGENET_NORMALISE, balanced
from tests.data_cases import WORKERS, as_is, epoch, forks, jpeg, random_bytes, samples_of, smooth_image, write_jpegs


@pytest.fixture(params=["arrays", "jpegs"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """A source of ten different samples with labels 0 1 2 0 1 2 0 1 2 0."""
    if request.param == "jpegs":
        return JpegSource(write_jpegs(tmp_path, 10), size=16, num_workers=0)
    inputs = torch.from_numpy(random_bytes(10, 3, 16, 16))
    return ArraySource(inputs, torch.arange(10) % 3, as_is, augment.pad_crop_flip)


class TestSources:
    @pytest.mark.parametrize("size", [2, 3])
    def test_parts_of_several_processes_make_the_whole(self, source: Source, size: int) -> None:
        whole = list(source.batches(4))
        parts = [list(source.batches(4, part=(rank, size))) for rank in range(size)]
        assert samples_of(torch.cat([x for part in parts for x, _ in part])) == samples_of(epoch(whole)[0])
        for number, (x, y) in enumerate(whole):
            mine = [part[number] for part in parts if number < len(part)]
            assert sum(len(labels) for _, labels in mine) == len(y)
            assert samples_of(torch.cat([pixels for pixels, _ in mine])) == samples_of(x)
        # In training, every part has the same share of each batch.
        orders = []
        for rank in range(size):
            torch.manual_seed(5)
            orders.append([len(y) for _, y in source.batches(2 * size, train=True, part=(rank, size))])
        assert orders == [[2] * len(orders[0])] * size
        torch.manual_seed(6)
        drawn = source.sample(8, 2)
        found = []
        for rank in range(size):
            torch.manual_seed(6)
            found += source.sample(8, 2, (rank, size))
        assert samples_of(epoch(found)[0]) == samples_of(epoch(drawn)[0])
        assert len(found) == len(drawn)

    def test_test_batches_are_all_samples_in_order(self, source: Source) -> None:
        assert len(source) == 10
        batches = source.batches(4)
        assert [len(y) for _, y in batches] == [4, 4, 2]
        x, y = epoch(batches)
        assert x.dtype == torch.float32
        assert x.shape == (10, 3, 16, 16)
        assert torch.equal(y, torch.arange(10) % 3)
        assert torch.equal(epoch(batches)[0], x)

    def test_training_leaves_out_an_incomplete_batch(self, source: Source) -> None:
        assert [len(y) for _, y in source.batches(4, train=True)] == [4, 4]
        assert len(source.batches(4, train=True)) == 2
        assert [len(y) for _, y in source.batches(64, train=True)] == [10]
        assert len(source.batches(5, train=True)) == len(source.batches(5)) == 2

    def test_epochs_differ_and_repeat_with_the_seed(self, source: Source) -> None:
        batches = source.batches(10, train=True)
        torch.manual_seed(7)
        first, second = epoch(batches), epoch(batches)
        assert not torch.equal(first[0], second[0])
        torch.manual_seed(7)
        again = epoch(batches)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert sorted(first[1].tolist()) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]

    def test_take_is_balanced_and_always_the_same(self, source: Source) -> None:
        few = source.take(6)
        assert len(few) == 6
        x, y = epoch(few.batches(6))
        assert y.bincount().tolist() == [2, 2, 2]
        torch.manual_seed(99)
        assert torch.equal(epoch(source.take(6).batches(6))[0], x)
        assert samples_of(x) < samples_of(epoch(source.batches(10))[0])

    def test_sample_is_equal_batches_without_replacement(self, source: Source) -> None:
        torch.manual_seed(1)
        parts = source.sample(6, 3)
        assert [(x.shape, y.shape) for x, y in parts] == [((3, 3, 16, 16), (3,))] * 2
        chosen = samples_of(torch.cat([x for x, _ in parts]))
        assert len(chosen) == 6
        assert chosen < samples_of(epoch(source.batches(10))[0])
        assert samples_of(torch.cat([x for x, _ in source.sample(6, 3)])) != chosen
        torch.manual_seed(1)
        assert samples_of(torch.cat([x for x, _ in source.sample(6, 3)])) == chosen

    def test_impossible_counts_are_refused(self, source: Source) -> None:
        with pytest.raises(ValueError, match="count must be at most 10, the number of samples; got 12"):
            source.sample(12, 3)
        with pytest.raises(ValueError, match=r"count must be a multiple of batch_size \(4\), got 6"):
            source.sample(6, 4)
        with pytest.raises(ValueError, match="count must be at most 10, the number of samples; got 11"):
            source.take(11)
        with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
            source.batches(0)

    def test_training_without_augmentation_is_a_permutation(self) -> None:
        inputs = torch.arange(100.0).reshape(100, 1)
        x, y = epoch(ArraySource(inputs, torch.arange(100), as_is).batches(10, train=True))
        assert torch.equal(x[:, 0].long(), y)
        assert not torch.equal(y, torch.arange(100))
        assert torch.equal(y.sort().values, torch.arange(100))

    def test_balanced_fills_up_small_classes_from_large_ones(self) -> None:
        labels = np.repeat([0, 1, 2, 5], [50, 3, 20, 9])
        chosen = balanced(labels, 31)
        counts = np.bincount(labels[chosen], minlength=6)
        assert counts[[1, 5]].tolist() == [3, 9]
        assert sorted(counts[[0, 2]]) == [9, 10]
        assert set(balanced(labels, 10)) < set(chosen)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert set(balanced(labels, len(labels))) == set(range(len(labels)))

    def test_labels_must_match_the_inputs(self) -> None:
        with pytest.raises(
            ValueError, match=r"labels must be int64 of shape \(4,\), one per input; got torch.int64 \(3,\)"
        ):
            ArraySource(torch.zeros(4, 2), torch.arange(3), as_is)
        with pytest.raises(ValueError, match="inputs must not be empty"):
            ArraySource(torch.zeros(0, 2), torch.arange(0), as_is)
        with pytest.raises(ValueError, match="entries must not be empty"):
            JpegSource([])


class TestPadCropFlip:
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_every_image_is_a_crop_of_its_padded_parent(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        parents = torch.from_numpy(random_bytes(400, 3, 7, 9)).to(dtype)
        children = augment.pad_crop_flip(parents, padding=2)
        assert children.dtype == dtype
        padded = F.pad(parents, (2, 2, 2, 2))
        kinds = set()
        for parent, child in zip(padded, children, strict=True):
            crops = {(top, left): parent[:, top : top + 7, left : left + 9] for top in range(5) for left in range(5)}
            matches = [
                (where, mirrored)
                for where, crop in crops.items()
                for mirrored in (False, True)
                if torch.equal(crop.flip(-1) if mirrored else crop, child)
            ]
            assert len(matches) == 1
            kinds.add(matches[0])
        # 25 positions, mirrored or not, are 50 kinds; 400 draws contain nearly all of them.
        assert len(kinds) >= 48

    def test_without_padding_images_are_only_mirrored(self) -> None:
        torch.manual_seed(0)
        parents = torch.from_numpy(random_bytes(200, 1, 4, 4))
        children = augment.pad_crop_flip(parents, padding=0)
        mirrored = (children == parents.flip(-1)).flatten(1).all(1)
        assert ((children == parents).flatten(1).all(1) ^ mirrored).all()
        assert 70 < int(mirrored.sum()) < 130

    def test_parents_are_left_alone(self) -> None:
        parents = torch.from_numpy(random_bytes(8, 3, 8, 8))
        before = parents.clone()
        augment.pad_crop_flip(parents)
        assert torch.equal(parents, before)


class TestScaleAndJitter:
    def test_jitter_is_bounded_by_clip(self) -> None:
        torch.manual_seed(0)
        clouds = torch.randn(20, 500, 3)
        moved = augment.scale_and_jitter(clouds, low=1, high=1, shift=0, sigma=0.01, clip=0.02) - clouds
        assert moved.abs().max() <= 0.02 + 1e-6
        # A normal distribution clipped at two deviations is at the bound in 4.6 % of cases; its deviation is 0.0096.
        assert 0.0091 < float(moved.std()) < 0.0100
        assert 0.04 < float((moved.abs() > 0.0199).float().mean()) < 0.06

    def test_scales_and_shifts_are_per_cloud_and_axis_and_within_bounds(self) -> None:
        torch.manual_seed(0)
        clouds = torch.randn(300, 8, 3)
        moved = augment.scale_and_jitter(clouds, sigma=0)
        low, high = clouds[:, :1], clouds[:, 1:2]
        factors = (moved[:, 1:2] - moved[:, :1]) / (high - low)
        shifts = moved[:, :1] - factors * low
        wide = (high - low).abs() > 0.1
        assert torch.allclose((moved - shifts - factors * clouds) * wide, torch.zeros(()), atol=1e-4)
        factors, shifts = factors[wide], shifts[wide]
        assert 2 / 3 - 1e-4 < factors.min() < 0.7
        assert 1.45 < factors.max() < 1.5 + 1e-4
        assert -0.2 - 1e-4 < shifts.min() < -0.19
        assert 0.19 < shifts.max() < 0.2 + 1e-4

    def test_points_are_a_random_subset_without_repetition(self) -> None:
        torch.manual_seed(0)
        clouds = torch.arange(40.0).reshape(1, 40, 1).expand(200, 40, 3)
        chosen = augment.scale_and_jitter(clouds, low=1, high=1, shift=0, sigma=0, points=10)[..., 0]
        assert all(len(set(cloud.tolist())) == 10 for cloud in chosen)
        times = chosen.long().flatten().bincount(minlength=40)
        assert 25 < int(times.min()) < int(times.max()) < 80
        everything = augment.scale_and_jitter(clouds, low=1, high=1, shift=0, sigma=0, points=40)[..., 0]
        assert torch.equal(everything.sort().values, clouds[..., 0])
        assert not torch.equal(everything, clouds[..., 0])

    def test_more_points_than_a_cloud_has_are_refused(self) -> None:
        with pytest.raises(ValueError, match="points must be from 1 to 8, the points of a cloud; got 9"):
            augment.scale_and_jitter(torch.zeros(1, 8, 3), points=9)


class TestCrops:
    @pytest.mark.parametrize(("width", "height"), [(500, 375), (30, 200), (7, 7)])
    def test_crops_are_inside_the_image_and_have_a_permitted_shape(self, width: int, height: int) -> None:
        generator = np.random.default_rng(0)
        shares = []
        for _ in range(300):
            left, top, right, bottom = augment.random_resized_crop(width, height, generator.random((10, 4)))
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            shares.append((right - left) * (bottom - top) / (width * height))
            # Sides are rounded to whole pixels.
            assert (right - left - 0.51) / (bottom - top + 0.51) <= 4 / 3
            assert (right - left + 0.51) / (bottom - top - 0.51) >= 3 / 4
        assert max(shares) <= 1
        assert len(set(shares)) > 5

    def test_area_is_drawn_evenly(self) -> None:
        draws = [[(u + 0.5) / 100, 0.5, 0, 0] for u in range(100)]
        shares = [augment.random_resized_crop(1000, 1000, [draw])[2] ** 2 / 1e6 for draw in draws]
        assert np.allclose(shares, [0.08 + 0.92 * draw[0] for draw in draws], atol=2e-3)

    def test_the_crop_is_the_centre_if_no_draw_fits(self) -> None:
        draws = [[0.99, 0.5, 0.1, 0.1]] * 10
        assert augment.random_resized_crop(1000, 90, draws) == (440, 0, 560, 90)
        assert augment.random_resized_crop(90, 1000, draws) == (0, 440, 90, 560)


class TestJpegs:
    def test_test_images_are_the_resized_centre(self) -> None:
        image = Image.open(io.BytesIO(jpeg(smooth_image(400, 300))))
        pixels = images.decode(jpeg(smooth_image(400, 300)), 112)
        expected = image.resize((171, 128), Image.Resampling.BILINEAR).crop((29, 8, 141, 120))
        difference = np.abs(pixels.astype(int) - np.asarray(expected).transpose(2, 0, 1))
        assert pixels.shape == (3, 112, 112)
        assert difference.max() <= 3

    def test_training_images_are_crops_mirrored_or_not(self) -> None:
        encoded = jpeg(smooth_image(400, 300))
        image = Image.open(io.BytesIO(encoded))
        kinds = set()
        for seed in range(12):
            pixels = images.decode(encoded, 64, np.random.default_rng(seed)).astype(int)
            draws = np.random.default_rng(seed).random(41)
            box = augment.random_resized_crop(400, 300, draws[:40].reshape(10, 4))
            expected = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR, box=box)).transpose(2, 0, 1)
            mirrored = bool(draws[40] < 0.5)
            assert np.abs(pixels - (expected[..., ::-1] if mirrored else expected)).max() <= 4
            # Red grows to the right.
            assert (pixels[0, :, 0].mean() > pixels[0, :, -1].mean()) == mirrored
            kinds.add(mirrored)
        assert kinds == {False, True}

    @pytest.mark.parametrize(
        ("width", "height", "size", "reduced"),
        [(512, 512, 224, (256, 256)), (2000, 1500, 224, (500, 375)), (500, 375, 224, (500, 375)), (9, 9, 64, (9, 9))],
    )
    def test_images_are_decoded_at_the_scale_that_the_crop_needs(
        self, width: int, height: int, size: int, reduced: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes, draft = [], JpegImagePlugin.JpegImageFile.draft

        def spy(image: Any, mode: Any, wanted: Any) -> Any:
            result = draft(image, mode, wanted)
            sizes.append(image.size)
            return result

        monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", spy)
        assert images.decode(jpeg(smooth_image(width, height)), size).shape == (3, size, size)
        assert sizes == [reduced]

    @pytest.mark.parametrize("mode", ["L", "CMYK"])
    def test_other_colours_become_rgb(self, mode: str) -> None:
        image = smooth_image(80, 80).convert(mode)
        pixels = images.decode(jpeg(image), 70).astype(int)
        expected = np.asarray(image.convert("RGB").resize((80, 80)).crop((5, 5, 75, 75))).transpose(2, 0, 1)
        assert np.abs(pixels - expected).mean() < 3
        assert (pixels[0] == pixels[1]).all() == (mode == "L")

    def test_a_png_under_the_name_of_a_jpeg_is_decoded(self) -> None:
        stream = io.BytesIO()
        smooth_image(80, 80).convert("P").save(stream, "PNG")
        assert images.decode(stream.getvalue(), 32, np.random.default_rng(0)).shape == (3, 32, 32)

    @forks
    def test_batches_do_not_depend_on_the_workers(self, tmp_path: Path) -> None:
        entries = write_jpegs(tmp_path, 7)
        results = []
        for workers in (0, 1, WORKERS):
            torch.manual_seed(3)
            batches = JpegSource(entries, 16, workers).batches(2, train=True)
            results.append([epoch(batches), epoch(batches), (torch.rand(4), torch.rand(4))])
        for other in results[1:]:
            for ours, theirs in zip(results[0], other, strict=True):
                assert torch.equal(ours[0], theirs[0])
                assert torch.equal(ours[1], theirs[1])

    def test_images_are_normalised(self, tmp_path: Path) -> None:
        (tmp_path / "grey.jpg").write_bytes(jpeg(Image.new("RGB", (40, 40), (128, 128, 128))))
        [(x, _)] = JpegSource([Entry(str(tmp_path / "grey.jpg"), 0, -1, 0)], 8, 0).batches(1)
        for channel, mean, std in zip(x[0], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True):
            assert torch.allclose(channel, torch.tensor((128 / 255 - mean) / std), atol=1e-4)

    @forks
    def test_an_epoch_may_end_early(self, tmp_path: Path) -> None:
        batches = JpegSource(write_jpegs(tmp_path, 9), 16, 1).batches(2)
        everything, _ = epoch(batches)
        first, _ = next(iter(batches))
        assert torch.equal(first, everything[:2])
        assert torch.equal(epoch(batches)[0], everything)

    @forks
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_damaged_file_is_named(self, tmp_path: Path, workers: int) -> None:
        entries = write_jpegs(tmp_path, 4)
        whole = (tmp_path / "2.jpg").read_bytes()
        for content in (b"", b"no image", whole[: len(whole) // 2]):
            (tmp_path / "2.jpg").write_bytes(content)
            with pytest.raises(ValueError, match=r"^cannot decode the JPEG .*2\.jpg: "):
                epoch(JpegSource(entries, 16, workers).batches(2))
        (tmp_path / "2.jpg").unlink()
        with pytest.raises(ValueError, match=r"cannot decode the JPEG .*2\.jpg: .*No such file"):
            epoch(JpegSource(entries, 16, workers).batches(2))

    def test_an_entry_beyond_the_end_of_its_file_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(bytes(100))
        with pytest.raises(ValueError, match=r"a\.tar at byte 50: the file ends after 50 of the 60 bytes at 50"):
            epoch(JpegSource([Entry(str(tmp_path / "a.tar"), 50, 60, 0)], 8, 0).batches(1))

    def test_sources_can_be_sent_to_other_processes(self, tmp_path: Path) -> None:
        source = JpegSource(write_jpegs(tmp_path, 3), 8, 0)
        again = pickle.loads(pickle.dumps(source))
        assert torch.equal(epoch(source.batches(3))[0], epoch(again.batches(3))[0])
        assert pickle.loads(pickle.dumps(IMAGENET_NORMALISE)) == IMAGENET_NORMALISE


def test_normalise_subtracts_the_mean_and_divides_by_the_deviation() -> None:
    pixels = torch.from_numpy(random_bytes(5, 2, 4, 4))
    result = images.normalise((0.5, 0.25), (0.2, 0.4))(pixels)
    mean, std = torch.tensor([0.5, 0.25])[:, None, None], torch.tensor([0.2, 0.4])[:, None, None]
    assert torch.allclose(result, (pixels / 255 - mean) / std, atol=1e-5)
    with pytest.raises(ValueError, match="mean and std must be equally many numbers, std > 0"):
        images.normalise((0.5,), (0.2, 0.2))


@pytest.mark.parametrize(("processes", "workers"), [(None, 6), ("2", 3), ("4", 1), ("16", 1)])
def test_processes_share_the_cores_for_decoding(
    processes: str | None, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_cores", lambda: 6)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert JpegSource(write_jpegs(tmp_path, 2), size=16).num_workers == workers
