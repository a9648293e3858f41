"""Small, well-known networks."""

from simparallel.base.hints import answer_unknown_names
from simparallel.models.decoder import Decoder
from simparallel.models.gpt import GPT, gpt
from simparallel.models.lenet import LeNet5, lenet5
from simparallel.models.mlp import mlp
from simparallel.models.resnet import ResNet, resnet18, resnet50

__all__ = ["GPT", "Decoder", "LeNet5", "ResNet", "gpt", "lenet5", "mlp", "resnet18", "resnet50"]

answer_unknown_names(__name__)
