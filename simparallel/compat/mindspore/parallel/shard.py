"""`mindspore.parallel.shard`."""

from simparallel import Layout, shard
