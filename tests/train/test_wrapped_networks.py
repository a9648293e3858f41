"""A `Model` of a wrapped network: the ranks that train together, saved state, and calls on one rank alone."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import strategies as st
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel import nn, optim
from simparallel.errors import InputError, RunFailedError
from simparallel.layout.layout import Layout
from simparallel.parallel import DataParallel, DistributedDataParallel, distribute_module, distribute_tensor
from simparallel.train import (
    Accuracy,
    CheckpointConfig,
    CheckpointManager,
    EarlyStopping,
    Model,
    ModelCheckpoint,
    save_checkpoint,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RNG = np.random.default_rng(0)
X = RNG.standard_normal((96, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 96)


def batches(first: int, count: int, rows: int = 4) -> list[Any]:
    starts = range(first, first + count * rows, rows)
    return [(X[start : start + rows], Y[start : start + rows]) for start in starts]


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Holder(nn.Module):
    """A network with a wrapper inside."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.head = DistributedDataParallel(nn.Linear(6, 3), process_group=group)

    def forward(self, x: Any) -> sp.Tensor:
        return self.head(x)


def make(network: nn.Module, lr: float = 0.1, **settings: Any) -> Model:
    return Model(network, nn.CrossEntropyLoss(), optim.SGD(network.parameters(), lr=lr), **settings)


# --- ranks that train together ----------------------------------------------------------------------------


class StopIn(sp.Callback):
    """One rank requests the end, at the end of an epoch."""

    def __init__(self, rank: int, epoch: int) -> None:
        self.rank, self.epoch = rank, epoch

    def on_train_epoch_end(self, run_context: Any) -> None:
        if sp.get_rank() == self.rank and run_context.original_args().cur_epoch_num == self.epoch:
            run_context.request_stop()


def train_in_a_group(groups: Any, wrap: Any, epochs: int, folder: Any = None, resume: bool = False) -> Any:
    """Train a model and data for each group; the first group ends after epoch 2. Other ranks do not train."""
    made = [sp.new_group(ranks) for ranks in groups]
    rank = sp.get_rank()
    number = next((i for i, ranks in enumerate(groups) if rank in ranks), None)
    if number is None:
        return None
    sp.manual_seed(number)
    place = groups[number].index(rank)
    model = make(wrap(made[number]), metrics={"loss", "accuracy"})
    callbacks: list[Any] = [StopIn(groups[0][-1], 2)] if folder is None else []
    if folder is not None:
        callbacks.append(ModelCheckpoint("net", folder / str(number), CheckpointConfig(4)))
    data = batches(48 * number + 12 * place, 3)
    history = model.fit(epochs, data, data[: 1 + place], 1, callbacks, resume=resume, progress=False)
    return number, history.history


def wrapped_in(group: Any) -> nn.Module:
    return DistributedDataParallel(norm_net(), process_group=group)


@pytest.mark.parametrize("wrap", [wrapped_in, Holder])
@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_process_group_trains_by_itself(transport, wrap):
    """As if there were no other ranks, with two groups or with one of some ranks: losses, metrics, ends."""
    groups = [[2, 0], [1, 3]]
    with World(transport) as world:
        alone = [world.run(2, lambda number=number: train_alone(number, wrap))[0] for number in range(2)]
        results = world.run(4, train_in_a_group, groups, wrap, 4)
        some = world.run(3, train_in_a_group, groups[:1], wrap, 4)
    assert [len(history["loss"]) for history in alone] == [2, 4]
    for number, history in results:
        assert history == alone[number]
    assert some == [(0, alone[0]), None, (0, alone[0])]


def train_alone(number: int, wrap: Any) -> Any:
    sp.manual_seed(number)
    rank = sp.get_rank()
    model = make(wrap(None), metrics={"loss", "accuracy"})
    data = batches(48 * number + 12 * rank, 3)
    stop = StopIn(1 if number == 0 else -1, 2)
    return model.fit(4, data, data[: 1 + rank], 1, [stop], progress=False).history


