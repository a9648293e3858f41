"""A training resumed from a checkpoint ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import nn, optim
from simparallel.errors import CheckpointError, InputError, RunFailedError
from simparallel.train import (
    CheckpointConfig,
    CheckpointManager,
    EarlyStopping,
    History,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = 3  # of an epoch


class Interrupt(sp.Callback):
    """Ends the process after a step, as far as training can tell."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == self.after:
            raise KeyboardInterrupt


def dataset(kind: str) -> Any:
    rng = np.random.default_rng(0)
    size = sp.get_world_size()
    rows = 4 * STEPS * size
    arrays = rng.normal(size=(rows, 5)).astype(np.float32), rng.integers(0, 3, rows)
    if kind == "pipeline":
        source = sp.data.NumpySlicesDataset(arrays, num_shards=size, shard_id=sp.get_rank(), seed=4)
        return source.shuffle(5).batch(4)
    data = sp.data.TensorDataset(*arrays)
    return sp.data.DataLoader(data, 4, sampler=sp.data.DistributedSampler(data, seed=4))


def train(
    folder: Any,
    kind: str,
    epochs: int,
    every: int = 1,
    interrupt: int | None = None,
    resume: Any = False,
    sink: bool = False,
    parallel: bool = False,
) -> dict[str, Any]:
    """Train with every part that has a state: dropout, batch norm, momentum, Adam's counts, loss scale, callbacks."""
    if parallel:
        sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    sp.manual_seed(7)
    network = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = optim.Adam(network.parameters(), lr=0.01)
    manager = optim.DynamicLossScaleManager(2.0**8, scale_window=2)
    model = Model(network, nn.CrossEntropyLoss(), optimizer, metrics={"loss", "F1"}, loss_scale_manager=manager)
    stopping = EarlyStopping("eval_loss", patience=4, restore_best_weights=True)
    own = History()
    callbacks = [
        ModelCheckpoint("net", folder, CheckpointConfig(every, keep_checkpoint_max=2)), LossMonitor(4), stopping,
        own, LearningRateScheduler(lambda lr, step: lr * 0.9),
    ]  # fmt: skip
    if interrupt is not None:
        callbacks.append(Interrupt(interrupt))
    data = dataset(kind)
    try:
        history = model.fit(
            epochs, data, dataset(kind), 1, callbacks, dataset_sink_mode=sink, resume=resume, progress=False
        )
    except KeyboardInterrupt:
        return {}
    return {
        "network": network.state_dict(), "optimizer": optimizer.state_dict(), "scale": manager.state_dict(),
        "history": history.history, "epochs": history.epoch, "own": own.history, "best": stopping.best,
        "next": data.epoch, "mask": nn.Dropout(0.5)(np.ones(50, np.float32)).numpy(),
    }  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Tell if values are equal, arrays to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b


