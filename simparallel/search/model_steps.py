"""Training steps of the known models, to plan them without memory for parameters or data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from simparallel import models
from simparallel.autograd import Tensor, functions as F
from simparallel.base.dry_arrays import empty
from simparallel.layout.layout import Layout
from simparallel.layout.sharding import placement
from simparallel.nn import BatchNorm2d, Module
from simparallel.nn.deferred import no_init_parameters
from simparallel.optim import AdamW, Momentum
from simparallel.parallel.operator.auto import micro_batches
from simparallel.search.graph import Graph, capture, captures


class KnownModel(NamedTuple):
    """A model, and the shape of its training data.

    Attributes:
        build: makes the model.
        sample: shape of one sample.
        vocabulary: number of tokens of a language model; None for a model of images.
        batch: samples for each device.
    """

    build: Callable[[], Module]
    sample: tuple[int, ...]
    vocabulary: int | None = None
    batch: int = 32


MODELS = {
    "mlp": KnownModel(models.mlp, (784,)),
    "lenet5": KnownModel(models.lenet5, (1, 28, 28)),
    "resnet18": KnownModel(models.resnet18, (3, 224, 224)),
    "resnet50": KnownModel(models.resnet50, (3, 224, 224)),
    "gpt": KnownModel(models.gpt, (64,), 256),
}


class ModelStep:
    """A training step of a known model: the cross-entropy, its gradients, Momentum or, for a language model, AdamW.

    Args:
        known: the model. Its parameters get no data until the step runs.
    """

    def __init__(self, known: KnownModel) -> None:
        self.known = known
        with no_init_parameters():
            self.model = known.build()
        trained = self.model.parameters()
        self._has_batch_norm = any(isinstance(module, BatchNorm2d) for module in self.model.modules())
        self.optimizer = Momentum(trained, 0.1, 0.9) if known.vocabulary is None else AdamW(trained, lr=3e-4)

    def __call__(self, x: Any, y: Any) -> Tensor:
        """Run a step; return the loss of the last micro-batch."""
        self.optimizer.zero_grad()
        # Not split with a batch norm, whose statistics would be those of a micro-batch.
        parts = [(x, y)] if self._has_batch_norm else micro_batches(x, y)
        for part, labels in parts:
            logits = self.model(part)
            if self.known.vocabulary is not None:
                logits = logits.reshape(-1, self.known.vocabulary)
            loss = F.cross_entropy(logits, labels)
            (loss if len(parts) == 1 else loss / len(parts)).backward()
        self.optimizer.step()
        return loss

    def graphs(self, batch: int, device_num: int) -> list[Graph]:
        """Return the graphs of the step with 1, 2, 4, … micro-batches; see `graph`."""
        return captures(partial(self.graph, batch, device_num))

    def graph(self, batch: int, device_num: int, num_micro_batches: int = 1) -> Graph:
        """Return the graph of the step on a batch that every device is given whole (`full_batch`)."""
        shape = (batch, *self.known.sample)
        is_text = self.known.vocabulary is not None
        x = np.zeros(shape, np.int64) if is_text else empty(shape, np.dtype(np.float32))
        y = np.zeros(x.size if is_text else batch, np.int64)
        inputs = [Tensor(x), Tensor(y)]
        given = []
        for each in inputs:
            whole = Layout((device_num,), ("batch",))(*["None"] * each.ndim)
            given.append((each, placement(whole, each.shape)))
        return capture(self, given, inputs, {}, num_micro_batches)