def test_process_group_saves_and_resumes_by_itself(inline, tmp_path):
    groups = [[2, 0], [1, 3]]
    expected = inline.run(4, train_in_a_group, groups, wrapped_in, 4, tmp_path / "whole")
    inline.run(4, train_in_a_group, groups, wrapped_in, 2, tmp_path / "part")
    assert inline.run(4, train_in_a_group, groups, wrapped_in, 4, tmp_path / "part", True) == expected


def test_save_interval_follows_first_rank_of_group(inline, tmp_path):
    def program():
        groups = [sp.new_group([1, 0]), sp.new_group([3, 2])]
        number = sp.get_rank() // 2
        seconds = CheckpointConfig(0, save_checkpoint_seconds=1e-9)
        callbacks = ModelCheckpoint("net", tmp_path / str(number), seconds)
        make(wrapped_in(groups[number])).train(1, batches(0, 2), callbacks, progress=False)
        return callbacks.manager.steps()

    assert inline.run(4, program) == [[1, 2]] * 4


def test_metrics_over_all_ranks_refuse_a_group(inline):
    def program(of_group: bool):
        group = sp.new_group([0, 1])
        if sp.get_rank() == 2:
            return None
        metric = Accuracy(group=group) if of_group else Accuracy()
        return make(wrapped_in(group), metrics={"acc": metric}).eval(batches(0, 2))

    with refused(RunFailedError):
        inline.run(3, program, False)
    first, second, third = inline.run(3, program, True)
    assert first == second
    assert third is None


def test_different_ranks_for_parts_are_refused(inline):
    def program():
        groups = [sp.new_group([0, 1]), sp.new_group([1, 0])]
        network = nn.Sequential(*(DistributedDataParallel(nn.Linear(3, 3), process_group=g) for g in groups))
        with refused(InputError):
            Model(network)

    inline.run(2, program)


def test_wrapper_inside_the_network_is_found(inline):
    """One loss for all ranks, and one end; other reductions of the same gradients are refused."""

    def program():
        sp.manual_seed(0)
        model = make(Holder(), lr=3.0)
        data = batches(24 * sp.get_rank(), 3)
        return model.train(8, data, EarlyStopping("loss", patience=1), progress=False).history

    def refusal():
        sp.set_auto_parallel_context(parallel_mode="data_parallel")
        with refused(InputError):
            Model(Holder())
        sp.reset_auto_parallel_context()
        with refused(InputError):
            make(Holder(), boost_level="O1")

    first, second = inline.run(2, program)
    assert first == second
    inline.run(2, refusal)


# --- evaluation and prediction ------------------------------------------------------------------------------


def test_rank_may_have_no_evaluation_batch(inline):
    """However the batches are split over the ranks, the evaluation is over all of them."""

    def program(counts: list[int], wrap: bool):
        sp.manual_seed(0)
        rank = sp.get_rank()
        network = DistributedDataParallel(norm_net()) if wrap else norm_net()
        model = make(network, metrics={"loss", "accuracy"})
        own = batches(4 * sum(counts[:rank]), counts[rank])
        if not wrap:
            return model.eval(own)
        return model.fit(1, batches(0, 2), own, progress=False).history

    def body(case: Any) -> None:
        counts, wrap = case
        size = len(counts)
        expected = inline.run(1, program, [sum(counts)], wrap)[0]
        results = inline.run(size, program, counts, wrap)
        for got in results:
            assert got == results[0]
            for name, value in expected.items():
                np.testing.assert_allclose(got[name], value, rtol=1e-5)

    counts = st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(any)
    inline.check(st.tuples(counts, st.booleans()), body)


def test_evaluation_without_batches_is_refused(inline):
    with refused(InputError):
        make(norm_net(), metrics={"loss"}).eval([])
    with refused(RunFailedError):
        inline.run(2, lambda: make(norm_net(), metrics={"loss"}).eval([]))
    with refused(RunFailedError):
        inline.run(2, lambda: make(wrapped_in(None)).train(1, [], progress=False))


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
def test_one_rank_may_predict_alone(transport):
    """After training, one rank alone predicts the same as all ranks together."""

    def program(alone: int | None):
        sp.manual_seed(0)
        model = make(wrapped_in(None))
        model.train(1, batches(24 * sp.get_rank(), 3), progress=False)
        if alone in (None, sp.get_rank()):
            return model.predict(X[:5]).numpy()
        return None

    with World(transport) as world:
        expected = world.run(2, program, None)
        assert np.array_equal(*expected)
        for rank in range(2):
            assert np.array_equal(world.run(2, program, rank)[rank], expected[0])


