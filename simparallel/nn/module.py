"""`Module`: a tree of named parameters with a forward function, and the walks through the tree."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from simparallel.arrays.captures import refuse, running
from simparallel.autograd import Tensor
from simparallel.backend import is_array, to_host
from simparallel.base.hints import attribute
from simparallel.clock.cuda import cuda_device
from simparallel.clock.memory import BUFFERS
from simparallel.clock.recorder import CALLED
from simparallel.errors import DeviceOutOfMemoryError, InputError, ShapeError
from simparallel.machine.devices import FIRST
from simparallel.nn.device_moves import hold, move_to
from simparallel.nn.hooks import Hooks, RemovableHandle
from simparallel.nn.parameter import Parameter
from simparallel.nn.state import LoadResult, load


class Module:
    """Base of everything with parameters. Assign Parameters and Modules to attributes in `__init__`.

    Example:
        >>> class Scale(sp.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = sp.nn.Parameter([2.0])
        ...
        ...     def forward(self, x):
        ...         return x * self.factor
        >>> [name for name, _ in Scale().named_parameters()]
        ['factor']
    """

    training: bool
    # A registered name may be reserved: its value is None.
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _not_saved: set[str]
    # Dotted path from the outermost module; empty for a module without a parent.
    _path: str = ""
    # A wrapper adds nothing to the paths of its children.
    _is_wrapper: bool = False
    # Names of its own that a subclass gives to members of its base, such as {"weight": "gamma"}: they are registered,
    # listed and saved under these names only.
    _renamed: ClassVar[Mapping[str, str]] = {}
    # Settings for `repr`, each with the value at which it is left out; with `...` it is always shown.
    _shown: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        # Bypass __setattr__, which reads these dicts.
        self.__dict__.update(training=True, _parameters={}, _buffers={}, _modules={}, _not_saved=set(), _path="")

    def _construct(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call `construct`, MindSpore's name of forward."""
        construct = getattr(self, "construct", None)
        if construct is None:
            raise TypeError(f"{type(self).__name__} does not define forward")
        return construct(*inputs, **kwargs)

    forward: Callable[..., Any] = _construct

    # Set on the instance when its first hook is registered.
    _hooks: Hooks | None = None

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        outer, CALLED.layer = CALLED.layer, self._path
        if running.modules is not None:
            running.modules[self] = self.training
        try:
            if self._hooks is not None:
                return self._hooks.call(self, inputs, kwargs)
            return self.forward(*inputs, **kwargs)
        except (DeviceOutOfMemoryError, ShapeError) as error:
            # Each module that the error passes through adds the name of its child: together, the layer's dotted path.
            for name, child in self._modules.items():
                if child is error.passed:
                    error.add_layer(name)
            error.passed = self
            raise
        finally:
            CALLED.layer = outer

    def register_forward_pre_hook(self, hook: Callable[[Any, tuple[Any, ...]], Any]) -> RemovableHandle:
        """Call `hook(module, inputs)` before each forward; a result that is not None replaces the inputs.

        Returns:
            A handle that removes the hook: `handle.remove()`, `handle()`, or the end of `with handle:`.
        """
        return self._own_hooks().add(before=hook)

    def register_forward_hook(self, hook: Callable[[Any, tuple[Any, ...], Any], Any]) -> RemovableHandle:
        """Call `hook(module, inputs, output)` after each forward; a result that is not None replaces the output.

        Returns:
            A handle that removes the hook: `handle.remove()`, `handle()`, or the end of `with handle:`.
        """
        return self._own_hooks().add(after=hook)

    def _own_hooks(self) -> Hooks:
        if self._hooks is None:
            self._hooks = Hooks()
        return self._hooks

    # --- registering -----------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        name = self._renamed.get(name, name)
        registry = self._registry_for(name, value)
        if registry is None:
            object.__setattr__(self, name, value)
            return
        self._check_name(name)
        for other in ("_parameters", "_buffers", "_modules"):
            if other != registry:
                self.__dict__[other].pop(name, None)
        # A plain attribute of this name would hide the registered one.
        self.__dict__.pop(name, None)
        self._name_members(name, value)
        self.__dict__[registry][name] = value

    def _registry_for(self, name: str, value: Any) -> str | None:
        """Return the name of the dict that stores `value`, None for a plain attribute. Raises InputError."""
        if isinstance(value, Parameter):
            return "_parameters"
        if isinstance(value, Module):
            return "_modules"
        if name in self.__dict__.get("_buffers", ()) and (value is None or isinstance(value, Tensor)):
            return "_buffers"
        # None assigned to a registered parameter or module leaves its name registered.
        for registry in ("_parameters", "_modules"):
            if value is None and name in self.__dict__.get(registry, ()):
                return registry
        for registry, kind in (("_parameters", "Parameter"), ("_buffers", "Tensor"), ("_modules", "Module")):
            if name in self.__dict__.get(registry, ()):
                raise InputError(
                    f"{type(self).__name__}.{name} is a registered {kind} and cannot become a "
                    f"{type(value).__name__}. Write into its .data, or `del` it first."
                )
        return None

    def __getattr__(self, name: str) -> Any:
        # Reached only if the usual look-up fails. Unpickling calls this before __dict__ is filled.
        for registry in ("_parameters", "_buffers", "_modules"):
            members = self.__dict__.get(registry, {})
            if name in members:
                return members[name]
        if name in self._renamed:
            return getattr(self, self._renamed[name])
        return attribute(self, name, "Module.")

    def __delattr__(self, name: str) -> None:
        name = self._renamed.get(name, name)
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in self.__dict__.get(registry, ()):
                self._release(name)
                del self.__dict__[registry][name]
                self._not_saved.discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._buffers, *self._modules})

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Add a parameter under `name`; None reserves the name (a layer without bias). Raises InputError."""
        if parameter is not None and not isinstance(parameter, Parameter):
            raise InputError(f"register_parameter({name!r}): {type(parameter).__name__} is not a Parameter.")
        self._register("_parameters", name, parameter)

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Add state that is not trained, such as a running mean.

        Args:
            name: attribute name.
            tensor: Tensor or array (kept, not copied), or None to reserve the name.
            persistent: whether it is part of `state_dict()`.

        Raises:
            InputError: the name is taken, or `tensor` has another type.
        """
        if is_array(tensor):
            tensor = Tensor(tensor)
        if isinstance(tensor, Tensor) and not isinstance(tensor, Parameter):
            hold(tensor, BUFFERS, f"a buffer of shape {tensor.shape}")
        if isinstance(tensor, Parameter) or not (tensor is None or isinstance(tensor, Tensor)):
            raise InputError(f"register_buffer({name!r}): {type(tensor).__name__} is not a Tensor or array.")
        name = self._register("_buffers", name, tensor)
        (self._not_saved.discard if persistent else self._not_saved.add)(name)

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a child under a name that need not be a Python identifier, such as "0"; None reserves the name.

        Raises:
            InputError: the name is taken or malformed, or `module` is not a Module.
        """
        if module is not None and not isinstance(module, Module):
            raise InputError(f"add_module({name!r}): {type(module).__name__} is not a Module.")
        self._register("_modules", name, module)

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not name or "." in name:
            raise InputError(f"{type(self).__name__}: name {name!r} must be a non-empty string without dots.")
        if "_parameters" not in self.__dict__:
            raise InputError(
                f"{type(self).__name__}: {name!r} was assigned before Module.__init__ ran; start __init__ with "
                "super().__init__()."
            )

    def _register(self, registry: str, name: str, member: Any) -> str:
        """Register a member, or reserve its name with None; return the name. Raises InputError if it is taken."""
        self._check_name(name)
        name = self._renamed.get(name, name)
        if hasattr(self, name):
            raise InputError(f"{type(self).__name__} already has an attribute {name!r}; choose another name.")
        self.__dict__[registry][name] = None
        setattr(self, name, member)
        return name

    # --- names of parameters ---------------------------------------------------------------------

    def _name_members(self, name: str, value: Any) -> None:
        """Set the path of a parameter, or of all parameters of a module, before it is registered.

        Parameters and modules with several parents keep their first name.
        """
        self._release(name)
        if isinstance(value, Module):
            self._adopt(name, value)
        elif value is not None and name not in self._buffers and not value.name:
            value.name = _join(self._path, name)

    def _adopt(self, name: str, child: Module) -> None:
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

    # --- walking the tree ---------------------------------------------------------------------------

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

    # --- saving and loading ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return dotted name -> copy of the array in host memory. Tied parameters appear under each of their names."""
        return {name: to_host(tensor.data).copy() for name, tensor in self._saved_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Copy arrays into the parameters and buffers, in place; all of them or, on an error, none.

        Args:
            state: name -> array or Tensor, as from `state_dict()`.
            strict: names must match exactly. Shapes and dtypes must match in any case.

        Returns:
            The missing and unexpected names; both lists are empty when `strict`.

        Raises:
            StateDictError: lists every missing and unexpected name, wrong shape and wrong dtype.
            InputError: `state` is not a mapping.
        """
        return load(type(self).__name__, dict(self._saved_tensors()), state, strict)

    # --- switching -------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the parameters and buffers of this module and its children to another device, dtype, or both.

        In place, with their gradients; returns self. Only floating-point tensors change their dtype. Arguments as for
        `Tensor.to`. Inputs have to be moved as well: `module(x.to("sim:1"))`. Move the module before wrapping it in
        DistributedDataParallel.

        Raises:
            InputError: there is no such device, or a dtype that is not floating point.
        """
        move_to(self, *args, **kwargs)
        return self

    def cuda(self, device: Any = None) -> Self:
        """Move to the device that PyTorch calls cuda, or cuda:`device`; see `simparallel.clock.cuda.cuda_device`."""
        return self.to(cuda_device(device))

    def cpu(self) -> Self:
        """Move to sim:0, the default device of this rank."""
        return self.to(FIRST)

    def half(self) -> Self:
        """Call `to(float16)`."""
        return self.to(np.float16)

    def float(self) -> Self:
        """Call `to(float32)`."""
        return self.to(np.float32)

    def double(self) -> Self:
        """Call `to(float64)`."""
        return self.to(np.float64)

    def train(self, mode: bool = True) -> Self:
        """Set `training` in this module and its children, for dropout and normalisation; returns self.

        Raises:
            InputError: `mode` is not a bool.
        """
        if not isinstance(mode, (bool, np.bool_)):
            raise InputError(f"train: mode={mode!r} must be True or False; eval() is train(False).")
        for module in self.modules():
            module.training = bool(mode)
        return self

    def eval(self) -> Self:
        """Call `train(False)`."""
        return self.train(False)

    def set_train(self, mode: bool = True) -> Self:
        """Call `train(mode)`. MindSpore's name."""
        return self.train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or (False) fill them with zeros in place."""
        if running.step:
            refuse("calls zero_grad", "Call it before the captured step.")
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.data.fill(0)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train the parameters of this module and its children, or freeze them; returns self."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[Module], Any]) -> Self:
        """Call `fn` with every module below, children first, and then with this module; returns self."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    # --- planning --------------------------------------------------------------------------------

    def explain(
        self,
        *shapes: tuple[int, ...],
        device_num: int | None = None,
        dtype: Any = np.float32,
        dataset_strategy: Any = "full_batch",
    ) -> Any:
        """Plan the strategies of this network's ops for inputs of these global shapes.

        The network runs on shapes alone: it computes nothing, starts no process and needs no data in its parameters.
        Ops without a strategy have the default of semi-automatic mode.

        Args:
            shapes: of the inputs, global.
            device_num: number of devices; by default the number of ranks in the run.
            dtype: of all inputs, or one for each.
            dataset_strategy: layout of the inputs, see `parallel.AutoParallel`.

        Returns:
            A `NetworkPlan`: each op's slices and collectives, each redistribution, and bytes in total. Prints as a
            table.

        Raises:
            StrategyError: a strategy is not legal.
            InputError: shapes, dtypes or the number of devices are malformed.
        """
        from simparallel.parallel.operator.explain_network import explain_network

        return explain_network(self, shapes, device_num, dtype=dtype, dataset_strategy=dataset_strategy)

    # --- copying ---------------------------------------------------------------------------------

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

    def _replica(self) -> Self:
        """Return a shallow copy with its own registries, for `parallel.replicate` to fill.

        A subclass that stores an object bound to itself must bind it to the copy.
        """
        replica = type(self).__new__(type(self))
        replica.__dict__.update(self.__dict__)
        for registry in ("_parameters", "_buffers", "_modules", "_not_saved"):
            replica.__dict__[registry] = self.__dict__[registry].copy()
        bind = getattr(self.__dict__.get("forward"), "bind", None)
        # Mixed precision stores a forward that is bound to its module.
        if bind is not None:
            replica.__dict__["forward"] = bind(replica)
        return replica

    # --- showing ---------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """Return the settings for `repr`, such as "in_features=3, out_features=2"."""
        shown = ((name, getattr(self, name)) for name in self._shown)
        return ", ".join(f"{name}={value!r}" for name, value in shown if value != self._shown[name])

    def __repr__(self) -> str:
        extra, children = self.extra_repr(), self._modules.items()
        if not children:
            return f"{type(self).__name__}({extra})"
        lines = ([extra] if extra else []) + [f"({name}): {child!r}" for name, child in children]
        return f"{type(self).__name__}(\n{textwrap.indent(chr(10).join(lines), '  ')}\n)"


class TensorModule(Module):
    """Base of layers and losses whose `forward` returns one Tensor. The settings of some are those of an op."""

    if TYPE_CHECKING:

        def __call__(self, *inputs: Any, **kwargs: Any) -> Tensor: ...

    def _take_settings(self, op: Any) -> None:
        """Take over the settings in `_shown` from an op, which has checked them: now, not in forward."""
        for name in self._shown:
            setattr(self, name, getattr(op, name))

    def _settings(self) -> dict[str, Any]:
        """Return the settings in `_shown`, as arguments of the op's function."""
        return {name: getattr(self, name) for name in self._shown}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
