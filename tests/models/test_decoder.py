"""The decoder of a config: its parameters, and its training cut over devices beside one device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError
from simparallel.simulate.config import read_config
from simparallel.simulate.program import decoder, runnable, train
from simparallel.simulate.transformer import TrainingPlan

SIZES = {
    "num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "vocab_size": 32,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 4, "n_positions": 8, "vocab_size": 32},
    "llama": {"model_type": "llama", **SIZES},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
}
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9))


def trained(plan, schedule):
    sp.set_seed(1)
    return train(plan, schedule, TOKENS, steps=3)


def losses(plan, schedule="1f1b"):
    return sp.launch(trained, (plan, schedule), world_size=plan.world_size, transport="inline")[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_decoder_has_the_parameters_of_its_config(name):
    shape = read_config(CONFIGS[name], 8)
    model = decoder(shape)
    assert sum(parameter.size for parameter in model.parameters()) == shape.num_parameters
    assert model(TOKENS[:, :-1]).shape == (8, 8, 32)


@pytest.mark.parametrize("name", CONFIGS)
def test_cut_decoders_train_as_on_one_device(name):
    shape = read_config(CONFIGS[name], 8)
    one = losses(TrainingPlan(shape, num_micro_batches=2, micro_batch=4, item_bytes=4))
    assert one[-1] < one[0]
    cuts = (
        ({"tensor": 2, "num_micro_batches": 4, "micro_batch": 2}, "1f1b"),
        ({"tensor": 2, "pipeline": 2, "data": 2, "num_micro_batches": 2, "micro_batch": 2}, "gpipe"),
        ({"pipeline": 2, "chunks": 2, "num_micro_batches": 4, "micro_batch": 2, "recompute": "full"}, "1f1b"),
        ({"pipeline": 4, "num_micro_batches": 4, "micro_batch": 2}, "zb_h1"),
    )
    if name == "llama":
        cuts += (
            ({"data": 2, "tensor": 2, "num_micro_batches": 2, "micro_batch": 2, "zero_stage": 1}, "1f1b"),
            ({"data": 2, "pipeline": 2, "num_micro_batches": 4, "recompute": "full", "zero_stage": 2}, "gpipe"),
            ({"data": 2, "tensor": 2, "pipeline": 2, "num_micro_batches": 4, "zero_stage": 3}, "1f1b"),
        )
    for cut, schedule in cuts:
        assert losses(TrainingPlan(shape, item_bytes=4, **cut), schedule) == pytest.approx(one, rel=1e-5)


def test_masked_positions_are_not_seen():
    model, changed = decoder(read_config(CONFIGS["llama"], 8)), TOKENS[:, :-1].copy()
    changed[:, 5:] = 0
    before, after = (model(tokens).numpy() for tokens in (TOKENS[:, :-1], changed))
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5)
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_heads_that_cannot_be_divided():
    with refused(InputError):
        sp.models.Decoder(8, 1, 4, 16, num_kv_heads=3)


def test_plans_that_no_program_runs():
    shape = read_config(CONFIGS["llama"], 8)
    expected = TrainingPlan(shape, tensor=2, overlap_messages=True)
    assert runnable(TrainingPlan(shape, tensor=2, sequence_parallel=True)) == expected
    others = ({"context": 2}, {"tensor": 4}, {"recompute": "selective"})
    assert [runnable(TrainingPlan(shape, **other)) for other in others] == [None] * 3
    sharded = TrainingPlan(shape, data=2, zero_stage=1)
    assert runnable(sharded) == replace(sharded, overlap_data=True, overlap_messages=True)
    assert runnable(sharded, "zb_h1") is None
    assert runnable(replace(sharded, shape=read_config(CONFIGS["gpt2"], 8))) is None


def test_recomputed_blocks_free_their_activations():
    """Each block of a stage by itself: not all of them until the stage's forward ends."""
    shape = read_config(CONFIGS["llama"], 8)

    def peak(recompute):
        plan = TrainingPlan(shape, micro_batch=8, recompute=recompute, item_bytes=4)
        results = sp.launch(trained, (plan, "1f1b"), transport="inline")
        return results.memory[0]["at_peak"]["activations"]

    assert peak("full") < 0.6 * peak("none")
