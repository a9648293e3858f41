"""Run a listing as it is printed, in device processes under a front; read by test_listings.py and torch_ranks.py."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import numpy as np

import simparallel as sp
from simparallel.compat import install

LISTINGS = Path(__file__).parent / "listings"


# Names that the tutorial on automatic parallelism expects: a folder, ResNet, and here a small size.
AROUND_AUTO_PARALLEL = """
import os, sys, types
import numpy as np
import mindspore.dataset.vision as vision
from simparallel.models.resnet import BasicBlock, ResNet
resize = vision.Resize
vision.Resize = lambda size: resize((size[0] // 28, size[1] // 28))
start = []
def resnet50(batch_size, num_classes):
    global network
    network = ResNet(BasicBlock, (1, 1), num_classes, "cifar")
    start.extend(np.copy(array) for array in network.state_dict().values())
    return network
sys.modules["resnet"] = types.SimpleNamespace(resnet50=resnet50)
data_path = os.environ["DATA_PATH"]
"""


def torch_names(samples: int = 64) -> str:
    """Define the names that the article's listings expect: a dataset, a model, a loss function and an optimizer."""
    return f"""
import torch
import simparallel as sp
torch.manual_seed(1)
dataset = torch.utils.data.TensorDataset(*[x[:{samples}] for x in sp.data.digits("train")[:]])
model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def text_of(name: str) -> str:
    return (LISTINGS / name).read_text()


def execute(text: str, rank: int) -> dict:
    """Run a program; return its numbers, strings and lists, and the state of `net` or `model`."""
    script = types.ModuleType("__main__")
    sys.argv = ["listing.py", f"--local_rank={rank}"]  # as torch.distributed.launch starts it
    sys.modules["__main__"] = script
    exec(compile(text, "listing.py", "exec"), script.__dict__)
    left = {name: value for name, value in vars(script).items() if isinstance(value, (int, float, str, list))}
    for name in ("net", "model", "network"):
        if hasattr(getattr(script, name, None), "state_dict"):
            left["state"] = {key: np.copy(value) for key, value in getattr(script, name).state_dict().items()}
    return left


def run(framework: str, text: str) -> dict:
    install(framework)
    return execute(text, int(os.environ["LOCAL_RANK"]))


def launch(framework: str, text: str, world_size: int, **settings) -> sp.Results:
    return sp.launch(run, (framework, text), world_size=world_size, echo=False, **settings)
