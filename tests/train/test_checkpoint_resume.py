"""A stopped training resumes with the same results, on the same number of ranks or another."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import safetensors.numpy
from crashing_files import HookedFiles
from hypothesis import given, settings, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import backend, nn, optim
from simparallel.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset
from simparallel.errors import CheckpointError, StateDictError
from simparallel.parallel import DistributedDataParallel
from simparallel.train import CheckpointManager
from simparallel.train.checkpoint import CheckpointReader, manager as manager_module

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# --- a whole training -------------------------------------------------------------------------------

SAMPLES, BATCH = 23, 3  # on 1 rank the last batch is smaller, on 2 a sample counts twice


class Training:
    """All parts with a state: dropout, running statistics, moments, rates, scale, order, epoch."""

    def __init__(self, directory: str, samples: int = SAMPLES) -> None:
        sp.init()
        sp.manual_seed(3)
        numbers = np.random.default_rng(0).normal(size=(samples, 4)).astype(np.float32)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 1)
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = optim.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = optim.GradScaler(optim.DynamicLossScaleManager(64.0, scale_window=3))
        sampler = DistributedSampler(TensorDataset(numbers), seed=7)
        self.loader = DataLoader(TensorDataset(numbers), BATCH, sampler=sampler, transform=self.augment)
        self.manager = CheckpointManager(directory, files=HookedFiles())
        self.losses: list[float] = []
        self.parts = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "sampler": self.loader,
            "scaler": self.scaler,
        }  # fmt: skip

    def augment(self, x: Any) -> Any:
        return x * np.float32(1.5)

    def run(self, epochs: int, save_at: int | None = None, stop_at: int | None = None) -> None:
        for epoch in range(self.loader.epoch, epochs):
            self.loader.sampler.set_epoch(epoch)
            for (x,) in self.loader:
                loss = (self.model(x) ** 2).mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.losses.append(loss.item())
                if len(self.losses) == save_at:
                    self.manager.save(save_at, **self.parts, extra={"losses": self.losses})
                if len(self.losses) == stop_at:
                    return

    def everything(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {**states, "random": backend.random_state.state_dict(), "losses": self.losses}


def without_a_stop(directory: str, save_at: int) -> dict[str, Any]:
    training = Training(directory)
    training.run(epochs=3, save_at=save_at)
    return training.everything()


def stopped_and_resumed(directory: str) -> dict[str, Any]:
    training = Training(directory)
    training.run(epochs=1, stop_at=2)  # a state beyond the saved one
    restored = training.manager.restore(**training.parts)
    assert restored.step == len(restored.extra["losses"])
    training.losses = restored.extra["losses"]
    training.run(epochs=3)
    return training.everything()


def equal(left: Any, right: Any) -> None:
    np.testing.assert_equal(left, right)


@pytest.mark.parametrize("save_at", [1, 3, 4, 6, 12])  # of 4 steps an epoch
@pytest.mark.parametrize("size", [1, 2])
def test_resumed_training_ends_with_the_same_bits(tmp_path, size, save_at):
    check_resuming(tmp_path, size, save_at * 2 // size, "inline")  # on one rank of 8 steps an epoch


@pytest.mark.process
def test_resumed_processes_end_with_the_same_bits(tmp_path):
    check_resuming(tmp_path, 2, 3, "shm")


def check_resuming(directory: Path, size: int, save_at: int, transport: str) -> None:
    with sp.Cluster(size, transport=transport, echo=False) as cluster:
        expected = cluster.run(without_a_stop, str(directory), save_at)
        found = cluster.run(stopped_and_resumed, str(directory))

    for rank in range(size):
        own = expected[rank]["losses"]
        assert len(own) == (12 if size == 2 else 24)
        # `extra` is rank 0's.
        assert found[rank]["losses"][save_at:] == own[save_at:]
        for part in ("model", "optimizer", "scheduler", "sampler", "scaler", "random"):
            equal(found[rank][part], expected[rank][part])


def test_bits_differ_without_random_state(tmp_path):
    """Red control: dropout takes part."""

    def resumed(directory: str) -> list[float]:
        training = Training(directory)
        training.run(epochs=1, stop_at=2)
        training.manager.restore(**training.parts, random=False)
        training.run(epochs=3)
        return training.losses[2:]

    (expected,) = sp.launch(without_a_stop, (str(tmp_path), 5), transport="inline", world_size=1, echo=False)
    (found,) = sp.launch(resumed, (str(tmp_path),), transport="inline", world_size=1, echo=False)

    assert len(found) == len(expected["losses"][5:])
    assert found != expected["losses"][5:]


def one_step(directory: str, restore: bool) -> dict[str, Any]:
    training = Training(directory)
    if restore:
        training.manager.restore(**training.parts)
    else:
        training.run(epochs=1, save_at=2, stop_at=2)
    seen = [x.numpy()[:, 0].tolist() for (x,) in training.loader] if restore else []
    return {**training.everything(), "seen": sum(seen, [])}


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_training_of_n_ranks_resumes_on_any_m(tmp_path, saved):
    before = sp.launch(one_step, (str(tmp_path), False), world_size=saved, transport="inline", echo=False)
    order = 1.5 * np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32)[:, 0]
    left = backend.random_permutation(7, "sampler", SAMPLES)[2 * BATCH * saved :]
    for loaded in (1, 2, 3, 5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            after = sp.launch(one_step, (str(tmp_path), True), world_size=loaded, transport="inline", echo=False)

        for part in ("optimizer", "scheduler", "scaler", "random"):
            equal([rank[part] for rank in after], [before[0][part]] * loaded)
        own = before if loaded == saved else before[:1] * loaded  # running statistics are each rank's own
        equal([rank["model"] for rank in after], [rank["model"] for rank in own])
        told = "all ranks take model.1.running_mean"
        assert [told in str(warning.message) for warning in caught] == [True] * (saved not in (1, loaded))

        each = -(-len(left) // loaded)
        padded = np.resize(np.concatenate([left, backend.random_permutation(7, "sampler", SAMPLES)]), each * loaded)
        equal([rank["seen"] for rank in after], [order[padded[rank::loaded]].tolist() for rank in range(loaded)])


def test_rank_specific_data_needs_the_same_ranks(tmp_path):
    """Plain data that differs between ranks cannot be loaded on another number of ranks."""

    class Part:
        def __init__(self) -> None:
            self.state = {"rank": sp.get_rank()}

        def state_dict(self) -> dict:
            return self.state

        def load_state_dict(self, state: dict) -> None:
            self.state = dict(state)

    def program(directory: str, save: bool) -> Any:
        sp.init()
        manager, part = CheckpointManager(directory, files=HookedFiles()), Part()
        if save:
            return manager.save(1, sampler=part)
        part.state = {"rank": -1}
        try:
            manager.restore(sampler=part)
        except CheckpointError as error:
            return str(error), part.state
        return part.state

    sp.launch(program, (str(tmp_path), True), world_size=2, transport="inline", echo=False)

    same = sp.launch(program, (str(tmp_path), False), world_size=2, transport="inline", echo=False)
    assert list(same) == [{"rank": 0}, {"rank": 1}]
    other = sp.launch(program, (str(tmp_path), False), world_size=3, transport="inline", echo=False)
    assert {text for text, _ in other} == {other[0][0]}
    assert "2 ranks saved different values, and these are 3 ranks: sampler cannot be assigned to them" in other[0][0]
    assert [state for _, state in other] == [{"rank": -1}] * 3


# --- all or nothing ---------------------------------------------------------------------------------


def misfit(directory: str, rank: int, what: str) -> tuple[str, bool]:
    """Restore where one rank cannot; return the error's text, and whether anything changed."""
    training = Training(directory)
    training.run(epochs=1, stop_at=1)
    mine = sp.get_rank() == rank
    parts = dict(training.parts)
    if mine and what == "shape":
        parts["model"] = nn.Linear(9, 9)
    elif mine and what == "optimizer":
        parts["optimizer"] = optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
    elif mine and what == "sampler":
        parts["sampler"] = DataLoader(TensorDataset(np.zeros((5, 1))), 2)
    elif mine and what == "file":
        training.manager.path(2).joinpath("manifest.json").unlink()
    elif mine and what == "late":  # the model itself, after all other parts succeeded
        parts["model"] = Refuses(training.model.module)
    elif mine and what == "no state":
        parts["scaler"] = object()
    before = training.everything()
    try:
        training.manager.restore(2, **parts)
    except CheckpointError as error:
        equal(training.everything(), before)
        return str(error), error.path
    return "", None


