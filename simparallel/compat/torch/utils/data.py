"""`torch.utils.data`, and its `distributed`."""

from __future__ import annotations

from typing import Any

from simparallel import data
from simparallel.compat.front import front, refuse, unused
from simparallel.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)


@front(data.DataLoader)
def DataLoader(
    dataset: Any, batch_size: int = 1, shuffle: bool | None = None, sampler: Any = None, batch_sampler: Any = None,
    num_workers: int = 0, collate_fn: Any = None, pin_memory: bool = False, drop_last: bool = False,
    timeout: float = 0, worker_init_fn: Any = None, multiprocessing_context: Any = None, generator: Any = None, *,
    prefetch_factor: int | None = None, persistent_workers: bool = False, pin_memory_device: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Batches of a dataset, see `sp.data.DataLoader`; the calling process reads them."""
    refuse("DataLoader", "give batch_size and a sampler", batch_sampler=batch_sampler)
    refuse("DataLoader", "call sp.manual_seed", generator=generator)
    unused("DataLoader", num_workers=num_workers or None, pin_memory=pin_memory or None)
    unused("DataLoader", prefetch_factor=prefetch_factor, persistent_workers=persistent_workers or None)
    return {
        "dataset": dataset, "batch_size": batch_size, "shuffle": bool(shuffle), "sampler": sampler,
        "collate_fn": collate_fn, "drop_last": drop_last,
    }  # fmt: skip
