"""Activation checkpointing gives the same numbers with fewer activations."""

from __future__ import annotations

import numpy as np
from refusals import refused

import simparallel as sp
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import AutogradError
from simparallel.machine.cluster import describe
from simparallel.nn import checkpoint


def make(depth: int = 6) -> list[sp.nn.Module]:
    sp.manual_seed(3)
    return [
        sp.nn.Sequential(sp.nn.Linear(16, 16), sp.nn.Tanh(), sp.nn.Linear(16, 16), sp.nn.Tanh()) for _ in range(depth)
    ]


def gradients(parts, x, run):
    for part in parts:
        x = run(part, x)
    loss = x.sum()
    loss.backward()
    return loss.item(), [parameter.grad.numpy() for part in parts for parameter in part.parameters()]


def test_gradients_are_bitwise_equal():
    """Gradients have the same bits as without checkpointing, and the peak of the activations is lower."""
    results, peaks = [], []
    for run in (lambda part, x: part(x), checkpoint):
        with use_recorder(Recorder(0, describe(1))) as recorder:
            x = sp.Tensor(np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16), requires_grad=True)
            loss, grads = gradients(make(), x, run)
            results.append((loss, grads, x.grad.numpy()))
            peaks.append(recorder.memory.at_peak["activations"])
    (loss, grads, dx), (loss_again, grads_again, dx_again) = results
    assert loss == loss_again
    assert all(np.array_equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert np.array_equal(dx, dx_again)
    assert peaks[1] < 0.7 * peaks[0]


def test_repeated_input_and_unused_parameters():
    """An input that is passed twice gets both gradients; an unused parameter gets None."""

    class Part(sp.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = sp.nn.Parameter([2.0]), sp.nn.Parameter([5.0])

        def forward(self, a, b, factor):
            return a * b * self.used * factor

    part, x = Part(), sp.Tensor([3.0], requires_grad=True)
    checkpoint(part, x, x, 10).sum().backward()
    assert x.grad.numpy().tolist() == [2 * 3 * 2 * 10]
    assert part.used.grad.numpy().tolist() == [90]
    assert part.unused.grad is None


def test_hooks_fire_once_and_shared_parameters_add_up():
    layer = sp.nn.Linear(2, 2, bias=False)
    layer.weight.data[...] = np.eye(2)
    fired = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.numpy().copy()))
    x = sp.Tensor(np.ones((1, 2), np.float32))
    (checkpoint(layer, checkpoint(layer, x)) + layer(x)).sum().backward()
    assert len(fired) == 1
    assert fired[0].tolist() == [[3, 3], [3, 3]]


def test_nothing_is_kept_without_gradients():
    part = sp.nn.Linear(2, 2)
    with sp.no_grad():
        assert not checkpoint(part, sp.Tensor(np.ones((1, 2), np.float32))).requires_grad
    with refused(AutogradError):
        checkpoint(lambda x: [x], sp.Tensor([1.0]))
