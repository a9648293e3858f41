"""`torch.distributed.fsdp.wrap`: which modules of a model become separate groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from simparallel.nn import Module


class ModuleWrapPolicy:
    """Each module of these classes is a group."""

    def __init__(self, module_classes: Collection[type[Module]]) -> None:
        self._classes = tuple(module_classes)

    def __call__(self, module: Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Return whether a module is a group, or (recurse) its children may be."""
        return recurse or isinstance(module, self._classes)


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Return True: each module is a group."""
    return True


def transformer_auto_wrap_policy(
    module: Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Collection[type[Module]]
) -> bool:
    """Return whether a module is a layer of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: Module, recurse: bool, nonwrapped_numel: int, min_num_params: int = 100_000_000
) -> bool:
    """Return whether as many parameters are in no group yet."""
    return nonwrapped_numel >= min_num_params


def _parts(module: Module, policy: Callable[..., bool] | None, is_root: bool = True) -> Iterator[Module]:
    """Yield the modules that `policy` makes groups, those inside of others first; and the root, with or without it."""
    free = sum(int(p.size) for p in module.parameters())
    if policy is not None and policy(module=module, recurse=True, nonwrapped_numel=free):
        for child in module.children():
            for part in _parts(child, policy, False):
                yield part
                free -= sum(int(p.size) for p in part.parameters())
    if is_root or (policy is not None and policy(module=module, recurse=False, nonwrapped_numel=free)):
        yield module
