"""Make `import mindspore` or `import torch` mean a front."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType

from simparallel.base.hints import FRONTS, Answer, answer_unknown_names
from simparallel.errors import InputError

_HERE = __name__.rpartition(".")[0]
# module -> other modules of the framework with the same names, inside of it.
_SAME = {
    "mindspore.common": "api parameter tensor",
    "mindspore.communication": "management",
    "mindspore.dataset.transforms": "c_transforms py_transforms transforms",
    "mindspore.dataset.vision": "c_transforms transforms",
    "mindspore.nn": "cell_wrapper grad_reducer loss momentum optim optimizer wrap",
    "mindspore.parallel": "algo_parameter_config auto_parallel nn parallel_cell_wrapper",
    "mindspore.train": "amp callback loss_scale_manager metrics model serialization",
    "torch.distributed": "distributed_c10d",
    "torch.distributed.pipelining": "schedules stage",
    "torch.nn": "modules",
    "torch.optim": "optimizer",
    "torch.utils.data": "dataloader dataset distributed",
}


class _Front(MetaPathFinder, InspectLoader):
    """Import hook: `mindspore.nn` is another name of the module `simparallel.compat.mindspore.nn`."""

    def __init__(self, framework: str) -> None:
        self.framework = framework

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self.framework:
            return None
        package, _, last = name.rpartition(".")
        # Some modules are attributes: this package's own, such as torch.nn.init, and those in `_SAME`.
        parent = sys.modules.get(package)
        own = getattr(parent, last, None)
        spec = getattr(own, "__spec__", None) or find_spec(f"{parent.__name__ if parent else _HERE}.{last}")
        if spec is None:
            # Returning None would let other finders look for the real package.
            text = f"simparallel's front for {self.framework} has no module {name!r}"
            raise ModuleNotFoundError(Answer(f"{_HERE}.{package}", last, True, text), name=name)
        is_package = spec.submodule_search_locations is not None
        return spec_from_loader(name, self, origin=spec.name, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.origin is not None:  # as `find_spec` made it
            sys.modules[module.__name__] = import_module(spec.origin)
        # Importing a front imports its submodules, too, which programs reach as attributes.
        for inside, front in [*sys.modules.items()]:
            if f"{inside}.".startswith(f"{_HERE}.{self.framework}."):
                # The import system uses the entry of sys.modules, so both names of a module mean one object.
                sys.modules[inside.removeprefix(f"{_HERE}.")] = front
                # One file here may be a package of the framework: the hook is asked for what is inside.
                vars(front).setdefault("__path__", [])
                same = _SAME.get(inside.removeprefix(f"{_HERE}."), "").split()
                answer_unknown_names(inside, dict.fromkeys(same, front).__getitem__, imports=True)
                front.__class__ = vars(front).get("Settings", ModuleType)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module, for `python -m`."""
        spec = find_spec(f"{_HERE}.{fullname}")
        return spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None

    def get_source(self, fullname: str) -> None:
        return None


def install(framework: str) -> None:
    """Make `import <framework>` mean its front in this process. Repeated calls are no-ops.

    Args:
        framework: one of `FRONTS`.

    Raises:
        InputError: there is no such front, or the real package is already imported.
    """
    if framework not in FRONTS:
        raise InputError(f"compat.install: {framework!r} has no front; choose from {', '.join(FRONTS)}.")
    if framework in installed():
        return
    if framework in sys.modules:
        raise InputError(
            f"compat.install: the real package {framework} was imported already; install the front before it."
        )
    # First in the list, or an installed package of this name would be found instead.
    sys.meta_path.insert(0, _Front(framework))


def installed() -> tuple[str, ...]:
    """Return the frameworks with a front in place in this process."""
    return tuple(finder.framework for finder in sys.meta_path if isinstance(finder, _Front))
