"""The data of a training that is resumed: the same in the middle of an epoch, any other after its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel import nn, optim
from simparallel.train import CheckpointConfig, Model, ModelCheckpoint

SAMPLES = 24
NUMBERS = np.arange(SAMPLES, dtype=np.float32)[:, None]


class Interrupt(sp.Callback):
    """Ends the process, as far as training can tell, after a step."""

    def __init__(self, after: int | None) -> None:
        self.after = after

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == self.after:
            raise KeyboardInterrupt


class Seen(sp.Callback):
    """The samples of each step, and the epochs that ended."""

    history: Any = None

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.ends: list[int] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.steps.append(np.asarray(run_context.original_args().train_dataset_element[0])[:, 0].tolist())

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.ends.append(run_context.original_args().cur_epoch_num)


def train(
    folder: Any, data: Any, epochs: int = 2, interrupt: int | None = None, resume: bool = False, every: int = 1,
    **more: Any,
) -> Seen:  # fmt: skip
    network = nn.Linear(1, 1)
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
def test_behind_the_last_step_of_an_epoch_the_next_one_may_have_other_batches(tmp_path, make, batch):
    whole = train(tmp_path / "whole", make(batch), 3)
    first = train(tmp_path / "part", make(4), 3, interrupt=SAMPLES // 4)
    more = train(tmp_path / "part", make(batch), 3, resume=True)

    assert first.ends == [1]
    assert more.steps == whole.steps[SAMPLES // batch :]
    assert more.ends == [1, 2, 3]  # the end itself comes again: what it did was not saved
    assert more.history.epoch == [1, 2, 3]


def test_behind_the_last_step_of_an_epoch_a_sink_may_have_another_size(tmp_path):
    """The data, which it goes through on and on, goes on."""
    train(tmp_path, numbers(), 1, dataset_sink_mode=True, sink_size=4)
    more = train(tmp_path, numbers(), 3, resume=True, dataset_sink_mode=True, sink_size=7)
    assert more.steps[-1] == train(tmp_path / "x", numbers(), 3).steps[4 + 2 * 7 - 1]