class Refuses(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def state_dict(self) -> dict:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        if not np.array_equal(state["0.weight"], self.inner.state_dict()["0.weight"]):
            raise MemoryError("no room")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["shape", "optimizer", "sampler", "file", "late", "no state"])
def test_failed_restore_of_one_rank_raises_on_all(tmp_path, rank, what):
    """Nothing is changed on any rank."""
    sp.launch(one_step, (str(tmp_path), False), world_size=2, transport="inline", echo=False)
    results = sp.launch(misfit, (str(tmp_path), rank, what), world_size=2, transport="inline", echo=False)

    assert len(set(results)) == 1
    text, path = results[0]
    with refused(CheckpointError):
        raise CheckpointError(text)
    assert text.startswith(f"rank {rank}: ") or what == "file"
    assert what == "no state" or str(tmp_path) in path


@pytest.mark.process
def test_processes_restore_together_or_not_at_all(tmp_path):
    with sp.Cluster(2, echo=False) as cluster:
        cluster.run(one_step, str(tmp_path), False)
        results = cluster.run(misfit, str(tmp_path), 1, "shape")

    assert results[0] == results[1]
    assert results[0][0].startswith("rank 1: ")


def test_damaged_checkpoint_falls_back_with_warning(tmp_path):
    """The previous checkpoint is restored instead."""
    manager, model = CheckpointManager(tmp_path, files=HookedFiles()), nn.Linear(2, 1)
    manager.save(1, model=model)
    before = model.state_dict()
    model.weight.data += 1
    damaged = manager.save(2, model=model) / "rank_0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])

    with pytest.warns(RuntimeWarning, match=r"rank_0\.safetensors: it has .* Going back to .*ckpt-000001"):
        assert manager.restore(model=model).step == 1
    equal(model.state_dict(), before)
    with refused(CheckpointError):
        manager.restore(2, model=model)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("step", "found"), [(None, 3), (1, 1)])
