"""Collectives through shared memory: `Views` of the members' memory, and the bodies of `direct`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from simparallel.comm.direct.direct import BODIES
from simparallel.comm.group import Medium
from simparallel.comm.views import Views


def pack(value: Any) -> np.ndarray:
    from simparallel.base import pickling  # costs a tenth of `import simparallel`, and few programs send objects

    return np.frombuffer(pickling.dumps(value), np.uint8)


def unpack(data: np.ndarray) -> Any:
    return pickle.loads(data.data)  # trusted: written by a rank of this run, in this run's own memory


SHARED_MEMORY = Medium(Views, BODIES, pack, unpack)
