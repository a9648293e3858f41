"""The auto-parallel context: MindSpore's names and defaults, for each rank and each run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.clock.notes import forget_notes
from simparallel.errors import DeviceOutOfMemoryError, InputError, RunFailedError
from simparallel.machine.cluster import describe
from simparallel.world.context import (
    get_algo_parameters,
    get_context,
    get_cost_model_context,
    set_algo_parameters,
    set_context,
    set_cost_model_context,
)

DEFAULTS = {
    "parallel_mode": "stand_alone", "gradients_mean": False, "parameter_broadcast": False, "device_num": 1,
    "global_rank": 0, "pipeline_stages": 1,
}  # fmt: skip


def settings() -> dict[str, object]:
    return {name: sp.get_auto_parallel_context(name) for name in DEFAULTS}


@pytest.fixture(autouse=True)
def _fresh():
    sp.reset_auto_parallel_context()
    yield
    sp.reset_auto_parallel_context()


def test_settings_are_kept_until_reset():
    assert settings() == DEFAULTS
    sp.set_auto_parallel_context(parallel_mode=sp.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    sp.set_auto_parallel_context(parameter_broadcast=True)
    assert settings() == {
        **DEFAULTS,
        "parallel_mode": "data_parallel",
        "gradients_mean": True,
        "parameter_broadcast": True,
    }
    sp.reset_auto_parallel_context()
    assert settings() == DEFAULTS


def test_context_is_per_rank_and_run():
    def program():
        before = settings()
        if sp.get_rank() == 1:
            sp.set_auto_parallel_context(parallel_mode="data_parallel")
        sp.barrier()
        return before, sp.get_auto_parallel_context("parallel_mode")

    sp.set_auto_parallel_context(gradients_mean=True)  # this thread's, not the ranks'
    with sp.Cluster(2, transport="inline") as cluster:
        for _ in range(2):
            (first, mode0), (second, mode1) = cluster.run(program)
            assert first == {**DEFAULTS, "device_num": 2}
            assert second == {**DEFAULTS, "device_num": 2, "global_rank": 1}
            assert (mode0, mode1) == ("stand_alone", "data_parallel")


@pytest.mark.process
def test_warm_process_starts_with_defaults():
    def program():
        before = sp.get_auto_parallel_context("parallel_mode")
        sp.set_auto_parallel_context(parallel_mode="data_parallel")
        return before

    with sp.Cluster(1, echo=False) as cluster:
        assert [cluster.run(program)[0] for _ in range(2)] == ["stand_alone"] * 2


@pytest.mark.parametrize("use", ["Model", "DistributedGradReducer"])
@pytest.mark.parametrize(("name", "value"), [("device_num", 8), ("global_rank", 3)])
def test_numbers_must_match_the_run(use, name, value):
    def program():
        sp.set_auto_parallel_context(device_num=2, global_rank=sp.get_rank())
        make()  # legal
        sp.set_auto_parallel_context(**{name: value})
        make()

    def make():
        linear = sp.nn.Linear(2, 2)
        sp.Model(linear) if use == "Model" else sp.parallel.DistributedGradReducer(linear.parameters())

    with refused(RunFailedError):
        sp.launch(program, world_size=2, transport="inline")


def train_cut(mode, dataset_strategy):
    """Train two epochs of a Model in this mode; return losses, accuracy, a prediction and the weights."""
    sp.set_auto_parallel_context(parallel_mode=mode, dataset_strategy=dataset_strategy)
    rank, size = (0, 1) if dataset_strategy == "full_batch" else (sp.get_rank(), sp.get_world_size())
    rng = np.random.default_rng(3)
    x, labels = rng.integers(-2, 3, (8, 6)).astype(np.float32), rng.integers(0, 4, 8)
    batches = [(x[part::2][rank::size], labels[part::2][rank::size]) for part in range(2)]
    network = sp.nn.Sequential(sp.nn.Linear(6, 8), sp.nn.ReLU(), sp.nn.Linear(8, 4))
    network[0].weight.data[...] = rng.integers(-2, 3, (8, 6))
    optimizer = sp.optim.SGD(network.parameters(), 0.125)
    model = sp.Model(network, sp.nn.CrossEntropyLoss(), optimizer, {"accuracy", "loss"})
    losses = model.train(2, batches, progress=False).history["loss"]
    weights = [p.full_tensor().numpy() for p in network.parameters()]
    return losses, model.eval(batches), model.predict(sp.Tensor(x[:4])).numpy(), weights


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("dataset_strategy", ["data_parallel", "full_batch"])
def test_model_cuts_operators(mode, dataset_strategy):
    """Two ranks that cut every operator train, evaluate and predict as one device does."""
    one = sp.launch(train_cut, ("stand_alone", "full_batch"), world_size=1, transport="inline")[0]
    for found in sp.launch(train_cut, (mode, dataset_strategy), world_size=2, transport="inline"):
        assert found[0] == pytest.approx(one[0], rel=1e-5)
        assert found[1] == pytest.approx(one[1], rel=1e-5)
        for a, b in zip([found[2], *found[3]], [one[2], *one[3]], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_boost_needs_whole_operators():
    sp.set_auto_parallel_context(parallel_mode="semi_auto")
    network = sp.nn.Linear(2, 2)
    optimizer = sp.optim.SGD(network.parameters(), 0.1)
    boost = {"boost": {"mode": "manual", "grad_freeze": True}}
    with refused(InputError):
        sp.Model(network, sp.nn.CrossEntropyLoss(), optimizer, boost_level="O1", boost_config_dict=boost)


def made_too_early(use, mode="data_parallel"):
    """Set the mode after the Model or reducer was made, and use it; return its weight before and after."""
    network = sp.nn.Linear(2, 2)
    before = network.weight.numpy().copy()
    if use == "Model":
        model = sp.Model(network, sp.nn.CrossEntropyLoss(), sp.optim.SGD(network.parameters(), 0.1))
    else:
        reducer = sp.parallel.DistributedGradReducer(network.parameters())
    sp.set_auto_parallel_context(parallel_mode=mode, gradients_mean=mode == "data_parallel")
    with refused(InputError):
        if use == "Model":
            model.train(1, [(np.ones((2, 2), np.float32), [0, 1])], progress=False)
        else:
            reducer([p.data for p in network.parameters()])
    return before, network.weight.numpy()


@pytest.mark.parametrize("use", ["Model", "DistributedGradReducer"])
def test_context_comes_before_what_reads_it(use):
    """MindSpore ignores settings that come after the Model: its ranks train apart."""
    before, after = made_too_early(use)
    np.testing.assert_array_equal(before, after)


def test_context_may_be_set_for_the_next_model():
    """The same settings again, settings that are read at the start of training, and a second Model are no mistakes."""
    batches = [(np.ones((2, 2), np.float32), [0, 1])]
    for mode in ("stand_alone", "data_parallel"):
        sp.set_auto_parallel_context(parallel_mode=mode)
        network = sp.nn.Linear(2, 2)
        model = sp.Model(network, sp.nn.CrossEntropyLoss(), sp.optim.SGD(network.parameters(), 0.1))
        sp.set_auto_parallel_context(parallel_mode=mode, parameter_broadcast=True)
        model.train(1, batches, progress=False)


def test_changes_of_another_run_are_told_so():
    """A Model that a rank gets from outside was made with the settings of outside."""
    sp.set_auto_parallel_context(parallel_mode="data_parallel")
    network = sp.nn.Linear(2, 2)
    model = sp.Model(network, sp.nn.CrossEntropyLoss(), sp.optim.SGD(network.parameters(), 0.1))

    def program():
        with refused(InputError):
            model.train(1, [(np.ones((2, 2), np.float32), [0, 1])], progress=False)

    sp.launch(program, world_size=1, transport="inline")


@pytest.mark.parametrize("first", ["mode", "parallel_mode"])
def test_pynative_mode_cuts_no_operators(first, capsys):
    """MindSpore refuses it, too. Data parallelism there is a matter of the version: one note."""

    def call(name, parallel_mode):
        if name == "mode":
            sp.set_context(mode=sp.PYNATIVE_MODE)
        else:
            sp.set_auto_parallel_context(parallel_mode=parallel_mode)

    forget_notes()
    second = "mode" if first == "parallel_mode" else "parallel_mode"
    try:
        call(first, "data_parallel")
        call(second, "data_parallel")
        call(second, "data_parallel")
        assert capsys.readouterr().err.count("PYNATIVE_MODE") == 1
        sp.set_context(mode=sp.GRAPH_MODE)
        call(first, "semi_auto_parallel")
        with refused(InputError):
            call(second, "semi_auto_parallel")
        assert sp.get_auto_parallel_context("parallel_mode") == (
            "semi_auto_parallel" if first == "parallel_mode" else "data_parallel"
        )
    finally:
        sp.set_context(mode=sp.GRAPH_MODE)


def test_max_device_memory_limits_the_device():
    def program():
        sp.set_context(max_device_memory="1MB")
        with refused(InputError):
            sp.set_context(mode=sp.PYNATIVE_MODE, max_device_memory="much")
        assert (get_context("max_device_memory"), get_context("mode")) == ("1MB", sp.PYNATIVE_MODE)
        with refused(DeviceOutOfMemoryError):
            sp.nn.Linear(1000, 1000)

    sp.launch(program, world_size=1, transport="inline")


def test_earlier_names_mean_the_same():
    sp.set_auto_parallel_context(mirror_mean=True, paramater_broadcast=True, full_batch=True)
    assert sp.get_auto_parallel_context("gradients_mean") is sp.get_auto_parallel_context("mirror_mean") is True
    assert sp.get_auto_parallel_context("parameter_broadcast") is True
    assert sp.get_auto_parallel_context("dataset_strategy") == "full_batch"


def test_data_parallel_mode_broadcasts_parameters():
    assert sp.get_auto_parallel_context("parameter_broadcast") is False
    sp.set_auto_parallel_context(parallel_mode="data_parallel")
    assert sp.get_auto_parallel_context("parameter_broadcast") is True
    sp.set_auto_parallel_context(parameter_broadcast=False)
    assert sp.get_auto_parallel_context("parameter_broadcast") is False


def test_unused_settings_are_noted_once(capsys):
    forget_notes()
    for _ in range(2):
        sp.set_context(enable_hccl=True)
        sp.set_auto_parallel_context(enable_alltoall=True)
        set_algo_parameters(fully_use_devices=True, algo_phase=1)
        set_cost_model_context(costmodel_beta=2.0, multi_subgraphs=True)
    assert get_algo_parameters("fully_use_devices") is True
    assert get_cost_model_context("costmodel_beta") == 2.0
    assert get_context("enable_hccl") is True
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 4
    assert "fully_use_devices" not in notes[2]
    assert all(note.startswith("simparallel: note: ") for note in notes)


def test_device_target_describes_the_device():
    """The program chooses the device that prices its work, unless the launcher did."""

    def program():
        set_context(device_target="Ascend")
        sp.all_reduce(np.ones(1000, np.float32))

    def used(**settings):
        return sp.launch(program, world_size=2, transport="inline", **settings).trace

    assert used().cluster.device.name == "ascend910"
    assert used().cluster == replace(describe(2, "ascend910"), is_assumed=True)
    assert used(device="a100").cluster.device.name == "a100"

    def chosen_twice():
        set_context(device_target="Ascend")
        set_context(device_target="GPU")

    assert sp.launch(chosen_twice, world_size=2, transport="inline").trace.cluster.device.name == "a100"
    assert used().events[0].sim_end_ps != used(device="a100").events[0].sim_end_ps


def test_rank_has_one_device():
    """Among several ranks, the local rank names the rank's device; other ranks' devices are refused."""

    def program():
        rank = sp.get_rank()
        x = sp.Tensor([1.0]).to(sp.device("sim", rank))
        with refused(InputError):
            sp.Tensor([1.0], device=f"sim:{rank + 1}")
        with refused(InputError):
            x.cuda(rank + 1)
        return str(x.device), str(x.cuda(rank).device), str(x.cuda().cpu().device)

    assert list(sp.launch(program, world_size=2, transport="inline")) == [("sim:0",) * 3] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: sp.set_auto_parallel_context(parallel_mode="data"),
        lambda: sp.set_auto_parallel_context(parallel_mode=3),
        lambda: sp.set_auto_parallel_context(gradients_mean=1),
        lambda: sp.set_auto_parallel_context(device_num=0),
        lambda: sp.set_auto_parallel_context(global_rank=-1),
        lambda: sp.set_auto_parallel_context(gradient_mean=True),
        lambda: sp.set_auto_parallel_context(pipeline_stages=0),
        lambda: sp.set_auto_parallel_context(pipeline_stages=None),
        lambda: sp.set_auto_parallel_context(pipeline_config={"pipeline_scheduler": "seqpipe"}),
        lambda: sp.set_auto_parallel_context(pipeline_config={"interleave": True}),
        lambda: sp.set_auto_parallel_context(pipeline_config="1f1b"),
        lambda: sp.set_context(enable_hcl=True),
        lambda: get_context("nothing"),
        lambda: sp.get_auto_parallel_context("mode"),
        lambda: sp.set_context(mode=2),
        lambda: sp.set_context(device_target="TPU"),
        lambda: sp.set_context(device_id="0"),
    ],
)
def test_bad_settings_are_refused(call):
    with refused(InputError):
        call()
    assert settings() == DEFAULTS


def test_mindspore_script_preamble_works():
    sp.set_context(mode=sp.GRAPH_MODE)
    sp.set_context(mode=sp.PYNATIVE_MODE, device_target="Ascend", device_id=0)
    sp.set_seed(3)
    first = sp.nn.Linear(2, 2).weight.numpy().copy()
    sp.manual_seed(3)
    assert (sp.nn.Linear(2, 2).weight.numpy() == first).all()
    sp.manual_seed(0)


def test_groups_have_ranks_and_sizes():
    def program():
        group = sp.new_group([2, 0])
        inside = sp.get_rank() in (0, 2)
        if not inside:
            with refused(InputError):
                sp.get_rank(group)
        return sp.get_group_size(), sp.get_group_size(group), sp.get_rank(group) if inside else None

    assert list(sp.launch(program, world_size=3, transport="inline")) == [(3, 2, 1), (3, 2, None), (3, 2, 0)]
