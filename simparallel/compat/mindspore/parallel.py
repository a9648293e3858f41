"""`mindspore.parallel`."""

from simparallel import AutoParallel, Layout, shard
from simparallel.world.context import (
    get_algo_parameters,
    get_cost_model_context,
    reset_algo_parameters,
    reset_cost_model_context,
    set_algo_parameters,
    set_cost_model_context,
)
