"""`mindspore.parallel.shard`."""

from typing import Any

import simparallel as sp
from simparallel import shard
from simparallel.compat.front import front


@front(sp.Layout)
def Layout(device_matrix: Any, alias_name: Any = None, rank_list: Any = None, *, name: Any = None) -> dict[str, Any]:
    """See `sp.Layout`; a tutorial calls its aliases `name`."""
    return {"alias_name": alias_name if name is None else name}
