"""Classes and shapes that are known without the files of a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from s3d_fast import data
from s3d_fast.data.samples import classes_and_shape


def test_every_data_set_has_classes_and_a_shape() -> None:
    found = {name: classes_and_shape(name, {"size": 64, "points": 128}) for name in data.SETS}
    assert found == {
        "cifar100": (100, (3, 32, 32)),
        "modelnet40": (40, (128, 3)),
        "imagenet": (1000, (3, 64, 64)),
        "fashion-mnist": (10, (1, 28, 28)),
        "digits": (10, (1, 8, 8)),
    }
    with pytest.raises(ValueError, match="'mnist'"):
        classes_and_shape("mnist", {})


def test_they_are_those_of_the_data(tmp_path: Path) -> None:
    digits = data.digits()
    assert classes_and_shape("digits", {}) == (digits.classes, digits.input_shape)
    clouds, labels = np.zeros((2, 9, 3), np.float32), np.zeros(2, np.int64)
    np.savez(tmp_path / "modelnet40.npz", x_train=clouds, y_train=labels, x_test=clouds, y_test=labels)
    clouds = data.modelnet40(tmp_path, points=7)
    assert classes_and_shape("modelnet40", {"points": 7}) == (clouds.classes, clouds.input_shape)
