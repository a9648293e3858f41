# %% [markdown]
# # Adasum across nodes: a ResNet, with MindSpore's names
#
# Two nodes, several devices each. Inside a node gradients are averaged; every node makes its own optimizer step,
# and what the steps did to the weights is summed by Adasum across the nodes. ResNet-18 on the shipped digits
# by default, some minutes on two cores: `python tutorials/adasum_resnet.py`. A net that takes seconds: `--net small`.
# All of it: `--net resnet50 --devices 16 --device-number 8`.

# %%
import argparse
import math

import numpy as np

import simparallel as sp
from simparallel.optim import FixedLossScaleManager

NUM_CLASSES = 10


# %% [markdown]
# ## Data: every device reads its own shard


# %%
def create_dataset(split: str, batch_size: int) -> sp.data.DataLoader:
    images = sp.data.digits(split, flatten=False)
    sampler = sp.data.DistributedSampler(images, shuffle=split == "train")
    return sp.data.DataLoader(images, batch_size, sampler=sampler, drop_last=split == "train")


# %% [markdown]
# ## Learning rate, groups of parameters, evaluation
#
# A warm-up in a straight line, then down in a straight line: one rate for every step. No weight decay for biases and
# normalisations. `order_params` keeps the order of the gradients.


# %%
def get_lr(lr_init: float, lr_end: float, lr_max: float, warmup_steps: int, total_steps: int) -> np.ndarray:
    up = np.linspace(lr_init, lr_max, warmup_steps, endpoint=False)
    down = np.linspace(lr_max, lr_end, total_steps - warmup_steps, endpoint=False)
    return np.concatenate([up, down]).astype(np.float32)


def init_group_params(net: sp.nn.Module) -> list[dict]:
    decayed, others = [], []
    for name, parameter in net.named_parameters():
        is_weight = parameter.ndim > 1 and not name.endswith("bias")
        (decayed if is_weight else others).append(parameter)
    return [
        {"params": decayed, "weight_decay": 1e-4},
        {"params": others},
        {"order_params": list(net.parameters())},
    ]


class ClassifyCorrectCell(sp.nn.Module):
    """How many of a batch are right, and how many there are."""

    def __init__(self, network: sp.nn.Module) -> None:
        super().__init__()
        self._network = network

    def forward(self, data: object, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        right = self._network(data).numpy().argmax(axis=1) == np.asarray(label)
        return np.array(float(right.sum())), np.array(float(right.size))


class DistAccuracy(sp.train.Metric):
    """The share of all samples of all devices that are right."""

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        right, count = inputs
        return np.array([float(count), float(right)])

    def result(self, sums: np.ndarray) -> float:
        return float(sums[1] / sums[0])


# %% [markdown]
# ## The training


# %%
BOOST = {
    "boost": {
        "mode": "manual",
        "less_bn": False,
        "grad_freeze": False,
        "adasum": True,
        "grad_accumulation": False,
        "dim_reduce": False,
    }
}


def make_net(name: str) -> sp.nn.Module:
    if name == "resnet50":
        return sp.models.resnet50(NUM_CLASSES, stem="cifar", in_channels=1)
    if name == "resnet18":
        return sp.models.resnet18(NUM_CLASSES, stem="cifar", in_channels=1)
    from simparallel.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1,), NUM_CLASSES, "cifar", in_channels=1)  # one block, to try things out


def train(net_name: str, epochs: int, batch_size: int, sink_size: int, device_number: int) -> dict:
    sp.init()
    sp.set_seed(1)
    sp.set_auto_parallel_context(
        device_num=sp.get_group_size(), parallel_mode=sp.ParallelMode.DATA_PARALLEL, gradients_mean=True
    )
    ds_train = create_dataset("train", batch_size)
    step_size = sink_size if sink_size > 0 else len(ds_train)
    net = make_net(net_name)
    loss = sp.nn.CrossEntropySmooth(sparse=True, reduction="mean", smooth_factor=0.1, num_classes=NUM_CLASSES)
    loss_scale = FixedLossScaleManager(1024, drop_overflow_update=False)
    lr = sp.Tensor(get_lr(0.0, 0.0, lr_max=0.05, warmup_steps=step_size // 2, total_steps=epochs * step_size))
    opt = sp.optim.Momentum(init_group_params(net), lr, 0.9, loss_scale=1024)
    model = sp.Model(
        net, loss_fn=loss, optimizer=opt, loss_scale_manager=loss_scale, amp_level="O2", boost_level="O2",
        keep_batchnorm_fp32=False, boost_config_dict={**BOOST, "common": {"device_number": device_number}},
        eval_network=ClassifyCorrectCell(net), metrics={"accuracy": DistAccuracy()},
    )  # fmt: skip
    cb = [sp.TimeMonitor(data_size=step_size), sp.LossMonitor()] if sp.get_rank() == 0 else []
    if sp.get_rank() == 0:
        print("============== Starting Training ==============")
    history = model.train(
        epochs, ds_train, callbacks=cb, sink_size=sink_size, dataset_sink_mode=True, progress=False
    )
    accuracy = model.eval(create_dataset("test", 16))["accuracy"]
    apart = sp.parallel.max_difference_between_ranks(net)
    sp.reset_auto_parallel_context()
    return {"losses": history.history["loss"], "accuracy": accuracy, "apart": apart}


# %%
def main(
    net: str = "resnet18", devices: int = 4, device_number: int = 2, epochs: int = 2, batch_size: int = 16,
    sink_size: int = -1,
) -> None:  # fmt: skip
    with sp.Cluster(devices, device="ascend910") as cluster:
        results = cluster.run(train, net, epochs, batch_size, sink_size, device_number)
    first = results[0]
    print(
        f"mean loss of each epoch   {', '.join(f'{x:.3f}' for x in first['losses'])}   (ln 10: {math.log(10):.3f})"
    )
    print(f"test accuracy             {first['accuracy']:.1%}")
    print(f"parameters of the devices differ by {first['apart']:g}")
    assert first["apart"] == 0
    assert first["losses"][-1] < first["losses"][0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="resnet18", choices=("resnet18", "resnet50", "small"))
    for option, default in (
        ("devices", 4),
        ("device-number", 2),
        ("epochs", 2),
        ("batch-size", 16),
        ("sink-size", -1),
    ):
        parser.add_argument(f"--{option}", type=int, default=default)
    main(**vars(parser.parse_args()))

# %% [markdown]
# ## Exercises
#
# 1. Say `--device-number 4`: what do the devices do now, and who says so?
# 2. Set `"adasum": False`. Every step now has the mean of all gradients. At which learning rate is the loss as low?
# 3. Set `"less_bn": True` as well. How many normalisations are left?
