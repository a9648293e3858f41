"""The bundled dataset: 1,797 real handwritten digits. See DIGITS.md for their origin and licence."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simparallel.backend import random_permutation
from simparallel.base.checks import check_choice
from simparallel.data.dataset import TensorDataset

FILE = Path(__file__).with_name("digits.npz")
# The value of a black pixel: each pixel counts the dark ones of a 4 x 4 block.
LARGEST = 16
NUM_TRAIN = 1440
SPLITS = ("train", "test", "all")


def digits(split: str = "train", flatten: bool = True) -> TensorDataset:
    """Return 8 x 8 images of handwritten digits and their labels; no download.

    Args:
        split: "train" (1,440), "test" (the other 357) or "all" (1,797). The split is fixed.
        flatten: return rows of 64 pixels; False returns images of shape (1, 8, 8), channel first.

    Returns:
        Dataset of images, float32 in 0 … 1, shape (n, 64) or (n, 1, 8, 8), and labels, int64 in
        0 … 9, shape (n,). Each call returns new arrays.

    Raises:
        InputError: unknown split.
    """
    check_choice("digits", "split", split, SPLITS)
    with np.load(FILE, allow_pickle=False) as file:
        pixels, labels = file["images"], file["labels"]  # uint8 (1797, 64), uint8 (1797,)
    # The file keeps the original order, which has runs of 0, 1, 2, …; so the split needs a permutation.
    order = random_permutation(0, "digits", len(labels))
    rows = {"train": order[:NUM_TRAIN], "test": order[NUM_TRAIN:], "all": order}[split]
    images = pixels[rows].astype(np.float32) / np.float32(LARGEST)
    return TensorDataset(images if flatten else images.reshape(-1, 1, 8, 8), labels[rows].astype(np.int64))