# --- checkpoints ------------------------------------------------------------------------------------------


class StopAfter(sp.Callback):
    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == 4:
            run_context.request_stop()


def train_to_the_best(folder: Any, wrap: bool, is_first: bool) -> np.ndarray:
    """Train with EarlyStopping; a resumed part gets worse, so that the best weights are the checkpoint's."""
    sp.manual_seed(0)
    bare = nn.Linear(6, 3)
    sp.reset_auto_parallel_context()
    if not wrap:
        sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    network = DistributedDataParallel(bare) if wrap else bare
    data = [(x * (1 if is_first else 60), y) for x, y in batches(0, 3)]
    callbacks = [
        EarlyStopping("loss", patience=3, restore_best_weights=True),
        ModelCheckpoint("net", folder, CheckpointConfig(1)),
        *([StopAfter()] if is_first else []),
    ]
    model = make(network, lr=0.5 if is_first else 50.0)
    model.train(3, data, callbacks, resume=not is_first, progress=False)
    return np.array(bare.weight.data)


def test_best_weights_have_unwrapped_names(inline, tmp_path):
    results = {}
    for saved in (False, True):
        for resumed in (False, True):
            folder = tmp_path / f"{saved}{resumed}"
            inline.run(2, train_to_the_best, folder, saved, True)
            results[saved, resumed] = inline.run(2, train_to_the_best, folder, resumed, False)
    for got in results.values():
        for weights in got:
            np.testing.assert_allclose(weights, results[False, False][0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["bare", "ddp", "dp", "ddp of dp"])
def test_checkpoint_does_not_depend_on_wrapper(tmp_path, kind):
    def save():
        sp.manual_seed(0)
        bare = norm_net()
        network: nn.Module = DataParallel(bare, device_ids=[0, 1]) if "dp" in kind.split() else bare
        if "ddp" in kind:
            network = DistributedDataParallel(network)
        optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        network(X[:8]).sum().backward()
        optimizer.step()
        CheckpointManager(tmp_path / "net").save(1, model=network, optimizer=optimizer)
        save_checkpoint(network, tmp_path / "net.safetensors")
        return bare.state_dict()

    def load():
        network = norm_net()
        optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        CheckpointManager(tmp_path / "net").restore(model=network, optimizer=optimizer)
        sp.load_checkpoint(tmp_path / "net.safetensors", norm_net(), strict_load=True)
        return network.state_dict()

    (saved,) = sp.launch(save, world_size=1, transport="inline", devices_per_rank=2)
    (loaded,) = sp.launch(load, world_size=1, transport="inline")
    assert saved.keys() == loaded.keys()
    assert all(np.array_equal(saved[name], loaded[name]) for name in saved)


# --- mixed precision and copies -----------------------------------------------------------------------------


def test_wrapped_parameters_are_not_replaced(inline):
    def program(change: Any):
        network = DistributedDataParallel(nn.Linear(6, 3))
        with refused(InputError):
            change(network)
        return network.module.weight.dtype == np.float32

    assert all(inline.run(2, program, lambda network: make(network, amp_level="O3")))
    assert all(inline.run(2, program, lambda network: nn.auto_mixed_precision(network, "O3")))
    assert all(inline.run(2, program, lambda network: nn.auto_mixed_precision(network.module, "O3")))


def test_copied_wrapper_keeps_additions(inline):
    def program():
        network = DistributedDataParallel(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout()))
        nn.auto_mixed_precision(network, "O2")
        network.register_forward_hook(lambda module, inputs, y: y * 2)
        network.note, network.scale = {"name": "a"}, nn.Parameter([3.0])
        network.register_buffer("seen", np.zeros(1), persistent=False)
        network.module[1].eval()
        twin = copy.deepcopy(network)
        assert [m.training for m in twin.modules()] == [m.training for m in network.modules()]
        assert twin.note == {"name": "a"}
        assert twin.note is not network.note
        assert twin.scale is not network.scale
        assert twin.state_dict().keys() == network.state_dict().keys()
        network.eval()
        twin.eval()
        before = network(X[:4])
        twin.module[0].weight.data[...] = 0  # its own, also in its own forward
        twin.module[0].bias.data[...] = 0
        assert before.dtype == np.float32
        assert twin(X[:4]).dtype == np.float32
        assert np.array_equal(network(X[:4]).data, before.data)
        assert not np.array_equal(twin(X[:4]).data, before.data)
        twin.module[0].load_state_dict(network.module[0].state_dict())
        assert np.array_equal(twin(X[:4]).data, before.data)

    inline.run(2, program)


