"""What sharding costs: collectives, bytes and memory, as the formulas have them; and what it makes possible."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from sharded_programs import LETTERS, OPTIMIZERS, gpt, mlp, shard, train

import simparallel as sp
from simparallel.clock.recorder import current_recorder
from simparallel.errors import RunFailedError


def _padded(model: Any, ranks: int) -> int:
    """Return the elements of a model with each tensor's rows padded to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * p.size // p.shape[0] for p in model.parameters())


@pytest.mark.parametrize(("make", "ranks"), [(mlp, 2), (gpt, 3), (mlp, 5)])
def test_collectives_and_bytes(make, ranks):
    """L blocks and the rest: L + 1 groups; a block is gathered twice, the rest once, as backward uses it first."""
    blocks = 2
    model = make()
    size = 4 * _padded(model, ranks)
    rest = size - 4 * sum(_padded(block, ranks) for block in _blocks(model))
    share = (ranks - 1) / ranks
    gathered = {"SSS": (2 * blocks + 1, 2 * size - rest), "RSS": (blocks + 1, size), "RPS": (blocks + 1, size)}
    for letters, (count, size_bytes) in gathered.items():
        found = sp.launch(train, (make, letters), world_size=ranks, transport="inline")[0]
        assert found.collectives == {"all_gather": count, "reduce_scatter": blocks + 1}
        assert found.sent_bytes["all_gather"] == round(share * size_bytes)
        assert found.sent_bytes["reduce_scatter"] == round(share * size)
    # Parameters that stay until backward are not gathered ahead for it.
    found = sp.launch(train, (make, "SSS"), {"reshards": False}, world_size=ranks, transport="inline")[0]
    assert found.collectives == {"all_gather": blocks + 1, "reduce_scatter": blocks + 1}
    found = sp.launch(train, (make, "DDP"), world_size=ranks, transport="inline")[0]
    assert found.sent_bytes["all_reduce"] == round(2 * share * 4 * sum(p.size for p in model.parameters()))


def _blocks(model: Any) -> list[Any]:
    return list(model.blocks) if hasattr(model, "blocks") else [x for x in model if isinstance(x, sp.nn.Linear)][:-1]


WIDTH, BLOCKS = 60, 6


