"""`mindspore.parallel`."""

from simparallel import AutoParallel, Layout, shard
from simparallel.context import (
    cost_model_context,
    get_algo_parameters,
    reset_algo_parameters,
    set_algo_parameters,
)
