"""Datasets, samplers, the loader and the digits."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel import data
from simparallel.autograd import Tensor
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.machine.cluster import describe

lengths = st.integers(1, 40)
worlds = st.integers(1, 9)
seeds = st.integers(0, 1000)


def numbered(n):
    return data.TensorDataset(np.arange(n, dtype=np.float32)[:, None] * np.ones(2, np.float32), np.arange(n))


class Plain:
    """A dataset of single samples that counts the requests."""

    def __init__(self, n):
        self.n, self.asked = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        self.asked += 1
        return np.full(2, i, np.float32), i


def ids(loader):
    """Return the sample numbers of each batch of an epoch."""
    return [batch[1].numpy().tolist() for batch in loader]


# --- datasets ----------------------------------------------------------------------------------------


def test_tensor_dataset_indices():
    """A TensorDataset takes an int, a slice or an index array, and refuses masks."""
    dataset = numbered(5)
    assert len(dataset) == 5
    row, label = dataset[3]
    assert (row.tolist(), label) == ([3, 3], 3)
    assert dataset[-1][1] == 4
    assert dataset[1:3][1].tolist() == [1, 2]
    assert dataset[np.array([4, 0, 4])][1].tolist() == [4, 0, 4]
    assert dataset[[]][0].shape == (0, 2)
    with pytest.raises(IndexError):
        dataset[5]
    with refused(DTypeError):
        dataset[np.ones(5, bool)]


def test_tensor_dataset_refuses_bad_arrays():
    with refused(InputError):
        data.TensorDataset()
    with refused(ShapeError):
        data.TensorDataset(np.zeros((3, 2)), np.zeros(4))
    with refused(ShapeError):
        data.TensorDataset(np.float32(1))


@given(n=lengths, draw=st.data())
def test_subset_is_indexing_twice(n, draw):
    chosen = draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    outer = draw.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=20))
    subset = data.Subset(data.Subset(numbered(n), range(n)), chosen)
    assert len(subset) == len(chosen)
    assert subset.vectorized
    assert subset[outer][1].tolist() == [chosen[i] for i in outer]
    assert [subset[i][1] for i in outer] == [chosen[i] for i in outer]


def test_subset_of_plain_dataset_reads_single_samples():
    subset = data.Subset(Plain(9), [8, 2])
    assert not subset.vectorized
    assert subset[1][1] == 2
    assert ids(data.DataLoader(subset, 2)) == [[8, 2]]


def test_subset_refuses_bad_indices():
    with refused(InputError):
        data.Subset(numbered(5), [0, 5])
    with refused(InputError):
        data.Subset(numbered(5), [-1])
    with refused(DTypeError):
        data.Subset(numbered(2), [True, False])
    assert len(data.Subset(numbered(2), [])) == 0


# --- samplers ----------------------------------------------------------------------------------------


def pytorchs_order(order, world, drop_last):
    """Compute the padding of torch.utils.data.DistributedSampler, with its lists."""
    order, n = list(order), len(order)
    cut = drop_last and n % world != 0
    num_samples = math.ceil((n - world if cut else n) / world)
    total = num_samples * world
    if drop_last:
        return order[:total]
    padding = total - n
    if padding <= n:
        return order + order[:padding]
    return order + (order * math.ceil(padding / n))[:padding]


@given(n=lengths, world=worlds, shuffle=st.booleans(), seed=seeds, epoch=st.integers(0, 5))
def test_distributed_sampler_covers_all_samples(n, world, shuffle, seed, epoch):
    """Equal shares cover every sample, in PyTorch's order."""
    samplers = [data.DistributedSampler(range(n), world, rank, shuffle, seed) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])} == {math.ceil(n / world)}
    dealt = [i for turn in zip(*shares, strict=True) for i in turn]
    assert sorted(dealt[:n]) == list(range(n))
    assert dealt == pytorchs_order(dealt[:n], world, drop_last=False)
    assert len(dealt) == samplers[0].total_size
    if not shuffle:
        assert dealt[:n] == list(range(n))


@given(n=lengths, world=worlds, seed=seeds)
def test_distributed_sampler_drop_last_cuts_the_end(n, world, seed):
    if n < world:
        with pytest.raises(InputError, match=f"{n} samples .* {world} ranks"):
            data.DistributedSampler(range(n), world, 0, drop_last=True)
        return
    cut = [list(data.DistributedSampler(range(n), world, r, seed=seed, drop_last=True)) for r in range(world)]
    whole = list(data.DistributedSampler(range(n), 1, 0, seed=seed))
    assert [i for turn in zip(*cut, strict=True) for i in turn] == pytorchs_order(whole, world, drop_last=True)


