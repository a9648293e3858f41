"""Regenerate `simparallel/data/digits.npz`: `python tools/pack_digits.py`. Needs scikit-learn.

scikit-learn ships the images as text. Here they are bytes, compressed by NumPy: 45 KB. (Packing
the 17 pixel values into 5 bits each would take 72 KB.)
"""

from __future__ import annotations

import numpy as np
import sklearn.datasets

from simparallel.data.digits import FILE, LARGEST


def main() -> None:
    """Read the images from scikit-learn, check them, and write the file."""
    source = sklearn.datasets.load_digits()
    images, labels = source.data.astype(np.uint8), source.target.astype(np.uint8)
    if not (np.array_equal(images, source.data) and images.max() == LARGEST and images.shape == (1797, 64)):
        raise SystemExit("these are not the 1,797 images of 64 pixels in 0 … 16")
    np.savez_compressed(FILE, images=images, labels=labels)
    print(f"{FILE}: {len(labels)} images, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
