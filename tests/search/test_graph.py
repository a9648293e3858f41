"""The graph of a program, and a capture without effects."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused
from training_programs import PROGRAMS, graph_of

import simparallel as sp
from simparallel import functions as F, nn
from simparallel.backend import random_state
from simparallel.errors import UnknownValueError
from simparallel.search.graph import CONSTANT, NODE, PARAMETER, InputSource
from simparallel.search.planner import graph_of as capture


def test_graph_of_a_training_step():
    graph, _ = graph_of("residual", 2)
    assert [node.name for node in graph.nodes[:4]] == ["up.Linear", "ReLU", "down.Linear", "Add"]
    assert [leaf.tensor.name for leaf in graph.parameters] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert graph.nodes[3].inputs == (InputSource("argument", 0), InputSource(NODE, 2))
    assert graph.readers[InputSource(PARAMETER, 0)] == [(0, 1), (4, 1)]
    assert all(node.has_backward for node in graph.nodes)


def test_capture_has_no_effects():
    sp.set_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.copy() for name, value in net.state_dict().items()}
    drawn = random_state.snapshot()
    capture(lambda x: net(x).sum().backward(), [sp.Tensor(np.ones((4, 4), np.float32))], {})
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    assert random_state.snapshot() == drawn
    assert all(parameter.grad is None for parameter in net.parameters())


def test_detached_results_keep_their_place():
    x = sp.Tensor(np.ones((4, 4)), requires_grad=True)
    graph = capture(lambda: (x * 2.0).detach().exp().sum(), [], {})
    exponential = next(node for node in graph.nodes if node.op.name == "Exp")
    assert exponential.inputs == (InputSource(NODE, 0),)
    assert not any(node.has_backward for node in graph.nodes)


def test_recomputed_parts_are_noted():
    graph, _ = graph_of("checkpointed", 2)
    assert graph.parts == [(0, 2, False)]
    graph, _ = graph_of("saving", 2)
    assert [(part.end - part.begin, part.is_optional) for part in graph.parts] == [(6, True), (6, True)]


def test_micro_batches_have_smaller_arguments():
    graph, _ = graph_of("saving", 2)
    assert graph.rows == 16
    smaller, _ = graph_of("saving", 2, 4)
    shapes = [[node.plan.output.shape for node in each.nodes] for each in (graph, smaller)]
    assert shapes[1] == [(4, *shape[1:]) if shape else shape for shape in shapes[0]]
    assert [place.shape for place in smaller.arguments[2:]] == [(4, 8), (4, 8)]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_program_runs_after_its_capture(name):
    """The tape of the capture leaves nothing behind that a run would meet."""
    graph_of(name, 1)
    graph, _ = graph_of(name, 1)
    assert graph.nodes[-1].has_backward


def test_values_are_not_known():
    w = nn.Parameter(np.ones(4))

    def program(x):
        if (x * w).sum().item() > 0:
            return x * 2.0
        return x

    with refused(UnknownValueError):
        capture(program, [sp.Tensor(np.ones(4))], {})


def test_whole_values_are_constants():
    w = nn.Parameter(np.ones(4))
    graph = capture(lambda: F.maximum(w, np.ones(4)).sum().backward(), [], {})
    assert {source.kind for source in graph.nodes[0].inputs} == {PARAMETER, CONSTANT}
