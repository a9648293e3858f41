"""Readers of data files, on sound files and over 40 kinds of broken ones."""

import gzip
import io
import os
import pickle
import random
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refused

from simparallel import data
from simparallel.data import cifar, imagefile
from simparallel.data.mnist import DTYPES
from simparallel.errors import DataError, DTypeError, InputError, ShapeError

CODES = {np.dtype(kind).newbyteorder("="): code for code, kind in DTYPES.items()}
RNG = np.random.default_rng(7)
IMAGES = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 0, 9, 9, 1], np.uint8)


def idx_bytes(array):
    code = CODES[array.dtype.newbyteorder("=")]
    dims = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, code, array.ndim]) + dims + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_mnist(folder, train=True, images=IMAGES, labels=LABELS, pack=gzip.compress):
    part, end = ("train" if train else "t10k"), (".gz" if pack is gzip.compress else "")
    write(folder / f"{part}-images-idx3-ubyte{end}", pack(idx_bytes(images)))
    write(folder / f"{part}-labels-idx1-ubyte{end}", pack(idx_bytes(labels)))


# --- IDX ---------------------------------------------------------------------------------------------


@given(
    array=st.sampled_from(sorted(DTYPES)).flatmap(
        lambda code: hnp.arrays(
            np.dtype(DTYPES[code]).newbyteorder("="), hnp.array_shapes(min_side=0, max_dims=4, max_side=4)
        )
    ),
    packed=st.booleans(),
)
def test_idx_round_trip(tmp_path_factory, array, packed):
    content = idx_bytes(array)
    path = write(tmp_path_factory.getbasetemp() / "a.idx", gzip.compress(content, 1) if packed else content)
    written = tmp_path_factory.getbasetemp() / ("b.idx.gz" if packed else "b.idx")
    data.write_idx(written, array)
    assert (gzip.decompress(written.read_bytes()) if packed else written.read_bytes()) == content
    values = data.read_idx(path)
    assert (values.dtype, values.shape) == (array.dtype, array.shape)
    assert values.dtype.isnative
    assert values.tobytes() == array.tobytes()
    assert np.array_equal(data.read_idx(path, shape=array.shape, dtype=array.dtype.name), values, equal_nan=True)


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros(2, np.int64), DTypeError), (np.zeros((), np.uint8), ShapeError),
        (np.zeros((1,) * 9, np.uint8), ShapeError),
    ],
)  # fmt: skip
def test_write_idx_refuses_unsupported_arrays(tmp_path, array, error):
    with refused(error):
        data.write_idx(tmp_path / "a", array)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["gz", "plain"])
@pytest.mark.parametrize("folder", ["MNIST/raw", "MNIST", ".", "train"])
def test_mnist_is_found_in_usual_folders(tmp_path, folder, pack):
    write_mnist(tmp_path / folder, pack=pack)
    dataset = data.MNIST(tmp_path)
    assert (dataset.images.shape, dataset.images.dtype) == ((5, 28, 28, 1), np.uint8)
    assert dataset.labels.tolist() == LABELS.tolist()
    assert dataset.labels.dtype == np.int64
    image, label = dataset[-1]
    assert np.array_equal(image[..., 0], IMAGES[-1])
    assert label == 1
    assert dataset[[2, 0]][1].tolist() == [9, 3]
    assert dataset[1:3][0].shape == (2, 28, 28, 1)
    with pytest.raises(IndexError):
        dataset[5]
    with refused(DataError):
        data.MNIST(tmp_path, train=False)


def test_mnist_and_fashion_mnist_do_not_mix(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw", labels=LABELS)
    write_mnist(tmp_path / "FashionMNIST" / "raw", labels=LABELS[::-1].copy())
    assert data.MNIST(tmp_path).labels[0] == 3
    assert data.FashionMNIST(tmp_path).labels[0] == 1
    assert data.FashionMNIST(tmp_path).classes[9] == "Ankle boot"


def test_root_may_come_from_the_environment(tmp_path, monkeypatch):
    for name in ("SIMPARALLEL_DATA", "DATA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with refused(DataError):
        data.MNIST()
    write_mnist(tmp_path / "b")
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "b"))
    assert len(data.MNIST()) == 5
    monkeypatch.setenv("SIMPARALLEL_DATA", str(tmp_path / "none"))  # the first variable takes precedence
    with refused(DataError):
        data.MNIST()
    assert len(data.MNIST(tmp_path / "b")) == 5


