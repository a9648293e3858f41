"""`fully_shard`: ZeRO and FSDP for the parameters of a module, in place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from simparallel.autograd.functions import cast
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.autograd.tree_map import change_each
from simparallel.backend import is_array, random_state, to_host
from simparallel.base.attributes import setting
from simparallel.base.checks import check_flags
from simparallel.base.units import format_type_of
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.layout.mesh import Mesh
from simparallel.nn import Module
from simparallel.nn.amp import check_unchanged
from simparallel.nn.hooks import is_reduced, summed_along
from simparallel.nn.parameter import Parameter
from simparallel.optim.optimizer import optimizers_of
from simparallel.parallel.ddp.mixed_precision import MixedPrecision
from simparallel.parallel.ddp.shared_buffers import SharedBuffers
from simparallel.parallel.operator.interpreter import implicit_replication
from simparallel.parallel.operator.op_call import mode
from simparallel.parallel.sharded.axes import Axes
from simparallel.parallel.sharded.group import Place, ShardedGroup
from simparallel.parallel.sharded.letters import Letters
from simparallel.parallel.sharded.order import order
from simparallel.parallel.sharded.use import Use

M = TypeVar("M", bound=Module)


def fully_shard(
    module: M,
    mesh: Mesh | None = None,
    axis: Any = "shard",
    parameter: str = "S",
    gradient: str = "S",
    state: str = "S",
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecision | None = None,
) -> M:
    """Store the parameters of a module, their gradients and their optimizer state in slices over the ranks.

    Every rank has its own part of the batch, as in `DistributedDataParallel`, and gets the same result: gradients are
    means over the ranks. The letters say where parameters, gradients and optimizer state are: "R" replicated, "S"
    sharded, "P" partial until the last micro-batch. By their names:

        R P R  DistributedDataParallel       R P S  ZeRO-1       R S S  ZeRO-2       S S S  ZeRO-3, FSDP

    Call it for the blocks of a model first and then for the model, and make the optimizer afterwards. The parameters of
    one call, without those of earlier calls, are a group: one all-gather before they are used, one reduce-scatter of
    their gradients. Tensors are cut into chunks of rows; on the wire the chunks are padded to one size.

    Parameters may be cut before, over the ranks that compute with one part of the batch, as in tensor parallelism: a
    rank then stores rows of its slice, and ops of the module run on these ranks. Run code around it, such as the loss,
    inside of `implicit_replication(ranks)`.

    Args:
        module: the same on every rank; ranks with equal slices take the values of the first of them, and all take the
            buffers of the first rank, before each forward as with `DistributedDataParallel`. It becomes a subclass of
            its class, with the methods of `FullySharded`.
            Parameters that were made inside `no_init_parameters()` are drawn slice by slice.
        mesh: all ranks; None for one axis of all of them. Gradients are summed along the named axes alone: ranks that
            differ in another one have other parameters, such as stages, or other slices of them. A parameter that is
            cut has a Layout over `mesh.part(axes, rank)`.
        axis: name of the axis of slices. A pair such as ("replicate", "shard") is hybrid sharding: slices along the
            second axis, and equal ones along the first.
        parameter, gradient, state: the letters. With gradient "S" each micro-batch is reduced; with "P" those inside
            of `no_sync()` wait for the first one after it, and those of a `Pipeline` for the last one of a step.
        reshard_after_forward: free the whole parameters after forward, and gather them again in backward. None does so
            for all modules but the outermost one, whose backward begins at once. For parameter "S" only.
        mp_policy: dtypes to compute and to reduce in: slices keep their dtype, and are gathered in `param_dtype`, in
            which floating-point inputs arrive, too. Scale the loss for float16, as `MixedPrecision` says.

    Returns:
        The module.

    Raises:
        InputError: letters that no training step can have, with the reason; a module with a parameter of no dims, of
            several dtypes, cut along `axis`, with a gradient or the state of an optimizer; parameters that a
            DistributedDataParallel reduces, or another group has. Nothing was changed. In backward: an optimizer has
            parameters that the loss depends on, and that nobody reduces. In forward: inside of AutoParallel, or as the
            model of a Pipeline, whose stages are to be groups; a parameter was replaced, or has another dtype.
        UnusedParameterError: (in backward) only some parameters of the group got a gradient.

    Collective: yes, and so are forward and backward.
    Cost: a step receives 3 (P-1)/P of the parameters' bytes with parameter "S", otherwise 2 (P-1)/P.

    Example:
        >>> net = sp.nn.Sequential(sp.nn.Linear(4, 8), sp.nn.ReLU(), sp.nn.Linear(8, 2))
        >>> layer = sp.parallel.fully_shard(net[0])
        >>> net = sp.parallel.fully_shard(net)
        >>> net(np.ones((3, 4), np.float32)).shape
        (3, 2)
    """
    letters = Letters.checked(parameter, gradient, state)
    if not isinstance(module, Module):
        raise InputError(f"fully_shard: module is {format_type_of(module)}, expected a Module.")
    if isinstance(module, FullySharded):
        raise InputError(f"fully_shard: {module._sharded.name} is a group already.")
    if reshard_after_forward is not None:
        check_flags("fully_shard", {"reshard_after_forward": reshard_after_forward}, ("reshard_after_forward",))
        if reshard_after_forward and letters.keeps_whole:
            raise InputError("fully_shard: reshard_after_forward=True frees parameters, and parameter='R' keeps them.")
    if mp_policy is not None and (not isinstance(mp_policy, MixedPrecision) or mp_policy.buffer_dtype is not None):
        raise InputError(
            f"fully_shard: mp_policy={mp_policy!r} must be a MixedPrecision without buffer_dtype, such as "
            "MixedPrecision(param_dtype=np.float16)."
        )
    places = _places(module)
    _check(module, places)
    name, axes = module._path or type(module).__name__, Axes(mesh, axis, letters.shards_state, list(places))
    group = ShardedGroup(name, places, axes, letters, mp_policy)
    group.reshards = False if letters.keeps_whole or axes.shard is None else reshard_after_forward
    order().groups.add(group)
    own = type(module)
    module.__class__ = type(own.__name__, (FullySharded, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    module.__dict__["_sharded"], module.__dict__["_sharded_buffers"] = group, None
    if axes.everyone is not None:
        module.__dict__["_sharded_buffers"] = SharedBuffers(module, current(), axes.everyone, f"buffers of {name}")
    module._share_buffers(True)
    return module


def _places(module: Module) -> dict[Parameter, list[Place]]:
    """Return the parameters of a module that no group has, each with all its places in the module."""
    found: dict[int, tuple[Parameter, list[Place]]] = {}
    for name, part in module.named_modules():
        inside = name and _is_in_group(module, name)
        for own, p in part._parameters.items():
            is_owned = p is not None and summed_along(p) is not None
            if p is None or (inside and is_owned):
                continue
            if is_owned:
                raise InputError(
                    f"fully_shard: {own} of {name or 'the module'} belongs to another group already; tied weights must "
                    "be in one group: call fully_shard for a module that contains all their uses, and not for a part."
                )
            found.setdefault(id(p), (p, []))[1].append((part._parameters, own))
    return dict(found.values())


def _is_in_group(module: Module, name: str) -> bool:
    """Return whether a part of a module is inside of a group of one of its parts."""
    parts = name.split(".")
    return any(
        isinstance(module.get_submodule(".".join(parts[:count])), FullySharded) for count in range(1, len(parts) + 1)
    )


def _check(module: Module, places: Mapping[Parameter, Any]) -> None:
    """Refuse a module whose parameters cannot be one group. Raises InputError."""
    who, name = "fully_shard", module._path or type(module).__name__
    check_unchanged(module, who)
    dtypes = sorted({str(p.dtype) for p in places})
    if len(dtypes) > 1:
        raise InputError(f"{who}: {name} has parameters of {' and '.join(dtypes)}; a group has one dtype.")
    for p in places:
        told = p.name or f"a parameter of shape {p.shape}"
        if not p.shape:
            raise InputError(f"{who}: {told} has no dim to cut; make it a tensor of shape (1,).")
        if is_reduced(p):
            raise InputError(f"{who}: a DistributedDataParallel reduces {told}; use the bare model.")
        if p.grad is not None:
            raise InputError(f"{who}: {told} has a gradient; call zero_grad() first.")
    for optimizer in optimizers_of(places):
        if any(p in optimizer.state for p in places):
            raise InputError(
                f"{who}: {type(optimizer).__name__} has state of parameters of {name}; make the optimizer after "
                "fully_shard."
            )


class FullySharded(Module):
    """What `fully_shard` adds to a module.

    Made by `fully_shard`.
    """

    _sharded: ShardedGroup
    # None on one rank.
    _sharded_buffers: SharedBuffers | None
    _is_running = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        group, interpreter = self._sharded, grad_mode.interpreter
        run = super().forward
        # A module whose parameters all belong to other groups takes no part in a pipeline, or in a plan.
        if self._is_running or (interpreter is not None and not group.parameters):
            return run(*inputs, **kwargs)
        now = order()
        if interpreter is not None and not interpreter.is_elsewhere:
            self._refuse()
        if interpreter is not None:
            # A stage of another rank: its ops read shapes alone.
            with setting(self, _is_running=True), Use.installed(group, group.placeholders()):
                return run(*inputs, **kwargs)
        is_outermost = not (now.depth or mode.weighted)
        reshards = not is_outermost if group.reshards is None else group.reshards
        if group.casts:
            inputs, kwargs = change_each((inputs, kwargs), self._cast)
        if not now.depth and not grad_mode.recomputing:
            self._share_buffers(grad_mode.enabled and group.syncs)
        use = None
        if group.parameters:
            group.check_places()
            use = Use(group, now)
            # A part that is recomputed is followed by the one before it.
            now.begin(group, "backward" if grad_mode.recomputing else "forward")
        # Ranks draw the masks of their parts of the batch, as with DistributedDataParallel.
        part = group.axes.part if is_outermost else random_state.given_part
        installed = nullcontext() if use is None else use.installed(group, use.tensors)
        running = setting(self, _is_running=True)
        with setting(now, depth=now.depth + 1), running, setting(random_state, given_part=part), installed:
            y = run(*inputs, **kwargs)
        if use is not None:
            # Backward begins where a recomputed part ends.
            use.end_forward(y, reshards and not grad_mode.recomputing)
        return y

    def _share_buffers(self, will_reduce: bool) -> None:
        """Copy the buffers of the first rank to all, if a forward pass may have changed them. Collective: yes, then."""
        shared = self._sharded_buffers
        if shared is not None:
            if shared.are_due and any(shared.registries):
                shared.broadcast(self._sharded.axes.everyone.ranks[0])  # type: ignore[union-attr]
            # As in DistributedDataParallel: only after a pass whose backward reduces.
            shared.are_due = will_reduce

    def _cast(self, x: Any) -> Any:
        """Return a floating-point input in the dtype of the parameters."""
        x, dtype = as_tensor(x) if is_array(x) and x.dtype.kind == "f" else x, self._sharded.dtype
        return cast(x, dtype) if isinstance(x, Tensor) and x.dtype.kind == "f" and x.dtype != dtype else x

    def _refuse(self) -> None:
        who = "AutoParallel" if mode.automatic else "Pipeline"
        raise InputError(
            f"{who}: {self._sharded.name} was given to fully_shard"
            + (
                ", and AutoParallel cuts parameters itself: give it the bare model."
                if mode.automatic
                else ", and its forward runs in several stages: call fully_shard for the children that are stages."
            )
        )

    # --- gradients ------------------------------------------------------------------------------------

    def _groups(self) -> list[ShardedGroup]:
        return [part._sharded for part in self.modules() if isinstance(part, FullySharded)]

    def no_sync(self) -> AbstractContextManager[None]:
        """Run micro-batches before the last one inside the block; the place of the forward pass decides.

        Gradients "P" wait in `.grad`, whole on each rank, and are reduced with those of the first backward after the
        block. Gradients "S" are reduced and added to the slices anyway, which saves their memory. Collective: no.
        """
        return order().no_sync(self._groups())

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce the gradients of coming forward passes, or keep them whole on each rank whatever the letters say.

        Args:
            requires_gradient_sync: False to accumulate whole gradients, which takes their memory.
            recurse: for the groups of children, too.

        Raises:
            InputError: not a bool.
        """
        name = "requires_gradient_sync"
        check_flags("set_requires_gradient_sync", {name: requires_gradient_sync}, (name,))
        for group in self._groups() if recurse else [self._sharded]:
            group.syncs = bool(requires_gradient_sync)

    # --- gathering ------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to gather the parameters of this group for its next forward. Collective: yes."""
        self._sharded.gather_ahead()

    def reshard(self) -> None:
        """Free parameters that `unshard` has gathered. Collective: yes, if it has."""
        self._sharded.forget_ahead()

    # --- whole values ---------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, np.ndarray]:
        """Return dotted name -> whole array in host memory, as `state_dict()` of the unsharded model.

        Collective: yes.
        """
        self._share_buffers(False)
        found = {}
        for name, x in self._saved_tensors():
            if x.placement is not None:
                with implicit_replication(x.placement.layout.mesh.ranks):
                    x = x.full_tensor()
            found[name] = to_host(x.data).copy()
        return found

    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load whole arrays, of which each rank takes its slices. Arguments and errors as `load_state_dict`."""
        own = dict(self._saved_tensors())
        arrays = {name: x.data if isinstance(x, Tensor) else x for name, x in state.items()}
        whole = [name for name, x in arrays.items() if name in own and getattr(x, "shape", None) == own[name].shape]
        return self.load_state_dict(arrays | {name: own[name]._slice(name, arrays[name]) for name in whole}, strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"{self._sharded.name} is sharded and cannot be copied; copy the model before fully_shard.")

    def __reduce__(self) -> Any:
        raise TypeError(f"{self._sharded.name} is sharded and cannot be saved or sent; take its full_state_dict().")
