"""DistributedSampler beside PyTorch's (the extra "bench"): the same lists from the same permutation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simparallel import data

torch = pytest.importorskip("torch")
from torch.utils.data.distributed import DistributedSampler  # noqa: E402


def torchs_permutation(seed, stream, size):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(size, generator=generator).numpy()


@given(
    size=st.integers(1, 60),
    num_replicas=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
    epochs=st.lists(st.integers(0, 4), max_size=3),
)
def test_every_rank_gets_pytorch_samples(size, num_replicas, shuffle, seed, drop_last, epochs):
    if drop_last and size < num_replicas:
        drop_last = False  # PyTorch gives every rank nothing; here that is an error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.sampler, "random_permutation", torchs_permutation)
        for rank in range(num_replicas):
            settings = {"num_replicas": num_replicas, "rank": rank, "shuffle": shuffle, "seed": seed,
                        "drop_last": drop_last}  # fmt: skip
            ours = data.DistributedSampler(range(size), **settings)
            theirs = DistributedSampler(range(size), **settings)
            assert (len(ours), ours.num_samples, ours.total_size) == (
                len(theirs),
                theirs.num_samples,
                theirs.total_size,
            )
            assert list(ours) == list(theirs)  # without set_epoch: epoch 0
            for epoch in epochs:
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)


def test_our_permutation_differs_from_torch():
    """Red control: without the patch, the numbers are ours."""
    ours = [int(i) for i in data.DistributedSampler(range(50), 1, 0)]
    assert ours != torchs_permutation(0, "", 50).tolist()
    assert sorted(ours) == list(range(50))
    assert math.isclose(np.mean(ours), 24.5)


@pytest.mark.parametrize("library", ["simparallel", "torch"])
def test_samplers_with_own_iter(library):
    """A subclass sets the order in `__iter__` alone, also below a sampler that has an order."""
    found = torch.utils.data if library == "torch" else data

    class Backwards(found.Sampler[int]):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def __iter__(self):
            return iter(range(self.size - 1, -1, -1))

    class Halved(DistributedSampler if library == "torch" else data.DistributedSampler):
        def __iter__(self):
            return (index // 2 for index in super().__iter__())

    class Squares(found.Dataset[int]):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return index**2

    def batches(sampler) -> list:
        return [np.asarray(batch).ravel().tolist() for batch in found.DataLoader(Squares(), 2, sampler=sampler)]

    assert batches(Backwards(5)) == [[16, 9], [4, 1], [0]]
    assert batches(Halved(range(5), 2, 1, shuffle=False)) == [[0, 1], [0]]


def test_own_order_resumes_on_its_rank():
    class Reversed(data.DistributedSampler):
        def __iter__(self):
            return iter(list(super().__iter__())[::-1])

    sampler = Reversed(range(12), 2, 1, shuffle=False)
    loader = data.DataLoader(data.TensorDataset(np.arange(12)), 2, sampler=sampler)
    assert [batch[0].tolist() for batch in loader.iterate(1)] == [[7, 5], [3, 1]]
