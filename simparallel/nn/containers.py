"""Modules that hold other modules and leave the order of calls to their owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

from simparallel.errors import InputError
from simparallel.nn.module import Module


class ModuleList(Module):
    """Modules in a list: registered, indexed, iterated over; not called.

    Args:
        modules: named "0", "1", … in their order.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end; returns self."""
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Add modules at the end; returns self."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> None:
        """Add a module in front of the one at `index`; those behind it get the next names."""
        if not isinstance(module, Module):
            raise InputError(f"ModuleList.insert: {type(module).__name__} is not a Module.")
        modules = list(self)
        modules.insert(index, module)
        self._modules.clear()
        self.extend(modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList: ...
    def __getitem__(self, index: int | slice) -> Module:
        """One module, or a ModuleList of some (the modules are shared)."""
        modules = list(self)
        return ModuleList(modules[index]) if isinstance(index, slice) else modules[index]

    def __setitem__(self, index: int, module: Module) -> None:
        if not isinstance(module, Module):
            raise InputError(f"ModuleList[{index}]: {type(module).__name__} is not a Module.")
        self._modules[list(self._modules)[index]] = module


class ModuleDict(Module):
    """Modules by name: registered, looked up, iterated over; not called.

    Args:
        modules: name -> Module. Names have no dots, and are no attributes of a Module.
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module]) -> None:
        """Add or replace modules."""
        for name, module in modules.items():
            self[name] = module

    def __getitem__(self, name: str) -> Module:
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        if name in self._modules and isinstance(module, Module):
            self._modules[name] = module
        else:
            self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __contains__(self, name: Any) -> bool:
        return name in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def keys(self) -> Iterable[str]:
        """The names."""
        return self._modules.keys()

    def values(self) -> Iterable[Module]:
        """The modules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Module]]:
        """(name, module) pairs."""
        return self._modules.items()