def test_loader_gives_batches_of_mnist(tmp_path):
    write_mnist(tmp_path)
    t = data.transforms
    pipeline = t.Compose([t.Rescale(1 / 255, 0), t.Normalize((0.1307,), (0.3081,)), t.HWC2CHW()])
    whole = data.MNIST(tmp_path, transform=pipeline, target_transform=t.TypeCast(np.int32))
    x, y = next(iter(data.DataLoader(whole, 4)))
    assert (x.shape, x.dtype, y.dtype) == ((4, 1, 28, 28), np.float32, np.int32)
    expected = (IMAGES[:4, None] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-6)
    late, _ = next(iter(data.DataLoader(data.MNIST(tmp_path), 4, transform=pipeline)))
    assert np.array_equal(late.numpy(), x.numpy())
    assert np.array_equal(whole[2][0], x.numpy()[2])


# --- CIFAR-10 ----------------------------------------------------------------------------------------

RECORDS = 3


def cifar_bytes(labels=(1, 0, 9)):
    pixels = np.arange(len(labels) * 3072, dtype=np.uint32).reshape(len(labels), 3072) % 251
    return b"".join(bytes([label]) + row.astype(np.uint8).tobytes() for label, row in zip(labels, pixels, strict=True))


def tar_gz(members, prefix="cifar-10-batches-bin/"):
    """members: name -> bytes, or a TarInfo with its bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info, body = content if isinstance(content, tuple) else (tarfile.TarInfo(prefix + name), content)
            info.size = len(body) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


TRAIN = {f"data_batch_{i}.bin": cifar_bytes((i, 0, 9)) for i in range(1, 6)}


@pytest.fixture
def small_cifar(monkeypatch):
    monkeypatch.setattr(data.CIFAR10, "records_per_file", RECORDS)


@pytest.mark.usefixtures("small_cifar")
@pytest.mark.parametrize("how", ["folder", "root", "archive"])
def test_cifar10(tmp_path, how):
    if how == "archive":
        write(tmp_path / cifar.ARCHIVE, tar_gz({"readme.html": b"hi", **TRAIN, "test_batch.bin": cifar_bytes()}))
    else:
        for name, content in {**TRAIN, "test_batch.bin": cifar_bytes()}.items():
            write(tmp_path / (cifar.FOLDER if how == "folder" else ".") / name, content)
    train, test = data.CIFAR10(tmp_path), data.CIFAR10(tmp_path, train=False)
    assert train.labels.tolist() == [1, 0, 9, 2, 0, 9, 3, 0, 9, 4, 0, 9, 5, 0, 9]
    assert test.images.shape == (3, 32, 32, 3)
    planes = np.frombuffer(cifar_bytes(), np.uint8).reshape(3, 3073)[:, 1:].reshape(3, 3, 32, 32)
    assert np.array_equal(test.images.transpose(0, 3, 1, 2), planes)
    assert train.classes[9] == "truck"
    with refused(DataError):
        data.CIFAR10(tmp_path / "elsewhere")


def test_cifar_file_of_any_length(tmp_path):
    images, labels = data.read_cifar10(write(tmp_path / "a.bin", cifar_bytes((5, 6))), None)
    assert (len(images), labels.tolist()) == (2, [5, 6])


# --- single images -----------------------------------------------------------------------------------

pixels = hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3])))


def pnm(image, largest=255, plain=False, comment=b""):
    height, width, channels = image.shape
    kind = (2 if plain else 5) + (channels == 3)
    head = b"P%d\n%s%d %d\n%d\n" % (kind, comment, width, height, largest)
    body = b" ".join(b"%d" % v for v in image.ravel()) if plain else image.tobytes()
    return head + body


@given(image=pixels, plain=st.booleans(), comment=st.sampled_from([b"", b"# 3 4 5\n", b"#\r\n# x\n"]))
def test_ppm_and_pgm(tmp_path_factory, image, plain, comment):
    path = tmp_path_factory.getbasetemp() / ("a.ppm" if image.shape[2] == 3 else "a.pgm")
    write(path, pnm(image, 255, plain, comment))
    assert np.array_equal(data.read_image(path), image)


def test_ppm_with_another_largest_value(tmp_path):
    image = np.array([[[0], [1], [3]]], np.uint8)
    scaled = data.read_image(write(tmp_path / "a.pgm", pnm(image, 3)))
    assert scaled[..., 0].tolist() == [[0, 85, 255]]
    wide = np.array([[[0], [300], [65535]]], ">u2")
    values = data.read_image(write(tmp_path / "b.pgm", pnm(wide, 65535)))
    assert (values.dtype, values[..., 0].tolist()) == (np.uint16, [[0, 300, 65535]])


@given(image=pixels, dtype=st.sampled_from(["u1", "<f4", ">f8", "<i2", "bool"]), fortran=st.booleans())
def test_npy_round_trip(tmp_path_factory, image, dtype, fortran):
    path = tmp_path_factory.getbasetemp() / "a.npy"
    for array in (image.astype(dtype), image[..., 0].astype(dtype)):
        array = np.asfortranarray(array) if fortran else array
        np.save(path, array)
        values = data.read_image(path)
        assert values.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(values, array if array.ndim == 3 else array[..., None])


def test_png_and_jpeg_through_pillow(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    image = RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image_module.fromarray(image).save(tmp_path / "a.png")
    image_module.fromarray(image[..., 0]).save(tmp_path / "b.png")
    image_module.fromarray(image).save(tmp_path / "c.jpg")
    assert np.array_equal(data.read_image(tmp_path / "a.png"), image)
    assert np.array_equal(data.read_image(tmp_path / "b.png"), image[..., :1])
    assert data.read_image(tmp_path / "c.jpg").shape == (4, 5, 3)
    with refused(DataError):
        data.read_image(tmp_path / "a.png", max_pixels=19)
    for content in (b"\x89PNG\r\n\x1a\nxxxx", (tmp_path / "a.png").read_bytes()[:50], b"GIF89axxxx"):
        with refused(DataError) as caught:
            data.read_image(write(tmp_path / "d.png", content))
        assert caught.value.path == str(tmp_path / "d.png")


def test_png_that_is_cut_anywhere_is_refused(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    image_module.fromarray(IMAGES[0]).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    for size in (*range(0, len(whole) - 20, 19), *range(len(whole) - 20, len(whole))):
        with pytest.raises(DataError):
            data.read_image(write(tmp_path / "b.png", whole[:size]))
    assert np.array_equal(data.read_image(write(tmp_path / "b.png", whole + b"more"))[..., 0], IMAGES[0])


READERS = {
    "idx": data.read_idx, "bin": cifar.read_cifar10, "tar.gz": lambda path: data.read_cifar10_archive(path, ["a"]),
    **dict.fromkeys(("npy", "ppm", "png"), data.read_image),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_pipe_is_refused_at_once(tmp_path, kind):
    if kind == "png":
        pytest.importorskip("PIL.Image")
    os.mkfifo(tmp_path / f"a.{kind}")
    with refused(DataError):
        READERS[kind](tmp_path / f"a.{kind}")


@pytest.mark.parametrize("kind", READERS)
def test_disk_read_error(tmp_path, kind):
    """Linux answers EIO where this file is read at its beginning."""
    if kind == "png":
        pytest.importorskip("PIL.Image")
    (tmp_path / f"a.{kind}").symlink_to("/proc/self/mem")
    with refused(DataError):
        READERS[kind](tmp_path / f"a.{kind}")


def test_file_larger_than_memory(tmp_path):
    """A sparse file takes no disk."""
    path = write(tmp_path / "a.bin", b"")
    os.truncate(path, cifar.RECORD_BYTES << 31)
    with pytest.raises(DataError, match="6.6 TB"):
        cifar.read_cifar10(path, num_records=None)


def test_image_folder(tmp_path):
    image = RNG.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    write(tmp_path / "dog" / "b.ppm", pnm(image))
    write(tmp_path / "dog" / "deep" / "a.PPM", pnm(255 - image))
    write(tmp_path / "cat" / "x.ppm", pnm(image // 2))
    write(tmp_path / "cat" / "notes.txt", b"no image")
    write(tmp_path / "cat" / ".hidden.ppm", b"")
    write(tmp_path / ".git" / "x.ppm", b"")
    folder = data.ImageFolder(tmp_path)
    assert (folder.classes, folder.class_to_idx) == (["cat", "dog"], {"cat": 0, "dog": 1})
    assert [path.name for path, _ in folder.samples] == ["x.ppm", "b.ppm", "a.PPM"]
    assert folder.targets == [0, 1, 1]
    assert np.array_equal(folder[1][0], image)
    (x, y), *_ = data.DataLoader(folder, 3, transform=data.transforms.HWC2CHW())
    assert x.shape == (3, 3, 4, 4)
    assert np.array_equal(x.numpy()[1], image.transpose(2, 0, 1))
    assert y.numpy().tolist() == [0, 1, 1]
    single = data.ImageFolder(
        tmp_path, transform=data.transforms.Rescale(1 / 255, 0), target_transform=lambda k: k + 10
    )
    assert (single[0][0].dtype, single[0][1]) == (np.float32, 10)


# --- broken files ------------------------------------------------------------------------------------


def idx_case(content, **arguments):
    return "a.idx", content, lambda path: data.read_idx(path, **arguments)


def image_case(name, content, **arguments):
    return name, content, lambda path: data.read_image(path, **arguments)


def cifar_case(content):
    return "a.bin", content, lambda path: data.read_cifar10(path, RECORDS)


def archive_case(content):
    names = ["data_batch_1.bin"]
    return "a.tar.gz", content, lambda path: data.read_cifar10_archive(path, names, RECORDS)


def npy_bytes(header, body=b"\0" * 12, version=1):
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + body


def npy_header(descr="'|u1'", fortran="False", shape="(2, 2, 3)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def pickled_npy():
    out = io.BytesIO()
    np.save(out, np.array([[{}]], object), allow_pickle=True)
    return out.getvalue()


def linked():
    info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return tar_gz({"x": (info, b"")})


def with_header(size, type_):
    """Make a tar member whose header announces more bytes than there are."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = type_, size
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + b"a" * 512)


