"""A resumed boosted training ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import cloudpickle
import numpy as np
import pytest
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.errors import CheckpointError, RunFailedError, StateDictError
from simparallel.parallel import AdasumOptimizer
from simparallel.train import CheckpointManager, ModelCheckpoint
from simparallel.train.boost.boost import Boost, BoostedStep
from simparallel.train.boost.dim_reduce import DimReduce

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOGETHER = ("less_bn", "grad_freeze", "adasum", "grad_accumulation")
LEGAL = [
    *(set_ for count in range(1, 5) for set_ in combinations(TOGETHER, count)),
    ("dim_reduce",), ("less_bn", "dim_reduce"),
]  # fmt: skip
STEPS, STOP, EVERY = 7, 3, 2  # it stops in the middle of an accumulation


class Interrupt(sp.Callback):
    """Ends the training after a step, as a crash would."""

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == STOP:
            raise KeyboardInterrupt


class Net(sp.nn.Module):
    """A residual block and a head: the smallest network that less_bn changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = sp.nn.Conv2d(1, 2, 3, padding=1), sp.nn.BatchNorm2d(2)
        self.conv2, self.bn2 = sp.nn.Conv2d(2, 1, 3, padding=1), sp.nn.BatchNorm2d(1)
        self.head = sp.nn.Linear(9, 3)

    def forward(self, x: Any) -> Any:
        x = sp.Tensor(x)
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + x
        return self.head(y.relu().reshape(y.shape[0], 9))


def config_of(on: tuple[str, ...], **more: Any) -> dict[str, Any]:
    return {
        "boost": {"mode": "manual", **dict.fromkeys(on, True)},
        "common": {"device_number": 1},
        "less_bn": {"fn_flag": True},
        "grad_freeze": {"param_groups": 3, "freeze_type": 0, "freeze_p": 0.5, "total_steps": 50},
        "grad_accumulation": {"grad_accumulation_step": EVERY},
        **more,
    }


def train(folder: Any, config: dict[str, Any] | None, mode: str = "whole") -> Any:
    """Return this rank's weights, statistics, optimizer state and loss scale after `STEPS` steps.

    Args:
        mode: "whole", "interrupt", "resume", or "forget": resume without the state of the steps.
    """
    sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    sp.manual_seed(3)
    network = Net()
    rates = sp.Tensor(np.linspace(0.1, 0.01, STEPS + 1, dtype=np.float32))
    optimizer = sp.optim.Momentum(network.parameters(), rates, 0.9)
    boost = {"boost_level": "O1", "boost_config_dict": config} if config else {}
    scale = sp.optim.DynamicLossScaleManager(2.0**8, scale_window=2)
    model = sp.Model(network, sp.nn.CrossEntropyLoss(), optimizer, amp_level="O2", loss_scale_manager=scale, **boost)
    if mode == "forget":
        model._step.load_state_dict = lambda state_dict: None
    rng = np.random.default_rng([5, sp.get_rank()])
    data = [(rng.normal(size=(4, 1, 3, 3)).astype(np.float32), rng.integers(0, 3, 4)) for _ in range(STEPS)]
    callbacks = [ModelCheckpoint("net", folder), *([Interrupt()] if mode == "interrupt" else [])]
    try:
        model.train(1, data, callbacks, resume=mode in ("resume", "forget"), progress=False)
    except KeyboardInterrupt:
        return None
    finally:
        sp.reset_auto_parallel_context()
    arrays = [*network.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return b"".join(np.asarray(a).tobytes() for a in arrays), scale.get_loss_scale()


def size_of(on: tuple[str, ...]) -> int:
    """Return the number of trained elements."""
    network = Net()
    Boost("O1", config_of(tuple(set(on) - {"dim_reduce"}))).change(network, sp.optim.SGD(network.parameters(), lr=0.1))
    return sum(p.size for p in network.parameters())


def config_with_directions(on: tuple[str, ...], folder: Any, seed: int = 0) -> dict[str, Any]:
    path = folder / f"p{seed}.npy"
    np.save(path, np.linalg.qr(np.random.default_rng(seed).normal(size=(size_of(on), 2)))[0].T)
    return config_of(on, dim_reduce={"n_components": 2, "alpha": 0.1, "pca_mat_path": str(path)})


@pytest.fixture(scope="module")
def world():
    with World("inline") as world:
        yield world


def interrupted(world: World, count: int, folder: Any, config: Any) -> None:
    assert world.run(count, train, folder, config, "interrupt") == [None] * count
    assert CheckpointManager(folder / "net").latest() == STOP


@pytest.mark.matrices
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("on", LEGAL, ids="+".join)
@pytest.mark.filterwarnings("ignore:Adasum across nodes")  # alone there is one node
def test_resumed_training_ends_with_the_same_bits(world, tmp_path, on, count):
    config = config_with_directions(on, tmp_path)
    whole = world.run(count, train, tmp_path / "whole", config)
    interrupted(world, count, tmp_path / "part", config)
    assert world.run(count, train, tmp_path / "part", config, "resume") == whole


@pytest.mark.parametrize("on", ["grad_freeze", "grad_accumulation", "dim_reduce"])
def test_resume_needs_the_state_of_the_steps(world, tmp_path, on):
    """Red control: without the steps' state the bits differ."""
    config = config_with_directions((on,), tmp_path)
    whole = world.run(2, train, tmp_path / "whole", config)
    interrupted(world, 2, tmp_path / "part", config)
    assert world.run(2, train, tmp_path / "part", config, "forget") != whole


@pytest.mark.process
def test_processes_resume_to_the_same_bits(tmp_path):
    config = config_of(TOGETHER)
    with World("shm") as world:
        whole = world.run(2, train, tmp_path / "whole", config)
        interrupted(world, 2, tmp_path / "part", config)
        assert world.run(2, train, tmp_path / "part", config, "resume") == whole


# --- refused states ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "now"), [(("adasum",), ()), ((), ("adasum",)), (("adasum",), ("adasum", "grad_freeze"))]
)
def test_other_switches_are_refused(world, tmp_path, then, now):
    interrupted(world, 2, tmp_path, config_of(then) if then else None)
    with refused(RunFailedError) as caught:
        world.run(2, train, tmp_path, config_of(now) if now else None, "resume")
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_other_settings_are_refused(world, tmp_path):
    on = ("grad_freeze", "grad_accumulation")
    interrupted(world, 1, tmp_path, config_of(on))
    other = config_of(on, grad_accumulation={"grad_accumulation_step": 4})
    with refused(RunFailedError):
        world.run(1, train, tmp_path, other, "resume")