def test_epoch_changes_the_order_and_only_it_does():
    sampler = data.DistributedSampler(range(50), 2, 1)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(data.DistributedSampler(range(50), 2, 1, seed=1)) == second  # seed + epoch, as PyTorch


def test_forgotten_set_epoch_warns():
    """From the second epoch on, once a loop; not without shuffling, where epochs are equal on purpose."""
    sampler = data.DistributedSampler(range(8), 2, 1)
    loader = data.DataLoader(numbered(8), 2, sampler=sampler)
    list(loader)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"epoch 0 again.*set_epoch") as caught:
            list(loader)
        assert len(caught) == 1
    asking = [lambda: list(sampler), sampler.indices, lambda: list(loader), lambda: next(loader.iterate())]
    for ask in asking:
        with pytest.warns(UserWarning, match="set_epoch") as caught:
            ask()
        assert caught[0].filename == __file__  # the user's line, not a line of the loader
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(loader)
    plain = data.DistributedSampler(range(8), 2, 1, shuffle=False)
    assert list(plain) == list(plain)


def test_reading_the_first_batch_is_no_epoch():
    sampler = data.DistributedSampler(range(8), 2, 1)
    loader = data.DataLoader(numbered(8), 2, sampler=sampler)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        kept = iter(loader)  # not closed yet
        next(kept)
        next(iter(loader))
        assert len(list(loader)) == 2  # a warning is an error here
    with pytest.warns(UserWarning, match="epoch 1 again"):
        list(loader)
    one = data.DistributedSampler(range(4), 2, 1)
    loader = data.DataLoader(numbered(4), 2, sampler=one)
    for _ in loader:
        pass
    with pytest.warns(UserWarning, match="epoch 0 again"):  # also if a loop has a single batch
        next(iter(loader))


