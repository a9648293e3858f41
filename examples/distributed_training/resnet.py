"""ResNet with the arguments of the tutorial."""

import os

from simparallel import models


def resnet50(batch_size, num_classes):
    """ResNet-50; RESNET=18 takes the smaller one. The batch size follows from the data."""
    make = models.resnet18 if os.getenv("RESNET") == "18" else models.resnet50
    return make(num_classes)