def header_chain():
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1
    return gzip.compress((info.tobuf(tarfile.GNU_FORMAT) + b"a" * 512) * 3000)


GOOD = idx_bytes(IMAGES)
SMALL = idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))
PPM = pnm(np.zeros((2, 2, 3), np.uint8))
CASES = {
    # name: (file name, content, reader), words of the message, byte offset
    "idx empty": (idx_case(b""), 0),
    "idx three bytes": (idx_case(SMALL[:3]), 3),
    "idx first byte": (idx_case(b"\x01" + SMALL[1:]), 0),
    "idx second byte": (idx_case(b"\0\x01" + SMALL[2:]), 0),
    "idx type 0x0a": (idx_case(b"\0\0\x0a" + SMALL[3:]), 0),
    "idx type 0": (idx_case(b"\0\0\0" + SMALL[3:]), 0),
    "idx text": (idx_case(b"<html>not found</html>"), 0),
    "idx no dims": (idx_case(b"\0\0\x08\0"), 3),
    "idx 255 dims": (idx_case(b"\0\0\x08\xff" + SMALL[4:]), 3),
    "idx cut in the dims": (idx_case(SMALL[:9]), 9),
    "idx cut in the elements": (idx_case(SMALL[:-1]), 12),
    "idx one byte more": (idx_case(SMALL + b"x"), 12),
    "idx huge": (idx_case(b"\0\0\x08\x02" + b"\xff" * 8), 4),
    "idx gigabyte": (idx_case(b"\0\0\x08\x01" + struct.pack(">I", 1 << 30)), 8),
    "idx limit": (idx_case(GOOD, max_bytes=100), 4),
    "idx wanted dtype": (idx_case(SMALL, dtype="float32"), 2),
    "idx wanted ndim": (idx_case(GOOD, shape=(None,)), 3),
    "idx wanted size": (idx_case(GOOD, shape=(None, 28, 27)), 12),
    "gz cut": (idx_case(gzip.compress(GOOD)[:-9]), None),
    "gz empty": (idx_case(b"\x1f\x8b"), 0),
    "gz bad block": (idx_case(gzip.compress(GOOD)[:10] + b"\xff" * 40), 0),
    "gz bad checksum": (idx_case(gzip.compress(GOOD)[:-8] + b"\0" * 8), None),
    "gz trailing garbage": (idx_case(gzip.compress(SMALL) + b"rubbish"), 18),
    "gz second member": (idx_case(gzip.compress(SMALL) * 2), 18),
    "gz bomb": (idx_case(gzip.compress(SMALL + bytes(20 << 20))), 18),
    "gz cannot hold it": (
        idx_case(gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 1 << 28))), 8
    ),
    "gz shorter than stated": (
        idx_case(gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 1000) + b"x" * 999)), 1007
    ),
    "cifar empty": (cifar_case(b""), 0),
    "cifar cut": (cifar_case(cifar_bytes()[:-1]), 0),
    "cifar long": (cifar_case(cifar_bytes() + b"x"), 0),
    "cifar label": (cifar_case(cifar_bytes((1, 10, 2))), 3073),
    "archive not gzip": (archive_case(b"not a gz file"), None),
    "archive not tar": (archive_case(gzip.compress(b"no tar")), None),
    "archive empty": (archive_case(tar_gz({})), None),
    "archive other place": (archive_case(tar_gz(TRAIN, prefix="../")), None),
    "archive cut": (archive_case(tar_gz(TRAIN)[:100]), None),
    "archive short member": (archive_case(tar_gz({"data_batch_1.bin": b"x"})), 0),
    "archive link": (archive_case(linked()), 0),
    "archive label": (archive_case(tar_gz({"data_batch_1.bin": cifar_bytes((99, 0, 0))})), 0),
    "archive many": (archive_case(tar_gz({f"{i}": b"" for i in range(70)})), None),
    "archive large": (archive_case(tar_gz({"x": bytes(2 << 20)})), 0),
    "archive long name": (archive_case(with_header(1 << 33, b"L")), None),
    "archive pax header": (archive_case(with_header(1 << 33, b"x")), None),
    "archive chain of headers": (archive_case(header_chain()), None),
    "npy empty": (image_case("a.npy", b""), 0),
    "npy magic": (image_case("a.npy", b"NUMPY" * 20), 0),
    "npy version": (image_case("a.npy", npy_bytes(npy_header(), version=9)), 0),
    "npy pickle": (image_case("a.npy", pickled_npy()), 0),
    "npy long header": (image_case("a.npy", npy_bytes(" " * 20_000)), 0),
    "npy cut header": (image_case("a.npy", npy_bytes(npy_header())[:30]), 0),
    "npy code": (image_case("a.npy", npy_bytes("__import__('os').abort()")), 0),
    "npy strange dtype": (image_case("a.npy", npy_bytes(npy_header("'<f1'"))), 0),
    "npy records": (image_case("a.npy", npy_bytes(npy_header("[('a', '<f4')]"))), 0),
    "npy negative": (image_case("a.npy", npy_bytes(npy_header(shape="(-1, 2, 3)"))), 0),
    "npy spaces": (image_case("a.npy", npy_bytes(npy_header(shape=("1" + " " * 30) * 8 + "X"))), 0),
    "npy deep": (image_case("a.npy", npy_bytes("-" * 9000 + "1")), 0),
    "npy brackets": (image_case("a.npy", npy_bytes("(" * 9000)), 0),
    "npy string": (image_case("a.npy", npy_bytes(npy_header("'<U4'"))), 0),
    "npy one dim": (image_case("a.npy", npy_bytes(npy_header(shape="(12,)"))), 0),
    "npy no pixels": (image_case("a.npy", npy_bytes(npy_header(shape="(0, 2, 3)"))), 0),
    "npy channels": (image_case("a.npy", npy_bytes(npy_header(shape="(1, 1, 99999)"))), 0),
    "npy huge": (image_case("a.npy", npy_bytes(npy_header(shape="(99999, 99999)"))), 0),
    "npy short": (image_case("a.npy", npy_bytes(npy_header(), b"x")), None),
    "npy long": (image_case("a.npy", npy_bytes(npy_header(), b"x" * 13)), None),
    "ppm empty": (image_case("a.ppm", b""), 0),
    "ppm magic": (image_case("a.ppm", b"P4" + PPM[2:]), 0),
    "ppm no numbers": (image_case("a.ppm", b"P6\nx"), 0),
    "ppm negative": (image_case("a.ppm", b"P6 -2 2 255 "), 0),
    "ppm cut header": (image_case("a.ppm", PPM[:8]), 0),
    "ppm endless comment": (image_case("a.ppm", b"P6\n#" + b"x" * 50_000), 0),
    "ppm long number": (image_case("a.ppm", b"P6\n" + b"1" * 5000), 0),
    "ppm no space": (image_case("a.ppm", b"P6 1 1 255xyz"), 0),
    "ppm zero": (image_case("a.ppm", b"P6 0 2 255\n"), 0),
    "ppm largest 0": (image_case("a.ppm", b"P6 1 1 0\nabc"), 0),
    "ppm largest 70000": (image_case("a.ppm", b"P6 1 1 70000\nabc"), 0),
    "ppm huge": (image_case("a.ppm", b"P6 99999 99999 255\n"), 0),
    "ppm short": (image_case("a.ppm", PPM[:-1]), len(PPM) - 12),
    "ppm long": (image_case("a.ppm", PPM + b"x"), len(PPM) - 12),
    "pgm above largest": (image_case("a.pgm", b"P5 2 1 7\n\x07\x08"), 10),
    "pgm plain letter": (image_case("a.pgm", b"P2 2 1 7\n1 x"), 11),
    "pgm plain negative": (image_case("a.pgm", b"P2 2 1 7\n1 -1"), 11),
    "pgm plain long number": (image_case("a.pgm", b"P2 2 1 7\n1 1234567"), 11),
    "pgm plain few": (image_case("a.pgm", b"P2 2 1 7\n1"), 9),
    "pgm plain many": (image_case("a.pgm", b"P2 2 1 7\n1 2 3"), 9),
    "pgm plain endless": (image_case("a.pgm", b"P2 2 1 7\n" + b" " * 5000), None),
    "unknown extension": (image_case("a.tiff", b"II*"), None),
}  # fmt: skip


