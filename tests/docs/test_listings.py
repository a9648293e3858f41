"""The listings of the seed documents, as printed: MindSpore's tutorials and an article on PyTorch.

The files in `tests/listings` hold their lines unchanged, with lost indentation restored. A listing with a mistake runs
as it is first, to check that the error names the mistake, and then with that line corrected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from run_listing import AROUND_AUTO_PARALLEL, launch, text_of, torch_names

import simparallel as sp

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import make_data  # noqa: E402

pytestmark = [pytest.mark.documents, pytest.mark.process]


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    return make_data.write_mnist(tmp_path_factory.mktemp("mnist"), samples=256)


def losses(log: Path) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in log.read_text().splitlines() if "loss is" in line]


def steps_of(results: sp.Results) -> list[list[float]]:
    """Return the losses of all steps of a `Model`, for each rank."""
    return [[value for _, name, value in results.metrics[rank] if name == "loss"] for rank in range(len(results))]


def close(a: dict, b: dict) -> bool:
    return all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a)


def with_inputs(text: str, dataset: str, epochs: int) -> str:
    """Return the listing, extended to export its initial weights and its batches."""
    line = text[text.index("net = Network()") :].partition("\n")[0]
    keep = "start = [np.copy(array) for array in net.state_dict().values()]"
    again = f"again = {dataset}\nbatches = [(x.asnumpy(), y.asnumpy()) for _ in range({epochs}) for x, y in again]"
    return f"import numpy as np\n{text.replace(line, f'{line}; {keep}')}\n{again}\n"


@pytest.fixture(scope="module")
def oracle():
    """Load the trainings in one process of PyTorch, if that is installed."""
    pytest.importorskip("torch")
    import oracles_listings

    return oracles_listings


@pytest.fixture(scope="module")
def data_parallel(mnist, tmp_path_factory):
    """Return the results of eight ranks, the folder of their logs, and the results of one device with all samples."""
    environment, logs = {"DATA_PATH": str(mnist)}, tmp_path_factory.mktemp("data_parallel")
    many = launch("mindspore", text_of("data_parallel.txt"), 8, log_dir=logs, environment=environment)
    whole = text_of("data_parallel.txt").replace("create_dataset(32)", "create_dataset(256)")
    (one,) = launch("mindspore", with_inputs(whole, "create_dataset(256)", 10), 1, environment=environment)
    return many, logs, one


def test_data_parallel(data_parallel):
    """Eight ranks with 32 samples each train as one device with 256."""
    many, logs, one = data_parallel
    assert all(close(many[0]["state"], other["state"]) for other in many[1:])
    assert close(many[0]["state"], one["state"])
    found = losses(logs / "worker_3.log")
    assert found[0] == pytest.approx(np.log(10), abs=0.01)
    assert len(found) == 10
    assert found[-1] < found[0]


@pytest.fixture(scope="module")
def data_parallel_in_torch(data_parallel, oracle):
    """Return the losses of PyTorch's 20 steps on the same batches from the same weights, and its final weights."""
    _, _, one = data_parallel
    network = oracle.dense()
    return oracle.train(network, one["start"], one["batches"], lr=1e-2), oracle.state(network)


def test_data_parallel_agrees_with_torch(data_parallel, data_parallel_in_torch, oracle):
    """The mean of the ranks' losses and the change of the weights are PyTorch's."""
    many, logs, one = data_parallel
    theirs, weights = data_parallel_in_torch
    means = np.mean([losses(logs / f"worker_{rank}.log") for rank in range(8)], axis=0)
    assert oracle.difference([means], [theirs[::2]]) < 1e-5
    # A ReLU whose input is 0 but for rounding may pass one sample's gradient here and not there.
    assert oracle.difference(many[0]["state"].values(), weights, one["start"]) < 1e-2


def test_summed_gradients_differ_from_torch(mnist, data_parallel, data_parallel_in_torch, oracle):
    """Red control: ranks that add up their gradients, instead of averaging them, are found."""
    _, _, one = data_parallel
    text = text_of("data_parallel.txt").replace("gradients_mean=True", "gradients_mean=False")
    text = text.replace("create_dataset(32)", "create_dataset(128)")
    summed = launch("mindspore", text, 2, environment={"DATA_PATH": str(mnist)})[0]
    weights = data_parallel_in_torch[1]
    assert oracle.difference(summed["state"].values(), weights, one["start"]) > 0.5


NO_INITIALIZER = "from mindspore.common.initializer import initializer\n"
NO_LAYOUT = "from mindspore.parallel import Layout\n"
NO_HAS_AUX = (
    "grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)",
    "grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)",
)


