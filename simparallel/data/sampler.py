"""Samplers: the order in which a loader, or one rank's loader, visits the samples.

The order of epoch e is the permutation of `random_permutation(seed + e, "sampler", n)`, the same in
`RandomSampler` and in `DistributedSampler`: the k-th batches of all ranks together hold the samples
of the k-th batch of a single process with a batch of that total size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from types import GenericAlias
from typing import Any

import numpy as np

from simparallel.backend import random_permutation, random_uniform
from simparallel.base.callsite import user_level
from simparallel.base.checks import check_integer, check_state
from simparallel.base.units import format_object
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError, StateDictError


class Sampler:
    """Base of samplers: a subclass defines `__len__` and one epoch's order.

    The order is `indices`, an int64 array of shape (len,), or `__iter__`, as in PyTorch.

    The `state_dict` is the same for every kind of sampler and number of ranks: a state saved by a
    `RandomSampler` can be resumed by the `DistributedSampler`s of many ranks, and vice versa.

    Attributes:
        num_replicas: number of ranks that share the order.
    """

    __repr__ = format_object

    num_replicas = 1

    __class_getitem__: Any = classmethod(GenericAlias)

    def indices(self) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} defines neither indices nor __iter__; a Sampler needs one of them.")

    def remaining(self, start: int) -> np.ndarray:
        """Return `indices()` of an epoch of which `start` samples, over all ranks, are done."""
        return self.indices()[start:]

    def mark_used(self, epoch: int) -> None:
        """Note that a loop used the order of this epoch: it went beyond the first batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that define the order, and the number of the next epoch, as plain data."""
        return {
            "num_samples": self._size(), "shuffle": self._shuffles(), "seed": getattr(self, "seed", 0),
            "epoch": getattr(self, "epoch", 0),
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume another sampler's state, with its seed.

        Raises:
            StateDictError: the state is for another number of samples, or shuffles while this sampler does not,
                or vice versa.
            InputError: a bad seed or epoch.
        """
        own, who = Sampler.state_dict(self), type(self).__name__
        check_state(who, state_dict, own)
        for name in ("num_samples", "shuffle"):
            if state_dict[name] != own[name]:
                raise StateDictError(
                    f"{who}: saved with {name}={state_dict[name]!r}, this one has {own[name]!r}; it would visit "
                    "different samples."
                )
        seed, epoch = (check_integer(who, name, state_dict[name], 0) for name in ("seed", "epoch"))
        # A sequential sampler has neither seed nor epoch, but accepts the state: its order is always the same.
        if hasattr(self, "epoch"):
            self.seed, self.epoch = seed, epoch

    def _size(self) -> int:
        return len(self)

    def _shuffles(self) -> bool | str:
        return False

    def __iter__(self) -> Iterator[int]:
        order = self.indices()
        # In pieces: an order of draws may be longer than the memory.
        starts = range(0, len(order), 4096)
        return (index for start in starts for index in order[start : start + 4096].tolist())

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} does not define __len__, which a Sampler needs.")


class SequentialSampler(Sampler):
    """The order 0, 1, …, n-1.

    Args:
        dataset: anything with a length.
    """

    def __init__(self, dataset: Sized) -> None:
        self.num_samples = len(dataset)

    def indices(self) -> np.ndarray:
        return np.arange(self.num_samples)

    def __len__(self) -> int:
        return self.num_samples


class _Draws:
    """Independent draws of 0 … n-1, computed where the order is sliced."""

    def __init__(self, seed: int, size: int, start: int, end: int) -> None:
        self.seed, self.size, self.range = seed, size, range(start, end)

    def __len__(self) -> int:
        return len(self.range)

    def __getitem__(self, part: slice) -> np.ndarray:
        chosen = self.range[part]
        return (random_uniform(self.seed, "sampler", chosen.start, len(chosen)) * self.size).astype(np.int64)


