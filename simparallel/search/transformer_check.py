"""How far the closed form of a transformer's plan and a dry run of its program are apart."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec
from simparallel.predict.dry_run import dry_run
from simparallel.simulate.prediction import worst_memory
from simparallel.simulate.program import train
from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import FLOAT32_ADAM, ModelStates
from simparallel.simulate.transformer_time import Efficiency, step_time

# A device runs at most about so many blocks in a step: each takes some milliseconds of this machine.
MOST_BLOCKS = 128
# What AdamW of this package holds for a parameter of 16 bits: two moments in float32.
_HALF_ADAM = ModelStates(2, 2, 8)


class TransformerCheck(NamedTuple):
    """A plan, and what the closed form and a dry run say of a step.

    Attributes:
        plan: what was compared; with fewer micro-batches if a step had too many.
        closed_s, dry_s: the time of a step [s].
        closed_bytes, dry_bytes: the memory of the fullest device.
    """

    plan: TrainingPlan
    closed_s: float
    dry_s: float
    closed_bytes: int
    dry_bytes: int


def check_plan(plan: TrainingPlan, cluster: ClusterSpec, schedule: str = "1f1b") -> TransformerCheck:
    """Dry-run the program of a plan on a cluster, and price the plan in closed form with the same optimizer.

    Both are for what the hardware achieves of its data sheet (`Efficiency`). Types of 16 bits run as float16, which has
    the size and the peak of bfloat16, and all states in it but the moments.

    Args:
        plan: one that is `runnable`.
        cluster: the described hardware.
        schedule: see `predict_transformer`.

    Raises:
        InputError: no such schedule.
    """
    software, achieved = cluster.device.software, Efficiency().achieved(cluster)
    plan = replace(plan, num_micro_batches=_fewer(plan), fused_attention=software != "plain")
    states = FLOAT32_ADAM if plan.item_bytes == 4 else _HALF_ADAM
    memory = worst_memory(plan, schedule, states, software, keeps_gradients=False)
    dry = dry_run(train, (plan, schedule), {"steps": 2}, plan.world_size, achieved, unknown=0.0)
    closed = step_time(plan, cluster, states=states, schedule=schedule)
    return TransformerCheck(plan, closed.step_s, dry.step_time_s, sum(memory.values()), dry.software_bytes)


def _fewer(plan: TrainingPlan) -> int:
    """Return the number of micro-batches: all, or as many as keep a dry run short, in whole rounds of the stages."""
    most = max(1, MOST_BLOCKS // plan.layers_per_stage // plan.pipeline) * plan.pipeline
    return min(plan.num_micro_batches, most)


def check_dtype(dtype: str) -> None:
    """Raise InputError for a type that no program has."""
    if dtype == "float8":
        raise InputError("plan: --check runs programs of float32, float16 and bfloat16; float8 is priced alone.")
