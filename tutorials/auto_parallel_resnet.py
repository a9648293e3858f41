# %% [markdown]
# # Automatic parallelism: a ResNet on eight cards
#
# One network, trained in three ways: on one device, data parallel on eight, and on eight with strategies that a search
# has found on a model of the hardware. All three have the same losses. Run it, in less than a minute:
# `python tutorials/auto_parallel_resnet.py`; the loss lines of card N go to `data_parallel/worker_N.log` and
# `auto_parallel/worker_N.log`, beside checkpoints. The same job as eight processes that a shell script starts, with
# MindSpore's names, is in `examples/distributed_training`.

# %%
import json
import tempfile
from pathlib import Path

import numpy as np

import simparallel as sp
from simparallel.data import transforms
from simparallel.models.resnet import BasicBlock, ResNet

NUM_CARDS, BATCH, EPOCHS, NUM_CLASSES = 8, 4, 2, 10

# %% [markdown]
# ## The cards
#
# A rank table lists the servers, their cards, and the rank of each card. This is its form for a laboratory.


# %%
def write_rank_table(path: Path) -> None:
    cards = [
        {
            "devices": [{"device_id": str(i), "device_ip": f"192.{i % 4 + 1}.27.{6 + i // 4}"}],
            "rank_id": str(i),
            "server_id": "10.0.0.1",
        }
        for i in range(NUM_CARDS)
    ]
    group = {"device_num": str(NUM_CARDS), "server_num": "1", "group_name": "", "instance_count": str(NUM_CARDS)}
    table = {
        "board_id": "0x0000",
        "chip_info": "910",
        "deploy_mode": "lab",
        "group_count": "1",
        "group_list": [{**group, "instance_list": cards}],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": [f"eth{i}" for i in range(NUM_CARDS)],
        "para_plane_nic_num": str(NUM_CARDS),
        "status": "completed",
    }
    path.write_text(json.dumps(table, indent=1))


# %% [markdown]
# ## Data: every card reads its own shard
#
# The files have the binary format of CIFAR-10: a byte for the class, then 32 x 32 bytes for each colour. Here they hold
# enlarged digits. Crops and flips are drawn by the number of the sample, so that they do not depend on the number of
# cards.


# %%
def write_cifar10(folder: Path) -> None:
    images, labels = sp.data.digits("train", flatten=False)[:160]
    planes = (images * 255).astype(np.uint8).repeat(4, 2).repeat(4, 3).repeat(3, 1).reshape(len(labels), -1)
    records = np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1)
    for i, part in enumerate(np.array_split(records, 5), 1):
        (folder / f"data_batch_{i}.bin").write_bytes(part.tobytes())


def create_dataset(folder: Path, batch_size: int) -> sp.data.Pipeline:
    rank_id, rank_size = sp.get_rank(), sp.get_group_size()
    data_set = sp.data.Cifar10Dataset(folder, "train", shuffle=False, num_shards=rank_size, shard_id=rank_id)
    c_trans = [
        transforms.RandomCrop((32, 32), (4, 4, 4, 4)),
        transforms.RandomHorizontalFlip(),
        transforms.Resize((16, 16)),
        transforms.Rescale(1.0 / 255.0, 0.0),
        transforms.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)),
        transforms.HWC2CHW(),
    ]
    data_set = data_set.map(transforms.TypeCast(np.int32), "label")
    data_set = data_set.map(c_trans, "image")
    return data_set.batch(batch_size, drop_remainder=True)


# %% [markdown]
# ## The loss in small ops
#
# The search gives a strategy to every op. A loss of small ops leaves it more choices: of the logits, it may cut the
# samples or the classes. `sp.nn.SoftmaxCrossEntropyExpand` is this class.


# %%
class SoftmaxCrossEntropyExpand(sp.nn.Module):
    def forward(self, logits: sp.Tensor, labels: sp.Tensor) -> sp.Tensor:
        exp = (logits - logits.max(-1, keepdims=True)).exp()
        softmax = exp / exp.sum(-1, keepdims=True)
        of_label = sp.functions.one_hot(labels, logits.shape[-1])
        return -(softmax.log() * of_label).sum(-1).mean()


