"""Checkpoint files: slices that any number of ranks can read, and validation of untrusted files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
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
from simparallel.errors import CheckpointError
from simparallel.layout.sharding import placement
from simparallel.train import CheckpointManager, CheckpointReader, TensorSlice
from simparallel.train.checkpoint import arrays, reader as reader_module, tree

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DTYPES = list(arrays.CODES)


def save(directory: Path, step: int = 1, **content: Any) -> Path:
    return CheckpointManager(directory, files=HookedFiles()).save(step, random=False, **content)


def same(left: Any, right: Any) -> bool:
    """Tell if values are equal to the bit and of equal types at every level."""
    if isinstance(left, (np.ndarray, np.generic)):
        return (
            type(left) is type(right)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


# --- plain data -------------------------------------------------------------------------------------

some_arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | some_arrays
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.int64, st.integers(-5, 5))
)
keys = st.text(max_size=4) | st.integers(0, 9) | st.sampled_from(["a", "a.b", "$tensor", "b"])
states = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(states)
def test_state_survives_json(state):
    kept: dict[str, Any] = {}
    text = json.dumps(tree.encode(state, kept), allow_nan=False)
    fetched = set()

    assert same(tree.decode(json.loads(text), lambda name: (fetched.add(name), kept[name])[1]), state)
    assert fetched == set(kept)


@pytest.mark.parametrize(
    "state",
    [{"f": len}, {"a": [1, {2}]}, {"a": np.array(["x"])}, {"a": np.array([None])}, {"a": np.zeros(2, np.complex128)}],
)
def test_other_than_plain_data_is_refused(tmp_path, state):
    """Nothing is written."""
    with refused(CheckpointError):
        save(tmp_path, model=Holder(state))

    assert list(tmp_path.iterdir()) == []


def test_self_referencing_state_is_refused(tmp_path):
    state: dict[str, Any] = {}
    state["me"] = state

    with refused(CheckpointError):
        save(tmp_path, model=Holder(state))


@given(st.lists(st.sampled_from([list, tuple, dict, "number keys"]), min_size=62, max_size=68))
def test_save_and_load_allow_the_same_depth(kinds):
    """Both sides refuse the same depths, and no smaller one."""
    state: Any = 1
    for kind in kinds:
        state = {"a": state} if kind is dict else {1: state} if kind == "number keys" else kind([state])
    if len(kinds) > tree.MAX_DEPTH:
        with refused(CheckpointError):
            tree.encode(state, {})
    else:
        assert tree.decode(json.loads(json.dumps(tree.encode(state, {}))), pytest.fail) == state


class Holder:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@settings(max_examples=settings.default.max_examples // 2)
@given(states)
def test_state_survives_a_checkpoint(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("state")
    holder = Holder()
    save(directory, model=Holder({"state": state}))
    CheckpointManager(directory).restore(model=holder, random=False)

    assert same(holder.state, {"state": state})


def test_extra_survives_and_is_plain_data(tmp_path):
    extra = {"losses": [float("nan"), float("inf"), np.float32(0.1)], 3: (1, "two", None)}
    save(tmp_path, extra=extra)

    assert same(CheckpointManager(tmp_path).restore(random=False).extra, extra)
    with refused(CheckpointError):
        save(tmp_path, extra={"x": np.ones(1)})
    save(tmp_path)
    assert CheckpointManager(tmp_path).restore(random=False).extra == {}


@pytest.mark.parametrize("name", ["__metadata__", "model.a", 3])
def test_tensor_needs_its_own_name(tmp_path, name):
    with refused(CheckpointError):
        save(tmp_path, model=Holder({"a": np.ones(1)}), tensors={name: np.ones(1)})
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=settings.default.max_examples // 2)
@given(states)
def test_save_and_load_are_inverse(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("state") / "file"
    sp.save(state, path)

    assert same(sp.load(path), state)


# --- slices -----------------------------------------------------------------------------------------


def cuts_of(size: int, parts: int) -> list[slice]:
    """Cut as evenly as possible; the last slices may be empty."""
    each = -(-size // parts)
    return [slice(min(i * each, size), min((i + 1) * each, size)) for i in range(parts)]


def save_rows(directory: str, size: int) -> None:
    sp.init()
    whole = np.arange(size * 3, dtype=np.float64).reshape(size, 3)
    part = cuts_of(size, sp.get_world_size())[sp.get_rank()]
    rows = (whole.shape, (part, slice(None)), whole[part])
    save(Path(directory), tensors={"rows": rows, "alike": whole})


def test_tensors_cut_over_n_ranks_are_read_by_any_m(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 48)  # two rows
    size = 6  # on 4 ranks 2, 2, 2 and 0
    whole = np.arange(size * 3, dtype=np.float64).reshape(size, 3)
    for n in range(1, 9):
        with sp.Cluster(n, transport="inline", echo=False) as cluster:
            cluster.run(save_rows, str(tmp_path / str(n)), size)
        with CheckpointManager(tmp_path / str(n)).open() as reader:
            assert reader.world_size == n
            for name in ("rows", "alike"):
                assert same(reader.read(name), whole)
                for m in range(1, 9):
                    parts = [reader.read(name, (part, slice(1, 3))) for part in cuts_of(size, m)]
                    assert same(np.concatenate(parts), np.ascontiguousarray(whole[:, 1:3]))


LAYOUTS = [
    (sp.Layout((1,), ("a",)), [("None", "None"), ("None",)]),
    (sp.Layout((4,), ("a",)), [("a", "None"), ("None",)]),
    (sp.Layout((4,), ("a",)), [("None", "a"), ("a",)]),
    (sp.Layout((2, 2), ("a", "b")), [("a", "b"), ("b",)]),
    (sp.Layout((2, 2), ("a", "b")), [("b", "None"), ("a",)]),
    (sp.Layout((2, 4), ("a", "b")), [(("b", "a"), "None"), (("a", "b"),)]),
]


class Cut(sp.nn.Module):
    """A model that holds this rank's slices; a `sharded` one declares it. One parameter is tied."""

    def __init__(
        self, layouts: dict[str, sp.Layout], shapes: dict[str, tuple[int, ...]], start: float, sharded: bool
    ) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            whole = start + 100 * i + np.arange(math.prod(shape), dtype=np.float64).reshape(shape)
            parameter = sp.nn.Parameter(whole[layouts[name].slices(sp.get_rank(), shape)].copy())
            if sharded:
                parameter.placement = placement(layouts[name], shape)
            setattr(self, name, parameter)
        self.tied = self.bias