def test_there_are_enough_cases():
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_bad_file_is_named_with_path_and_offset(tmp_path, name):
    (file, content, read), offset = CASES[name]
    path = write(tmp_path / file, content)
    tracemalloc.start()
    try:
        with refused(DataError) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == str(path)
    if offset is not None:
        assert caught.value.offset == offset
    assert peak < 8 << 20, peak
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), InputError)


def test_missing_files_and_folders(tmp_path):
    for read in (data.read_idx, data.read_image, data.read_cifar10, lambda p: data.read_cifar10_archive(p, ["x"])):
        with refused(DataError):
            read(tmp_path / "none.npy")
    with refused(DataError):
        data.read_idx(tmp_path)
    with refused(DataError):
        data.read_idx("a\0b")
    with refused(DataError):
        data.ImageFolder(tmp_path / "none")
    with refused(DataError):
        data.ImageFolder(tmp_path)
    (tmp_path / "cat").mkdir()
    with refused(DataError):
        data.ImageFolder(tmp_path)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (IMAGES, np.array([1, 2, 10, 3, 4], np.uint8)),
        (IMAGES, LABELS[:4]),
        (IMAGES[:, :27], LABELS),
        (IMAGES[:0], LABELS[:0]),
        (IMAGES.astype(np.int8), LABELS),
        (LABELS, LABELS),
    ],
)
def test_mismatched_mnist_files(tmp_path, images, labels):
    write_mnist(tmp_path, images=images, labels=labels)
    with refused(DataError):
        data.MNIST(tmp_path)


