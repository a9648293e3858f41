"""The tree that modules are: what is registered where, and the walks through it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Self

from simparallel.autograd import Tensor
from simparallel.errors import InputError

if TYPE_CHECKING:
    from simparallel.nn.module import Module, Parameter


class ModuleTree:
    """What a Module has of the modules below it. A name may be kept for an absent one, which is None."""

    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _not_saved: set[str]
    _path: str = ""  # from the outermost module to this one; empty for one that stands alone
    _is_wrapper: ClassVar[bool] = False  # what is below has the names that it would have without this module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of the modules right below this one, each once, by its first name."""
        seen: set[int] = set()
        for name, child in self._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                yield name, child

    def children(self) -> Iterator[Module]:
        """The modules right below this one, each once."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(dotted name, module), this one first, parents before children, each module once."""
        seen: set[int] = set()
        stack: list[tuple[str, Any]] = [(prefix, self)]
        while stack:
            path, module = stack.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            yield path, module
            stack += [(_join(path, name), child) for name, child in reversed(module._modules.items())]

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def get_submodule(self, target: str) -> Module:
        """The module of this dotted name, as in `named_modules()`; "" for this one.

        Raises:
            InputError: there is none.
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
        """(dotted name, parameter); one that is used in several places comes once, by its first name.

        Args:
            prefix: in front of the names.
            recurse: False for those of this module alone.
        """
        return self._named_members("_parameters", prefix, recurse)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """All parameters, each once, in the order of `named_parameters()`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def get_parameters(self, expand: bool = True) -> Iterator[Parameter]:
        """As `parameters(expand)`. MindSpore's name."""
        return self.parameters(expand)

    def trainable_params(self) -> list[Parameter]:
        """The parameters that require a gradient, each once: what an optimizer wants. MindSpore's name."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[Parameter]:
        """The parameters that require no gradient; MindSpore's name."""
        return [parameter for parameter in self.parameters(recurse) if not parameter.requires_grad]

    def cells_and_names(self, cells: Any = None, name_prefix: str = "") -> Iterator[tuple[str, Module]]:
        """`named_modules`, by MindSpore's name; `cells` has no effect."""
        return self.named_modules(name_prefix)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """(dotted name, buffer), each buffer once. Arguments as for `named_parameters`."""
        return self._named_members("_buffers", prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """All buffers, each once, in the order of `named_buffers()`."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _named_members(self, registry: str, prefix: str, recurse: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix) if recurse else ((prefix, self),):
            for name, tensor in module.__dict__[registry].items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _join(path, name), tensor

    def _saved_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers under *every* name they have, as a file needs them."""
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if tensor is not None and name not in self._not_saved:
                yield _join(prefix, name), tensor
        for name, child in self._modules.items():
            if child is not None:
                yield from child._saved_tensors(_join(prefix, name))

    # --- names of parameters ---------------------------------------------------------------------

    def _name_members(self, name: str, value: Any) -> None:
        """Give a parameter that is about to be registered its path, or the parameters of a module theirs.

        What several modules share keeps its first name.
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
        """Let a child stand alone again."""
        child = self._modules.get(name)
        if child is not None and child._path == self._below(self._path, name):
            child._place("", set())

    def _place(self, path: str, seen: set[int]) -> None:
        """Move to another path, with all that is named after this module."""
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
        """A copy stands alone: its parameters are named from here on."""
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
