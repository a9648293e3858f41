"""Hints for names that a module does not have: the name used here, a similar name, or the page of missing features."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from simparallel.base.names import did_you_mean

# Names that the packages in _ROOMS do not have.
_ELSEWHERE = {
    **dict.fromkeys(("tensor", "as_tensor", "from_numpy", "FloatTensor", "LongTensor"), "simparallel.Tensor(data)"),
    **dict.fromkeys(("randn", "randn_like", "normal"), "Tensor(numpy.random.default_rng(seed).standard_normal(shape))"),
    **dict.fromkeys(("rand", "rand_like", "randint", "randperm"), "Tensor(numpy.random.default_rng(seed)...)"),
    **{
        name: f"Tensor(numpy.{name}(...))"
        for name in (
            "arange", "asarray", "array", "empty_like", "eye", "full", "full_like", "linspace", "meshgrid", "ones",
            "ones_like", "tril", "triu", "zeros", "zeros_like",
        )
    },
    **{name: f"numpy.{name}" for name in ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")},
    **dict.fromkeys(("double", "float", "half", "long", "int", "bool"), "a dtype of NumPy, such as numpy.float32"),
    **dict.fromkeys(("F", "functional"), "simparallel.functions"),
    **dict.fromkeys(("distributed", "dist", "communication"), "simparallel itself: all_reduce, broadcast, init, …"),
    **dict.fromkeys(("cuda", "mps", "xpu"), "simparallel.device('sim:0'), or CuPy arrays as data"),
    **dict.fromkeys(("set_grad_enabled", "inference_mode"), "simparallel.no_grad and enable_grad"),
    "DistributedDataParallel": "simparallel.parallel.DistributedDataParallel",
    "Cell": "simparallel.nn.Module", "SequentialCell": "simparallel.nn.Sequential", "Dense": "simparallel.nn.Linear",
    "Conv2dTranspose": "simparallel.nn.ConvTranspose2d",
    "CellList": "simparallel.nn.ModuleList", "dataset": "simparallel.data",
    "amp": "simparallel.nn.auto_mixed_precision",
    "lr_scheduler": "simparallel.optim.lr_scheduler", "Dataset": "simparallel.data.Dataset",
    "spawn": "simparallel.launch", "mp": "simparallel.launch",
    "manual_seed_all": "simparallel.manual_seed",
    "DeviceMesh": "simparallel.Mesh", "init_device_mesh": "simparallel.Mesh",
    **dict.fromkeys(("DTensor", "Shard", "Replicate", "Partial"), "simparallel.Layout, with simparallel.Tensor"),
    "profiler": "simparallel.Trace",
}  # fmt: skip
_ROOMS = ("functions", "nn", "optim", "data", "parallel", "train", "ops", "models", "cluster", "view", "testing")


# Public name -> module that defines its names.
_INSIDE = {"functions": "autograd.functions", "cluster": "machine.cluster"}


class NoAttributeError(AttributeError):
    """A module has no such name; the message suggests the name used here.

    The hint is looked up when the message is shown: imports often probe for names without showing any error.

    Args:
        module: the module without the name.
        name: the missing name.
        find: returns a module by its name, or None; by default only imported modules.
    """

    def __init__(self, module: str, name: str, find: Callable[[str], ModuleType | None] = sys.modules.get) -> None:
        # Without obj=, or Python would add a second suggestion to the traceback.
        super().__init__(name=name)
        self._module, self._find = module, find

    def __str__(self) -> str:
        told = f"module {self._module!r} has no attribute {self.name!r}"
        if str(self.name).startswith("_"):
            return told
        try:
            found = self._names()
        except ImportError:
            # The message is shown in the middle of an import.
            found = []
        if found:
            return f"{told}; here it is {' or '.join(found[:2])}."
        module = sys.modules.get(self._module)
        near = did_you_mean(str(self.name), [name for name in dir(module) if not name.startswith("_")])
        return f"{told}.{near or ' docs/not_here.md lists missing features and alternatives.'}"

    def _names(self) -> list[str]:
        """Return the names that this package uses instead."""
        name = str(self.name)
        found = [f"simparallel.{room}.{name}" for room in _ROOMS if self._has(room, name)]
        return found or ([_ELSEWHERE[name]] if name in _ELSEWHERE else [])

    def _has(self, room: str, name: str) -> bool:
        found = self._find(f"simparallel.{_INSIDE.get(room, room)}")
        return found is not None and name in vars(found).get("__all__", ())

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        # Modules cannot be pickled: keep the message.
        return AttributeError, (str(self),)