def test_non_image_arrays():
    with refused(ShapeError):
        data.ImageArrays(IMAGES, LABELS)


# --- fuzz --------------------------------------------------------------------------------------------


def mutants(content, count, seed):
    """Yield copies with bytes flipped, cut, inserted, doubled or set to extremes."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(mutant)) if mutant else 0
            kind = rng.randrange(5)
            if kind == 0 and mutant:
                mutant[at] ^= 1 << rng.randrange(8)
            elif kind == 1 and mutant:
                mutant[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x20, 0x39))
            elif kind == 2:
                del mutant[at:]
            elif kind == 3:
                mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                mutant[at:at] = mutant[at : at + rng.randrange(1, 40)]
        yield bytes(mutant)


def seeds_of_the_fuzz():
    npy = io.BytesIO()
    np.save(npy, IMAGES[0, :4, :4])
    plain = pnm(np.arange(12, dtype=np.uint8).reshape(2, 2, 3), plain=True, comment=b"# c\n")
    one = {"data_batch_1.bin": cifar_bytes()}
    return {
        "idx": (idx_case(SMALL), 400),
        "idx.gz": (idx_case(gzip.compress(SMALL)), 300),
        "npy": (image_case("a.npy", npy.getvalue()), 400),
        "ppm": (image_case("a.ppm", PPM), 300),
        "plain ppm": (image_case("a.ppm", plain), 300),
        "cifar": (cifar_case(cifar_bytes()), 100),
        "archive": (archive_case(gzip.compress(gzip.decompress(tar_gz(one)), 0)), 150),
    }


@pytest.mark.parametrize("name", ["idx", "idx.gz", "npy", "ppm", "plain ppm", "cifar", "archive"])
def test_mutated_files_are_read_or_refused(tmp_path, name):
    (file, content, read), count = seeds_of_the_fuzz()[name]
    path, refused = tmp_path / file, 0
    read(write(path, content))  # the control
    tracemalloc.start()
    try:
        for mutant in mutants(content, count, seed=len(name)):
            path.write_bytes(mutant)
            tracemalloc.reset_peak()
            try:
                read(path)
            except DataError:
                refused += 1
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert refused > count // 20


@pytest.mark.parametrize("format_", ["png", "jpg"])
def test_mutated_pictures_are_read_or_refused(tmp_path, format_):
    image_module = pytest.importorskip("PIL.Image")
    path = tmp_path / f"a.{format_}"
    image_module.fromarray(IMAGES[0]).save(path)
    content, refused = path.read_bytes(), 0
    for mutant in mutants(content, 100, seed=1):
        path.write_bytes(mutant)
        try:
            data.read_image(path)
        except DataError:
            refused += 1
    assert refused > 5


def test_plain_pixels_are_not_searched(tmp_path, monkeypatch):
    """The search for a wrong character is slow: a hundred megabytes of spaces took seconds."""
    monkeypatch.setattr(imagefile, "_NOT_PLAIN", None)
    path = tmp_path / "a.pgm"
    path.write_bytes(b"P2 2 1 255\n7 " + b" " * 1000 + b"255")
    assert imagefile.read_pnm(path).tolist() == [[[7], [255]]]