# --- ranks that save together -------------------------------------------------------------------------------


def data(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [(random.normal(size=(8, 4)).astype("f"), random.normal(size=(8, 2)).astype("f")) for _ in range(3)]


def train_group(directory: Path, epochs: int, resume: bool) -> float:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another one, all with one folder."""
    which = sp.get_rank() // 2
    group = [sp.new_group([0, 1]), sp.new_group([2, 3])][which]
    sp.manual_seed(which + 10 * resume)  # the initial weights of a resumed one do not matter
    net = nn.Linear(4, 2)
    wrapped = DistributedDataParallel(net, process_group=group)
    model = sp.Model(wrapped, nn.MSELoss(), sp.optim.SGD(wrapped.parameters(), lr=0.1))
    model.train(epochs, data(which), [sp.ModelCheckpoint(directory=directory)], progress=False, resume=resume)
    return float(net.weight.data.sum())


def test_groups_in_one_folder_resume_their_weights(tmp_path: Path) -> None:
    straight = list(sp.launch(train_group, (tmp_path / "a", 3, False), world_size=4, transport="inline"))
    sp.launch(train_group, (tmp_path / "b", 2, False), world_size=4, transport="inline")
    resumed = list(sp.launch(train_group, (tmp_path / "b", 3, True), world_size=4, transport="inline"))
    assert resumed == straight
    assert straight[0] == straight[1] != straight[2] == straight[3]
    assert sorted(p.name for p in (tmp_path / "b/CKP").iterdir()) == ["ranks_0_1", "ranks_2_3"]


class Cut(nn.Module):
    """Two layers, cut over "tp" if a layout is given."""

    def __init__(self, layout: Any) -> None:
        super().__init__()
        self.body, self.layout = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), layout

    def forward(self, x: Any) -> Any:
        return self.body(x if self.layout is None else distribute_tensor(x, self.layout("dp", "None")))


class Square(nn.Module):
    def forward(self, y: Any, target: Any) -> Any:
        return (y**2).mean()


def train_cut(directory: Path, epochs: int, resume: bool) -> list[float]:
    layout = Layout((2, 2), ("dp", "tp"))
    groups = [sp.new_group([0, 2]), sp.new_group([1, 3])]
    sp.manual_seed(int(resume))
    net = Cut(layout)
    places = {"*.0.weight": ("tp", "None"), "*.0.bias": ("tp",), "*.2.weight": ("None", "tp")}
    distribute_module(net, layout, places)
    wrapped = DistributedDataParallel(net, process_group=groups[sp.get_rank() % 2])
    model = sp.Model(wrapped, Square(), sp.optim.SGD(wrapped.parameters(), lr=0.1))
    model.train(epochs, data(0), [sp.ModelCheckpoint(directory=directory)], progress=False, resume=resume)
    return [float(p.full_tensor().numpy().sum()) for p in net.parameters()]


def test_slices_are_saved_by_all_their_ranks(tmp_path: Path) -> None:
    straight = list(sp.launch(train_cut, (tmp_path / "a", 3, False), world_size=4, transport="inline"))
    sp.launch(train_cut, (tmp_path / "b", 2, False), world_size=4, transport="inline")
    assert list(sp.launch(train_cut, (tmp_path / "b", 3, True), world_size=4, transport="inline")) == straight
    whole = Cut(None)
    sp.CheckpointManager(tmp_path / "a" / "CKP").restore(model=whole)
    np.testing.assert_allclose([p.numpy().sum() for p in whole.parameters()], straight[0], rtol=1e-6)