def test_random_sampler_counts_epochs_by_itself():
    sampler = data.RandomSampler(range(30), seed=4)
    epochs = [list(sampler) for _ in range(3)]
    assert all(sorted(order) == list(range(30)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    sampler.set_epoch(1)
    assert [list(sampler), list(sampler)] == epochs[1:]
    assert list(data.SequentialSampler(range(3))) == [0, 1, 2]


def test_distributed_sampler_uses_current_rank():
    with use_recorder(Recorder(2, describe(3))):
        inside = data.DistributedSampler(range(10))
    outside = data.DistributedSampler(range(10))
    assert (inside.rank, inside.num_replicas, inside.num_samples) == (2, 3, 4)
    assert (outside.rank, outside.num_replicas, outside.num_samples) == (0, 1, 10)


@pytest.mark.parametrize(
    "arguments",
    [(range(5), 2, 2), (range(5), 2, -1), (range(5), 0, 0), (range(5), 2.0, 0), (range(5), 2, 0, True, -3), ([], 2, 0)],
)
def test_distributed_sampler_refuses_bad_arguments(arguments):
    with refused(InputError):
        data.DistributedSampler(*arguments)


def test_bad_epoch_changes_nothing():
    for sampler in (data.DistributedSampler(range(5), 2, 0), data.RandomSampler(range(5))):
        with refused(InputError):
            sampler.set_epoch(-1)
        assert sampler.epoch == 0
    with refused(TypeError):
        list(data.Sampler())


# --- loader ------------------------------------------------------------------------------------------


@given(n=lengths, batch_size=st.integers(1, 45), drop_last=st.booleans(), shuffle=st.booleans())
def test_epoch_has_every_sample_once(n, batch_size, drop_last, shuffle):
    if drop_last and n < batch_size:
        with refused(InputError):
            data.DataLoader(numbered(n), batch_size, drop_last=True)
        return
    loader = data.DataLoader(numbered(n), batch_size, shuffle=shuffle, drop_last=drop_last)
    batches = ids(loader)
    assert len(batches) == len(loader)
    flat = [i for batch in batches for i in batch]
    kept = n - n % batch_size if drop_last else n
    assert len(set(flat)) == len(flat) == kept
    assert all(len(batch) == batch_size for batch in batches[: None if drop_last else -1])
    if not shuffle:
        assert flat == list(range(kept))


@given(n=lengths, batch_size=st.integers(1, 10), seed=seeds)
def test_vectorised_and_plain_datasets_agree(n, batch_size, seed):
    fast = data.DataLoader(numbered(n), batch_size, shuffle=True, seed=seed)
    slow = data.DataLoader(Plain(n), batch_size, shuffle=True, seed=seed)
    for _ in range(2):
        for (x, y), (u, v) in zip(fast, slow, strict=True):
            assert (x.shape, x.dtype, y.dtype) == (u.shape, u.dtype, v.dtype)
            assert np.array_equal(x.numpy(), u.numpy())
            assert np.array_equal(y.numpy(), v.numpy())


@given(world=worlds, each=st.integers(1, 4), steps=st.integers(1, 5), seed=seeds, epochs=st.integers(1, 3))
def test_ranks_together_see_one_process_batches(world, each, steps, seed, epochs):
    n = world * each * steps
    alone = data.DataLoader(numbered(n), world * each, shuffle=True, seed=seed)
    samplers = [data.DistributedSampler(range(n), world, rank, seed=seed) for rank in range(world)]
    loaders = [data.DataLoader(numbered(n), each, sampler=sampler) for sampler in samplers]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for whole, *parts in zip(ids(alone), *map(ids, loaders), strict=True):
            assert set(whole) == set().union(*parts)


def test_vectorised_dataset_is_asked_once_per_batch():
    class Counting(data.TensorDataset):
        asked = 0

        def __getitem__(self, index):
            self.asked += 1
            return super().__getitem__(index)

    dataset = Counting(np.arange(100.0))
    assert len(list(data.DataLoader(data.Subset(dataset, range(50)), 10))) == 5
    assert dataset.asked == 5


def test_epochs_differ_and_repeat_with_the_seed():
    loader, again = (data.DataLoader(numbered(40), 8, shuffle=True, seed=3) for _ in range(2))
    epochs = [ids(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [ids(again) for _ in range(3)] == epochs
    again.sampler.set_epoch(1)
    assert ids(again) == epochs[1]


def test_batches_are_tensors_and_copies():
    dataset = numbered(4)
    for x, y in data.DataLoader(dataset, 2):
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        x.data[...] = -1
    assert dataset.arrays[0][:, 0].tolist() == [0, 1, 2, 3]


def test_sampler_and_collate_fn():
    assert ids(data.DataLoader(numbered(9), 2, sampler=[7, 1, 1])) == [[7, 1], [1]]
    batches = list(data.DataLoader(numbered(3), 2, collate_fn=lambda samples: [y for _, y in samples]))
    assert batches == [[0, 1], [2]]


def test_default_collate():
    x, y, z = data.default_collate([(np.ones(2, np.float32), 1, 0.5), (np.zeros(2, np.float32), 2, 1.5)])
    assert (x.shape, x.dtype) == ((2, 2), np.float32)
    assert (y.numpy().tolist(), y.dtype) == ([1, 2], np.int64)
    assert (z.numpy().tolist(), z.dtype) == ([0.5, 1.5], np.float32)
    (single,) = data.default_collate([Tensor([1.0]), Tensor([2.0])])
    assert single.numpy().tolist() == [[1], [2]]
    with refused(ShapeError):
        data.default_collate([np.ones(2), np.ones(3)])
    with refused(ShapeError):
        data.default_collate([(1,), (1, 2)])


def lists(batch):
    """Return a batch with Tensors as lists."""
    if isinstance(batch, dict):
        return {key: lists(value) for key, value in batch.items()}
    return tuple(map(lists, batch)) if isinstance(batch, tuple) else getattr(batch, "data", np.array(batch)).tolist()


class Pair(NamedTuple):
    left: float
    right: int


def test_batch_has_the_structure_of_samples():
    """As PyTorch's default_collate, with tuples in place of its lists."""
    samples = [
        {"x": np.full(2, i), "views": (i, [i, 2.0 * i]), "name": f"n{i}", "pair": Pair(0.5, i)} for i in range(2)
    ]
    batch = data.default_collate(samples)

    assert lists(batch) == {
        "x": [[0, 0], [1, 1]],
        "views": ([0, 1], ([0, 1], [0.0, 2.0])),
        "name": ["n0", "n1"],
        "pair": ([0.5, 0.5], [0, 1]),
    }
    assert batch["pair"].right.numpy().tolist() == [0, 1]
    assert batch["views"][1][1].dtype == np.float32
    for loader in (data.DataLoader(samples, 2), data.DataLoader(Columns(x=np.arange(4), y=np.ones(4)), 2)):
        first = next(iter(loader))
        assert isinstance(first, dict)
        assert isinstance(first["x"], Tensor)
        assert len(first["x"]) == 2


class Columns(dict):
    """A vectorised dataset of dicts."""

    vectorized = True

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {key: values[index] for key, values in self.items()}


@pytest.mark.parametrize(
    "samples",
    [[(1, None), (2, None)], [{"x": [1, {2}]}], [1, None], [(1, 2), {"x": 1}], [{"x": 1}, {"x": 1, "y": 2}], []],
)
def test_bad_samples_are_refused(samples):
    with refused(InputError):
        data.default_collate(samples)


@pytest.mark.parametrize("samples", [[((1, 2), 3), ((1,), 3)], [{"x": np.ones(2)}, {"x": np.ones(3)}]])
def test_samples_of_other_shapes_are_refused(samples):
    with refused(ShapeError):
        data.default_collate(samples)


def test_transform_needs_an_array_first():
    with refused(InputError):
        next(iter(data.DataLoader([{"x": 1.0}], transform=lambda batch: batch)))
    with refused(InputError):
        next(iter(data.DataLoader([((1.0, 2.0), 3)], transform=lambda batch: batch)))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0},
        {"batch_size": 2.0},
        {"shuffle": True, "sampler": [0]},
        {"shuffle": True, "seed": -1},
        {"sampler": []},
    ],
)
def test_loader_refuses_bad_settings(settings):
    with refused(InputError):
        data.DataLoader(numbered(5), **settings)


# --- per-rank batch size -----------------------------------------------------------------------------


@given(each=st.integers(1, 100), world=worlds, rest=st.integers(0, 8))
def test_per_rank_batch_size(each, world, rest):
    assert data.per_rank_batch_size(each * world, world) == each
    if 0 < rest < world:
        with pytest.raises(InputError, match=f" {each * world} or {(each + 1) * world}"):
            data.per_rank_batch_size(each * world + rest, world)


def test_per_rank_batch_size_of_a_run():
    assert data.per_rank_batch_size(12) == 12
    with use_recorder(Recorder(0, describe(4))):
        assert data.per_rank_batch_size(12) == 3
    with refused(InputError):
        data.per_rank_batch_size(3, 4)
    with refused(InputError):
        data.per_rank_batch_size(3, 0)


# --- digits ------------------------------------------------------------------------------------------


def test_digits_are_1797_labelled_images():
    images, labels = data.digits("all").arrays
    assert (images.shape, images.dtype) == ((1797, 64), np.float32)
    assert (labels.shape, labels.dtype) == ((1797,), np.int64)
    assert (images.min(), images.max()) == (0, 1)
    assert np.array_equal(images * 16, np.round(images * 16))
    # The numbers of each digit in the documentation of the dataset's test set.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_split_is_fixed():
    train, test, everything = (data.digits(split) for split in ("train", "test", "all"))
    assert (len(train), len(test)) == (1440, 357)
    for part, whole in zip(zip(train.arrays, test.arrays, strict=True), everything.arrays, strict=True):
        assert np.array_equal(np.concatenate(part), whole)
    assert train.arrays[1][:10].tolist() == data.digits().arrays[1][:10].tolist()
    assert np.bincount(test.arrays[1]).min() >= 20  # every digit is tested


def test_digits_are_new_at_each_call():
    data.digits().arrays[0][:] = 7
    assert data.digits().arrays[0].max() == 1
    assert data.digits(flatten=False).arrays[0].shape == (1440, 1, 8, 8)
    with refused(InputError):
        data.digits("valid")


def test_digits_can_be_learned_by_nearest_neighbour():
    """Labels belong to their images: nearest neighbour, one line, is right for nearly all."""
    (a, labels), (b, truth) = data.digits("train").arrays, data.digits("test").arrays
    nearest = ((b * b).sum(1)[:, None] - 2 * b @ a.T + (a * a).sum(1)).argmin(1)
    assert (labels[nearest] == truth).mean() > 0.97


@given(lengths, st.integers(1, 5), st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_epoch_can_begin_in_the_middle(size, batch_size, start, ranks, shuffle):
    """The same batches as if the first ones had been read, and those are not fetched."""
    for rank in range(ranks):
        sampler = data.DistributedSampler(range(size), ranks, rank, shuffle, seed=3)
        dataset = Plain(size)
        loader = data.DataLoader(dataset, batch_size, sampler=sampler)
        loader.set_epoch(2)
        expected = ids(loader)[start:]
        loader.set_epoch(2)
        dataset.asked = 0
        assert [batch[1].numpy().tolist() for batch in loader.iterate(start)] == expected
        assert dataset.asked == sum(map(len, expected))
