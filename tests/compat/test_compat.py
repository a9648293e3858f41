"""The fronts: MindSpore's and PyTorch's names and arguments. The listings have their own file."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.clock.notes import forget_notes
from simparallel.compat import FRONTS, install, mindspore as ms, torch
from simparallel.compat.__main__ import _import_of
from simparallel.compat.mindspore.ops import operations as P
from simparallel.compat.torch import distributed as dist
from simparallel.errors import InputError

X = np.arange(-4, 8, dtype=np.float32).reshape(3, 4)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


# --- imports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", FRONTS)
def test_both_names_of_a_module_mean_one_object(front):
    code = f"""
import pkgutil
from importlib import import_module
from pathlib import Path
from simparallel.compat import install, {front} as package
install("{front}")
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
same = [import_module(name.removeprefix("simparallel.compat.")) is import_module(name) for name in names]
print(len(same) > 20, all(same))
"""
    assert python(code).stdout == "True True\n"


SAME_NAMES = [
    ("mindspore.communication.management", "mindspore.communication.init"),
    ("mindspore.dataset.transforms.c_transforms", "mindspore.dataset.transforms.TypeCast"),
    ("mindspore.dataset.transforms.vision.c_transforms", "mindspore.dataset.vision.RandomCrop"),
    ("mindspore.nn.loss.loss", "mindspore.nn.CrossEntropyLoss"),
    ("mindspore.nn.optim.momentum", "mindspore.nn.Momentum"),
    ("mindspore.nn.wrap.cell_wrapper", "mindspore.nn.PipelineCell"),
    ("mindspore.ops.composite", "mindspore.ops.value_and_grad"),
    ("mindspore.parallel.auto_parallel", "mindspore.parallel.AutoParallel"),
    ("mindspore.parallel.shard", "mindspore.parallel.shard"),
    ("mindspore.train.amp", "mindspore.train.auto_mixed_precision"),
    ("mindspore.train.model", "mindspore.ParallelMode"),
    ("torch.distributed.pipelining.schedules", "torch.distributed.pipelining.Schedule1F1B"),
    ("torch.nn.parallel.distributed", "torch.nn.parallel.DistributedDataParallel"),
    ("torch.utils.data.distributed", "torch.utils.data.DistributedSampler"),
]


def test_other_modules_have_the_same_names():
    """A name is one object in all modules of the framework that have it, and importing them replaces none."""
    code = f"""
from importlib import import_module
from simparallel.compat import FRONTS, install
for front in FRONTS:
    install(front)
values = []
for older, name in {SAME_NAMES}:
    module, _, member = name.rpartition(".")
    value = getattr(import_module(older), member)
    assert value is getattr(import_module(module), member), name
    values.append(value)
