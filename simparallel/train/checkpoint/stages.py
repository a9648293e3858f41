"""A pipeline and its optimizer as parts of a checkpoint: each rank saves and reads what its own stages have."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from simparallel.backend import to_host
from simparallel.collectives import all_gather_object
from simparallel.errors import CheckpointError
from simparallel.optim import Optimizer
from simparallel.parallel import Pipeline


class StageModel:
    """The model of a pipeline, with the names of one device. Loading takes None for tensors of other stages.

    Attributes:
        others: names of what other stages have.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._own, self.load_state_dict = pipeline.own_tensors(), pipeline.load_state_dict
        self.others = {name for name, _ in pipeline.model._saved_tensors()} - set(self._own)

    def state_dict(self) -> dict[str, Any]:
        found = {name: to_host(x.data).copy() for name, x in self._own.items()}
        return found | dict.fromkeys(self.others)


class StageOptimizer:
    """The optimizer of a pipeline, whose parameters have the numbers of one device: in the model's order, by groups.

    Attributes:
        parameters, parameter_numbers: of this rank.
        others: prefixes of the names of what other stages have.

    Raises:
        CheckpointError: a parameter of another model, or groups that other ranks do not have.

    Collective: yes.
    """

    def __init__(self, pipeline: Pipeline, optimizer: Optimizer) -> None:
        places = {id(p): place for place, p in enumerate(pipeline.model.parameters())}
        own = [[places.get(id(p), -1) for p in group["params"]] for group in optimizer.param_groups]
        ranks: list[list[list[int]]] = all_gather_object(own)
        if len(counts := set(map(len, ranks))) > 1 or any(-1 in group for groups in ranks for group in groups):
            raise CheckpointError(
                f"the optimizers of a pipeline have {' or '.join(map(str, sorted(counts)))} groups, or parameters of "
                "another model; give all ranks as many groups, of parameters of the pipeline."
            )
        whole = [sorted(set(chain(*groups))) for groups in zip(*ranks, strict=True)]
        number = {place: number for number, place in enumerate(chain(*whole))}
        self._optimizer, self.parameters = optimizer, optimizer.parameters
        self._own, self._whole = ([[number[place] for place in group] for group in groups] for groups in (own, whole))
        self.parameter_numbers = list(chain(*self._own))
        self.others = {f"state.{i}." for i in number.values()} - {f"state.{i}." for i in self.parameter_numbers}

    def state_dict(self) -> dict[str, Any]:
        found = self._optimizer.state_dict()
        state = {str(self.parameter_numbers[i]): values for i, values in found["state"].items()}
        groups = [{**group, "params": whole} for group, whole in zip(found["param_groups"], self._whole, strict=True)]
        return {**found, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved = state_dict["param_groups"]
        sizes = [[len(group) for group in groups] for groups in ([g["params"] for g in saved], self._whole)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(f"groups of {sizes[0]} parameters were saved, but the pipeline has {sizes[1]}.")
        groups = [{**group, "params": own} for group, own in zip(saved, self._own, strict=True)]
        state = {i: x for i, x in state_dict["state"].items() if int(i) in self.parameter_numbers}
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})