def test_open_skips_removed_checkpoint(tmp_path, monkeypatch, ranks, step, found):
    """A concurrent training saves after the reader has listed the directory, and keeps only its newest checkpoint."""
    folder, model = tmp_path / "run", nn.Linear(2, 1)
    newer = folder / f"ckpt-{found:06d}-0002"

    class Beside(CheckpointReader):
        def __init__(self, path: Any, rank: int, *args: Any) -> None:
            if rank == 0 and path != newer:
                made.rename(newer)
                shutil.rmtree(path)
            super().__init__(path, rank, *args)

    def program(how: str) -> int:
        manager = CheckpointManager(folder)
        if how == "open":
            with manager.open(step) as reader:
                return reader.step
        return manager.restore(step, model=nn.Linear(2, 1)).step

    monkeypatch.setattr(manager_module, "CheckpointReader", Beside)
    for how in ("restore", "open") if ranks == 1 else ("restore",):
        shutil.rmtree(folder, ignore_errors=True)
        CheckpointManager(folder, files=HookedFiles()).save(1, model=model)
        made = CheckpointManager(tmp_path / "beside", files=HookedFiles()).save(found, model=model)
        assert list(sp.launch(program, (how,), world_size=ranks, transport="inline")) == [found] * ranks


def test_directory_emptied_during_restore_raises(tmp_path, monkeypatch):
    manager, model = CheckpointManager(tmp_path, files=HookedFiles()), nn.Linear(2, 1)
    path, read_states = manager.save(1, model=model), manager_module.read_states

    def remove_and_read(*args: Any) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        return read_states(*args)

    monkeypatch.setattr(manager_module, "read_states", remove_and_read)
    with refused(CheckpointError):
        manager.restore(model=model)


