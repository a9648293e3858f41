"""Every name of MindSpore 2.3's script for operator-level parallelism: the context cuts the step, not AutoParallel."""

import os

import mindspore as ms
import mindspore.dataset as ds
from mindspore import Layout, nn, ops
from mindspore.common.initializer import initializer
from mindspore.communication import init

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_context(max_device_memory="28GB")
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)
init()
ms.set_seed(1)


class Network(nn.Cell):
    def __init__(self, width=32):
        super().__init__()
        self.flatten = ops.Flatten()
        sizes = ([28 * 28, width], [width, width], [width, 10])
        for i, size in enumerate(sizes, 1):
            setattr(self, f"fc{i}_weight", ms.Parameter(initializer("normal", size, ms.float32)))
        self.matmul1, self.matmul2, self.matmul3 = ops.MatMul(), ops.MatMul(), ops.MatMul()
        self.relu1, self.relu2 = ops.ReLU(), ops.ReLU()

    def construct(self, x):
        x = self.relu1(self.matmul1(self.flatten(x), self.fc1_weight))
        return self.matmul3(self.relu2(self.matmul2(x, self.fc2_weight)), self.fc3_weight)


net = Network()
layout, layout2 = Layout((2, 2, 2), ("dp", "sp", "mp")), Layout((8,), ("tp",))
net.matmul1.shard((layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
net.relu1.shard(((4, 1),))
net.matmul2.shard((layout2("None", "tp"), layout2("tp", "None")))
net.relu2.shard(((8, 1),))


def create_dataset(batch_size):
    images = ds.MnistDataset(os.getenv("DATA_PATH"))
    scale = ds.vision.Rescale(1.0 / 255.0, 0)
    transforms = [scale, ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)), ds.vision.HWC2CHW()]
    images = images.map(transforms, "image")
    images = images.map(ds.transforms.TypeCast(ms.int32), "label")
    return images.batch(batch_size)


data_set = create_dataset(32)
optimizer = nn.SGD(net.trainable_params(), 1e-2)
loss_fn = nn.CrossEntropyLoss()


def forward_fn(data, target):
    logits = net(data)
    return loss_fn(logits, target), logits


grad_fn = ms.value_and_grad(forward_fn, None, net.trainable_params(), has_aux=True)


@ms.jit
def train_step(inputs, targets):
    (loss_value, _), grads = grad_fn(inputs, targets)
    optimizer(grads)
    return loss_value


for epoch in range(2):
    for i, (image, label) in enumerate(data_set):
        loss_output = train_step(image, label)
        if i % 10 == 0:
            print("epoch: %s, step: %s, loss is %s" % (epoch, i, loss_output))
