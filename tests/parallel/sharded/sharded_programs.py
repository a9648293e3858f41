"""Programs that train with sharded states, and the same with DistributedDataParallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import simparallel as sp
from simparallel.clock.recorder import current_recorder
from simparallel.models.gpt import GPT, Block

VOCABULARY = 37
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: sp.optim.SGD(p, lr=0.1),
    "momentum": lambda p: sp.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: sp.optim.Adam(p, lr=0.01),
    "adamw": lambda p: sp.optim.AdamW(p, lr=0.01),
    "muon": lambda p: Both(list(p)),
}
LETTERS = ("RPR", "RPS", "RSS", "SSS")


class Both:
    """Muon for matrices, AdamW for all others."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parts = [
            sp.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.1),
            sp.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01),
        ]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


class CheckpointInside(Block):
    """A block that recomputes its attention."""

    def forward(self, x: Any) -> Any:
        x = x + sp.nn.checkpoint(lambda x: self.out(self.attend(self.norm1(x))), x)
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class CheckpointOutside(GPT):
    """A GPT that recomputes its blocks."""

    def forward(self, tokens: Any) -> Any:
        tokens = sp.Tensor(tokens)
        x = self.tokens(tokens) + self.positions(np.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = sp.nn.checkpoint(block, x)
        return sp.functions.linear(self.norm(x), self.tokens.weight)


def mlp(sizes: tuple[int, ...] = (5, 7, 9, 3), dtype: Any = np.float32) -> Any:
    """Return a network of odd sizes: chunks are uneven, and empty on many ranks."""
    layers: list[Any] = []
    for width, next_width in zip(sizes, sizes[1:], strict=False):
        layers += [sp.nn.Linear(width, next_width, dtype=dtype), sp.nn.Tanh()]
    return sp.nn.Sequential(*layers[:-1])


def gpt() -> Any:
    return sp.models.gpt(VOCABULARY, 8, num_layers=2, num_heads=2, width=12)


def blocks_of(model: Any) -> list[Any]:
    """Return the parts of a model that are groups of their own."""
    return list(model.blocks) if hasattr(model, "blocks") else [x for x in model if isinstance(x, sp.nn.Linear)][:-1]


def shard(model: Any, letters: str, **settings: Any) -> Any:
    settings |= dict(zip(("parameter", "gradient", "state"), letters, strict=True))
    for block in blocks_of(model):
        sp.parallel.fully_shard(block, **settings)
    return sp.parallel.fully_shard(model, **settings)


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Any]
    collectives: Counter[str]  # of the last step
    sent_bytes: Counter[str]
    norms: list[float]


def batches(model: Any, rank: int, dtype: Any = np.float32) -> Any:
    draw = np.random.default_rng(rank)
    while True:
        if hasattr(model, "blocks"):
            yield draw.integers(0, VOCABULARY, (3, 8)), draw.integers(0, VOCABULARY, 24)
        else:
            yield draw.standard_normal((4, 5)).astype(dtype), draw.integers(0, 3, 4)


def train(
    make: Callable[[], Any],
    letters: str,
    optimizer: str = "sgd",
    *,
    micro_batches: int = 1,
    synchronizes: bool = True,
    clip: float | None = None,
    checkpoint: Any = None,
    mesh: Any = None,
    axis: Any = "shard",
    precision: Any = None,
    reshards: bool | None = None,
    steps: int = 3,
) -> Trained:
    """Train on this rank's batches; `letters` is "DDP", or the letters of fully_shard."""
    sp.manual_seed(3)
    model = make()
    if checkpoint is CheckpointInside:
        for block in model.blocks:
            block.__class__ = CheckpointInside
    elif checkpoint is not None:
        model.__class__ = checkpoint
    if letters == "DDP":
        run: Any = sp.parallel.DistributedDataParallel(model, mixed_precision=precision)
    else:
        run = shard(model, letters, mesh=mesh, axis=axis, mp_policy=precision, reshard_after_forward=reshards)
    step, draw = OPTIMIZERS[optimizer](model.parameters()), batches(model, sp.get_rank())
    losses, norms, recorder, start = [], [], current_recorder(), 0
    assert recorder is not None
    for _ in range(steps):
        step.zero_grad()
        start = len(recorder.events)
        for m in range(micro_batches):
            is_last = m == micro_batches - 1
            if not synchronizes and letters != "DDP":
                run.set_requires_gradient_sync(is_last)
            x, y = next(draw)
            if is_last:
                scores = run(x)
            else:
                with run.no_sync():
                    scores = run(x)
            loss = sp.functions.cross_entropy(scores.reshape(len(y), -1), y)
            loss.backward()
        if clip is not None:
            norms.append(sp.optim.clip_grad_norm_(model.parameters(), clip))
        step.step()
        losses.append(loss.item())
    events = [e for e in recorder.events[start:] if e.kind == "collective" and len(e.group) > 1]
    sent: Counter[str] = Counter()
    for event in events:
        sent[event.name] += event.sent_bytes
    weights = model.state_dict() if letters == "DDP" else model.full_state_dict()
    return Trained(losses, weights, Counter(e.name for e in events), sent, norms)