class RandomSampler(Sampler):
    """A new permutation of 0 … n-1 for each iteration, or new draws.

    Args:
        dataset: any object with a length.
        seed: integer of 0 or more.
        replacement: draw each index independently of the others.
        num_samples: the number of draws, however large; None for as many as the dataset has. Only with `replacement`.

    Attributes:
        epoch: number of the next epoch; each iteration increments it.

    Raises:
        InputError: a bad seed or number of draws, or such a number without `replacement`.
    """

    def __init__(
        self, dataset: Sized, seed: int = 0, *, replacement: bool = False, num_samples: int | None = None
    ) -> None:
        self.size = len(dataset)
        if num_samples is not None and not replacement:
            raise InputError(f"RandomSampler: num_samples={num_samples!r} needs replacement=True.")
        self.num_samples = check_integer(
            "RandomSampler", "num_samples", self.size if num_samples is None else num_samples, 0
        )
        self.seed = check_integer("RandomSampler", "seed", seed, 0)
        self.replacement = replacement
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Move to an epoch, for example when training resumes."""
        self.epoch = check_integer("RandomSampler", "epoch", epoch, 0)

    def _shuffles(self) -> bool | str:
        return "with replacement" if self.replacement else True

    def indices(self) -> Any:
        return self.remaining(0)

    def remaining(self, start: int) -> Any:
        # Each call is a new epoch, so the counter is one ahead of the order returned.
        self.epoch += 1
        seed = self.seed + self.epoch - 1
        if self.replacement:
            return _Draws(seed, self.size, start, self.num_samples)
        return random_permutation(seed, "sampler", self.num_samples)[start:]

    def __len__(self) -> int:
        return self.num_samples


class DistributedSampler(Sampler):
    """One rank's share: every `num_replicas`-th sample of the epoch's order, from `rank` on.

    All ranks get equally many samples. If they do not divide evenly, the order is extended with its
    own beginning (so a few samples count twice), or with `drop_last` truncated. Semantics
    and names are PyTorch's; call `set_epoch` before each epoch, or every epoch has the same order: the
    second such epoch and later ones warn.

    Args:
        dataset: any object with a length.
        num_replicas: number of ranks; None takes the run's world size, or 1 outside of a run.
        rank: rank of the share; None takes the current rank, or 0 outside of a run.
        shuffle: permute the samples in each epoch.
        seed: the same on all ranks.
        drop_last: truncate the order instead of extending it.

    Attributes:
        epoch: number of the current epoch, see `set_epoch`.
        num_samples: samples of each rank.
        total_size: samples of all ranks, `num_samples * num_replicas`.

    Raises:
        InputError: a rank out of range, an empty dataset, no sample for a rank, or a bad seed.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        recorder = current_recorder()
        if num_replicas is None:
            # Outside of a run there is no recorder.
            num_replicas = recorder.cluster.world_size if recorder else 1
        if rank is None:
            rank = recorder.rank if recorder else 0
        who = "DistributedSampler"
        self.num_replicas = check_integer(who, "num_replicas", num_replicas, 1)
        self.rank = check_integer(who, "rank", rank, 0, high=self.num_replicas - 1)
        self.seed = check_integer(who, "seed", seed, 0)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.epoch = 0
        # Whether a loop over the order of this epoch went beyond its first batch.
        self._is_used = False
        self.dataset = dataset
        self.size = len(dataset)
        if self.size == 0:
            raise InputError(f"{who}: the dataset has length 0; each of {num_replicas} ranks needs a sample.")
        # -(-a // b) rounds up.
        self.num_samples = self.size // num_replicas if drop_last else -(-self.size // num_replicas)
        if self.num_samples == 0:
            raise InputError(
                f"{who}: {self.size} samples and drop_last=True leave no samples for some of the {num_replicas} ranks. "
                f"Use drop_last=False, {self.size} ranks at most, or {num_replicas} samples at least."
            )
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch's order; call it with the same number on all ranks before each epoch."""
        self.epoch = check_integer("DistributedSampler", "epoch", epoch, 0)
        self._is_used = False

    def indices(self) -> np.ndarray:
        order = self.remaining(0)
        self.mark_used(self.epoch)
        return order

    def mark_used(self, epoch: int) -> None:
        # A loop over an earlier epoch may end after `set_epoch`; it does not count.
        self._is_used = self._is_used or epoch == self.epoch

    def remaining(self, start: int) -> np.ndarray:
        if self.shuffle:
            if self._is_used and not start:
                # start > 0 resumes an epoch, which is no repetition.
                warnings.warn(
                    f"DistributedSampler: this is epoch {self.epoch} again, with the same order of samples. Call "
                    "sampler.set_epoch(epoch) before each epoch (or pass shuffle=False if one order is meant).",
                    UserWarning,
                    stacklevel=user_level(),
                )
            # The stream of RandomSampler: one process and many ranks see the same order.
            order = random_permutation(self.seed + self.epoch, "sampler", self.size)
        else:
            order = np.arange(self.size)
        left = max(self.size - start, 0)
        # Divide only the samples left after `start`, which may have been consumed on another number of ranks.
        each = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        # np.resize truncates the order, or repeats it as often as needed.
        return np.resize(order, start + each * self.num_replicas)[start + self.rank :: self.num_replicas]

    def __len__(self) -> int:
        return self.num_samples

    def _size(self) -> int:
        return self.size

    def _shuffles(self) -> bool:
        return self.shuffle