def _peak(
    letters: str, trains: bool = True, reshards: bool | None = None, micro_batches: int = 1, optimizer: str = "adam"
) -> dict[str, int]:
    """Return the bytes of states at the peak of a step: blocks of one matrix each, and next to no activations."""
    model = sp.nn.Sequential(*(sp.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    if letters == "DDP":
        run: Any = sp.parallel.DistributedDataParallel(model)
    else:
        run = shard(model, letters, reshard_after_forward=reshards)
    step = OPTIMIZERS[optimizer](model.parameters())
    memory = current_recorder().memory
    for _ in range(3):
        step.zero_grad()
        memory.peak = 0
        for m in range(micro_batches):
            with sp.no_grad() if not trains else run.no_sync() if m < micro_batches - 1 else nullcontext():
                loss = run(np.ones((1, WIDTH), np.float32)).sum()
            if trains:
                loss.backward()
        if trains:
            step.step()
    at_peak = dict(memory.at_peak)
    return {name: at_peak[name] for name in ("parameters", "gathered", "gradients", "optimizer state", "buffers")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_of_states(ranks):
    """Slices of everything; and whole: the gradient that is reduced, the one that is computed, twice, and the block
    that is gathered ahead, on its wire."""
    block = WIDTH * WIDTH * 4
    model, slices = BLOCKS * block, block // ranks
    moments, prefetched, work_array = 2, 1, slices
    by_formula = model // ranks * (1 + moments + 1) + (2 + prefetched) * block - (1 + prefetched) * slices
    found = sp.launch(_peak, ("SSS",), world_size=ranks, transport="inline")[0]
    assert found["parameters"] == model // ranks
    assert found["optimizer state"] == moments * model // ranks + work_array
    # The input of a reduce-scatter comes on top, unless all other ranks have read it already; its output comes later.
    least = by_formula - slices
    assert least <= sum(found.values()) - work_array <= least + block + WIDTH * 4
    # Without backward: the root, which is kept for it, the block in use, and the next one.
    found = sp.launch(_peak, ("SSS", False), world_size=ranks, transport="inline")[0]
    expected = {"parameters": model // ranks, "gathered": 3 * block}
    assert {name: size for name, size in found.items() if size} == expected
    kept = sp.launch(_peak, ("RSS",), world_size=ranks, transport="inline")[0]
    assert (kept["parameters"], kept["gathered"]) == (model, 0)
    assert kept["optimizer state"] == moments * model // ranks + work_array
    assert kept["gradients"] <= model // ranks + 3 * block
    everywhere = sp.launch(_peak, ("DDP",), world_size=ranks, transport="inline")[0]
    assert sum(everywhere.values()) >= (2 + moments) * model


def _expected_peak(letters: str, reshards: bool | None, micro_batches: int, moments: int, ranks: int) -> int:
    """Return the bytes of states at the peak: P a block, S a slice of it.

    In backward there are the gradient that an op computes, its copy by rank, and the input of the reduce-scatter under
    way, whose slice comes later; beside them the block that is gathered ahead. That is (2 + q) P - (1 + q) S and P - S
    for its buffer. Slices of earlier micro-batches are there already.
    """
    block = WIDTH * WIDTH * 4
    model, cut = BLOCKS * block, block // ranks
    slices = model // ranks
    waiting = 3 * block + slices - (2 * cut if micro_batches == 1 else 0)
    work_array = cut
    if letters == "RPR":
        return (2 + moments) * model + block + block
    if letters == "SSS" and reshards is False:  # at the beginning of backward
        return slices + model + block + moments * slices + work_array
    if letters == "SSS":
        return slices + waiting + block - (cut if micro_batches == 1 else 0) + moments * slices + work_array
    gradients = model + block if letters == "RPS" and micro_batches > 1 else waiting
    return model + gradients + moments * slices + work_array


@pytest.mark.parametrize("ranks", [2, 6])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_peaks_are_those_of_the_formulas(ranks, optimizer):
    """Letters, micro-batches and gathering ahead; beside states there are gradients of two rows of activations."""
    cases = [(letters, None, count) for letters in LETTERS for count in (1, 2)]
    for letters, reshards, count in [*cases, ("SSS", False, 1)]:
        settings = letters, True, reshards, count, optimizer
        found = sum(sp.dry_run(_peak, settings, world_size=ranks).values[0].values())
        expected = _expected_peak(letters, reshards, count, 2 * (optimizer == "adam"), ranks)
        assert expected <= found <= expected + 2 * WIDTH * 4, settings


def _train_large(letters: str) -> list[float]:
    sp.manual_seed(0)
    # A rank draws its slices alone.
    with sp.parallel.no_init_parameters() if letters != "DDP" else nullcontext():
        model = mlp((5, 300, 300, 300, 300, 300, 3))
    run = shard(model, letters) if letters != "DDP" else sp.parallel.DistributedDataParallel(model)
    step = sp.optim.Adam(model.parameters(), lr=0.01)
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((8, 5)).astype(np.float32), draw.integers(0, 3, 8)
    losses = []
    for _ in range(8):
        step.zero_grad()
        loss = sp.functions.cross_entropy(run(x), y)
        loss.backward()
        step.step()
        losses.append(loss.item())
    return losses


def test_model_larger_than_a_device_trains():
    settings: Any = {"world_size": 4, "transport": "inline", "device_memory": "4MB"}
    losses = sp.launch(_train_large, ("SSS",), **settings)[0]
    assert losses[-1] < losses[0] - 0.2
    # 360,000 parameters of 4 bytes, and as many gradients and states of Adam.
    with pytest.raises(RunFailedError, match="DeviceOutOfMemoryError"):
        sp.launch(_train_large, ("DDP",), **settings)


def _large_gpt(layers: int, width: int, vocabulary: int) -> None:
    with sp.parallel.no_init_parameters():
        model = sp.models.gpt(vocabulary, 1024, num_layers=layers, num_heads=width // 128, width=width)
    run = shard(model, "SSS")
    step = sp.optim.Adam(model.parameters())
    tokens = np.zeros((1, 1024), np.int64)
    scores = run(tokens)
    sp.functions.cross_entropy(scores.reshape(1024, -1), tokens.reshape(-1)).backward()
    step.step()


def _steps_of_even_slices(letters: str) -> None:
    model = shard(sp.models.gpt(32, 8, num_layers=3, num_heads=2, width=16), letters)
    optimizer, tokens = sp.optim.Adam(model.parameters(), lr=0.1), np.zeros((1, 8), int)
    for _ in range(2):
        optimizer.zero_grad()
        sp.functions.cross_entropy(model(tokens).reshape(-1, 32), tokens.reshape(-1)).backward()
        optimizer.step()


@pytest.mark.parametrize("letters", LETTERS)
def test_ranks_with_even_slices_are_one_class(letters):
    """Memory is freed at the same operation on each rank, whichever comes to a collective first."""
    assert sp.dry_run(_steps_of_even_slices, (letters,), world_size=4).classes == {0: 4}


@pytest.mark.parametrize(("vocabulary", "classes"), [(51200, {0: 1024}), (50257, {0: 1005, 1005: 1, 1006: 18})])
def test_dry_run_of_many_ranks(vocabulary, classes):
    """A GPT of 1.8 billion parameters: all ranks are alike but for uneven rows, and few of them run."""
    layers, width, ranks = 8, 4096, 1024
    found = sp.dry_run(_large_gpt, (layers, width, vocabulary), world_size=ranks)
    block = 4 * (12 * width * width + 13 * width)
    rest = 4 * (51200 + 1024 + 2) * width
    memory = found.memory[0]
    # A rank has slices only, from the first line on, and at the peak, in the last block's backward, one block beside
    # them: the gradient of the scores was the last to read the embeddings.
    slices = (rest + layers * block) // ranks
    assert slices <= memory["at_peak"]["parameters"] <= 1.02 * slices
    assert memory["at_peak"]["gathered"] == block
    # A model that is no longer used is freed at once.
    assert memory["live"]["parameters"] == 0
    assert found.classes == classes
    assert len(found.memory) <= 5


def test_dry_run_of_a_large_model_takes_no_memory():
    """The slices of one rank are 440 MB, and a block has 800 MB."""
    tracemalloc.start()
    try:
        found = sp.dry_run(_large_gpt, (2, 4096, 51200), world_size=16)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.memory[0]["peak_bytes"] > 10**9
    # Masks of the attention are broadcast for their strides, and never written.
    assert peak_bytes < 5 * 10**7


@pytest.mark.parametrize(("ranks", "optimizer"), [(5, "sgd"), (5, "muon"), (12, "muon")])
def test_folded_ranks_have_the_memory_of_all(ranks, optimizer):
    """Chunks of 7, 9 and 3 rows: uneven, and fewer than there are ranks; and owners of matrices."""
    whole = sp.dry_run(train, (mlp, "SSS", optimizer), world_size=ranks, fold=False)
    folded = sp.dry_run(train, (mlp, "SSS", optimizer), world_size=ranks)
    assert folded.makespan_s == whole.makespan_s
    for rank, stands_for in enumerate(folded.stands_for):
        assert folded.memory[stands_for]["at_peak"]["parameters"] == whole.memory[rank]["at_peak"]["parameters"]


def _owners(layers: int, width: int) -> None:
    with sp.parallel.no_init_parameters():
        model = sp.models.gpt(2048, 512, num_layers=layers, num_heads=2, width=width)
    run, tokens = shard(model, "SSS"), np.zeros((1, 512), np.int64)
    step = OPTIMIZERS["muon"](model.parameters())
    sp.functions.cross_entropy(run(tokens).reshape(512, -1), tokens.reshape(-1)).backward()
    step.step()


def test_owners_of_equal_work_fold():
    """18 matrices have owners: the table, 8 of feed-forward parts, 4 of queries to values, positions, 4 outputs."""
    found = sp.dry_run(_owners, (4, 256), world_size=128)
    assert found.classes == {0: 1, 1: 8, 9: 4, 13: 1, 14: 4, 18: 110}
    assert len({*found.stands_for}) < 20


def _in_stages(letters: str, recompute: bool = False) -> Any:
    """Return the bytes of this rank's parameters, as counted and as expected, and the events of the second step."""
    mesh = sp.Mesh((2, 2), ("pp", "shard"))
    with sp.parallel.no_init_parameters():
        model = sp.models.Decoder(32, 4, 2, 64, dtype=np.float64, recompute=recompute)
    for block in model.blocks:
        sp.parallel.fully_shard(block, mesh, "shard", *letters)
    stages = [["tokens", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "norm", "head"]]
    pipeline = sp.parallel.Pipeline(model, _loss, 3, stages=stages, mesh=mesh)
    step, tokens = sp.optim.Adam(pipeline.parameters()), np.zeros((3, 8), np.int64)
    recorder = current_recorder()
    for _ in range(2):
        start = len(recorder.events)
        step.zero_grad()
        pipeline.step(tokens, tokens)
        step.step()
    events = [e for e in recorder.events[start:] if e.group in ((), mesh.group("shard", sp.get_rank()))]
    expected = sum(p.data.nbytes if letters == "SSS" else 8 * p.size for p in pipeline.parameters())
    return recorder.memory.live["parameters"], expected, events


def _loss(logits: Any, labels: Any) -> Any:
    return sp.functions.cross_entropy(logits.reshape(-1, 32), labels.reshape(-1))


@pytest.mark.parametrize(("letters", "count"), [("SSS", 12), ("RPS", 2)])
def test_stages_gather_ahead(letters, count):
    """Of other stages a rank has no slices. The second block is gathered while the first one computes."""
    for held, expected, events in sp.launch(_in_stages, (letters,), world_size=4, transport="inline"):
        assert held == expected
        gathers = [e for e in events if e.name == "all_gather"]
        # Two blocks: in both passes of three micro-batches, or once a step.
        assert len(gathers) == count
        blocks = [e for e in events if e.kind == "forward" and e.layer.startswith("blocks.")]
        first = [e for e in blocks if e.layer.startswith(blocks[0].layer)]
        assert gathers[0].sim_end_ps <= first[0].sim_start_ps
        assert gathers[1].sim_start_ps < first[-1].sim_end_ps


@pytest.mark.parametrize("recompute", [False, True])
def test_stages_reduce_partial_gradients_once(recompute):
    for *_, events in sp.launch(_in_stages, ("RPS", recompute), world_size=4, transport="inline"):
        assert sum(e.name == "reduce_scatter" for e in events) == 2
