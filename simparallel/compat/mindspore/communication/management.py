"""`mindspore.communication.management`: the names of `mindspore.communication`."""

from simparallel.compat.mindspore.communication import *
