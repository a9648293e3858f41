"""A residual network of two blocks with every layer, op and setting that the tutorial's ResNet uses."""

import numpy as np
from mindspore import Tensor, dtype as mstype, nn, ops


def drawn(*shape, scale=0.1):
    return Tensor(np.random.normal(0, scale, size=shape).astype(np.float32))


def conv(inputs, outputs, size, stride=1, padded=False):
    weight = drawn(outputs, inputs, size, size)
    if padded:
        return nn.Conv2d(
            inputs, outputs, kernel_size=size, stride=stride, padding=size // 2, pad_mode="pad", weight_init=weight
        )
    return nn.Conv2d(inputs, outputs, kernel_size=size, stride=stride, padding=0, pad_mode="same", weight_init=weight)


def norm(channels, gamma=1, eps=1e-4, momentum=0.9):
    initial = {"gamma_init": gamma, "beta_init": 0, "moving_mean_init": 0, "moving_var_init": 1}
    return nn.BatchNorm2d(channels, eps=eps, momentum=momentum, **initial)


def dense(inputs, outputs):
    weight = Tensor(
        np.reshape(np.random.normal(loc=0, scale=0.1, size=outputs * inputs), (outputs, inputs)), dtype=mstype.float32
    )
    return nn.Dense(inputs, outputs, has_bias=True, weight_init=weight, bias_init=0)


class Block(nn.Cell):
    """Convolutions beside a shortcut, and a factor for each channel."""

    def __init__(self, inputs, outputs, stride):
        super(Block, self).__init__()
        self.body = nn.SequentialCell([conv(inputs, outputs, 3, stride), norm(outputs), nn.ReLU()])
        self.last = norm(outputs, gamma=0)
        self.se_global_pool = ops.operations.ReduceMean(keep_dims=False)
        self.se_dense = dense(outputs, outputs)
        self.se_sigmoid = nn.Sigmoid()
        self.se_mul = ops.operations.Mul()
        self.relu = nn.ReLU()
        pool = nn.MaxPool2d(kernel_size=2, stride=2, pad_mode="same")
        self.shortcut = nn.SequentialCell([pool, conv(inputs, outputs, 1), norm(outputs)]) if stride == 2 else None

    def construct(self, x):
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.last(self.body(x))
        factor = self.se_sigmoid(self.se_dense(self.se_global_pool(out, (2, 3))))
        factor = ops.functional.reshape(factor, ops.functional.shape(factor) + (1, 1))
        return self.relu(self.se_mul(factor, out) + identity)


class ResNet(nn.Cell):
    def __init__(self, num_classes, width=4):
        super(ResNet, self).__init__()
        self.conv1 = conv(3, width, 7, stride=2, padded=True)
        self.bn1 = norm(width, eps=1e-5, momentum=0.1)
        self.relu = ops.operations.ReLU()
        self.pad = nn.Pad(paddings=((0, 0), (0, 0), (1, 1), (1, 1)))
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="valid")
        self.maxpool2 = nn.MaxPool2d(kernel_size=3, stride=1, pad_mode="same")
        self.layer = nn.SequentialCell([Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)])
        self.mean = ops.operations.ReduceMean(keep_dims=True)
        self.flatten = nn.Flatten()
        self.end_point = dense(2 * width, num_classes)

    def construct(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer(self.maxpool2(self.maxpool(self.pad(x))))
        return self.end_point(self.flatten(self.mean(x, (2, 3))))


def resnet50(num_classes=1001):
    return ResNet(num_classes)