def test_missing_part_raises_without_fallback(tmp_path):
    manager, model = CheckpointManager(tmp_path, files=HookedFiles()), nn.Linear(2, 1)
    manager.save(1, model=model, scheduler=SequentialSampler([1]))
    manager.save(2, model=model)

    with refused(CheckpointError):
        manager.restore(model=model, scheduler=SequentialSampler([1]))


# --- kept checkpoints -------------------------------------------------------------------------------


def test_repeated_step_replaces_older_save(tmp_path):
    """The last `keep` saves stay, in the order of saving; a repeated step replaces its older save."""
    manager = CheckpointManager(tmp_path / "new" / "run", keep=2, files=HookedFiles())
    assert (manager.steps(), manager.latest()) == ([], None)
    for step, steps in ((10, [10]), (30, [10, 30]), (20, [20, 30]), (20, [20, 30]), (5, [5, 20])):
        manager.save(step, extra=len(steps))
        assert (manager.steps(), manager.latest()) == (steps, step)

    assert manager.restore().step == 5
    with refused(CheckpointError):
        manager.restore(30)
    assert len(list(manager.directory.iterdir())) == 2
    assert (tmp_path / "new" / "run").stat().st_mode & 0o777 == 0o700


def test_other_files_are_left_alone(tmp_path):
    for name in ("ckpt-000007-0001", "notes.txt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "ckpt-000008-0001").symlink_to(tmp_path)
    (tmp_path / "ckpt-000001-0001.tmp-00").mkdir()
    manager = CheckpointManager(tmp_path, keep=1, files=HookedFiles())

    assert manager.steps() == []
    manager.save(3)
    assert manager.steps() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ckpt-000003-0001",
        "ckpt-000007-0001",
        "ckpt-000008-0001",
        "notes.txt",
    ]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 10**18])
