"""Every name of MindSpore 0.2's program for automatic parallelism, on small images: pytest runs it on each device."""

import os

import mindspore.common.dtype as mstype
import mindspore.dataset as ds
import mindspore.dataset.transforms.c_transforms as C
import mindspore.dataset.transforms.vision.c_transforms as vision
import mindspore.nn as nn
import mindspore.ops.functional as F
from mindspore import Tensor, context
from mindspore.communication.management import get_group_size, get_rank, init
from mindspore.nn.optim.momentum import Momentum
from mindspore.ops import operations as P
from mindspore.train.callback import LossMonitor
from mindspore.train.model import Model, ParallelMode
from resnet import resnet50

BATCH, SIZE = 4, 16

device_id = int(os.getenv("DEVICE_ID"))
context.set_context(mode=context.GRAPH_MODE, device_target="Ascend")
context.set_context(enable_task_sink=True, device_id=device_id)
context.set_context(enable_hccl=True)
context.set_context(enable_loop_sink=False)
context.set_context(enable_mem_reuse=False)
init()


def create_dataset(repeat_num=1, batch_size=BATCH):
    images = ds.Cifar10Dataset(os.environ["DATA_PATH"], num_shards=get_group_size(), shard_id=get_rank())
    operations = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip()]
    operations += [vision.Resize((SIZE, SIZE)), vision.Rescale(1.0 / 255.0, 0.0)]
    operations += [vision.Normalize((0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)), vision.HWC2CHW()]
    images = images.map(input_columns="label", operations=C.TypeCast(mstype.int32))
    images = images.map(input_columns="image", operations=operations)
    images = images.shuffle(buffer_size=10)
    images = images.batch(batch_size=batch_size, drop_remainder=True)
    return images.repeat(repeat_num)


class SoftmaxCrossEntropyExpand(nn.Cell):
    def __init__(self, sparse=False):
        super(SoftmaxCrossEntropyExpand, self).__init__()
        self.sparse = sparse
        self.exp, self.div, self.log, self.sub, self.onehot = P.Exp(), P.Div(), P.Log(), P.Sub(), P.OneHot()
        self.max, self.sum = P.ReduceMax(keep_dims=True), P.ReduceSum(keep_dims=True)
        self.sum_cross_entropy, self.mean = P.ReduceSum(keep_dims=False), P.ReduceMean(keep_dims=False)
        self.mul, self.mul2 = P.Mul(), P.Mul()
        self.on_value, self.off_value = Tensor(1.0, mstype.float32), Tensor(0.0, mstype.float32)
        self.eps = Tensor(1e-24, mstype.float32)

    def construct(self, logit, label):
        exp = self.exp(self.sub(logit, self.max(logit, -1)))
        shares = self.div(exp, self.sum(exp, -1))
        if self.sparse:
            label = self.onehot(label, F.shape(logit)[1], self.on_value, self.off_value)
        losses = self.sum_cross_entropy(self.mul(self.log(shares + self.eps), label), -1)
        return self.mean(self.mul2(F.scalar_to_array(-1.0), losses), -1)


def test_train_cifar(num_classes=10, epoch_size=2):
    context.set_auto_parallel_context(parallel_mode=ParallelMode.AUTO_PARALLEL, mirror_mean=True)
    net = resnet50(32, num_classes)
    opt = Momentum(filter(lambda x: x.requires_grad, net.get_parameters()), 0.01, 0.9)
    model = Model(net, loss_fn=SoftmaxCrossEntropyExpand(sparse=True), optimizer=opt)
    model.train(epoch_size, create_dataset(epoch_size), callbacks=[LossMonitor()], dataset_sink_mode=False)
