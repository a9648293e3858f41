"""`mindspore.parallel.algo_parameter_config`: the names of `mindspore.parallel`."""

from simparallel.compat.mindspore.parallel import *
