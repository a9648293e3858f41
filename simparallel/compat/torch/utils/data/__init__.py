"""`torch.utils.data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simparallel import data
from simparallel.compat.front import front, refuse, unused
from simparallel.data import Dataset, DistributedSampler, Sampler, SequentialSampler, Subset, TensorDataset


def default_collate(batch: Sequence[Any]) -> Any:
    """See `sp.data.default_collate`; for samples of a single field the batch is that field alone."""
    made = data.default_collate(batch)
    # Ours always returns a tuple of fields.
    return made if isinstance(batch[0], (tuple, list, Mapping)) else made[0]


@front(data.RandomSampler, data_source="dataset")
def RandomSampler(
    data_source: Any, replacement: bool = False, num_samples: int | None = None, generator: Any = None
) -> None:
    """See `sp.data.RandomSampler`."""
    refuse("RandomSampler", "call sp.manual_seed", generator=generator)


@front(data.DataLoader)
def DataLoader(
    dataset: Any,
    batch_size: int = 1,
    shuffle: bool | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    num_workers: int = 0,
    collate_fn: Any = None,
    pin_memory: bool = False,
    drop_last: bool = False,
    timeout: float = 0,
    worker_init_fn: Any = None,
    multiprocessing_context: Any = None,
    generator: Any = None,
    *,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    pin_memory_device: str = "",
) -> dict[str, Any]:
    """An iterable of batches, see `sp.data.DataLoader`; the calling process reads them."""
    refuse("DataLoader", "give batch_size and a sampler", batch_sampler=batch_sampler)
    refuse("DataLoader", "call sp.manual_seed", generator=generator)
    unused("DataLoader", num_workers=num_workers or None, pin_memory=pin_memory or None)
    unused("DataLoader", prefetch_factor=prefetch_factor, persistent_workers=persistent_workers or None)
    unused("DataLoader", timeout=timeout or None, worker_init_fn=worker_init_fn)
    unused("DataLoader", multiprocessing_context=multiprocessing_context, pin_memory_device=pin_memory_device or None)
    if collate_fn is None and not getattr(dataset, "vectorized", False):
        # Only this function unpacks single fields; a vectorised dataset is never collated sample by sample.
        collate_fn = default_collate
    return {"shuffle": bool(shuffle), "collate_fn": collate_fn}
