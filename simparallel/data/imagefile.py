"""Read one image from one file: `.npy`, `.ppm` and `.pgm` with the readers below, png and jpeg with Pillow."""

from __future__ import annotations

import io
import os
import re
import warnings
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import numpy.lib.format as npy

from simparallel.data.source import Source, bad_file, open_file, open_source
from simparallel.errors import DataError

LARGEST_PIXELS = 1 << 26
LARGEST_HEADER = 10_000
LARGEST_PNM_HEADER = 1_000
PILLOW = (".png", ".jpg", ".jpeg")
EXTENSIONS = (".npy", ".ppm", ".pgm", *PILLOW)


def read_image(path: str | os.PathLike[str], max_pixels: int = LARGEST_PIXELS) -> np.ndarray:
    """Read an image of shape (height, width, channels).

    `.npy` returns the saved array (two dims get a third of size 1); `.ppm`, `.png` and `.jpg` return
    uint8 with 3 channels, `.pgm` and gray images 1 channel. If the maximum that a `.ppm` or `.pgm` declares is
    below 255, values are scaled to 255; if it is above, they stay unchanged, as uint16.

    Args:
        path: path of the file; its extension selects the format.
        max_pixels: refuse larger images.

    Raises:
        DataError: the file is missing, broken, too large or of unknown extension, or Pillow is needed and missing.
    """
    path = Path(path)
    extension = path.suffix.lower()
    if extension in PILLOW:
        return _read_pillow(path, max_pixels)
    if extension == ".npy":
        return read_npy(path, max_pixels)
    if extension in (".ppm", ".pgm"):
        return read_pnm(path, max_pixels)
    raise bad_file(path, f"{extension or 'no extension'} is unknown; use one of {', '.join(EXTENSIONS)}.")


class EncodedImage(io.BytesIO):
    """The bytes of an image file, accepted in place of a path."""

    def __str__(self) -> str:
        return "an encoded image"


def read_encoded(image: EncodedImage, max_pixels: int = LARGEST_PIXELS) -> np.ndarray:
    """Read an image from the bytes of a file, as `read_image`; the first bytes select the format.

    Raises:
        DataError: the bytes are broken, too large or of unknown format, or Pillow is needed and missing.
    """
    start = image.getvalue()[:6]
    if start == b"\x93NUMPY":
        return read_npy(image, max_pixels)
    if start[:2] in (b"P2", b"P3", b"P5", b"P6"):
        return read_pnm(image, max_pixels)
    return _read_pillow(image, max_pixels)


# --- npy -------------------------------------------------------------------------------------------

# By version; 3 differs from 2 only in field names, which images do not have.
_NPY_HEADERS = {1: npy.read_array_header_1_0, 2: npy.read_array_header_2_0, 3: npy.read_array_header_2_0}


def read_npy(path: str | os.PathLike[str] | EncodedImage, max_pixels: int = LARGEST_PIXELS) -> np.ndarray:
    """Read an image from a `.npy` file: numbers only, never a pickle.

    Raises:
        DataError: see `read_image`.
    """
    with open_source(path) as source:
        shape, fortran, dtype = _npy_header(source)
        if len(shape) not in (2, 3) or min(shape) < 1:
            raise source.fail(f"an image has shape (height, width, channels), not {shape}.", 0)
        # Both limits are checked before any memory is allocated.
        _check_pixels(source, prod(shape[:2]), max_pixels)
        if prod(shape[2:]) > 64:
            raise source.fail(f"{shape[2]} channels of shape {shape}, the limit is 64.", 0)
        values = source.array(shape[::-1] if fortran else shape, dtype, "pixels")
    # A file in Fortran order has the reversed shape in C order.
    values = values.T if fortran else values
    values = np.ascontiguousarray(values.astype(dtype.newbyteorder("="), copy=False))
    return values[:, :, None] if values.ndim == 2 else values


