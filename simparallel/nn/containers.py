"""Modules that hold other modules: in a row, in a list, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import index as as_index
from typing import Any, Self, overload

from simparallel.errors import InputError, OutOfRangeError
from simparallel.nn.module import Module


class AbstractModuleSequence(Module):
    """Modules in order, with the methods of a list; they can be shared with other containers.

    Names are "0", "1", … unless others were given. A replaced module keeps its name; inserting or removing one
    renumbers all modules, as in PyTorch, and the names in `state_dict()` with them.
    """

    # Typed as Any, so that callers need no check for None.
    _modules: dict[str, Any]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one module, or a container of several.

        Raises:
            OutOfRangeError: the index is out of range.
        """
        names = self._names(index)
        return self._some(names) if isinstance(index, slice) else self._modules[names[0]]

    def __setitem__(self, index: int, module: Module) -> None:
        self._check_modules((module,))
        name = self._names(as_index(index))[0]
        self._name_members(name, module)
        self._modules[name] = module

    def __delitem__(self, index: int | slice) -> None:
        gone = self._names(index)
        self._number([module for name, module in self._modules.items() if name not in gone])

    def insert(self, index: int, module: Module) -> Self:
        """Insert a module before position `index`, which may be the length; returns self.

        Raises:
            OutOfRangeError: the index is out of range.
        """
        self._check_modules((module,))
        modules = list(self)
        if not -len(modules) <= index <= len(modules):
            raise self._out_of_range(index)
        modules.insert(index, module)
        self._number(modules)
        return self

    def append(self, module: Module) -> Self:
        """Add a module at the end, named by the next free number; returns self."""
        return self.extend((module,))

    def extend(self, modules: Iterable[Module]) -> Self:
        """Add modules at the end, all of them or, on an error, none; returns self."""
        modules = list(modules)
        self._check_modules(modules)
        for module in modules:
            number = len(self)
            while str(number) in self._modules:
                number += 1
            self.add_module(str(number), module)
        return self

    def pop(self, index: int | slice = -1) -> Any:
        """Remove and return a module, by default the last, or a container of several."""
        taken = self[index]
        del self[index]
        return taken

    def __iadd__(self, modules: Iterable[Module]) -> Self:
        return self.extend(modules)

    def __add__(self, modules: Iterable[Module]) -> Self:
        """Return a new container with these modules after its own, all renumbered."""
        joined = self._some(())
        return joined.extend(self).extend(modules)

    def _some(self, names: Iterable[str]) -> Any:
        """Return a container with the modules of these names."""
        raise TypeError(f"{type(self).__name__} does not define _some")

    def _names(self, index: int | slice) -> list[str]:
        names = list(self._modules)
        if isinstance(index, slice):
            return names[index]
        if not -len(names) <= as_index(index) < len(names):
            raise self._out_of_range(index)
        return [names[index]]

    def _number(self, modules: Iterable[Any]) -> None:
        modules = list(modules)
        # All names may shift, so detach every path before assigning new ones.
        for name in self._modules:
            self._release(name)
        self._modules.clear()
        for i, module in enumerate(modules):
            self._modules[str(i)] = module
            if module is not None:
                self._adopt(str(i), module)

    def _check_modules(self, modules: Iterable[Any]) -> None:
        for module in modules:
            if not isinstance(module, Module):
                raise InputError(f"{type(self).__name__}: {type(module).__name__} is not a Module; give nn.Modules.")

    def _out_of_range(self, index: int) -> OutOfRangeError:
        return OutOfRangeError(f"{type(self).__name__}: index {index} is out of range for {len(self)} modules.")


class Sequential(AbstractModuleSequence):
    """Modules one after the other: `Sequential(a, b)(x)` is `b(a(x))`. It has list methods: `insert`, `pop`, `+=`, …

    Args:
        modules: Modules, named "0", "1", …; or one list of Modules; or one mapping from names to Modules.

    Raises:
        InputError: an entry that is not a Module, or a name that is taken.
    """

    def __init__(self, *modules: Module | Sequence[Module] | Mapping[str, Module]) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], (list, tuple)):
            modules = tuple(modules[0])
        named: Mapping[str, Any] = {str(i): module for i, module in enumerate(modules)}
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            named = modules[0]
        self._check_modules(named.values())
        for name, module in named.items():
            self.add_module(name, module)

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            x = module(x)
        return x

    def _some(self, names: Iterable[str]) -> Sequential:
        return Sequential({name: self._modules[name] for name in names})


class ModuleList(AbstractModuleSequence):
    """A list of registered modules. It has no forward.

    Args:
        modules: named "0", "1", … in their order.
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def _some(self, names: Iterable[str]) -> ModuleList:
        return ModuleList([self._modules[name] for name in names])


class ModuleDict(Module, MutableMapping[str, Any]):
    """A dict of registered modules. It has no forward.

    Args:
        modules: name -> Module. A name has no dots and is not an attribute of Module.
    """

    # As for every module: two of them are never equal.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        if name in self._modules and isinstance(module, Module):
            self._name_members(name, module)
            self._modules[name] = module
        else:
            self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        self._release(name)
        del self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)