def test_bad_step_is_refused(tmp_path, step):
    with refused(CheckpointError):
        CheckpointManager(tmp_path).save(step)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_bad_number_to_keep_is_refused(tmp_path, keep):
    with refused(CheckpointError):
        CheckpointManager(tmp_path, keep)


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    manager, array = CheckpointManager("~/run", files=HookedFiles()), np.arange(3)
    assert manager.save(1, extra="saved").parent == tmp_path / "run"
    assert CheckpointReader("~/run/ckpt-000001-0001").extra == "saved"
    sp.save(array, Path("~/plain"))
    sp.save_checkpoint({"x": array}, "~/file")
    equal([sp.load("~/plain"), sp.load_checkpoint("~/file")], [array, {"x": array}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "plain", "run"]


def test_group_saves_and_restores_separately(tmp_path):
    def program(directory: str) -> Any:
        sp.init()
        groups = [sp.new_group(ranks) for ranks in ((0, 2), (1,))]
        own = groups[sp.get_rank() % 2]
        manager = CheckpointManager(Path(directory, str(sp.get_rank() % 2)), files=HookedFiles())
        manager.save(sp.get_rank() % 2, extra=sp.get_rank(), group=own)
        with refused(CheckpointError):
            manager.restore(group=groups[1 - sp.get_rank() % 2])
        return manager.restore(group=own)[:2]

    results = sp.launch(program, (str(tmp_path),), world_size=3, transport="inline", echo=False)

    assert list(results) == [(0, 0), (1, 1), (0, 0)]


# --- samplers and loaders ---------------------------------------------------------------------------

samplers = st.sampled_from(["sequential", "random", "distributed"])


@pytest.mark.filterwarnings("ignore:DistributedSampler")  # the same epoch twice on purpose
@settings(max_examples=3 * settings.default.max_examples)
@given(samplers, st.integers(1, 20), st.integers(1, 6), st.booleans(), st.data())
def test_loader_resumes_inside_an_epoch(kind, size, batch, drop_last, data):
    dataset = TensorDataset(np.arange(size))
    make = {
        "sequential": SequentialSampler, "random": lambda d: RandomSampler(d, 5),
        "distributed": lambda d: DistributedSampler(d, 3, 1, seed=5),
    }[kind]  # fmt: skip
    batch = min(batch, len(make(dataset)))

    def loader() -> DataLoader:
        return DataLoader(dataset, batch, sampler=make(dataset), drop_last=drop_last)

    first = loader()
    total = 2 * len(first)
    stop = data.draw(st.integers(0, total))
    rest, state = [], first.state_dict()
    done = 0
    for _ in range(2):
        for (x,) in first:
            done += 1
            if done > stop:
                rest.append(x.numpy().tolist())
            elif done == stop:
                state = first.state_dict()

    second = loader()
    for _ in second:
        break  # left: the next loop is another epoch, unless a state is loaded
    second.load_state_dict(state)
    assert second.state_dict() == state
    found = [x.numpy().tolist() for _ in range(2) for (x,) in second]

    assert found[: len(rest)] == rest


def test_set_epoch_keeps_place_in_same_epoch():
    """`set_epoch` keeps the position only for the epoch that was saved."""
    dataset = TensorDataset(np.arange(8))
    loader = DataLoader(dataset, 2, sampler=DistributedSampler(dataset, shuffle=False))
    state = {**loader.state_dict(), "epoch": 4, "position": 6}

    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert [x.numpy().tolist() for (x,) in loader] == [[6, 7]]
    assert len(list(loader)) == 4
    loader.load_state_dict(state)
    loader.set_epoch(5)
    assert len(list(loader)) == 4


def test_loader_refuses_state_of_other_data():
    loader = DataLoader(TensorDataset(np.arange(8)), 2, shuffle=True)
    state = loader.state_dict()

    for other in (DataLoader(TensorDataset(np.arange(9)), 2, shuffle=True), DataLoader(TensorDataset(np.arange(8)), 2)):
        before = other.state_dict()
        with refused(StateDictError):
            other.load_state_dict(state)
        assert other.state_dict() == before
    with refused(StateDictError):
        loader.load_state_dict({"epoch": 1})


# --- single files -----------------------------------------------------------------------------------


def test_model_survives_one_file(tmp_path):
    model, path = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tmp_path / "deep" / "model.ckpt"
    expected = model.state_dict()
    sp.save_checkpoint(model, path)
    for parameter in model.parameters():
        parameter.data += 1

    found = sp.load_checkpoint(path, model)

    equal(model.state_dict(), expected)
    equal(found, expected)
    assert all(array.flags.writeable for array in found.values())
    equal(safetensors.numpy.load_file(path), expected)
    assert [entry.name for entry in path.parent.iterdir()] == ["model.ckpt"]


def test_renamed_note_is_damage(tmp_path):
    """Any flipped bit of the name of our entry: the value would be read as arrays without their tree."""
    path = tmp_path / "file"
    sp.save({"a": {"b": np.ones(2), "c": 3}}, path)
    content = path.read_bytes()
    place = content.index(b'"simparallel"') + 1
    for bit in range(8 * len("simparallel")):
        damaged = bytearray(content)
        damaged[place + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with refused(CheckpointError):
            sp.load(path)


def test_dict_and_foreign_files_are_read(tmp_path):
    arrays = {"a": np.arange(6, dtype=">i4").reshape(2, 3), "b": sp.Tensor([1.5]), "c": np.float32([[1, 2]]).T}
    sp.save_checkpoint(arrays, tmp_path / "ours")
    safetensors.numpy.save_file({"x": np.ones(3)}, tmp_path / "theirs")

    found = sp.load_checkpoint(tmp_path / "ours")
    equal(found, {"a": arrays["a"], "b": np.array([1.5], np.float32), "c": arrays["c"]})
    equal(sp.load_checkpoint(tmp_path / "theirs"), {"x": np.ones(3)})
    equal(sp.load(tmp_path / "theirs"), {"x": np.ones(3)})


def test_parameters_load_by_name_and_report_the_rest():
    model = nn.Linear(2, 1)
    weight = np.full((1, 2), 7, np.float32)

    assert sp.load_param_into_net(model, {"weight": weight, "other": weight}) == (["bias"], ["other"])
    equal(model.weight.numpy(), weight)
    before = model.state_dict()
    for wrong, strict in (({"weight": weight.T}, False), ({"weight": weight + 1}, True)):
        with refused(CheckpointError):
            sp.load_param_into_net(model, wrong, strict_load=strict)
        equal(model.state_dict(), before)


def test_renamed_layer_warns(tmp_path):
    class Net(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)
            setattr(self, name, nn.Linear(3, 3))

    saved, net, path = Net("body"), Net("backbone"), tmp_path / "file"
    before = net.state_dict()
    sp.save_checkpoint(saved, path)
    names = r"lacks backbone\.weight, backbone\.bias of Net; Net does not have its body\.bias, body\.weight\."
    with pytest.warns(RuntimeWarning, match=names):
        sp.load_checkpoint(path, net)
    equal(net.state_dict(), before | {f"head.{k}": v for k, v in saved.head.state_dict().items()})
    with refused(CheckpointError):
        sp.load_checkpoint(path, net, strict_load=True)
    sp.save_checkpoint({"weight": net.head.weight, "step": np.array(3)}, path)
    with pytest.warns(RuntimeWarning, match=r"it lacks bias of Linear; Linear does not have its step\."):
        sp.load_checkpoint(path, nn.Linear(3, 2))


def test_file_without_model_parameters_is_refused(tmp_path):
    sp.save_checkpoint({"a": np.ones(1)}, tmp_path / "file")

    with refused(CheckpointError):
        sp.load_checkpoint(tmp_path / "file", nn.Linear(2, 1))


@pytest.mark.parametrize("value", [3, [np.ones(2)], {1: np.ones(1)}, {"a": "text"}, {"__metadata__": np.ones(1)}])
def test_only_models_can_be_saved(tmp_path, value):
    with refused(CheckpointError):
        sp.save_checkpoint(value, tmp_path / "file")
    assert not (tmp_path / "file").exists()


@settings(max_examples=settings.default.max_examples)
@given(st.lists(st.tuples(st.sampled_from("fc"), st.integers(0, 10**6), st.integers(0, 7)), min_size=15, max_size=25))
def test_damaged_file_leaves_the_model_unchanged(tmp_path_factory, damages):
    path = tmp_path_factory.mktemp("single") / "file"
    model, expected = nn.Linear(5, 4), {}
    sp.save_checkpoint(model, path)
    content = path.read_bytes()
    expected = model.state_dict()
    for kind, place, bit in damages:
        damaged = bytearray(content)
        place %= len(content)
        if kind == "f":
            damaged[place] ^= 1 << bit
        else:
            del damaged[place:]
        path.write_bytes(damaged)
        try:
            found = sp.load_checkpoint(path, model)
        except CheckpointError:
            found = expected
        equal(found, expected)  # a flip in the note of another library, at most
        equal(model.state_dict(), expected)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, (10**15).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
     (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4000000]}}'.ljust(60)],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "file")

    with refused(CheckpointError):
        sp.load_checkpoint(tmp_path / "file")
    for name in ("none", "link", "."):
        with refused(CheckpointError):
            sp.load_checkpoint(tmp_path / name)