def test_other_directions_are_refused(world, tmp_path):
    interrupted(world, 1, tmp_path, config_with_directions(("dim_reduce",), tmp_path))
    with refused(RunFailedError):
        world.run(1, train, tmp_path, config_with_directions(("dim_reduce",), tmp_path, 1), "resume")


# --- on another number of ranks ------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "loaded"), [(4, 2), (2, 4), (2, 1)])
@pytest.mark.filterwarnings("ignore")
def test_another_number_of_ranks(world, tmp_path, saved, loaded):
    """In the middle of an accumulation it is refused; otherwise it resumes, with a warning if the ranks differed."""
    interrupted(world, saved, tmp_path / "middle", config_of(("grad_accumulation",)))
    with refused(RunFailedError):
        world.run(loaded, train, tmp_path / "middle", config_of(("grad_accumulation",)), "resume")
    config = config_of(("grad_freeze", "adasum"))
    interrupted(world, saved, tmp_path / "between", config)
    results = world.run(loaded, train, tmp_path / "between", config, "resume")
    assert all(np.isfinite(scale) for _, scale in results)


def local_steps(folder: Any, mode: str, steps: int = 5) -> Any:
    """Return the weights after some steps of an `AdasumOptimizer` that exchanges after every third one."""
    sp.manual_seed(1)
    model = sp.nn.Linear(3, 2)
    optimizer = AdasumOptimizer(sp.optim.Momentum(model.parameters(), 0.1, 0.9), local_steps=3)
    manager = CheckpointManager(folder)
    first = manager.restore(model=model, optimizer=optimizer).step if mode == "resume" else 0
    for step in range(first, steps):
        rng = np.random.default_rng([sp.get_rank(), step])
        optimizer.zero_grad()
        sp.functions.cross_entropy(
            model(sp.Tensor(rng.normal(size=(4, 3)).astype(np.float32))), rng.integers(0, 2, 4)
        ).backward()
        optimizer.step()
    if mode == "save":
        manager.save(steps, model=model, optimizer=optimizer)
    return b"".join(p.numpy().tobytes() for p in model.parameters())


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_adasum_local_steps_are_resumed(world, tmp_path, saved):
    whole = world.run(2, local_steps, tmp_path, "whole")
    world.run(2, local_steps, tmp_path, "save", saved)
    assert world.run(2, local_steps, tmp_path, "resume") == whole


@pytest.mark.filterwarnings("ignore")
def test_local_steps_on_another_number_of_ranks(world, tmp_path):
    world.run(2, local_steps, tmp_path / "between", "save", 2)
    with refused(RunFailedError):
        world.run(3, local_steps, tmp_path / "between", "resume")
    world.run(2, local_steps, tmp_path / "after", "save", 3)
    assert len(set(world.run(3, local_steps, tmp_path / "after", "resume", 6))) == 1


# --- parts ---------------------------------------------------------------------------------------------


def test_state_of_another_network_is_refused():
    def step_of(network: sp.nn.Module) -> BoostedStep:
        optimizer = sp.optim.SGD(network.parameters(), lr=0.1)
        return Boost("O1", config_of(("grad_accumulation",))).make_step(
            network, sp.functions.cross_entropy, optimizer, None, False
        )

    ours, other = step_of(sp.nn.Linear(3, 2)), step_of(sp.nn.Linear(4, 2))
    ours((np.ones((2, 3), np.float32), np.zeros(2, int)))
    state = ours.state_dict()
    with refused(StateDictError):
        other.load_state_dict(state)
    assert other.state_dict()["sums"] == {}
    ours((np.ones((2, 3), np.float32), np.zeros(2, int)))
    assert len(state["sums"]) == 2  # a copy


def test_dim_reduce_before_its_first_step():
    w = sp.Tensor(np.zeros(3), requires_grad=True)
    reduce = DimReduce([w], np.eye(3)[:2], rho=0.55, gamma=0.9, alpha=0.1, sigma=0.4)
    state = reduce.state_dict()
    reduce.step([np.ones(3)], 1.0, lambda: 0.0)
    assert state["before"] is None
    reduce.load_state_dict(state)
    assert reduce.state_dict()["before"] is None
    assert reduce.state_dict()["v"] == 0.0
