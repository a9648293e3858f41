"""`torch.amp` and `torch.cuda.amp`."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from simparallel import optim
from simparallel.clock.notes import note_once
from simparallel.compat.front import front


class autocast(ContextDecorator):
    """A block or a function that PyTorch computes in another precision: noted, and computed in float32 here."""

    def __init__(
        self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if enabled:
            note_once(
                "autocast computes in the dtypes of its inputs here; for float16, sp.nn.auto_mixed_precision(model)."
            )

    def __enter__(self) -> autocast:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@front(optim.GradScaler)
def GradScaler(
    device: Any = "cuda",
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> None:
    """See `sp.optim.GradScaler`."""
