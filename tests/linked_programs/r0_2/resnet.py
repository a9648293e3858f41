"""A residual network of two blocks with every layer, op and setting of the ResNet in MindSpore 0.2's tutorials."""

import mindspore.nn as nn
import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.ops import operations as P


def weight_of(*shape):
    return initializer("XavierUniform", shape=shape, dtype=mstype.float32)


def filled(value, shape):
    return Tensor(np.full(shape, value).astype(np.float32))


def conv(in_channels, out_channels, size, stride=1, padding=0):
    weight = weight_of(out_channels, in_channels, size, size)
    settings = {"weight_init": weight, "has_bias": False, "pad_mode": "same"}
    return nn.Conv2d(in_channels, out_channels, kernel_size=size, stride=stride, padding=padding, **settings)


def norm(out_channels):
    gamma = initializer("Uniform", shape=(out_channels), dtype=mstype.float32)
    beta, mean, var = filled(0, (out_channels)), filled(0, (out_channels)), filled(1, (out_channels))
    statistics = {"moving_mean_init": mean, "moving_var_init": var}
    return nn.BatchNorm2d(out_channels, momentum=0.99, eps=0.00001, gamma_init=gamma, beta_init=beta, **statistics)


def dense(input_channels, out_channels):
    bias = initializer("Uniform", shape=(out_channels), dtype=mstype.float32)
    return nn.Dense(input_channels, out_channels, weight_of(out_channels, input_channels), bias)


class Block(nn.Cell):
    def __init__(self, in_channels, out_channels, stride=1):
        super(Block, self).__init__()
        self.conv1, self.bn1 = conv(in_channels, out_channels, 3, stride), norm(out_channels)
        self.conv2, self.bn2 = conv(out_channels, out_channels, 1), norm(out_channels)
        self.down, self.bn_down = conv(in_channels, out_channels, 1, stride), norm(out_channels)
        self.relu, self.add = P.ReLU(), P.TensorAdd()

    def construct(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(self.add(out, self.bn_down(self.down(x))))


class ResNet(nn.Cell):
    def __init__(self, num_classes=100, batch_size=32, width=4):
        super(ResNet, self).__init__()
        self.batch_size, self.num_classes = batch_size, num_classes
        self.conv1, self.bn1, self.relu = conv(3, width, 7, stride=2), norm(width), P.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, pad_mode="same")
        self.layer1, self.layer2 = Block(width, width), Block(width, 2 * width, stride=2)
        self.pool, self.squeeze = P.ReduceMean(keep_dims=True), P.Squeeze(axis=(2, 3))
        self.fc = dense(2 * width, num_classes)

    def construct(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.pool(self.layer2(self.layer1(x)), (2, 3))
        return self.fc(self.squeeze(x))


def resnet50(batch_size, num_classes):
    return ResNet(num_classes, batch_size)
