"""The listings that this project began with, as they were printed: MindSpore's tutorials and an article on PyTorch.

The files in `tests/listings` have their lines, unchanged; where a page had lost the indentation, it is back. A listing
that has a slip of its own is run as it is, to see that the error says which, and then with that line mended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import simparallel as sp
from simparallel.compat import install

LISTINGS = Path(__file__).parent / "listings"
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import make_data  # noqa: E402

pytestmark = pytest.mark.process


def text_of(name: str) -> str:
    return (LISTINGS / name).read_text()


def run(framework: str, text: str) -> dict:
    """Run a listing in this rank; returns the arrays and numbers that it leaves, parameters of `net` or `model` too."""
    install(framework)
    script = types.ModuleType("__main__")
    sys.argv = [
        "listing.py",
        f"--local_rank={os.environ['LOCAL_RANK']}",
    ]  # as torch.distributed.launch starts it
    sys.modules["__main__"] = script
    exec(compile(text, "listing.py", "exec"), script.__dict__)
    left = {name: value for name, value in vars(script).items() if isinstance(value, (int, float, str, list))}
    for name in ("net", "model", "network"):
        if isinstance(getattr(script, name, None), sp.nn.Module):
            left["state"] = {key: np.copy(value) for key, value in getattr(script, name).state_dict().items()}
    return left


def launch(framework: str, text: str, world_size: int, **settings) -> sp.Results:
    return sp.launch(run, (framework, text), world_size=world_size, echo=False, **settings)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    return make_data.write_mnist(tmp_path_factory.mktemp("mnist"), samples=256)


def losses(log: Path) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in log.read_text().splitlines() if "loss is" in line]


def close(a: dict, b: dict) -> bool:
    return all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a)


def test_data_parallel(mnist, tmp_path):
    """Eight ranks with 32 samples each train as one device with 256."""
    environment = {"DATA_PATH": str(mnist)}
    many = launch("mindspore", text_of("data_parallel.txt"), 8, log_dir=tmp_path, environment=environment)
    whole = text_of("data_parallel.txt").replace("create_dataset(32)", "create_dataset(256)")
    (one,) = launch("mindspore", whole, 1, environment=environment)
    assert all(close(many[0]["state"], other["state"]) for other in many[1:])
    assert close(many[0]["state"], one["state"])
    found = losses(tmp_path / "worker_3.log")
    assert found[0] == pytest.approx(np.log(10), abs=0.01)
    assert len(found) == 10
    assert found[-1] < found[0]


NO_INITIALIZER = "from mindspore.common.initializer import initializer\n"
NO_LAYOUT = "from mindspore.parallel import Layout\n"
NO_HAS_AUX = (
    "grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)",
    "grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)",
)


def with_layouts() -> str:
    """The second listing of a network in the place of the first one, as the tutorial says."""
    first, _, rest = text_of("operator_parallel.txt").partition(
        "import mindspore as ms\nfrom mindspore import nn, ops\n"
    )
    return first + text_of("operator_parallel_layout.txt") + rest[rest.index("\nfrom mindspore.nn.utils") :]


@pytest.mark.parametrize(
    "text", [text_of("operator_parallel.txt"), with_layouts()], ids=["tuples", "layouts"]
)
def test_operator_parallel(mnist, tmp_path, text):
    """Eight ranks train as one device, with the import and `has_aux` that the listing forgets."""
    environment = {"DATA_PATH": str(mnist)}
    text = NO_INITIALIZER + NO_LAYOUT + text.replace(*NO_HAS_AUX).replace("range(10)", "range(2)")
    launch("mindspore", text, 8, log_dir=tmp_path / "many", environment=environment)
    alone = "class AutoParallel:\n    def __new__(cls, step, parallel_mode): return step\n"
    text = text.replace("from mindspore.parallel.auto_parallel import AutoParallel", alone)
    launch(
        "mindspore", text.replace(".shard", ".shard"), 1, log_dir=tmp_path / "one", environment=environment
    )
    many, one = (losses(tmp_path / name / "worker_0.log") for name in ("many", "one"))
    assert len(many) == len(one) == 4
    assert many == pytest.approx(one, rel=1e-5)
    assert many[-1] < many[0]


def test_missing_import_is_named(mnist, tmp_path):
    """As printed, the listing uses `initializer` without importing it."""
    script = tmp_path / "listing.py"
    script.write_text(text_of("operator_parallel.txt"))
    ended = subprocess.run(
        [sys.executable, "-m", "simparallel", "run", "--as", "mindspore", "-n", "2", str(script)],
        cwd=tmp_path, env={**os.environ, "DATA_PATH": str(mnist)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "name 'initializer' is not defined" in ended.stderr
    assert "from mindspore.common.initializer import initializer" in ended.stderr


# What the tutorial on automatic parallelism takes from outside: a folder, ResNet, and here a size for lessons.
AROUND_AUTO_PARALLEL = """
import os, sys, types
import mindspore.dataset.vision as vision
from simparallel.models.resnet import BasicBlock, ResNet
resize = vision.Resize
vision.Resize = lambda size: resize((size[0] // 28, size[1] // 28))
sys.modules["resnet"] = types.SimpleNamespace(
    resnet50=lambda batch_size, num_classes: ResNet(BasicBlock, (1, 1), num_classes, "cifar")
)
data_path = os.environ["DATA_PATH"]
"""


def test_auto_parallel(tmp_path):
    """Ranks whose operators cut the batch train as one device does, batch norm included."""
    environment = {"DATA_PATH": str(make_data.write_cifar10(tmp_path / "cifar", samples=64))}
    text = AROUND_AUTO_PARALLEL + text_of("resnet50_auto_parallel.txt") + "\ntest_train_cifar(epoch_size=3)\n"
    launch("mindspore", text, 2, log_dir=tmp_path / "printed", environment=environment)
    first, second = (losses(tmp_path / "printed" / f"worker_{rank}.log") for rank in range(2))
    assert first == second
    assert len(first) == 3
    assert first[-1] < first[0]

    in_order = text.replace("data_set = data_set.shuffle(buffer_size=10)", "")
    launch("mindspore", in_order, 2, log_dir=tmp_path / "many", environment=environment)
    whole = in_order.replace("batch_size=32,", "batch_size=64,")
    launch("mindspore", whole, 1, log_dir=tmp_path / "one", environment=environment)
    many, one = (losses(tmp_path / name / "worker_0.log") for name in ("many", "one"))
    assert many[0] == pytest.approx(one[0], rel=1e-5)
    assert many == pytest.approx(one, rel=1e-2)  # rounding, which batch norms and momentum amplify


# --- the article on PyTorch ---------------------------------------------------------------------------


def torch_names(samples: int = 64) -> str:
    """The names that the article's listings expect: a dataset, a model, a loss function and an optimizer."""
    return f"""
import torch
import simparallel as sp
torch.manual_seed(1)
dataset = torch.utils.data.TensorDataset(*[x[:{samples}] for x in sp.data.digits("train")[:]])
model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_torch_distributed():
    """Four ranks with one sample each train as one device with four."""
    many = launch("torch", torch_names() + text_of("torch_distributed.txt"), 4)
    one = text_of("torch_distributed.txt").replace("DataLoader(dataset,", "DataLoader(dataset, batch_size=4,")
    (alone,) = launch("torch", torch_names() + one, 1)
    states = [
        {name.removeprefix("module."): x for name, x in each["state"].items()} for each in [*many, alone]
    ]
    assert all(close(states[0], other) for other in states[1:])


REDUCED_LOSS = """
import argparse
torch.distributed.init_process_group("nccl")
args = argparse.Namespace(local_rank=torch.distributed.get_rank())
loss = torch.tensor(args.local_rank + 1.0)
"""


def test_torch_reduced_loss():
    """As printed: a parenthesis is missing, and then only rank 0 reduces; both errors say so."""
    text = torch_names() + REDUCED_LOSS + text_of("torch_reduced_loss.txt")
    with pytest.raises(sp.errors.RunFailedError, match=r"SyntaxError: '\(' was never closed"):
        launch("torch", text, 2)
    with pytest.raises(sp.errors.RunFailedError, match=r"rank 0 waits in .* reduce\(sum\) .* but rank 1 l"):
        launch("torch", text.rstrip() + ")", 2)
    mended = text.rstrip().replace("if args.local_rank==0:", "if True:") + ")\n"
    assert [
        left["loss_tensor"] for left in launch("torch", mended + "loss_tensor = loss_tensor.item()", 2)
    ] == [3.0, 2.0]


def test_torch_sync_batch_norm():
    """With SyncBatchNorm two ranks have the statistics of one device with the whole batch."""
    text = torch_names() + REDUCED_LOSS + text_of("torch_sync_batch_norm.txt")
    with pytest.raises(sp.errors.RunFailedError, match="SyntaxError"):
        launch("torch", text, 2)
    batch_norm = "network = torch.nn.Sequential(torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4))"
    mended = f"from torch import nn\n{text.replace('network = ....', batch_norm)}\n"
    forward = "x = torch.as_tensor(dataset[:][0])\n"
    many = launch("torch", mended + forward + "ddp_network(x[args.local_rank::2])", 2)
    (one,) = launch("torch", mended + forward + "ddp_network(x)", 1)
    assert close(many[0]["state"], one["state"])


def test_torch_accumulation():
    """Eight batches of 32, their gradients accumulated, make the step of one batch of 256."""
    names = torch_names(256) + "network, loss_function, optim = model, loss_fn, optimizer\n"
    loader = "dataloader = torch.utils.data.DataLoader(dataset, batch_size={})\n"
    (many,) = launch("torch", names + loader.format(32) + text_of("torch_accumulate.txt"), 1)
    whole = text_of("torch_accumulate.txt").replace(
        "BATCH_FIT_IN_MEMORY = 256, 32", "BATCH_FIT_IN_MEMORY = 256, 256"
    )
    (one,) = launch("torch", names + loader.format(256) + whole, 1)
    assert close(many["state"], one["state"])


SAME_START = """
import numpy as np
import torch
rng = np.random.default_rng(3)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
start = {name: rng.standard_normal(tuple(p.shape)).astype("f4") for name, p in network.named_parameters()}
network.load_state_dict({name: torch.tensor(values) for name, values in start.items()})
loss_function = torch.nn.CrossEntropyLoss()
optim = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
samples, labels = rng.standard_normal((512, 8)).astype("f4"), rng.integers(0, 4, 512)
dataset = torch.utils.data.TensorDataset(torch.tensor(samples), torch.tensor(labels))
dataloader = torch.utils.data.DataLoader(dataset, batch_size=32)
"""


def test_torch_accumulation_agrees_with_torch():
    """The same lines under the front and under PyTorch itself end in the same weights."""
    pytest.importorskip("torch")
    text = SAME_START + text_of("torch_accumulate.txt")
    (ours,) = launch("torch", text, 1)
    theirs: dict = {}
    exec(compile(text, "listing.py", "exec"), theirs)
    assert close(ours["state"], {name: x.numpy() for name, x in theirs["network"].state_dict().items()})


def test_torch_split_and_data_parallel():
    """A network split over two devices, and one replicated on both, give what one device gives."""
    split = text_of("torch_split.txt").replace("self.module1 = ...", "self.module1 = nn.Linear(64, 8)")
    split = split.replace("self.module2 = ...", "self.module2 = nn.Linear(8, 10)")
    use = """
torch.manual_seed(3)
network = Network(split_gpus={0})
loss = loss_fn(network(torch.as_tensor(dataset[:][0])), torch.as_tensor(dataset[:][1]).cuda({1}))
loss.backward()
value, place = loss.item(), str(network.module2.weight.device)
"""
    (two,) = launch("torch", torch_names() + split + use.format(True, 1), 1, devices_per_rank=2)
    (one,) = launch("torch", torch_names() + split + use.format(False, 0), 1)
    assert (two["place"], one["place"]) == ("sim:1", "sim:0")
    assert two["value"] == one["value"]
    wrap = text_of("torch_data_parallel.txt").replace("loss = ...", "loss = loss_fn(model(batch), labels)")
    wrap = "batch, labels = map(torch.as_tensor, dataset[:])\n" + wrap + "\nvalue = loss.item()"
    (two,) = launch("torch", torch_names() + wrap, 1, devices_per_rank=2)
    (one,) = launch("torch", torch_names() + wrap, 1)
    assert two["value"] == pytest.approx(one["value"], rel=1e-6)