@pytest.mark.parametrize("kind", ["pipeline", "loader"])
def test_resume_after_any_step_has_the_same_bits(tmp_path, kind):
    (whole,) = sp.launch(train, (tmp_path / "whole", kind, 3, 1), transport="inline")
    assert same(whole["own"], whole["history"])

    @settings(max_examples=2 * settings.default.max_examples // 3)
    @given(st.integers(1, 3 * STEPS - 1), st.integers(1, 2 * STEPS))
    def check(interrupt, every):
        folder = tmp_path / f"{interrupt} {every}"
        sp.launch(train, (folder, kind, 3, every, interrupt), transport="inline")
        manager = CheckpointManager(folder / "net")
        assert manager.latest() == (interrupt // every * every or None)
        (resumed,) = sp.launch(train, (folder, kind, 3, every, None, True), transport="inline")
        assert same(resumed, whole)

    check()
    assert not same(whole, sp.launch(train, (tmp_path / "x", kind, 2, 1), transport="inline")[0])


def test_ended_training_continues_for_more_epochs(tmp_path):
    (whole,) = sp.launch(train, (tmp_path / "whole", "pipeline", 4), transport="inline")
    sp.launch(train, (tmp_path / "part", "pipeline", 2), transport="inline")
    (more,) = sp.launch(train, (tmp_path / "part", "pipeline", 4, 1, None, True), transport="inline")
    assert same(more, whole)
    (again,) = sp.launch(
        train, (tmp_path / "part", "pipeline", 4, 1, None, tmp_path / "part" / "net"), transport="inline"
    )
    assert same(again, whole)


def test_sink_is_resumed_at_the_end_of_an_epoch(tmp_path):
    (whole,) = sp.launch(train, (tmp_path / "whole", "pipeline", 3, 2, None, False, True), transport="inline")
    assert CheckpointManager(tmp_path / "whole" / "net").steps() == [2 * STEPS, 3 * STEPS]
    sp.launch(train, (tmp_path / "part", "pipeline", 2, 2, None, False, True), transport="inline")
    (more,) = sp.launch(train, (tmp_path / "part", "pipeline", 3, 2, None, True, True), transport="inline")
    assert same(more, whole)


@pytest.mark.process
def test_ranks_resume_together(tmp_path):
    with sp.Cluster(2, echo=False) as cluster:
        whole = cluster.run(train, tmp_path / "whole", "loader", 2, 2, parallel=True)
        with refused(RunFailedError):
            cluster.run(failing, tmp_path / "part")
        resumed = cluster.run(train, tmp_path / "part", "loader", 2, 2, None, True, parallel=True)
    assert CheckpointManager(tmp_path / "whole" / "net").steps() == [4, 6]
    for one, other in zip(whole, resumed, strict=True):
        assert same(one, other)


def failing(folder: Any) -> None:
    train(folder, "loader", 2, 2, interrupt=5, parallel=True)
    raise RuntimeError("rank dies")


def test_last_step_is_always_saved(tmp_path):
    sp.launch(train, (tmp_path, "pipeline", 1, 100), transport="inline")
    assert CheckpointManager(tmp_path / "net").steps() == [STEPS]


def test_save_interval_follows_rank_0(tmp_path):
    """With nearly 0 s, every step is saved; with a day, only the last one."""

    def program(seconds):
        network = nn.Linear(5, 3)
        config = CheckpointConfig(0, seconds, keep_checkpoint_max=9)
        checkpoint = ModelCheckpoint(f"s{seconds:g}", tmp_path, config)
        optimizer = optim.SGD(network.parameters())
        Model(network, nn.CrossEntropyLoss(), optimizer).train(1, dataset("pipeline"), checkpoint, progress=False)
        return checkpoint.manager.steps()

    assert list(sp.launch(program, (1e-9,), world_size=2, transport="inline")) == [[1, 2, 3]] * 2
    assert list(sp.launch(program, (86400,), world_size=2, transport="inline")) == [[3]] * 2


def test_resume_without_checkpoint_starts_or_raises(tmp_path):
    (whole,) = sp.launch(train, (tmp_path / "a", "pipeline", 1), transport="inline")
    (begun,) = sp.launch(train, (tmp_path / "b", "pipeline", 1, 1, None, True), transport="inline")
    assert same(whole, begun)
    network = nn.Linear(5, 3)
    model = Model(network, nn.CrossEntropyLoss(), optim.SGD(network.parameters()))
    with refused(CheckpointError):
        model.train(1, dataset("pipeline"), resume=True, progress=False)
    with refused(CheckpointError):
        model.train(1, dataset("pipeline"), resume=tmp_path / "nothing", progress=False)


def test_resume_none_starts_anew(tmp_path):
    (begun,) = sp.launch(train, (tmp_path / "a", "pipeline", 1, 1, None, None), transport="inline")
    assert same(begun, sp.launch(train, (tmp_path / "b", "pipeline", 1), transport="inline")[0])


def test_other_number_of_steps_inside_epoch_is_refused(tmp_path):
    def program(rows, resume):
        network = nn.Linear(5, 3)
        model = Model(network, nn.CrossEntropyLoss(), optim.SGD(network.parameters()))
        data = sp.data.NumpySlicesDataset((np.ones((rows, 5), np.float32), np.zeros(rows, int))).batch(2)
        stop = [Interrupt(2)] if not resume else []
        model.train(2, data, [ModelCheckpoint("net", tmp_path), *stop], resume=resume, progress=False)

    with pytest.raises(KeyboardInterrupt):
        program(6, False)
    with refused(CheckpointError):
        program(8, True)
    program(6, True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ModelCheckpoint("a/b"), lambda: ModelCheckpoint(""),
        lambda: ModelCheckpoint(".."), lambda: ModelCheckpoint("."),
        lambda: CheckpointConfig(0), lambda: CheckpointConfig(-1),
        lambda: CheckpointConfig(keep_checkpoint_max=0),
    ],
)  # fmt: skip
def test_bad_settings(call):
    with refused(InputError):
        call()


class Counter(sp.Callback):
    """Counts steps from a start that distinguishes the ranks."""

    def __init__(self, begin: int) -> None:
        self.count = begin

    def on_train_step_end(self, run_context: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "array": np.array([self.count])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["array"].tolist() == [state_dict["count"]]
        self.count = state_dict["count"]


class Named(Counter):
    """Another class, hence another name."""


def with_own_callbacks(folder: Any, interrupt: int | None, resume: bool) -> Any:
    """Train 12 samples a step over all ranks; rank 0 also prints, and rank 1 counts in its own class."""
    sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    sp.manual_seed(7)
    rank, size = sp.get_rank(), sp.get_world_size()
    rng = np.random.default_rng(0)
    arrays = rng.integers(-4, 5, (48, 5)).astype(np.float32), rng.integers(0, 3, 48)
    data = sp.data.NumpySlicesDataset(arrays, num_shards=size, shard_id=rank).batch(12 // size)
    network = nn.Linear(5, 3)
    model = Model(network, nn.CrossEntropyLoss(), optim.Momentum(network.parameters(), 0.1, 0.9))
    counters = [Counter(100 * rank), *([Named(1000 * rank)] if rank in (1, 2) else [])]
    callbacks = [ModelCheckpoint("net", folder), *counters]
    if rank == 0:
        callbacks.insert(0, LossMonitor(2))
    if interrupt is not None:
        callbacks.append(Interrupt(interrupt))
    try:
        history = model.train(2, data, callbacks, resume=resume, progress=False)
    except KeyboardInterrupt:
        return None
    finally:
        sp.reset_auto_parallel_context()
    return history.history["loss"], network.weight.numpy(), [counter.count for counter in counters]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_callbacks_on_some_ranks_resume_on_any_number(tmp_path, ranks):
    """On the same number each rank gets its own state, on others the first one saved under that name."""
    (whole, _) = sp.launch(with_own_callbacks, (tmp_path / "whole", None, False), world_size=2, transport="inline")
    sp.launch(with_own_callbacks, (tmp_path / "part", 5, False), world_size=2, transport="inline")

    def resume():
        return sp.launch(with_own_callbacks, (tmp_path / "part", None, True), world_size=ranks, transport="inline")

    if ranks == 2:
        resumed = resume()
        assert all(same(rank[1], whole[1]) for rank in resumed)
    else:
        with pytest.warns(RuntimeWarning, match=r"all ranks take .*own\.Counter\.0"):
            resumed = resume()
    # 8 steps in all; the other counter starts at 1000 on rank 1, the first one that has it
    counts = {1: [[8]], 2: [[8], [108, 1008]], 3: [[8], [8, 1008], [8, 1008]], 4: [[8], [8, 1008], [8, 1008], [8]]}
    assert [rank[2] for rank in resumed] == counts[ranks]
    for rank in resumed:
        np.testing.assert_allclose(rank[1], whole[1], rtol=1e-5)


def test_new_callback_starts_afresh(tmp_path):
    def program(callbacks, resume):
        network = nn.Linear(5, 3)
        model = Model(network, nn.CrossEntropyLoss(), optim.SGD(network.parameters()))
        checkpoint = ModelCheckpoint("net", tmp_path)
        model.train(2, dataset("loader"), [checkpoint, *callbacks], resume=resume, progress=False)

    with pytest.raises(KeyboardInterrupt):
        program([Interrupt(4)], False)
    counter = Counter(0)
    program([counter], True)
    assert counter.count == 2 * STEPS - 4


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_epoch_mean_loss_is_the_same_on_any_ranks(tmp_path, saved, ranks):
    """The network does not learn: the mean of the samples, in batches and shares of one size."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(np.ones((), np.float32))

        def forward(self, x):
            return (self.weight * sp.Tensor(x)).mean()

    def program(interrupt, resume):
        sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        rank, size = sp.get_rank(), sp.get_world_size()
        network = Mean()
        data = [(step[rank::size],) for step in np.arange(48, dtype=np.float32).reshape(4, 12)]
        model = Model(network, None, optim.SGD(network.parameters(), 0.0))
        callbacks = [ModelCheckpoint("net", tmp_path), Interrupt(interrupt)]
        try:
            return model.train(1, data, callbacks, resume=resume, progress=False).history["loss"]
        except KeyboardInterrupt:
            return None
        finally:
            sp.reset_auto_parallel_context()

    sp.launch(program, (3, False), world_size=saved, transport="inline")
    found = sp.launch(program, (-1, True), world_size=ranks, transport="inline")
    assert list(found) == [[pytest.approx(np.arange(48).mean(), rel=1e-12)]] * ranks


def test_saved_steps_do_not_depend_on_resumes(tmp_path):
    def steps(name, *interrupts):
        for interrupt in (*interrupts, None, None):  # finally, with no steps left
            sp.launch(keeping, (tmp_path / name, interrupt), transport="inline")
        return sorted(path.name for path in (tmp_path / name / "net").iterdir())

    def keeping(folder, interrupt):
        network = nn.Linear(5, 3)
        checkpoint = ModelCheckpoint("net", folder, CheckpointConfig(4, keep_checkpoint_max=99))
        callbacks = [checkpoint, *([] if interrupt is None else [Interrupt(interrupt)])]
        model = Model(network, nn.CrossEntropyLoss(), optim.SGD(network.parameters()))
        with contextlib.suppress(KeyboardInterrupt):
            model.train(4, dataset("loader"), callbacks, resume=True, progress=False)

    assert steps("whole") == ["ckpt-000004-0001", "ckpt-000008-0002", "ckpt-000012-0003"]
    assert steps("parts", 5, 7, 11) == steps("whole")
