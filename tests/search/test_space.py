"""The choices of a search are those that a run executes."""

from __future__ import annotations

import pytest
from training_programs import PROGRAMS, slow_cluster, space_of

from simparallel.parallel.operator.explain import Input
from simparallel.parallel.operator.op_call import OpCall


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_choices_run_in_the_priced_layouts(name):
    space, _kept = space_of(name, slow_cluster(4))
    for node, choices in zip(space.graph.nodes, space.choices, strict=True):
        inputs = [Input(spec) for spec in node.plan.inputs]
        for choice in choices:
            call = OpCall(choice.call.op, inputs, 4)
            assert (tuple(call.inputs), call.output) == (choice.inputs, choice.output), choice.strategy
