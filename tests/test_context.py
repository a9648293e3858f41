"""The auto-parallel context: MindSpore's names and defaults, for each rank and each run."""

from __future__ import annotations

import pytest

import simparallel as sp
from simparallel.errors import InputError, RunFailedError

DEFAULTS = {
    "parallel_mode": "stand_alone", "gradients_mean": False, "parameter_broadcast": False, "device_num": 1,
    "global_rank": 0,
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
        **DEFAULTS, "parallel_mode": "data_parallel", "gradients_mean": True, "parameter_broadcast": True
    }  # fmt: skip
    sp.reset_auto_parallel_context()
    assert settings() == DEFAULTS


def test_every_rank_and_every_run_has_its_own():
    def program():
        before = settings()
        if sp.get_rank() == 1:
            sp.set_auto_parallel_context(parallel_mode="data_parallel")
        sp.barrier()
        return before, sp.get_auto_parallel_context("parallel_mode")

    sp.set_auto_parallel_context(gradients_mean=True)  # of this thread, not of the ranks
    with sp.Cluster(2, transport="inline") as cluster:
        for _ in range(2):
            (first, mode0), (second, mode1) = cluster.run(program)
            assert first == {**DEFAULTS, "device_num": 2}
            assert second == {**DEFAULTS, "device_num": 2, "global_rank": 1}
            assert (mode0, mode1) == ("stand_alone", "data_parallel")


@pytest.mark.process
def test_a_warm_process_begins_afresh():
    def program():
        before = sp.get_auto_parallel_context("parallel_mode")
        sp.set_auto_parallel_context(parallel_mode="data_parallel")
        return before

    with sp.Cluster(1, echo=False) as cluster:
        assert [cluster.run(program)[0] for _ in range(2)] == ["stand_alone"] * 2


@pytest.mark.parametrize("use", ["Model", "DistributedGradReducer"])
@pytest.mark.parametrize(("name", "value"), [("device_num", 8), ("global_rank", 3)])
def test_numbers_have_to_be_those_of_the_run(use, name, value):
    def program():
        sp.set_auto_parallel_context(device_num=2, global_rank=sp.get_rank())
        make()  # this is right
        sp.set_auto_parallel_context(**{name: value})
        make()

    def make():
        linear = sp.nn.Linear(2, 2)
        sp.Model(linear) if use == "Model" else sp.parallel.DistributedGradReducer(linear.parameters())

    with pytest.raises(RunFailedError, match=f"{use}: {name}={value} was set, but it is"):
        sp.launch(program, world_size=2, transport="inline")


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel", "semi_auto", "auto"])
def test_modes_that_cut_operators_say_what_they_need(mode):
    with pytest.raises(InputError, match=r"operator-level parallelism: .*AutoParallel"):
        sp.set_auto_parallel_context(gradients_mean=True, parallel_mode=mode)
    assert settings() == DEFAULTS


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: sp.set_auto_parallel_context(parallel_mode="data"),
            "'data' is not one of stand_alone, data_parallel",
        ),
        (lambda: sp.set_auto_parallel_context(parallel_mode=3), "parallel_mode=3"),
        (lambda: sp.set_auto_parallel_context(gradients_mean=1), "gradients_mean=1"),
        (lambda: sp.set_auto_parallel_context(device_num=0), "device_num=0"),
        (lambda: sp.set_auto_parallel_context(global_rank=-1), "global_rank=-1"),
        (lambda: sp.set_auto_parallel_context(mirror_mean=True), "gradients_mean now"),
        (lambda: sp.get_auto_parallel_context("mode"), "no setting 'mode'"),
        (lambda: sp.set_context(mode=2), "mode=2"),
        (lambda: sp.set_context(device_target="TPU"), "TPU"),
        (lambda: sp.set_context(device_id="0"), "device_id"),
    ],
)
def test_what_is_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()
    assert settings() == DEFAULTS


def test_what_a_script_says_first_is_taken():
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
            with pytest.raises(InputError, match="rank 1 is not a member"):
                sp.get_rank(group)
        return sp.get_group_size(), sp.get_group_size(group), sp.get_rank(group) if inside else None

    assert list(sp.launch(program, world_size=3, transport="inline")) == [(3, 2, 1), (3, 2, None), (3, 2, 0)]