def with_layouts() -> str:
    """Return the second listing of a network in place of the first one, as the tutorial says."""
    first, _, rest = text_of("operator_parallel.txt").partition(
        "import mindspore as ms\nfrom mindspore import nn, ops\n"
    )
    return first + text_of("operator_parallel_layout.txt") + rest[rest.index("\nfrom mindspore.nn.utils") :]


LISTINGS_OF_OPERATORS = {"tuples": text_of("operator_parallel.txt"), "layouts": with_layouts()}


@pytest.fixture(scope="module", params=sorted(LISTINGS_OF_OPERATORS))
def operator_parallel(request, mnist, tmp_path_factory):
    """Return results and output of eight ranks and of one device, with the missing import and `has_aux` added."""
    logs, environment = tmp_path_factory.mktemp(request.param), {"DATA_PATH": str(mnist)}
    text = NO_INITIALIZER + NO_LAYOUT + LISTINGS_OF_OPERATORS[request.param]
    text = text.replace(*NO_HAS_AUX).replace("range(10)", "range(2)")
    whole = "\nwhole = [p.full_tensor().numpy() for p in net.parameters()]\n"
    many = launch("mindspore", text + whole, 8, log_dir=logs / "many", environment=environment)
    alone = "class AutoParallel:\n    def __new__(cls, step, parallel_mode): return step\n"
    text = text.replace("from mindspore.parallel.auto_parallel import AutoParallel", alone)
    text = text.replace("with no_init_parameters():", "if True:")  # the weights exist before the first step
    text = with_inputs(text, "create_dataset(32)", 2)
    (one,) = launch("mindspore", text, 1, log_dir=logs / "one", environment=environment)
    return many, one, *(losses(logs / name / "worker_0.log") for name in ("many", "one"))


def test_operator_parallel(operator_parallel):
    """Eight ranks train as one device."""
    _, _, many, one = operator_parallel
    assert len(many) == len(one) == 4
    assert many == pytest.approx(one, rel=1e-5)
    assert many[-1] < many[0]


def test_operator_parallel_agrees_with_torch(operator_parallel, oracle):
    """The losses that eight ranks print, and the change of the weights in 32 steps, are PyTorch's."""
    many, one, printed, _ = operator_parallel
    network = oracle.Products(784, 512, 512, 10)
    theirs = oracle.train(network, one["start"], one["batches"], lr=1e-2)
    assert oracle.difference([printed], [[theirs[i] for i in (0, 10, 16, 26)]]) < 1e-5
    assert oracle.difference(many[0]["whole"], oracle.state(network), one["start"]) < 1e-3


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


@pytest.fixture(scope="module")
def auto_parallel(tmp_path_factory):
    """Return the unchanged listing's output; and, without shuffling, results and output of two ranks and one device."""
    logs = tmp_path_factory.mktemp("auto_parallel")
    environment = {"DATA_PATH": str(make_data.write_cifar10(logs / "cifar", samples=64))}
    text = AROUND_AUTO_PARALLEL + text_of("resnet50_auto_parallel.txt") + "\ntest_train_cifar(epoch_size=3)\n"
    launch("mindspore", text, 2, log_dir=logs / "printed", environment=environment)
    in_order = text.replace("data_set = data_set.shuffle(buffer_size=10)", "")
    many = launch("mindspore", in_order, 2, log_dir=logs / "many", environment=environment)
    whole = in_order.replace("batch_size=32,", "batch_size=64,")
    again = "batches = [(x.asnumpy(), y.asnumpy()) for x, y in create_dataset(3)]\n"
    (one,) = launch("mindspore", whole + again, 1, log_dir=logs / "one", environment=environment)
    return logs, many, one


def test_auto_parallel(auto_parallel):
    """Ranks whose operators cut the batch train as one device does, batch norm included."""
    logs, _, _ = auto_parallel
    first, second = (losses(logs / "printed" / f"worker_{rank}.log") for rank in range(2))
    assert first == second
    assert len(first) == 3
    assert first[-1] < first[0]
    many, one = (losses(logs / name / "worker_0.log") for name in ("many", "one"))
    assert many[0] == pytest.approx(one[0], rel=1e-5)
    assert many == pytest.approx(one, rel=1e-2)  # rounding, which batch norms and momentum amplify


def test_auto_parallel_agrees_with_torch(auto_parallel, oracle):
    """The losses of 6 steps on two ranks, the weights and the running statistics are PyTorch's."""
    _, many, one = auto_parallel
    network = oracle.residual()
    theirs = oracle.train(network, one["start"], one["batches"], lr=0.01, momentum=0.9)
    ours = steps_of(many)[0]
    assert oracle.difference([ours[:2]], [theirs[:2]]) < 1e-5
    # Batch norms and momentum amplify rounding; ReLUs with an input of about 0 do, too.
    assert oracle.difference([ours], [theirs]) < 1e-4
    assert oracle.difference(many[0]["state"].values(), oracle.state(network), one["start"]) < 5e-2


