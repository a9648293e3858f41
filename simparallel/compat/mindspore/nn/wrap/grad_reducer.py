"""`mindspore.nn.wrap.grad_reducer`: the names of `mindspore.nn`."""

from simparallel.compat.mindspore.nn import *