# %% [markdown]
# ## Training
#
# The mode is the only difference. In data-parallel mode every card has the whole network, and gradients are averaged; a
# plain batch norm would see the samples of its card only. In automatic mode the first step is captured without data, a
# strategy is found for each of its ops on the described hardware, and the first card's plan goes to all others.
#
# A checkpoint of eight cards is continued on one device: it holds whole tensors, and the position in the data.


# %%
def train(folder: Path, mode: str, batch_size: int, checkpoints: str, epochs: int, resume: str | None = None) -> dict:
    sp.init()
    sp.set_seed(1)
    sp.set_auto_parallel_context(parallel_mode=mode, gradients_mean=True)
    net = ResNet(BasicBlock, (1, 1), NUM_CLASSES, "cifar")
    if mode == sp.ParallelMode.DATA_PARALLEL:
        net = sp.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    opt = sp.optim.Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = sp.Model(net, loss_fn=SoftmaxCrossEntropyExpand(), optimizer=opt)
    data_set = create_dataset(folder, batch_size)
    steps = len(data_set)
    saved = sp.ModelCheckpoint(directory=checkpoints, config=sp.CheckpointConfig(save_checkpoint_steps=steps))
    callbacks = [sp.LossMonitor(steps), saved]
    history = model.train(epochs, data_set, callbacks=callbacks, resume=resume, progress=False)
    sp.reset_auto_parallel_context()
    return {"losses": history.history["loss"], "plan": model.plan}


# %% [markdown]
# ## Why these strategies
#
# A plan has the cost of each op, and of the next best strategies. For ResNet-50 with 32 large images on each card,
# nothing is much faster than data parallelism. With a million classes, the sum of the last layer's gradient would take
# most of a step, so the classes are cut: the logits stay where they are made.


# %%
def plan_of(classes: int, images: int) -> sp.Plan:
    """Return the plan of a training step on eight described cards, which are not there."""

    def search() -> sp.Plan:
        with sp.no_init_parameters():
            net = sp.models.resnet50(classes)
        opt = sp.optim.Momentum(net.parameters(), 0.01, 0.9)

        def step(x: sp.Tensor, labels: sp.Tensor) -> None:
            sp.functions.cross_entropy(net(x), labels).backward()
            opt.step()

        parallel = sp.AutoParallel(step, "auto")
        parallel(np.zeros((images, 3, 224, 224), np.float32), np.zeros(images, np.int64))
        return parallel.plan

    return sp.dry_run(search, world_size=NUM_CARDS, cluster="ascend910-8").values[0]


# %%
def main(log_dir: str = ".") -> dict:
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cifar10(folder)
        write_rank_table(folder / "rank_table.json")
        for mode in (sp.ParallelMode.STAND_ALONE, sp.ParallelMode.DATA_PARALLEL, sp.ParallelMode.AUTO_PARALLEL):
            many = {"rank_table": folder / "rank_table.json"} if mode != sp.ParallelMode.STAND_ALONE else {}
            cards = NUM_CARDS if many else 1
            logs = str(Path(log_dir) / mode)
            with sp.Cluster(cards, device="ascend910", log_dir=logs, **many) as cluster:
                results[mode] = cluster.run(train, folder, mode, NUM_CARDS * BATCH // cards, logs, EPOCHS)[0]
        with sp.Cluster(1) as cluster:
            again = ("stand_alone", NUM_CARDS * BATCH, f"{name}/again", EPOCHS + 1, f"{logs}/CKP")
            results["continued alone"] = cluster.run(train, folder, *again)[0]
    for mode, result in results.items():
        print(f"{mode:<16}", *(f"{loss:.5f}" for loss in result["losses"]))
    print("\n", results["auto_parallel"]["plan"], sep="")
    for classes in (1000, 1 << 20):
        plan = plan_of(classes, NUM_CARDS * 32)
        print(f"\nResNet-50, {classes} classes: {plan.title}")
        print(plan.explain("fc.Linear"))
    return {mode: result["losses"] for mode, result in results.items()}


if __name__ == "__main__":
    main()

# %% [markdown]
# ## Exercises
#
# 1. Leave out `convert_sync_batchnorm`. Which losses change, and why only those?
# 2. Save the plan, `plan.save("plan.json")`, change the strategy of one op with `with_`, and pass the file to
#    `AutoParallel(step, "auto", plan="plan.json")`. Which losses change?
# 3. `simparallel plan resnet50 --cluster ascend910-8 --picture plan.png` draws the plan for the large network. Which
#    `--cluster` makes another plan better?
