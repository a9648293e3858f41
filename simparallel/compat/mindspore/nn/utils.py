"""`mindspore.nn.utils`."""

from simparallel import no_init_parameters
