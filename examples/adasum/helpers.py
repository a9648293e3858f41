"""The parts that the tutorial takes from MindSpore's model zoo: loss, learning rates, weights, parameter groups."""

import numpy as np
from mindspore import nn, ops
from mindspore.common import initializer as weight_init
from mindspore.communication import GlobalComm


class CrossEntropySmooth(nn.LossBase):
    """Cross-entropy with smoothed labels."""

    def __init__(self, sparse=True, reduction="mean", smooth_factor=0.0, num_classes=1000):
        super().__init__()
        self.onehot = ops.OneHot()
        self.sparse, self.num_classes = sparse, num_classes
        self.on_value = 1.0 - smooth_factor
        self.off_value = smooth_factor / (num_classes - 1)
        self.loss = nn.SoftmaxCrossEntropyWithLogits(reduction=reduction)

    def construct(self, logit, label):
        if self.sparse:
            label = self.onehot(label, self.num_classes, self.on_value, self.off_value)
        return self.loss(logit, label)


class ClassifyCorrectCell(nn.Cell):
    """The number of correct predictions of all ranks."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self._network = network
        self.argmax = ops.Argmax()
        self.equal = ops.Equal()
        self.sum = ops.ReduceSum()
        self.allreduce = ops.AllReduce(ops.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)

    def construct(self, data, label):
        right = self.equal(self.argmax(self._network(data)), label)
        return (self.allreduce(self.sum(ops.cast(right, "float32"))),)


def get_lr(lr_init, lr_end, lr_max, warmup_epochs, total_epochs, steps_per_epoch, lr_decay_mode):
    """Return the rate of each step: a linear warm-up, then a linear or cosine decay."""
    total, warmup = total_epochs * steps_per_epoch, warmup_epochs * steps_per_epoch
    step = np.arange(total)
    over = (step - warmup) / (total - warmup)
    decay = 1 - over if lr_decay_mode == "linear" else 0.5 * (1 + np.cos(np.pi * over))
    rates = np.where(
        step < warmup, lr_init + (lr_max - lr_init) * step / max(1, warmup), lr_end + (lr_max - lr_end) * decay
    )
    return rates.astype(np.float32)


def init_weight(net):
    """Initialise convolutions with Xavier's values, dense layers with truncated normal ones."""
    for _, cell in net.cells_and_names():
        if isinstance(cell, nn.Conv2d):
            shape, dtype = cell.weight.shape, cell.weight.dtype
            cell.weight.set_data(weight_init.initializer(weight_init.XavierUniform(), shape, dtype))
        if isinstance(cell, nn.Dense):
            shape, dtype = cell.weight.shape, cell.weight.dtype
            cell.weight.set_data(weight_init.initializer(weight_init.TruncatedNormal(), shape, dtype))


def init_group_params(net, weight_decay=1e-4):
    """Return groups of weights with decay, and of biases and the parameters of norms without."""
    kept = "beta", "gamma", "bias"
    normal = [param for param in net.trainable_params() if not any(word in param.name for word in kept)]
    rest = [param for param in net.trainable_params() if any(word in param.name for word in kept)]
    return [
        {"params": normal, "weight_decay": weight_decay},
        {"params": rest},
        {"order_params": net.trainable_params()},
    ]