from mindspore.nn import loss
import mindspore.dataset as ds, torch
assert not any(isinstance(value, type(torch)) for value in values)
assert ds.transforms.transforms.TypeCast is ds.transforms.TypeCast
assert torch.utils.data.distributed.DistributedSampler is torch.utils.data.DistributedSampler
assert loss.SoftmaxCrossEntropyWithLogits is import_module("mindspore.nn").SoftmaxCrossEntropyWithLogits
print(len(values))
"""
    result = python(code)
    assert (result.stdout, result.stderr) == (f"{len(SAME_NAMES)}\n", "")


def test_install_changes_one_process():
    code = "from simparallel.compat import install; install('torch'); import torch; print(torch.__name__)"
    assert python(code).stdout.strip() == "simparallel.compat.torch"
    code = "import simparallel.compat.torch, sys; print('torch' in sys.modules)"
    assert python(code).stdout.strip() == "False"


def test_install_comes_before_the_real_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mindspore", sys)
    with refused(InputError):
        install("mindspore")
    with refused(InputError):
        install("jax")


def test_missing_module_is_named(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    install("mindspore")
    try:
        with refused(ModuleNotFoundError):
            import_module("mindspore.nn.layer.conv")
    finally:
        for name in [name for name in sys.modules if f"{name}.".startswith("mindspore.")]:
            sys.modules.pop(name)


def test_shell_functions(tmp_path):
    """One line makes `python` and `pytest` of this shell use the front, and leaves `python -c` unchanged."""
    # As pytest does on its own for an installed plugin: its import hook loads all modules of the package.
    (tmp_path / "conftest.py").write_text("import pytest\npytest.register_assert_rewrite('simparallel')\n")
    (tmp_path / "test_x.py").write_text(
        "import mindspore\nfrom mindspore.communication.management import init\n"
        "def test(): assert 'compat' in mindspore.__name__\n"
    )
    script = f"""
        eval "$({sys.executable} -m simparallel.compat mindspore)"
        python test_x.py && python -m test_x && pytest -q -p no:cacheprovider test_x.py
        python -c 'print("as ever")'
    """
    environment = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(Path(sp.__file__).parents[1])}
    ended = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "1 passed" in ended.stdout
    assert ended.stdout.endswith("as ever\n")


# --- MindSpore ---------------------------------------------------------------------------------------


def test_tensor_takes_a_dtype():
    assert ms.Tensor(1.0, ms.float32).dtype == ms.float32
    assert ms.Tensor([1, 2], ms.float16).dtype == ms.float16
    assert ms.Tensor(X, dtype=ms.int32).dtype == ms.int32
    assert not ms.Tensor(X, ms.float32).requires_grad
    with refused(sp.errors.DTypeError):
        ms.Tensor(X, "floaty")


def test_cells_construct():
    class Scale(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            self.factor = ms.Parameter([2.0], name="factor")

        def construct(self, x, times=1):
            return x * self.factor * times

    cell = Scale()
    assert cell(ms.Tensor(X), times=3).numpy().tolist() == (X * 6).tolist()
    assert [p.name for p in cell.trainable_params()] == ["factor"]
    assert [name for name, _ in ms.nn.SequentialCell([cell]).cells_and_names()] == ["", "0"]
    with refused(TypeError):
        ms.nn.Cell()(X)


def test_front_classes_are_their_base():
    dense = ms.nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
    assert dense(ms.Tensor(X)).numpy().tolist() == np.repeat(X.sum(1, keepdims=True), 2, 1).tolist()
    assert isinstance(dense, sp.nn.Linear)
    assert isinstance(sp.nn.Linear(1, 1), ms.nn.Dense)
    assert not isinstance(sp.nn.ReLU(), ms.nn.Dense)
    assert issubclass(ms.nn.Dense, ms.nn.Cell)
    assert issubclass(sp.nn.ReLU, ms.nn.Cell)
    assert not issubclass(sp.nn.ReLU, ms.nn.Dense)
    assert isinstance(sp.nn.Parameter(1.0), ms.Parameter)
    assert ms.nn.BatchNorm2d(3).momentum == pytest.approx(0.1)
    with refused(InputError):
        ms.nn.Dense(1, 1, activation="relu")


@pytest.mark.parametrize(("size", "stride"), [(5, 2), (6, 2), (7, 3), (4, 1)])
def test_same_padding_of_pools(size, stride):
    """ceil(size / stride) windows, the odd pixel of padding at the end."""
    image = np.arange(size * size, dtype=np.float32).reshape(1, 1, size, size)
    found = ms.nn.MaxPool2d(3, stride, pad_mode="same")(ms.Tensor(image)).numpy()[0, 0]
    count = -(-size // stride)
    pad = max((count - 1) * stride + 3 - size, 0)
    padded = np.pad(image[0, 0], (pad // 2, pad - pad // 2), constant_values=-np.inf)
    starts = range(0, count * stride, stride)
    assert found.tolist() == [[padded[i : i + 3, j : j + 3].max() for j in starts] for i in starts]


@pytest.mark.parametrize("mode", ["same", "valid", "pad"])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (2, 3, 1), (2, 1, 3)])
def test_transposed_sizes_match_mindspore(kernel, stride, dilation, mode):
    reach = dilation * (kernel - 1) + 1
    excess = {"same": 0, "valid": max(reach - stride, 0), "pad": reach - stride}[mode]
    layer = ms.nn.Conv2dTranspose(1, 1, kernel, stride, mode, dilation=dilation, weight_init="ones")
    assert layer.bias is None
    assert layer(ms.Tensor(X[None, None])).shape == (1, 1, 3 * stride + excess, 4 * stride + excess)
    with refused(InputError):
        ms.nn.Conv2dTranspose(1, 1, 3, 2, output_padding=1)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda x: P.ReduceSum(keep_dims=True)(x, -1), X.sum(-1, keepdims=True)),
        (lambda x: P.ReduceSum()(x), X.sum()),
        (lambda x: P.ReduceMean()(x, (0, 1)), X.mean()),
        (lambda x: P.ReduceMax(True)(x, 0), X.max(0, keepdims=True)),
        (lambda x: P.ReduceMin()(x, 1), X.min(1)),
        (lambda x: P.Transpose()(x, (1, 0)), X.T),
        (lambda x: P.Reshape()(x, (4, 3)), X.reshape(4, 3)),
        (lambda x: P.Cast()(x, ms.int32), X.astype(np.int32)),
        (lambda x: P.Concat(1)((x, x)), np.concatenate([X, X], 1)),
        (lambda x: P.ExpandDims()(x, 0), X[None]),
        (lambda x: P.Argmax()(x), X.argmax(-1)),
        (lambda x: P.Gather()(x, ms.Tensor([2, 0])), X[[2, 0]]),
        (lambda x: P.Tile()(x, (2, 1)), np.tile(X, (2, 1))),
        (lambda x: ms.ops.softmax(x, axis=0).sum(0), np.ones(4)),
        (lambda x: ms.ops.reduce_sum(x, (0,), True), X.sum(0, keepdims=True)),
    ],
)  # fmt: skip
def test_ops_take_settings_with_the_call(made, expected):
    found = made(ms.Tensor(X))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_one_hot_takes_tensors():
    on, off = ms.Tensor(0.75, ms.float32), ms.Tensor(0.25, ms.float32)
    found = P.OneHot()(ms.Tensor([2, 0]), 3, on, off)
    assert found.numpy().tolist() == [[0.25, 0.25, 0.75], [0.75, 0.25, 0.25]]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (lambda x: P.Stack(1)((x, x)), np.stack([X, X], 1)),
        (lambda x: ms.ops.flatten(x.reshape(3, 2, 2)), X),
        (lambda x: ms.ops.sum(x, dim=1, keepdim=True), X.sum(1, keepdims=True)),
        (lambda x: ms.ops.max(x, 1)[0], X.max(1)),
        (lambda x: ms.ops.min(x, axis=1)[1], X.argmin(1).astype(np.int32)),
        (lambda x: ms.ops.max(x)[1], np.int32(0)),
        (lambda x: P.Squeeze()(x.reshape(3, 1, 4)), X),
        (lambda x: ms.nn.LeakyReLU()(x), np.where(X < 0, np.float32(0.2) * X, X)),
        (lambda x: ms.nn.SmoothL1Loss()(x, x + 2), np.full_like(X, 1.5)),
        (lambda x: ms.ops.cross_entropy(x[:2] * 0, ms.Tensor([0, -100]), None, -100), np.log(np.float32(4))),
    ],
)  # fmt: skip
def test_mindspores_defaults(ours, expected):
    y = ours(ms.Tensor(X)).numpy()
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_one_hot_refuses_another_axis():
    with refused(InputError):
        ms.ops.one_hot(ms.Tensor([1]), 2, axis=0)


def test_rms_prop_takes_mindspores_arguments():
    """One step from rest: x - lr g / sqrt((1 - decay) g²), with epsilon under the root."""
    x = ms.Parameter(np.array([1.0, -2.0]))
    (x * x).sum().backward()
    ms.nn.RMSProp([x], 0.5, 0.75).step()
    np.testing.assert_allclose(x.numpy(), [0.0, -1.0], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("np", None),
        ("refuse", None),
        ("nn", "from mindspore import nn"),
        ("init", "from mindspore.communication import init"),
        ("initializer", "from mindspore.common.initializer import initializer"),
    ],
)
def test_missing_imports_come_from_the_front(name, line):
    assert _import_of("mindspore", name) == line


def test_late_ops_are_sharded():
    """A strategy holds for every call of an op that gets its settings with the call."""

    def program():
        add_up = P.ReduceSum().shard(((2, 1),))
        step = sp.AutoParallel(lambda x: (add_up(x, 0), add_up(x, 1)))
        return [y.numpy() for y in step(X[:2])]

    for rows, columns in sp.launch(program, world_size=2, transport="inline"):
        assert rows.tolist() == X[:2].sum(0).tolist()
        assert columns.tolist() == X[:2].sum(1).tolist()


# --- PyTorch -----------------------------------------------------------------------------------------


def test_torch_collectives_fill_lists():
    def program():
        dist.init_process_group("nccl", rank=-1, world_size=3)
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.tensor([1.0, 2.0]) * (rank + 1)
        found = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(found, x)
        gathered = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
        dist.gather(x, gathered, dst=1)
        part = torch.zeros(2)
        dist.scatter(part, [x, x * 10, x * 100] if rank == 2 else None, src=2)
        total = x.clone()
        dist.all_reduce(total, reduce_op=dist.ReduceOp.SUM)
        best = x.clone()
        dist.reduce(best, 0, dist.ReduceOp.MAX)
        mine, theirs = torch.zeros(2), [torch.zeros(2) for _ in range(size)]
        dist.reduce_scatter(mine, [x, x, x * 2])
        dist.all_to_all(theirs, [x, x + 1, x + 2])
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        values = [found, gathered or [], part, total, best, mine, theirs]
        return [[t.tolist() for t in v] if isinstance(v, list) else v.tolist() for v in values], objects

    each = [np.array([1.0, 2.0]) * k for k in (1, 2, 3)]
    results = sp.launch(program, world_size=3, transport="inline")
    for rank, ((found, gathered, part, total, best, mine, theirs), objects) in enumerate(results):
        assert found == [x.tolist() for x in each]
        assert gathered == (found if rank == 1 else [])
        assert part == (each[2] * 10**rank).tolist()
        assert total == sum(each).tolist()
        assert best == (each[2] if rank == 0 else each[rank]).tolist()
        assert mine == (sum(each) * (2 if rank == 2 else 1)).tolist()
        assert theirs == [(x + rank).tolist() for x in each]
        assert objects == [{"rank": r} for r in range(3)]


def test_torch_uneven_parts_and_any_source():
    def program():
        rank = dist.get_rank()
        parts = torch.tensor([0.0, 1.0, 2.0]) + 10 * rank
        sizes, mine = [1, 2], [1, 2][rank]
        found = torch.zeros(2 * mine)
        dist.all_to_all_single(found, parts, [mine, mine], sizes)
        if rank:
            dist.send(parts, 0)
        else:
            whose = dist.recv(message := torch.zeros(3))
            assert (whose, message.tolist()) == (1, [10, 11, 12])
        dist.monitored_barrier()
        group = dist.new_group([rank], use_local_synchronization=True)
        return found.tolist(), dist.get_world_size(group), dist.get_backend()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [
        ([0, 10], 1, "inline"),
        ([1, 2, 11, 12], 1, "inline"),
    ]


def test_torch_groups_are_sorted_and_local():
    def program():
        rank = sp.get_rank()
        group = dist.new_group([2, 0])
        rows = [torch.zeros(1) for _ in range(2)]
        work = None
        if dist.get_rank(group) >= 0:
            work = dist.all_gather(rows, torch.full((1,), float(rank)), group, async_op=True)
            work.wait()
        return (dist.get_rank(group), dist.get_world_size(group), [row.item() for row in rows], work is not None)

    found = list(sp.launch(program, world_size=3, transport="inline"))
    assert found == [(0, 2, [0.0, 2.0], True), (-1, -1, [0.0, 0.0], False), (1, 2, [0.0, 2.0], True)]


def test_torch_lists_have_one_tensor_a_rank():
    def program():
        with refused(InputError):
            dist.all_gather([torch.zeros(1)], torch.ones(1))

    sp.launch(program, world_size=2, transport="inline")


def test_torch_resizing_layers():
    x = X[None, None]
    doubled = x.repeat(2, axis=2).repeat(2, axis=3)
    for layer in (torch.nn.UpsamplingNearest2d(scale_factor=2), ms.nn.Upsample((6, 8))):
        assert layer(torch.tensor(x)).tolist() == doubled.tolist()
    corners = torch.nn.UpsamplingBilinear2d((5, 7))(torch.tensor(x)).numpy()[0, 0]
    np.testing.assert_array_equal(corners[::2, ::2], X)
    np.testing.assert_array_equal(corners[1::2, ::2], (X[1:] + X[:-1]) / 2)


def test_torch_tensors():
    assert torch.tensor([1, 2]).dtype == torch.int64
    assert torch.tensor(np.float64(1.5), dtype=torch.float16).dtype == torch.float16
    assert torch.arange(3).tolist() == [0, 1, 2]
    assert torch.zeros(2, 3).shape == torch.zeros((2, 3)).shape == torch.randn(2, 3).shape == (2, 3)
    assert sorted(torch.randperm(5).tolist()) == [0, 1, 2, 3, 4]
    assert set(torch.randint(0, 3, (50,)).tolist()) == {0, 1, 2}
    assert torch.ones(2, requires_grad=True).requires_grad
    source = np.ones(2, np.float32)
    copied = torch.tensor(source)
    source[0] = 5
    assert copied.tolist() == [1, 1]


def test_unused_arguments_are_noted_once(capsys):
    forget_notes()
    dataset = torch.utils.data.TensorDataset(np.arange(4))
    for _ in range(2):
        assert len(torch.utils.data.DataLoader(dataset, 2, num_workers=4, pin_memory=True)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    with refused(InputError):
        torch.utils.data.DataLoader(dataset, batch_sampler=[[0, 1]])


def test_ddp_device_ids_count_within_the_node():
    def program():
        model = torch.nn.Linear(2, 2).to(torch.device("cuda", sp.get_local_rank()))
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[sp.get_local_rank()])
        return str(next(wrapped.parameters()).device), torch.cuda.device_count(), torch.cuda.current_device()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [("sim:0", 2, 0), ("sim:0", 2, 1)]


def answers(*files: str) -> dict[str, str]:
    """Return what a process with both fronts says of each name of these files that they lack."""
    names = [name for file in files for name in (Path(__file__).parent / file).read_text().split()]
    code = """