# Names that the tutorial on Adasum expects: the files beside it, a small ResNet, and random images.
AROUND_ADASUM = f"""
import argparse, os, sys
import numpy as np
sys.path.insert(0, {str(EXAMPLES / "adasum")!r})
import mindspore.dataset as ds
from helpers import ClassifyCorrectCell, CrossEntropySmooth, get_lr, init_group_params
from helpers import init_weight as weights_of_the_model_zoo
from mindspore import Model, ParallelMode, Tensor, context
from mindspore.communication import get_group_size, get_rank, init
from mindspore.nn import Momentum
from mindspore.parallel import set_algo_parameters
from mindspore.train import FixedLossScaleManager
from mindspore.train.callback import LossMonitor, TimeMonitor
from resnet import resnet as resnet_of_depth
args = argparse.Namespace(data_path="")
rng = np.random.default_rng(5)
images = [rng.standard_normal((64, 3, 32, 32)).astype("f4"), rng.integers(0, 1001, 64).astype("i4")]
start = []
def create_dataset(distribute, **settings):
    shard = dict(num_shards=get_group_size(), shard_id=get_rank())
    return ds.NumpySlicesDataset(tuple(images), ["image", "label"], shuffle=False, **shard).batch(8)
def resnet(num_classes):
    return resnet_of_depth(num_classes, (1, 1), 4)
def init_weight(net):
    weights_of_the_model_zoo(net)
    start.extend(np.copy(array) for array in net.state_dict().values())
"""


@pytest.mark.parametrize("amp_level", ["O0", "O2"])
def test_adasum_agrees_with_torch(oracle, amp_level):
    """The listing on two nodes of two ranks, as printed and in float32: the losses of 6 steps are PyTorch's."""
    text = text_of("adasum.txt").replace("device_num=16", "device_num=4").replace("train(90,", "train(3,")
    text = AROUND_ADASUM + text.replace('amp_level="O2"', f'amp_level="{amp_level}"')
    many = launch("mindspore", text + "\nrates = lr.asnumpy().tolist()\n", 4, nodes=2)
    images, labels = many[0]["images"]
    epoch = [[(images[rank::4][i : i + 8], labels[rank::4][i : i + 8]) for rank in range(4)] for i in (0, 8)]
    networks = [oracle.AdasumResNet((1, 1), 1001, 4) for _ in range(4)]
    start, rates = many[0]["start"], many[0]["rates"]
    theirs = oracle.train_with_adasum(networks, start, [[0, 1], [2, 3]], epoch * 3, rates)
    ours = np.transpose(steps_of(many))
    assert ours.shape == (6, 4)
    if amp_level == "O2":  # gradients in float16 are off by some percent, under PyTorch, too
        assert oracle.difference(ours, theirs) < 2e-3
        return
    assert oracle.difference(ours, theirs) < 1e-5
    for left, network in zip(many, networks, strict=True):
        assert oracle.difference(left["state"].values(), oracle.state(network), start) < 1e-2


# --- the article on PyTorch ---------------------------------------------------------------------------


def test_torch_distributed():
    """Four ranks with one sample each train as one device with four."""
    many = launch("torch", torch_names() + text_of("torch_distributed.txt"), 4)
    one = text_of("torch_distributed.txt").replace("DataLoader(dataset,", "DataLoader(dataset, batch_size=4,")
    (alone,) = launch("torch", torch_names() + one, 1)
    states = [{name.removeprefix("module."): x for name, x in each["state"].items()} for each in [*many, alone]]
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
    with pytest.raises(sp.errors.RunFailedError, match="SyntaxError"):
        launch("torch", text, 2)
    with refused(sp.errors.RunFailedError):
        launch("torch", text.rstrip() + ")", 2)
    mended = text.rstrip().replace("if args.local_rank==0:", "if True:") + ")\n"
    assert [left["loss_tensor"] for left in launch("torch", mended + "loss_tensor = loss_tensor.item()", 2)] == [
        3.0,
        2.0,
    ]


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
    whole = text_of("torch_accumulate.txt").replace("BATCH_FIT_IN_MEMORY = 256, 32", "BATCH_FIT_IN_MEMORY = 256, 256")
    (one,) = launch("torch", names + loader.format(256) + whole, 1)
    assert close(many["state"], one["state"])


def test_torch_split_and_data_parallel():
    """A network split over two devices, and one replicated on both, match one device."""
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