def cut_training(directory: str, number: int, restoring: bool, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Save, or restore over other values; return this rank's slices."""
    sp.init()
    layout, dims = LAYOUTS[number]
    shapes = {"weight": shape, "bias": shape[:1]}
    layouts = {name: layout(*dim) for name, dim in zip(shapes, dims, strict=True)}
    sharded = number % 2 == 1 or shape[0] != 8  # otherwise the global shape is computed, for equal slices
    model = Cut(layouts, shapes, -7.0 if restoring else 0.0, sharded)
    optimizer = sp.optim.Adam(model.parameters())
    if not restoring:
        optimizer([parameter.data * 2 for parameter in model.parameters()])
    manager = CheckpointManager(directory, files=HookedFiles())
    act = manager.restore if restoring else lambda **content: manager.save(1, **content)
    act(model=model, optimizer=optimizer, layouts=None if sharded else layouts)
    state = optimizer.state_dict()["state"]
    found = {**model.state_dict(), **{f"{n}.{i}": state[i][n] for i in state for n in ("exp_avg", "exp_avg_sq")}}
    shape_of = {name: shape if array.ndim > 1 else shape[:1] for name, array in found.items()}
    return {
        name: (layouts["weight" if len(shape_of[name]) > 1 else "bias"].slices(sp.get_rank(), shape_of[name]), array)
        for name, array in found.items()
    }


def assembled(results: Any, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    whole: dict[str, np.ndarray] = {}
    for rank in results:
        for name, (slices, array) in rank.items():
            target = whole.setdefault(name, np.full(shape if array.ndim > 1 else shape[:1], np.nan))
            target[slices] = array
    return whole


@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
def test_training_resumes_under_any_layout(tmp_path, shape):
    """Model and optimizer saved under one layout resume under any other."""
    expected: dict[str, np.ndarray] = {}
    numbers = range(0, len(LAYOUTS), 1 if shape == (8, 4) else 2)
    for saved in numbers:
        for loaded in numbers:
            directory = str(tmp_path / str(saved))
            if loaded == 0:
                with sp.Cluster(LAYOUTS[saved][0].mesh.size, transport="inline", echo=False) as cluster:
                    found = assembled(cluster.run(cut_training, directory, saved, False, shape), shape)
                expected = expected or found
                assert all(same(found[name], expected[name]) for name in expected)
            with sp.Cluster(LAYOUTS[loaded][0].mesh.size, transport="inline", echo=False) as cluster:
                found = assembled(cluster.run(cut_training, directory, loaded, True, shape), shape)
            assert set(found) == set(expected)
            assert all(same(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("slices", [[(0, 2), (3, 4)], [(0, 2), (1, 3)], [(0, 2), (2, 5)], [(0, 4), (0, 4)]])
def test_slices_that_do_not_tile_are_refused(tmp_path, slices):
    """All ranks refuse slices that do not tile the tensor."""

    def program(directory: str) -> str:
        sp.init()
        low, high = slices[sp.get_rank()]
        part = np.full((high - low, 4), sp.get_rank())
        with refused(CheckpointError) as caught:
            save(Path(directory), tensors={"w": TensorSlice((4, 4), (slice(low, high), slice(None)), part)})
        return str(caught.value)

    texts = sp.launch(program, (str(tmp_path),), world_size=2, transport="inline", echo=False)

    assert len(set(texts)) == 1
    with refused(CheckpointError):
        raise CheckpointError(texts[0])
    assert list(tmp_path.iterdir()) == []


def test_unlike_slices_are_refused(tmp_path):
    """Slices of other dtypes or shapes are no tensor, and a slice is none beside another rank's own whole one."""

    def program(directory: str, case: int) -> None:
        sp.init()
        rank, rows = sp.get_rank(), (slice(2 * sp.get_rank(), 2 * sp.get_rank() + 2),)
        shape, dtype = (4 + 2 * rank if case == 1 else 4,), [np.float32, np.float64][rank if case == 0 else 0]
        array = np.zeros(2, dtype)
        with refused(CheckpointError):
            save(Path(directory), tensors={"w": array if case == 2 and rank else TensorSlice(shape, rows, array)})

    for case in range(3):
        sp.launch(program, (str(tmp_path), case), world_size=2, transport="inline", echo=False)


def test_only_the_blocks_that_are_needed_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 1 << 10)
    whole = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)  # 16 blocks of 4 rows
    path = save(tmp_path, tensors={"w": whole})
    file = path / "rank_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in the last block
    file.write_bytes(content)

    with CheckpointReader(path) as reader:
        assert same(reader.read("w", (slice(8, 60), slice(3, 5))), whole[8:60, 3:5].copy())
        with refused(CheckpointError):
            reader.read("w", (slice(8, 61), slice(3, 5)))
    with CheckpointReader(path, verify=False) as reader:
        assert same(reader.read("w", (slice(8, 61), slice(3, 5))), whole[8:61, 3:5].copy())


def test_other_libraries_read_the_files(tmp_path):
    model = sp.nn.Linear(3, 2)
    path = save(tmp_path, model=model, tensors={str(dtype): np.ones(2, dtype) for dtype in DTYPES})
    found = safetensors.numpy.load_file(path / "rank_0.safetensors")

    assert same(found["model.weight"], model.weight.numpy())
    assert all(same(found[str(dtype)], np.ones(2, dtype)) for dtype in DTYPES)
    json.loads((path / "manifest.json").read_text())


def test_replicated_arrays_are_written_once(tmp_path):
    """Each is written once; the ranks share the work."""

    def program(directory: str) -> None:
        sp.init()
        save(Path(directory), model=Holder({str(i): np.full(1000, i, np.float32) for i in range(8)}))

    sp.launch(program, (str(tmp_path),), world_size=4, transport="inline", echo=False)
    sizes = [file.stat().st_size for file in sorted(tmp_path.rglob("rank_*.safetensors"))]

    assert len(sizes) == 4
    assert all(8000 <= size < 9000 for size in sizes)  # two arrays of 4000 bytes each


# --- damage -----------------------------------------------------------------------------------------

CONTENT = {
    "model": {"weight": np.arange(40, dtype=np.float32).reshape(5, 8), "bias": np.ones(5), "flag": np.array(True)},
    "optimizer": {"state": {0: {"step": 3, "m": np.arange(6.0)}}, "lr": 0.1},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A checkpoint of two ranks."""

    def program(directory: str) -> None:
        sp.init()
        save(Path(directory), **{name: Holder(state) for name, state in CONTENT.items()}, extra={"epoch": 2})

    directory = tmp_path_factory.mktemp("sound")
    sp.launch(program, (str(directory),), world_size=2, transport="inline", echo=False)
    return CheckpointManager(directory).path()


def outcome(path: Path) -> str:
    """Return "same" or "refused"; anything else is a failure. A refused restore changes nothing."""
    holders = {name: Holder("untouched") for name in CONTENT}
    try:
        restored = CheckpointManager(path.parent).restore(1, random=False, **holders)
    except CheckpointError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert str(path.parent) in str(refusal)
        assert all(holder.state == "untouched" for holder in holders.values())
        return "refused"
    assert restored.extra == {"epoch": 2}
    assert all(same(holders[name].state, CONTENT[name]) for name in CONTENT)
    return "same"


@pytest.fixture
def copy(sound, tmp_path) -> Path:
    target = tmp_path / sound.name
    shutil.copytree(sound, target)
    return target


FILES = ("manifest.json", "rank_0.safetensors", "rank_1.safetensors")


def test_sound_checkpoint_is_read(copy):
    assert outcome(copy) == "same"


@settings(max_examples=2 * settings.default.max_examples)
@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), min_size=15, max_size=25))
def test_any_flipped_bit_is_found_or_harmless(sound, tmp_path_factory, name, flips):
    copy = tmp_path_factory.mktemp("flips") / sound.name
    shutil.copytree(sound, copy)
    content = (sound / name).read_bytes()
    for place, bit in flips:
        damaged = bytearray(content)
        damaged[place % len(content)] ^= 1 << bit
        (copy / name).write_bytes(damaged)
        expected = {"refused"}
        if name != "manifest.json" and place % len(content) < 8 + int.from_bytes(content[:8], "little"):
            expected = {"same"}  # this header is for other libraries, the manifest holds the same facts
        assert {outcome(copy)} == expected
    shutil.rmtree(copy.parent)


@given(st.sampled_from(FILES), st.lists(st.integers(0, 10**6), min_size=10, max_size=20), st.binary(max_size=9))
def test_any_truncated_or_longer_file_is_refused(sound, tmp_path_factory, name, places, tail):
    copy = tmp_path_factory.mktemp("cut") / sound.name
    shutil.copytree(sound, copy)
    content = (sound / name).read_bytes()
    for place in places:
        damaged = content[: place % len(content)] + tail
        (copy / name).write_bytes(damaged)
        assert outcome(copy) == ("same" if damaged == content else "refused")
    (copy / name).write_bytes(content + b"\0")
    assert outcome(copy) == "refused"
    shutil.rmtree(copy.parent)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["missing", "link", "directory", "pipe", "empty"])
def test_other_file_types_are_refused(copy, sound, name, what):
    (copy / name).unlink()
    if what == "link":  # to the right bytes, but a link could point anywhere
        (copy / name).symlink_to(sound / name)
    elif what == "directory":
        (copy / name).mkdir()
    elif what == "pipe":
        os.mkfifo(copy / name)
    elif what == "empty":
        (copy / name).touch()

    assert outcome(copy) == "refused"


def test_swapped_files_are_refused(copy):
    (copy / FILES[1]).rename(copy / "x")
    (copy / FILES[2]).rename(copy / FILES[1])
    (copy / "x").rename(copy / FILES[2])

    assert outcome(copy) == "refused"


def forge(path: Path, change: Callable[[dict], None]) -> None:
    """Change a manifest, and sign it like a valid one."""
    data = json.loads((path / "manifest.json").read_text())
    del data["sha256"]
    change(data)
    rest = json.dumps(data).encode()[1:]
    digest = hashlib.sha256(rest).hexdigest()
    (path / "manifest.json").write_bytes(b'{"sha256": "%s",\n' % digest.encode() + rest)


def test_forged_manifest_is_read(copy):
    """Red control of the tests below: the signature alone does not stop them."""
    forge(copy, lambda data: None)

    assert outcome(copy) == "same"


def tensor(data: dict, name: str = "weight") -> dict:
    return data["tensors"][f"model.{name}"][0]


ABSURD = {
    "path": lambda data: tensor(data)["blocks"][0].update(file="../../etc/passwd"),
    "other file": lambda data: data["files"].update({"/etc/passwd": 100}),
    "dots": lambda data: data["files"].update({"../rank_0.safetensors": data["files"]["rank_0.safetensors"]}),
    "version": lambda data: data.update(version=2),
    "format": lambda data: data.update(format="other"),
    "shape": lambda data: tensor(data).update(shape=[10**12, 10**12]),
    "huge shape and block": lambda data: (
        tensor(data).update(shape=[10**9, 10**3]), tensor(data)["blocks"][0].update(shape=[10**9, 10**3])
    ),
    "overflow": lambda data: tensor(data).update(shape=[2**62, 2**62, 0], blocks=[]),
    "negative": lambda data: tensor(data)["blocks"][0].update(offset=-8),
    "outside": lambda data: tensor(data)["blocks"][0].update(offset=10**9),
    "start": lambda data: tensor(data)["blocks"][0].update(start=[1, 0]),
    "shared bytes": lambda data: data["tensors"].update({f"x{i}": [tensor(data)] for i in range(9)}),
    "block twice": lambda data: tensor(data)["blocks"].append(tensor(data)["blocks"][0]),
    "no block": lambda data: tensor(data).update(blocks=[]),
    "dtype": lambda data: tensor(data).update(dtype="F8"),
    "wider dtype": lambda data: tensor(data).update(dtype="F64"),
    "bool as a number": lambda data: tensor(data)["blocks"][0].update(offset=True),
    "dims": lambda data: tensor(data, "flag").update(
        shape=[1] * 99, blocks=[{**tensor(data, "flag")["blocks"][0], "start": [0] * 99, "shape": [1] * 99}]
    ),
    "lost tensor": lambda data: data["tensors"].pop("model.weight"),
    "no variants": lambda data: data["tensors"].update({"model.weight": []}),
    "owned twice": lambda data: data["tensors"].update({"model.bias": [tensor(data), tensor(data)]}),
    "rank": lambda data: tensor(data).update(ranks=[7]),
    "size": lambda data: data["files"].update({"rank_0.safetensors": 10**15}),
    "step": lambda data: data.update(step="1"),
    "world size": lambda data: data.update(world_size=0),
    "no parts": lambda data: data.update(parts=[]),
    "part": lambda data: data["parts"].pop("model"),
    "tensor in extra": lambda data: data.update(extra={"$tensor": "model.weight"}),
    "mark": lambda data: data["parts"]["model"][0].update(tree={"$tensor": "model.weight", "x": 1}),
    "unknown mark": lambda data: data["parts"]["model"][0].update(tree={"$import": "os"}),
    "object": lambda data: data["parts"]["model"][0].update(tree={"$scalar": ["O", "00" * 8]}),
    "deep": lambda data: data["parts"]["model"][0].update(tree=nested(900)),
}  # fmt: skip


def read_all(path: Path) -> None:
    with CheckpointReader(path) as reader:
        for name in reader.names():
            reader.read(name)
        for name in CONTENT:
            reader.state(name)


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_forged_manifest_is_refused(copy, case):
    forge(copy, ABSURD[case])
    tracemalloc.start()
    try:
        assert outcome(copy) == "refused"
        with pytest.raises(CheckpointError):
            read_all(copy)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[" * 200_000, b'{"sha256": "x"}', b"\xff" * 100, b"9" * 5000],
    ids=["empty", "no checksum", "deep", "short checksum", "not text", "digits"],
)
@pytest.mark.parametrize("signed", [False, True])
def test_manifest_that_is_not_json_is_refused(copy, text, signed):
    front = b'{"sha256": "%s",\n' % hashlib.sha256(text).hexdigest().encode() if signed else b""
    (copy / "manifest.json").write_bytes(front + text)

    assert outcome(copy) == "refused"


def test_nan_in_manifest_is_refused(copy):
    text = b'"step": NaN}'
    (copy / "manifest.json").write_bytes(b'{"sha256": "%s",\n' % hashlib.sha256(text).hexdigest().encode() + text)
    with refused(CheckpointError):
        CheckpointReader(copy)


def test_manifest_beyond_the_limit_is_not_read(copy, monkeypatch):
    with open(copy / "manifest.json", "r+b") as file:
        file.truncate(reader_module.MAX_BYTES + 1)  # sparse: it takes no disk

    with refused(CheckpointError):
        CheckpointReader(copy)


nodes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "F32", "..", "rank_0.safetensors", "model.weight"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "$tensor"]), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(st.tuples(st.integers(0, 10**6), nodes), min_size=10, max_size=15))
def test_fuzzed_manifest_never_crashes(sound, tmp_path_factory, changes):
    """Any value at any place of a forged manifest is read or refused."""
    copy = tmp_path_factory.mktemp("forged") / sound.name
    shutil.copytree(sound, copy)
    for place, node in changes:
        shutil.copy(sound / "manifest.json", copy / "manifest.json")

        def change(data: Any, place: int = place, node: Any = node) -> None:
            places = list(walk(data))
            parent, key = places[place % len(places)]
            parent[key] = node

        forge(copy, change)
        with suppress(CheckpointError), CheckpointReader(copy) as reader:
            for name in reader.parts():
                reader.state(name)
    shutil.rmtree(copy.parent)


def walk(data: Any) -> Any:
    """Yield every (container, key) in JSON data."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(value, (dict, list)):
            yield from walk(value)
