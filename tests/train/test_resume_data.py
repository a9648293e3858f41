"""The data of a resumed training: the same inside an epoch, any other after its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn, optim
from simparallel.errors import CheckpointError, InputError, RunFailedError
from simparallel.train import CheckpointConfig, Model, ModelCheckpoint

SAMPLES = 24
NUMBERS = np.arange(SAMPLES, dtype=np.float32)[:, None]


class Interrupt(sp.Callback):
    """Ends the process after a step, as far as training can tell."""

    def __init__(self, after: int | None) -> None:
        self.after = after

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == self.after:
            raise KeyboardInterrupt


class Seen(sp.Callback):
    """Records the samples of each step, and the epochs that ended."""

    history: Any = None

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.ends: list[int] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.steps.append(np.asarray(run_context.original_args().train_dataset_element[0])[:, 0].tolist())

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.ends.append(run_context.original_args().cur_epoch_num)


def train(
    folder: Any,
    data: Any,
    epochs: int = 2,
    interrupt: int | None = None,
    resume: bool = False,
    every: int = 1,
    **more: Any,
) -> Seen:
    network: Any = nn.Linear(1, 1)
    if sp.get_world_size() > 1:
        network = sp.parallel.DistributedDataParallel(network)
    model = Model(network, nn.MSELoss(), optim.SGD(network.parameters(), 1e-9))
    seen = Seen()
    checkpoint = ModelCheckpoint("net", folder, CheckpointConfig(every))
    callbacks = [seen, checkpoint, Interrupt(interrupt)]
    try:
        seen.history = model.train(epochs, data, callbacks, resume=resume, progress=False, **more)
    except KeyboardInterrupt:
        assert interrupt is not None
    return seen


def numbers(batch: int = 4, samples: int = SAMPLES, **more: Any) -> Any:
    columns = NUMBERS[:samples], NUMBERS[:samples]
    return sp.data.NumpySlicesDataset(columns, **{"seed": 3, **more}).batch(batch)


def loader(batch: int = 4, samples: int = SAMPLES, seed: int = 3) -> Any:
    data = sp.data.TensorDataset(NUMBERS[:samples], NUMBERS[:samples])
    return sp.data.DataLoader(data, batch, shuffle=True, seed=seed)


@pytest.mark.parametrize("make", [numbers, loader])
@pytest.mark.parametrize("batch", [2, 4, 8, 12])
def test_batch_size_may_change_after_an_epoch(tmp_path, make, batch):
    """A training stopped after an epoch's last step may resume with other batches."""
    whole = train(tmp_path / "whole", make(batch), 3)
    first = train(tmp_path / "part", make(4), 3, interrupt=SAMPLES // 4)
    more = train(tmp_path / "part", make(batch), 3, resume=True)

    assert first.ends == [1]
    assert more.steps == whole.steps[SAMPLES // batch :]
    assert more.ends == [1, 2, 3]  # the end itself is repeated: its effects were not saved
    assert more.history.epoch == [1, 2, 3]


def test_sink_size_may_change_after_an_epoch(tmp_path):
    """The sink continues in the data, which it cycles through."""
    train(tmp_path, numbers(), 1, dataset_sink_mode=True, sink_size=4)
    more = train(tmp_path, numbers(), 3, resume=True, dataset_sink_mode=True, sink_size=7)
    assert more.steps[-1] == train(tmp_path / "x", numbers(), 3).steps[4 + 2 * 7 - 1]


OTHER = {
    "samples": lambda: numbers(2, SAMPLES // 2),
    "order": lambda: numbers(shuffle=False),
    "stages": lambda: numbers().shuffle(2),
    "batches": lambda: numbers(4, 21),
    "times": lambda: numbers().repeat(2),
    "part": lambda: numbers(4, num_samples=21),
    "loader": lambda: loader(2, SAMPLES // 2),
    "list": lambda: [(NUMBERS[:4], NUMBERS[:4])] * 6,  # the difference cannot be detected
}


class OwnOrder:
    """A sampler that is none of the package's: each rank's share of the numbers, backwards."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.num_replicas, self.rank = ranks, rank

    def __len__(self) -> int:
        return SAMPLES // self.num_replicas

    def __iter__(self) -> Any:
        return iter(range(SAMPLES - 1 - self.rank, -1, -self.num_replicas))


def of_replica(name: str, ranks: int, rank: int) -> Any:
    """Return the data of one of the ranks that share batches of 12."""
    batch, columns = 12 // ranks, sp.data.TensorDataset(NUMBERS, NUMBERS)
    if name == "sampler":
        return sp.data.DataLoader(columns, batch, sampler=sp.data.DistributedSampler(columns, ranks, rank, seed=3))
    if name == "own order":
        return sp.data.DataLoader(columns, batch, sampler=OwnOrder(ranks, rank))
    shards: dict[str, Any] = {"num_shards": ranks, "shard_id": rank}
    if name == "shards":
        return numbers(batch, **shards)
    return sp.data.NumpySlicesDataset((NUMBERS, NUMBERS), shuffle=False, **shards).shuffle(5).batch(batch)


@pytest.mark.parametrize("name", ["sampler", "shards", "own order", "shuffle"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_other_ranks_see_each_sample_once(tmp_path, name, before, after):
    """Ranks shuffle all samples alike and share them, which any number can; if each shuffles its own, none can."""

    def steps(ranks: int, interrupt: int | None, resume: bool) -> list[float]:
        found = sp.launch(
            lambda: train(tmp_path, of_replica(name, ranks, sp.get_rank()), 1, interrupt, resume).steps,
            world_size=ranks, transport="inline", echo=False,
        )  # fmt: skip
        return sum((step for of_rank in found for step in of_rank), [])

    seen = steps(before, 1, resume=False)
    assert len(seen) == 12
    if name == "shuffle":
        with refused(RunFailedError):
            steps(after, None, resume=True)
        seen += steps(before, None, resume=True)
    else:
        seen += steps(after, None, resume=True)
    assert sorted(seen) == NUMBERS[:, 0].tolist()


def test_uneven_rest_of_an_own_order_is_refused():
    state = {"epoch": 0, "position": 14}
    data = of_replica("own order", 3, 0)
    data.load_state_dict(state)
    with refused(InputError):
        iter(data)


@pytest.mark.parametrize("name", OTHER)
def test_other_data_inside_an_epoch_are_refused(tmp_path, name):
    def numbers_then(interrupt: int) -> Seen:
        return train(tmp_path, numbers(), 2, interrupt, every=interrupt)

    data = OTHER[name]()
    numbers_then(4)
    if name == "list":
        train(tmp_path, data, 2, resume=True)
    else:
        with refused(CheckpointError):
            train(tmp_path, data, 2, resume=True)
    numbers_then(6)
    assert train(tmp_path, data, 2, resume=True).ends == [1, 2]


def test_sink_refuses_data_of_another_size(tmp_path):
    train(tmp_path, numbers(), 1, dataset_sink_mode=True, sink_size=4)
    with refused(CheckpointError):
        train(tmp_path, numbers(4, 12), 2, resume=True, dataset_sink_mode=True, sink_size=4)


@pytest.mark.parametrize("interrupt", [4, 6])
@pytest.mark.parametrize(
    "make",
    [
        numbers, loader, lambda seed: numbers(seed=seed).shuffle(3).repeat(2),
        lambda seed: sp.data.NumpySlicesDataset((NUMBERS, NUMBERS), seed=seed, shuffle=False).shuffle(9).batch(4),
    ],
)  # fmt: skip
def test_resume_keeps_the_saved_seed(tmp_path, make, interrupt):
    """The seed may be the time of day, for example."""
    whole = train(tmp_path / "whole", make(seed=8), 3)
    before = train(tmp_path / "part", make(seed=8), 3, interrupt)
    assert before.steps + train(tmp_path / "part", make(seed=1), 3, resume=True).steps == whole.steps


def test_pipeline_and_loader_are_interchangeable(tmp_path):
    """A pipeline and a loader of the same samples count as the same data."""
    whole = train(tmp_path / "whole", numbers(), 2)
    train(tmp_path / "part", numbers(), 2, interrupt=4)
    assert train(tmp_path / "part", loader(seed=1), 2, resume=True).steps == whole.steps[4:]


@pytest.mark.parametrize("now", [{"samples": 16}, {"batch": 2}])
def test_saved_seed_applies_to_equal_sizes_only(tmp_path, now):
    """After the end of an epoch, the saved seed applies only to data with as many samples."""
    train(tmp_path / "part", numbers(seed=8), 1)
    more = train(tmp_path / "part", numbers(seed=1, **now), 2, resume=True)
    seed = 1 if "samples" in now else 8
    whole = train(tmp_path / "whole", numbers(seed=seed, **now), 2).steps
    assert more.steps == whole[len(whole) // 2 :]
