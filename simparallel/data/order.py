"""Describe the order of a dataset's batches, and transfer its seed to another dataset."""

from __future__ import annotations

from typing import Any

from simparallel.data.loader import DataLoader
from simparallel.data.pipeline import Batched, Pipeline, Repeated, Shuffled
from simparallel.data.sampler import Sampler
from simparallel.data.sharded import SourceDataset

# Datasets that agree in these entries have the same order, given the same seed.
_SOURCE = ("num_samples", "shuffle")


def order_of(dataset: Any) -> dict[str, Any]:
    """Return plain data that defines the order, equal for all shards.

    Returns:
        "num_samples" and "shuffle" of the sampler; "stages" in their order, with batch sizes summed over all
        shards, and the number of shards where each shuffles its own samples; "seed" and "stage_seed", each None if
        nothing is shuffled with it. Unknown entries are left out: all of them, unless the dataset is a `DataLoader`
        or a pipeline.
    """
    if isinstance(dataset, DataLoader):
        return {
            **_of_sampler(dataset.sampler),
            "stages": [f"batch {_over_all_shards(dataset.sampler, dataset.batch_size)}"],
        }
    if not isinstance(dataset, Pipeline):
        return {}
    source, stages = _source(dataset), []
    stage: Pipeline | None = dataset
    while stage is not None:
        if isinstance(stage, Shuffled):
            # Each shard shuffles its own samples, so the order depends on the number of shards.
            shards = _over_all_shards(source.sampler, 1)
            stages.append(f"shuffle {stage.buffer_size}" + f" in each of {shards} shards" * (shards > 1))
        elif isinstance(stage, Batched):
            stages.append(f"batch {_over_all_shards(source.sampler, stage.batch_size)}")
        elif isinstance(stage, Repeated):
            stages.append(f"repeat {stage.count}")
        # The source's `num_samples=` drops the end of the order.
        elif isinstance(stage, SourceDataset) and stage.num_samples < len(stage.sampler):
            stages.append(f"take {_over_all_shards(stage.sampler, stage.num_samples)}")
        stage = stage.child
    # Without a shuffling stage the seed changes nothing, so other seeds are not a difference.
    seed = source.seed if dataset.num_shuffles else None
    return {**_of_sampler(source.sampler), "stages": stages[::-1], "stage_seed": seed}


def take_seed(dataset: Any, order: dict[str, Any]) -> None:
    """Set the seed of a dataset from an `order_of`, if both have as many samples and shuffle alike."""
    own = order_of(dataset)
    if not own or any(order.get(name) != own.get(name) for name in _SOURCE):
        return
    source = _source(dataset) if isinstance(dataset, Pipeline) else dataset
    if own.get("seed") is not None and order.get("seed") is not None:
        source.sampler.seed = order["seed"]
    if own.get("stage_seed") is not None and order.get("stage_seed") is not None:
        source.seed = order["stage_seed"]


def _of_sampler(sampler: Any) -> dict[str, Any]:
    if not isinstance(sampler, Sampler):
        return {}
    state = Sampler.state_dict(sampler)
    return {name: state[name] for name in _SOURCE} | {"seed": state["seed"] if state["shuffle"] else None}


def _source(pipeline: Pipeline) -> SourceDataset:
    while pipeline.child is not None:
        pipeline = pipeline.child
    assert isinstance(pipeline, SourceDataset)
    return pipeline


def _over_all_shards(sampler: Any, count: int) -> int:
    """Return the count of all shards together, given the count of each."""
    return count * getattr(sampler, "num_replicas", 1)
