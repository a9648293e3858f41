"""`torch.amp` and `torch.cuda.amp`."""

from __future__ import annotations

from contextlib import ContextDecorator, nullcontext
from typing import Any

from simparallel import optim
from simparallel.clock.notes import note_once


class autocast(nullcontext[None], ContextDecorator):
    """A block or a function that PyTorch computes in another precision: noted, and computed in float32 here."""

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if enabled:
            note_once("autocast keeps the dtypes of the inputs; for float16, use sp.nn.auto_mixed_precision(model).")
        super().__init__()


class GradScaler(optim.GradScaler):
    """`sp.optim.GradScaler`, with PyTorch's argument for the device."""

    def __init__(self, device: Any = "cuda", **settings: Any) -> None:
        super().__init__(**settings)