import sys
from functools import cache
from simparallel.base import hints
from simparallel.compat import install
install("torch"); install("mindspore")
import torch, mindspore
# As attributes: without the import hook.
from torch import nn, distributed, optim
from mindspore import nn, ops
# No module changes between the names.
places = cache(lambda owner, imports: look(hints.Answer(owner, "", imports)))
look, hints.Answer._places = hints.Answer._places, lambda answer: places(answer.owner, answer.imports)
hints._plain = cache(hints._plain)
for full in sys.stdin.read().split():
    try:
        eval(full)
    except AttributeError as error:
        print(full, error)
"""
    done = subprocess.run([sys.executable, "-c", code], input=" ".join(names), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_every_unknown_name_is_answered():
    """PyTorch 2.13's names (`dir` of its modules) and MindSpore's (its pages): where each is, or what is missing."""
    told = answers("torch_names.txt", "mindspore_names.txt")
    assert len(told) > 1000
    # A name that the framework has is no misspelling of another.
    assert [line for line in told.values() if "here it is" not in line and "missing feature:" not in line] == []
    for name, answer in {
        "torch.distributed.DeviceMesh": "here it is simparallel.Mesh.",
        "torch.svd": "missing feature: linear algebra: numpy.linalg or SciPy",
        "mindspore.ops.MaxPoolWithArgmax": "positions of the maxima of a pool",
        "mindspore.ops.SGD": "here it is mindspore.nn.SGD.",
    }.items():
        assert answer in told[name]


def test_misspelt_names_find_the_nearest():
    told = answers("misspelt_names.txt")
    assert len(told) == 50
    assert [line for line in told.values() if "Did you mean" not in line and "here it is" not in line] == []


UNKNOWN = r"""
import pickle
from simparallel.compat import install
install("torch")
def error_of(line):
    try:
        exec(line)
    except (ImportError, AttributeError) as error:
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        return f"{type(error).__name__}: {error}"
print(error_of("from torch.nn import Liner"))
print(error_of("from torch import nn; nn.Liner"))
print(error_of("from simparallel.optim import Adm"))
print(error_of("import torch.linagl"))
# Names that a function or a layer has, too; a module inside of what is one file here; a module of this package.
print(error_of("import torch.distributed.tensor"))
print(error_of("from torch.nn.utils.rnn import pad_sequence"))
print(error_of("from torch.nn.utils.clip_grad import clip_grad_norm_"))
print(error_of("import torch.nn.init as init; from torch.nn.init import normal_; assert init.normal_ is normal_"))
import simparallel as sp
print(error_of("sp.Tensor([1.0]).backwrd"))
print(error_of("sp.Tensor([1.0]).argsort"))
print(error_of("sp.nn.Linear(1, 1).wieght"))
print(error_of("sp.nn.Linear(1, 1).bfloat16"))
# More names than one byte counts: the import has two instructions.
print(error_of("".join(f"a{i} = {i}\n" for i in range(300)) + "from torch.nn import Liner as a299"))
"""


def test_unknown_names_of_imports_and_objects():
    done = subprocess.run([sys.executable, "-c", UNKNOWN], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "ImportError: cannot import name 'Liner' from 'torch.nn'. Did you mean Linear?",
        "AttributeError: module 'torch.nn' has no attribute 'Liner'. Did you mean Linear?",
        "ImportError: cannot import name 'Adm' from 'simparallel.optim'. Did you mean Adam?",
        "ModuleNotFoundError: simparallel's front for torch has no module 'torch.linagl'. docs/not_here.md lists "
        "missing features and alternatives.",
        "ModuleNotFoundError: simparallel's front for torch has no module 'torch.distributed.tensor'; here it is "
        "simparallel.Layout, with simparallel.Tensor.",
        "ModuleNotFoundError: simparallel's front for torch has no module 'torch.nn.utils.rnn'; missing feature: other "
        "functions, layers and losses: compose them of simparallel.functions, or write a simparallel.Function, see "
        "docs/not_here.md.",
        "ModuleNotFoundError: simparallel's front for torch has no module 'torch.nn.utils.clip_grad'. Did you mean "
        "clip_grad_norm_?",
        "None",
        "AttributeError: 'Tensor' object has no attribute 'backwrd'. Did you mean backward?",
        "AttributeError: 'Tensor' object has no attribute 'argsort'; here it is simparallel.functions.sort.",
        "AttributeError: 'Linear' object has no attribute 'wieght'. Did you mean weight?",
        "AttributeError: 'Linear' object has no attribute 'bfloat16'; missing feature: quantised types: float16 with "
        "loss scaling, see docs/not_here.md.",
        "ImportError: cannot import name 'Liner' from 'torch.nn'. Did you mean Linear?",
    ], done.stderr
