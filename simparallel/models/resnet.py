"""Residual networks, with torchvision's structure and parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simparallel import nn
from simparallel.autograd import Tensor
from simparallel.base.checks import check_choice

STEMS = ("imagenet", "cifar")


class BasicBlock(nn.Module):
    """y = relu(x' + bn(conv(relu(bn(conv(x)))))), two 3 x 3 convolutions; x' is x, or projected to y's shape."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        # Without biases: the batch norms that follow would subtract them.
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        _add_shortcut(self, in_channels, channels, stride)

    def forward(self, x: Any) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class Bottleneck(nn.Module):
    """As `BasicBlock`, with 1 x 1, 3 x 3 and 1 x 1 convolutions; the middle one has the stride."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        # The stride is here and not in the first convolution, as in torchvision: no pixel is skipped by a 1 x 1 window.
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        _add_shortcut(self, in_channels, out_channels, stride)

    def forward(self, x: Any) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


def _add_shortcut(block: nn.Module, in_channels: int, out_channels: int, stride: int) -> None:
    """Add a 1 x 1 convolution and a normalisation of x if its shape differs from y's."""
    if stride != 1 or in_channels != out_channels:
        # Option B of the paper: project only where shapes differ.
        projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        block.add_module("downsample", nn.Sequential(projection, nn.BatchNorm2d(out_channels)))


class ResNet(nn.Module):
    """A residual network.   Source: He et al. 2016, "Deep residual learning for image recognition".

    x: (N, in_channels, H, W)   y: (N, num_classes), logits

    Args:
        block: `BasicBlock` or `Bottleneck`.
        num_blocks: number of blocks in each stage.
        num_classes: of the output.
        stem: "imagenet" starts with a 7 x 7 convolution of stride 2 and a pooling; "cifar", for images of 32 x 32, with
            a 3 x 3 convolution of stride 1.
        in_channels: of the images.

    Raises:
        InputError: unknown `stem`.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        num_blocks: Sequence[int],
        num_classes: int = 1000,
        stem: str = "imagenet",
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        check_choice("ResNet", "stem", stem, STEMS)
        # With the large stem, images of 32 x 32 would shrink to one pixel in the last stage.
        is_small = stem == "cifar"
        self.conv1 = (
            nn.Conv2d(in_channels, 64, 3, 1, 1, bias=False)
            if is_small
            else nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if is_small else nn.MaxPool2d(3, 2, 1)
        width = 64
        for stage, count in enumerate(num_blocks):
            channels, blocks = 64 << stage, nn.Sequential()
            for i in range(count):
                # The first block of each later stage halves height and width.
                blocks.append(block(width, channels, stride=2 if stage and not i else 1))
                width = channels * block.expansion
            self.add_module(f"layer{stage + 1}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(width, num_classes)
        # torchvision's initial weights.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Any) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name, stage in self._modules.items():
            # By name, so that replaced and removed stages work, too.
            if stage is not None and name.startswith("layer"):
                x = stage(x)
        return self.fc(self.flatten(self.avgpool(x)))


def resnet18(num_classes: int = 1000, stem: str = "imagenet", in_channels: int = 3) -> ResNet:
    """Make a ResNet-18: two basic blocks per stage.

    Args:
        num_classes: number of scores.
        stem: "imagenet" or, for images of 32 x 32, "cifar"; see `ResNet`.
        in_channels: channels of the images.
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, stem, in_channels)


def resnet50(num_classes: int = 1000, stem: str = "imagenet", in_channels: int = 3) -> ResNet:
    """Make a ResNet-50: stages of 3, 4, 6 and 3 bottlenecks.

    Args:
        num_classes: number of scores.
        stem: "imagenet" or, for images of 32 x 32, "cifar"; see `ResNet`.
        in_channels: channels of the images.
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, stem, in_channels)
