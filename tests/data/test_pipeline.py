"""Pipelines match MindSpore's row-by-row evaluation, in any combination."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused
from test_data_files import write, write_mnist

import simparallel as sp
from simparallel import data
from simparallel.autograd import Tensor
from simparallel.backend import random_permutation, random_uniform
from simparallel.data import transforms as T
from simparallel.data.pipeline import buffered_order
from simparallel.errors import DataError, InputError, ShapeError

sizes = st.integers(1, 25)


def source(size: int, **settings: Any) -> data.NumpySlicesDataset:
    """Make a source whose sample i is (i, [i, -i])."""
    numbers = np.arange(size)
    return data.NumpySlicesDataset((numbers, np.stack([numbers, -numbers], 1)), ["id", "pair"], **settings)


def ids(pipeline: data.Pipeline) -> list[Any]:
    """Return the column "id" of each row of the next epoch."""
    return [row["id"].tolist() for row in pipeline.create_dict_iterator(output_numpy=True)]


def flat(rows: list[Any]) -> list[int]:
    return [i for row in rows for i in (row if isinstance(row, list) else [row])]


# --- order and shards ---------------------------------------------------------------------------------


@given(sizes, st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_shards_match_the_distributed_sampler(size, shards, shuffle, epoch):
    """Shards have equal sizes; together they hold every sample, and repeat the first ones where they do not divide."""
    rows = []
    for shard in range(shards):
        part = source(size, num_shards=shards, shard_id=shard, shuffle=shuffle, seed=5)
        part.set_epoch(epoch)
        sampler = data.DistributedSampler(range(size), shards, shard, shuffle, seed=5)
        sampler.set_epoch(epoch)
        rows.append(ids(part))
        assert rows[-1] == sampler.indices().tolist()
        assert part.get_dataset_size() == len(rows[-1]) == -(-size // shards)
    whole = source(size, shuffle=shuffle, seed=5)
    whole.set_epoch(epoch)
    order = ids(whole)
    together = [row for step in zip(*rows, strict=True) for row in step]
    assert together == list(itertools.islice(itertools.cycle(order), len(together)))
    assert sorted(order) == list(range(size))


def test_shard_batches_add_up_to_one_device_batches():
    whole = [sorted(batch) for batch in ids(source(24, seed=1).batch(8))]
    parts = [ids(source(24, seed=1, num_shards=4, shard_id=s).batch(2)) for s in range(4)]
    assert [sorted(sum(batches, [])) for batches in zip(*parts, strict=True)] == whole


def test_order_is_a_function_of_seed_and_epoch():
    first, second = source(30, seed=2), source(30, seed=2)
    epochs = [ids(first) for _ in range(3)]
    assert [ids(second) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    second.set_epoch(1)
    assert ids(second) == epochs[1]
    assert ids(source(30, seed=3)) != epochs[0]
    sp.manual_seed(2)
    assert ids(source(30)) == epochs[0]  # the rank's seed, if none is given
    sp.manual_seed(0)
    assert ids(source(30, shuffle=False)) == list(range(30))


def test_sampler_or_a_number_of_samples():
    assert ids(source(9, sampler=[4, 4, 0])) == [4, 4, 0]
    sampler = data.RandomSampler(range(9), seed=6)
    assert ids(source(9, sampler=sampler)) == data.RandomSampler(range(9), seed=6).indices().tolist()
    assert ids(source(9, shuffle=False, num_samples=4)) == [0, 1, 2, 3]
    assert ids(source(9, shuffle=False, num_samples=2, num_shards=3, shard_id=1)) == [1, 4]
    assert source(9, num_samples=40).get_dataset_size() == 9


# --- shuffle --------------------------------------------------------------------------------------------


def through_a_buffer(count: int, buffer_size: int, places: list[int]) -> list[int]:
    """Shuffle as by hand: fill the buffer, yield one, put the next in its place; at the end yield the rest."""
    size = min(buffer_size, count)
    buffer, given_out = list(range(size)), []
    for i in range(count - size):
        given_out.append(buffer[places[i]])
        buffer[places[i]] = size + i
    return given_out + buffer


@given(st.integers(0, 60), st.integers(2, 70), st.integers(0, 99))
def test_buffered_shuffle_matches_a_loop(count, buffer_size, seed):
    order = buffered_order(seed, "s", count, buffer_size)
    size = min(buffer_size, count)
    places = (random_uniform(seed, "s", 0, count - size) * size).astype(int).tolist()
    expected = through_a_buffer(count, buffer_size, places)
    last = [expected[count - size :][i] for i in random_permutation(seed, "s/rest", size)]
    assert order.tolist() == expected[: count - size] + last
    assert sorted(order.tolist()) == list(range(count))
    assert all(row <= position + buffer_size - 1 for position, row in enumerate(order.tolist()))


@given(sizes, st.integers(2, 30))
def test_shuffle_permutes_and_each_epoch_differently(size, buffer_size):
    rows = source(size, shuffle=False).shuffle(buffer_size)
    epochs = [ids(rows) for _ in range(4)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 8 and buffer_size > 8:
        assert len({tuple(epoch) for epoch in epochs}) == 4
    twice = rows.shuffle(buffer_size)
    assert size < 12 or buffer_size < 6 or ids(twice) != epochs[0]  # a different permutation each time


def test_batches_are_shuffled_whole():
    batches = ids(source(12, shuffle=False).batch(3).shuffle(4))
    assert sorted(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert batches != sorted(batches)


# --- batch and repeat -------------------------------------------------------------------------------------


@given(sizes, st.integers(1, 9), st.booleans(), st.integers(1, 3), st.booleans())
def test_batch_and_repeat(size, batch_size, drop, count, repeat_first):
    base = source(size, seed=1)
    stage = base.repeat(count) if repeat_first else base
    if drop and stage.get_dataset_size() < batch_size:
        with refused(InputError):
            stage.batch(batch_size, drop)
        return
    batched = stage.batch(batch_size, drop_remainder=drop)
    batched = batched if repeat_first else batched.repeat(count)

    def epoch(number: int) -> list[int]:
        base.set_epoch(number)
        return ids(base)

    def cut(rows: list[int]) -> list[list[int]]:
        parts = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        return [part for part in parts if not drop or len(part) == batch_size]

    for e in range(2):
        epochs = [epoch(e * count + r) for r in range(count)]
        expected = cut(sum(epochs, [])) if repeat_first else [batch for rows in epochs for batch in cut(rows)]
        assert ids(batched) == expected
        assert batched.get_dataset_size() == len(batched) == len(expected)
    assert (batched.get_batch_size(), batched.get_repeat_count()) == (batch_size, count)


def test_imagenet_has_312_steps_of_16_ranks():
    """The number of steps that a tutorial prints for batches of 256."""
    images = data.NumpySlicesDataset(np.zeros(1_281_167, np.uint8), num_shards=16, shard_id=15)
    assert images.batch(256, drop_remainder=True).get_dataset_size() == 312


@given(st.integers(1, 30), st.integers(0, 12), st.integers(1, 3))
def test_epoch_can_begin_in_the_middle(size, start, count):
    """Resuming: the same rows as if the first ones had been read, and none of those is computed."""
    asked: list[int] = []

    def note(i):
        asked.append(int(i))
        return i

    for stage in (lambda p: p.batch(3).repeat(count), lambda p: p.repeat(count).shuffle(5).batch(4)):
        expected = [row[0].numpy().tolist() for row in stage(source(size, seed=3))]
        asked.clear()
        resumed = stage(source(size, seed=3).map(note, "id"))
        rows = [row[0].numpy().tolist() for row in resumed.iterate(start)]
        assert rows == expected[start:]
        assert len(asked) == len(flat(rows))
        assert resumed.epoch == 1


# --- map ----------------------------------------------------------------------------------------------------


def test_map_names_columns():
    rows = source(4, shuffle=False)
    assert rows.map(lambda i: i * 10).get_col_names() == ["id", "pair"]  # the first column
    both = rows.map(lambda i, pair: (pair.sum() + i, i), ["id", "pair"], ["total", "id"])
    assert both.get_col_names() == ["id", "total"]
    assert [tuple(v.tolist() for v in row) for row in both.create_tuple_iterator(output_numpy=True)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    renamed = rows.map(lambda pair: pair, "pair", "two")
    assert renamed.get_col_names() == ["id", "two"]
    chained = rows.map([lambda i: (i, i + 1), lambda a, b: a * b], "id", "product")
    assert [row["product"].item() for row in chained.create_dict_iterator()] == [0, 2, 6, 12]
    assert ids(rows) == [0, 1, 2, 3]  # the first pipeline is unchanged


def test_functions_see_rows_and_transforms_see_batches():
    shapes: list[Any] = []

    class Seen(T.Transform):
        def apply(self, batch):
            shapes.append(batch.shape)
            return batch

    def row(pair):
        shapes.append(pair.shape)
        return pair

    list(source(6, shuffle=False).map([Seen(), row], "pair").batch(4).map([Seen(), row], "pair"))
    first = [(4, 2)] + [(2,)] * 4 + [(4, 2)] * 2
    assert shapes == first + [(2, 2)] + [(2,)] * 2 + [(2, 2)] * 2


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 3), st.booleans())
def test_random_transforms_draw_by_sample_and_epoch(size, batch_size, count, after):
    """The same numbers before or after batch, at any batch size, across the ends of epochs."""
    images = np.arange(size * 6.0).reshape(size, 2, 3, 1)
    flip = T.RandomFlip(0.5, seed=3)
    base = data.NumpySlicesDataset((images, np.arange(size)), ["image", "id"], seed=2).repeat(count)
    pipeline = base.batch(batch_size).map(flip, "image") if after else base.map(flip, "image").batch(batch_size)
    for e in range(2):
        seen = 0
        for image, number in pipeline.create_tuple_iterator(output_numpy=True):
            for i in range(len(number)):
                epoch = e * count + seen // size
                expected = flip(images[number[i]][None], number[i : i + 1], epoch)[0]
                assert np.array_equal(image[i], expected)
                seen += 1
        pipeline.set_epoch(e + 1)


def test_images_of_several_sizes_are_resized(tmp_path):
    rng = np.random.default_rng(0)
    for i, (name, side) in enumerate((("cat", 3), ("cat", 4), ("dog", 5))):
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        write(tmp_path / name / f"{i}.ppm", b"P6 %d %d 255\n" % (side, side) + pixels.tobytes())
    folder = data.ImageFolderDataset(tmp_path, shuffle=False)
    assert folder.num_classes() == 2
    with refused(ShapeError):
        list(folder.batch(3))
    (batch,) = folder.map([T.Resize((4, 4)), T.HWC2CHW()], "image").batch(3).create_dict_iterator()
    assert (batch["image"].shape, batch["label"].numpy().tolist()) == ((3, 3, 4, 4), [0, 0, 1])
    alone = T.Resize((4, 4))(data.read_image(tmp_path / "dog" / "2.ppm")[None])[0]
    assert np.array_equal(batch["image"].numpy()[2], alone.transpose(2, 0, 1))
    assert [row[0].shape for row in folder] == [(3, 3, 3), (4, 4, 3), (5, 5, 3)]


# --- iterating ----------------------------------------------------------------------------------------------------


def test_row_types():
    """Rows are Tensors or arrays, in tuples, lists or dicts."""
    batches = source(4, shuffle=False).batch(2)
    number, pair = next(iter(batches))
    assert isinstance(number, Tensor)
    assert isinstance(pair, Tensor)
    assert (number.shape, pair.shape) == ((2,), (2, 2))
    as_list = next(batches.create_tuple_iterator())
    assert isinstance(as_list, list)
    assert isinstance(as_list[0], Tensor)
    as_dict = next(batches.create_dict_iterator(output_numpy=True))
    assert list(as_dict) == ["id", "pair"]
    assert isinstance(as_dict["id"], np.ndarray)
    sample = next(source(4, shuffle=False).create_tuple_iterator(output_numpy=True))
    assert (sample[0].shape, sample[1].tolist()) == ((), [0, 0])


def test_iterator_ends_after_num_epochs():
    iterator = source(10, seed=1).batch(5).create_tuple_iterator(num_epochs=2)
    first, second = ([row[0].numpy().tolist() for row in iterator] for _ in range(2))
    assert first != second
    assert len(iterator) == 2
    with refused(InputError):
        list(iterator)
    endless = source(3, shuffle=False).create_dict_iterator()
    assert [next(endless)["id"].item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(endless)


def test_numbers_of_workers_have_no_effect():
    plain, told = (
        source(6, seed=1, **n).map(lambda i: i + 1, "id", **n).batch(4, **n) for n in ({}, {"num_parallel_workers": 2})
    )
    assert ids(plain) == ids(told)


def test_rows_are_copies():
    numbers = np.arange(4.0)
    pipeline = data.NumpySlicesDataset(numbers, "x", shuffle=False)
    for (row,) in pipeline.batch(4):
        row.data[...] = 7
    assert numbers.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes_differ", [False, True])
def test_function_may_work_in_place(sizes_differ):
    def double(x: np.ndarray) -> np.ndarray:
        x *= 2
        return x

    samples = [np.full(2 + i * sizes_differ, 10.0) for i in range(3)]
    pipeline = data.GeneratorDataset(samples, "x", shuffle=False).map(double)
    for _ in range(2):
        assert [row["x"].max() for row in pipeline.create_dict_iterator(output_numpy=True)] == [20, 20, 20]
    assert all((sample == 10).all() for sample in samples)


# --- sources --------------------------------------------------------------------------------------------------------


def test_mnist_reads_the_sets_in_the_folder(tmp_path):
    write_mnist(tmp_path / "a", train=True)
    first = data.MnistDataset(tmp_path / "a", shuffle=False)
    assert first.get_dataset_size() == 5
    image, label = next(first.create_tuple_iterator(output_numpy=True))
    assert (image.shape, image.dtype, label.dtype) == ((28, 28, 1), np.uint8, np.int64)
    with refused(DataError):
        data.MnistDataset(tmp_path / "a", "all")
    write_mnist(tmp_path / "a", train=False)
    assert [data.MnistDataset(tmp_path / "a", usage).get_dataset_size() for usage in (None, "all", "test")] == [
        10,
        10,
        5,
    ]
    write(tmp_path / "a" / "t10k-labels-idx1-ubyte.gz", b"broken")
    with refused(DataError):
        data.MnistDataset(tmp_path / "a")  # not skipped silently
    assert data.MnistDataset(tmp_path / "a", "train").get_dataset_size() == 5
    (tmp_path / "a" / "t10k-labels-idx1-ubyte.gz").unlink()
    with refused(DataError):
        data.MnistDataset(tmp_path / "a")
    (tmp_path / "a" / "train-images-idx3-ubyte.gz").unlink()
    with refused(DataError):
        data.MnistDataset(tmp_path / "a")
    with refused(DataError):
        data.MnistDataset(tmp_path / "none")
    with refused(InputError):
        data.MnistDataset(tmp_path / "a", "valid")


def test_cifar10_and_fashion_mnist(tmp_path, monkeypatch):
    monkeypatch.setattr(data.CIFAR10, "records_per_file", 2)
    record = bytes([3]) + bytes(range(256)) * 12
    for i in range(1, 6):
        write(tmp_path / f"data_batch_{i}.bin", record * 2)
    images = data.Cifar10Dataset(tmp_path, num_shards=2, shard_id=1)
    assert (images.get_dataset_size(), images.get_col_names()) == (5, ["image", "label"])
    assert next(images.create_dict_iterator())["image"].shape == (32, 32, 3)
    write(tmp_path / "test_batch.bin", record * 2)
    (tmp_path / "data_batch_3.bin").unlink()
    with refused(DataError):
        data.Cifar10Dataset(tmp_path)
    write_mnist(tmp_path / "FashionMNIST" / "raw")
    assert data.FashionMnistDataset(tmp_path).get_dataset_size() == 5


class Numbered:
    def __len__(self):
        return 5

    def __getitem__(self, i):
        assert type(i) is int
        return i, 0.5


def test_generator_dataset_sources():
    """A GeneratorDataset reads from an object with `__getitem__`, an iterable or a function."""
    rows = data.GeneratorDataset(Numbered(), ["id", "half"], shuffle=False).batch(5)
    number, half = next(rows.create_tuple_iterator(output_numpy=True))
    assert (number.tolist(), half.dtype) == ([0, 1, 2, 3, 4], np.float32)
    made = data.GeneratorDataset(lambda: ((i, i * i) for i in range(4)), "id, square")
    assert ids(made) == [0, 1, 2, 3]  # in order, unless shuffle=True
    assert ids(made) == [0, 1, 2, 3]
    assert sorted(ids(data.GeneratorDataset(iter([5, 6, 7]), "id", shuffle=True))) == [5, 6, 7]
    batched = data.GeneratorDataset(data.TensorDataset(np.arange(6), np.ones((6, 2))), ["id", "x"], shuffle=False)
    assert ids(batched.batch(4)) == [[0, 1, 2, 3], [4, 5]]


def test_dataset_with_own_transform_knows_the_epoch():
    """Also when the end of an epoch is inside a batch."""
    images = np.arange(24.0).reshape(4, 2, 3, 1)
    flip = T.RandomFlip(0.5, seed=1)
    own = data.ImageArrays(images, np.arange(4), transform=flip)
    pipeline = data.GeneratorDataset(own, ["image", "id"], seed=3).repeat(2).batch(3)
    rows = [
        (number, image)
        for batch in pipeline.create_tuple_iterator(output_numpy=True)
        for image, number in zip(*batch, strict=True)
    ]
    for place, (number, image) in enumerate(rows):
        assert np.array_equal(image, flip(images[number][None], np.array([number]), place // 4)[0])


def test_numpy_slices_name_their_columns():
    assert data.NumpySlicesDataset({"a": [1, 2], "b": [3.0, 4.0]}).get_col_names() == ["a", "b"]
    assert data.NumpySlicesDataset(([1, 2], [3, 4])).get_col_names() == ["column_0", "column_1"]
    assert data.NumpySlicesDataset([[1, 2], [3, 4]]).get_col_names() == ["column_0"]


def forgets(x: np.ndarray) -> None:
    x * 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: source(3, num_shards=2), InputError),
        (lambda: source(3, num_shards=2, shard_id=2), InputError),
        (lambda: source(3, num_shards=0, shard_id=0), InputError),
        (lambda: source(3, sampler=[0], shuffle=True), InputError),
        (lambda: ids(source(3, sampler=[0, 5])), InputError),
        (lambda: ids(source(3, sampler=[-1])), InputError),
        (lambda: source(0), InputError),
        (lambda: data.GeneratorDataset(Numbered(), ["x", "x"]), InputError),
        (lambda: source(3, num_samples=0), InputError),
        (lambda: source(3, seed=-1), InputError),
        (lambda: source(3).shuffle(1), InputError),
        (lambda: source(3).batch(0), InputError),
        (lambda: source(3).batch(4, True), InputError),
        (lambda: source(3).batch(1).batch(1), InputError),
        (lambda: source(3).repeat(0), InputError),
        (lambda: source(3).map(3), InputError),
        (lambda: source(3).map([]), InputError),
        (lambda: source(3).map(abs, "is"), InputError),
        (lambda: source(3).map(abs, ["id", "id"]), InputError),
        (lambda: list(source(3).map(lambda i: (i, i), "id")), InputError),
        (lambda: list(source(3).map(forgets, "id")), InputError),
        (lambda: list(source(3).batch(2).map(forgets, "id")), InputError),
        (lambda: list(source(3).map(lambda i: (i, {}), "id")), InputError),
        (lambda: list(data.GeneratorDataset([{"x": 1}], "x")), InputError),
        (lambda: list(data.GeneratorDataset([(1, [[1], [2, 3]])], "x,y")), InputError),
        (lambda: list(source(3).map(T.TypeCast(int), ["id", "pair"])), InputError),
        (lambda: list(source(3, shuffle=False).map(lambda i: (i,) * (1 + int(i)), "id")), InputError),
        (lambda: source(3).create_dict_iterator(num_epochs=0), InputError),
        (lambda: source(3).set_epoch(-1), InputError),
        (lambda: data.GeneratorDataset(3, "x"), InputError),
        (lambda: list(data.GeneratorDataset(Numbered(), "id")), InputError),
        (lambda: data.NumpySlicesDataset(([1], [2, 3])), ShapeError),
        (lambda: data.NumpySlicesDataset([1, 2], ["a", "b"]), InputError),
        (lambda: data.NumpySlicesDataset(5), ShapeError),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error):
    with refused(error):
        call()
