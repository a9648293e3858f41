"""The tree of modules: registries of parameters, buffers and children, and the walks through them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

from simparallel.autograd import Tensor
from simparallel.errors import InputError

if TYPE_CHECKING:
    from simparallel.nn.module import Module, Parameter


class ModuleTree:
    """The part of Module that manages its subtree. A registered name may be reserved: its value is None."""

    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _not_saved: set[str]
    # Dotted path from the outermost module; empty for a module without a parent.
    _path: str = ""
    # A wrapper adds nothing to the paths of its children.
    _is_wrapper: bool = False

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) of the direct children, each once, by its first name."""
        seen: set[int] = set()
        for name, child in self._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                yield name, child

    def children(self) -> Iterator[Module]:
        """Yield the direct children, each once."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module): this module first, parents before children, each module once."""
        seen: set[int] = set()
        stack: list[tuple[str, Any]] = [(prefix, self)]
        while stack:
            path, module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
            # Reversed, because the stack pops the last entry first.
            stack += [(_join(path, name), child) for name, child in reversed(module._modules.items())]

    def modules(self) -> Iterator[Module]:
        """Yield this module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def get_submodule(self, target: str) -> Module:
        """Return the module of this dotted name, as in `named_modules()`; "" is this module.

        Raises:
            InputError: there is no such module.
        """
        found: Any = self
        for name in target.split(".") if target else ():
            child = found._modules.get(name)
            if child is None:
                names = ", ".join(name for name, _ in found.named_children()) or "none"
                raise InputError(
                    f"{type(self).__name__}.get_submodule({target!r}): {type(found).__name__} has no module {name!r}; "
                    f"it has: {names}."
                )
            found = child
        return found

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield (dotted name, parameter); a shared parameter once, by its first name.

        Args:
            prefix: in front of the names.
            recurse: False for the parameters of this module alone.
        """
        return self._named_members("_parameters", prefix, recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Yield all parameters, each once, in the order of `named_parameters()`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def get_parameters(self, expand: bool = True) -> Iterator[Parameter]:
        """Return `parameters(expand)`. MindSpore's name."""
        return self.parameters(expand)

    def trainable_params(self) -> list[Parameter]:
        """Return the parameters that require a gradient, each once, for an optimizer. MindSpore's name."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[Parameter]:
        """Return the parameters that require no gradient. MindSpore's name."""
        return [parameter for parameter in self.parameters(recurse) if not parameter.requires_grad]

    def cells_and_names(self, cells: Any = None, name_prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Return `named_modules(name_prefix)`. MindSpore's name; `cells` has no effect."""
        return self.named_modules(name_prefix)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, buffer), each buffer once. Arguments as for `named_parameters`."""
        return self._named_members("_buffers", prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield all buffers, each once, in the order of `named_buffers()`."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named_members(self, registry: str, prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix) if recurse else ((prefix, self),):
            for name, tensor in module.__dict__[registry].items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _join(path, name), tensor

    def _saved_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and saved buffers under *every* name they have, as a file needs them."""
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is not None and name not in self._not_saved:
                yield _join(prefix, name), tensor
        for name, child in self._modules.items():
            if child is not None:
                yield from child._saved_tensors(_join(prefix, name))

    # --- names of parameters ---------------------------------------------------------------------

    def _name_members(self, name: str, value: Any) -> None:
        """Set the path of a parameter, or of all parameters of a module, before it is registered.

        Parameters and modules with several parents keep their first name.
        """
        self._release(name)
        if isinstance(value, ModuleTree):
            self._adopt(name, value)
        elif value is not None and name not in self._buffers and not value.name:
            value.name = _join(self._path, name)

    def _adopt(self, name: str, child: ModuleTree) -> None:
        if not child._path:
            child._place(self._below(self._path, name), set())

    def _release(self, name: str) -> None:
        """Detach a child's path from this module."""
        child = self._modules.get(name)
        if child is not None and child._path == self._below(self._path, name):
            child._place("", set())

    def _place(self, path: str, seen: set[int]) -> None:
        """Move this module to another path, with all parameters and children that are named after it."""
        seen.add(id(self))
        before, self.__dict__["_path"] = self._path, path
        for name, parameter in self._parameters.items():
            if parameter is not None and parameter.name == _join(before, name):
                parameter.name = _join(path, name)
        for name, child in self._modules.items():
            if child is not None and id(child) not in seen and child._path == self._below(before, name):
                child._place(self._below(path, name), seen)

    def _below(self, path: str, name: str) -> str:
        return path if self._is_wrapper else _join(path, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy without a parent: the names of its parameters start at the copy."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = deepcopy(value, memo)
        copied._place("", set())
        for name, child in copied._modules.items():
            if child is not None:
                copied._adopt(name, child)
        return copied


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