def _npy_header(source: Source) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read (shape, is Fortran order, dtype) of numbers; NumPy parses the literal without evaluating it."""
    stream = io.BytesIO(source.peek(LARGEST_HEADER))
    try:
        with warnings.catch_warnings():
            # NumPy warns about headers with Python 2's number literals, which it can read.
            warnings.simplefilter("ignore")
            major, _ = npy.read_magic(stream)
            shape, fortran, dtype = _NPY_HEADERS[major](stream, max_header_size=LARGEST_HEADER)
    except Exception:
        # The parser may raise anything on arbitrary text.
        shape, fortran, dtype = (), False, np.dtype(object)
    if dtype.kind not in "uifb" or dtype.itemsize not in (1, 2, 4, 8):
        wanted = f"the header of a .npy file of numbers, of at most {LARGEST_HEADER} bytes"
        raise source.fail(f"it begins with {stream.getvalue()[:99]!r}, not with {wanted}.", 0)
    source.take(stream.tell(), "the header")
    return tuple(map(int, shape)), fortran, dtype


# --- portable pixmaps --------------------------------------------------------------------------------

# P and a digit; then width, height and largest value, each after white space and comments; then one white space.
_PNM_HEADER = re.compile(rb"P([2356])" + 3 * rb"(?:\s|#[^\r\n]*+[\r\n])++(\d{1,9})" + rb"\s")
_PLAIN = b"0123456789 \t\r\n\v\f"
# Any other character, or a number of more than 5 digits.
_NOT_PLAIN = re.compile(rb"[^0-9 \t\r\n\v\f]|\d{6}")


def read_pnm(path: str | os.PathLike[str] | EncodedImage, max_pixels: int = LARGEST_PIXELS) -> np.ndarray:
    """Read an image from a `.ppm` or `.pgm` file, binary (P5, P6) or plain (P2, P3).

    Format: the man pages ppm(5) and pgm(5) of Netpbm. One image per file.

    Raises:
        DataError: see `read_image`.
    """
    with open_source(path) as source:
        start = source.peek(LARGEST_PNM_HEADER)
        header = _PNM_HEADER.match(start)
        kind, width, height, largest = map(int, header.groups()) if header else (0, 0, 0, 0)
        if not (header and width and height and 0 < largest < 65536):
            wanted = f"P2, P3, P5 or P6, width, height and largest value (1 … 65535), in {LARGEST_PNM_HEADER} bytes"
            raise source.fail(f"it begins with {start[:40]!r}, not with {wanted}.", 0)
        _check_pixels(source, width * height, max_pixels)
        source.take(header.end(), "the header")
        at = source.position
        shape = (height, width, 3 if kind in (3, 6) else 1)
        # The format has two bytes, big-endian, for values above 255.
        dtype = "u1" if largest < 256 else ">u2"
        values = source.array(shape, dtype, "pixels") if kind >= 5 else _read_ascii(source, shape)
    wrong = values > largest
    if wrong.any():
        position = int(np.argmax(wrong.reshape(-1)))
        value = values.reshape(-1)[position]
        # Decimal numbers have different lengths, so the error has the offset of the first pixel.
        offset = at + position * values.itemsize if kind >= 5 else at
        raise source.fail(f"value {value} at position {position} is above the largest, {largest}.", offset)
    if largest >= 255:
        return values.astype("u1" if largest == 255 else "u2", copy=False)
    # Rounded division in integers.
    return ((values.astype(np.uint32) * 255 + largest // 2) // largest).astype(np.uint8)


def _read_ascii(source: Source, shape: tuple[int, ...]) -> np.ndarray:
    """Read the pixels of a plain file, decimal numbers of at most 5 digits, with about 15 bytes of white space each."""
    at, count = source.position, prod(shape)
    # Bounded by the number of pixels, so that a small header cannot be followed by endless text.
    text = source.rest(20 * count + 1000, "pixels")
    words = text.split()
    # A quick check first: the regular expression is slow, and only needed for the position of an error.
    is_plain = not text.translate(None, _PLAIN) and max(map(len, words), default=0) <= 5
    bad = None if is_plain else _NOT_PLAIN.search(text)
    if bad is not None:
        raise source.fail(
            f"{bad.group()!r} is among the pixels; only numbers up to 65535 are allowed.", at + bad.start()
        )
    if len(words) != count:
        raise source.fail(f"{len(words)} values for shape {shape}, expected {count}.", at)
    # `_NOT_PLAIN` has refused longer numbers, so 5 characters hold each of them.
    return np.array(words, dtype="S5").astype(np.int64).reshape(shape)


# --- png and jpeg ------------------------------------------------------------------------------------


def _read_pillow(path: Path | EncodedImage, max_pixels: int) -> np.ndarray:
    # Slow to import; installed with matplotlib.
    from PIL import Image

    with open_file(path) as file:
        try:
            # Only these two: Pillow's decoders of other formats never run on untrusted files.
            with Image.open(file, formats=("PNG", "JPEG")) as image:
                # The size is known from the header, before pixels are decoded.
                if image.width * image.height > max_pixels:
                    text = (
                        f"{image.height} x {image.width} pixels, the limit is {max_pixels}; pass a larger max_pixels."
                    )
                    raise bad_file(path, text, 0)
                # Palettes, alpha channels and other modes become plain colours, so that all images of a folder are
                # alike.
                pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "I", "I;16") else "RGB"))
                if image.format == "PNG":
                    _check_end_of_png(file)
        except DataError:
            raise
        except Exception as error:
            # A decoder may raise anything on a broken file.
            text = f"cannot be decoded: {type(error).__name__}: {error}"
            raise bad_file(path, f"{text}.", 0) from None
    return np.array(pixels[:, :, None] if pixels.ndim == 2 else pixels)


def _check_end_of_png(file: IO[bytes]) -> None:
    """Check that all chunks up to IEND are complete: Pillow accepts a file that is truncated after the last pixel."""
    # Chunks begin after the 8 bytes of the signature.
    size, at, kind = file.seek(0, os.SEEK_END), 8, b""
    while kind != b"IEND":
        file.seek(at)
        head = file.read(8)
        # A chunk is 4 bytes of length, 4 of type, the data, and 4 of CRC.
        at, kind = at + 12 + int.from_bytes(head[:4], "big"), head[4:]
        if len(head) < 8 or at > size:
            raise ValueError(f"the file ends at byte {size}, inside a chunk: truncated")


def _check_pixels(source: Source, count: int, max_pixels: int) -> None:
    if count > max_pixels:
        raise source.fail(f"{count} pixels, the limit is {max_pixels}; pass a larger max_pixels.", 0)
