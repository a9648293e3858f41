"""`torch.distributed.fsdp`: see `sp.parallel.fully_shard`, which also has PyTorch's defaults."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any

from simparallel import Mesh, get_local_world_size, get_world_size, optim, parallel
from simparallel.compat.front import front, refuse, unused
from simparallel.compat.torch.distributed.fsdp import wrap
from simparallel.compat.torch.distributed.fsdp.wrap import _parts
from simparallel.nn import Module


@front(parallel.MixedPrecision)
def MixedPrecisionPolicy(
    param_dtype: Any = None, reduce_dtype: Any = None, output_dtype: Any = None, cast_forward_inputs: bool = True
) -> None:
    """See `sp.parallel.MixedPrecision`."""
    is_cast = None if cast_forward_inputs else "False"
    refuse("MixedPrecisionPolicy", "cast inside of forward", output_dtype=output_dtype, cast_forward_inputs=is_cast)


@front(parallel.MixedPrecision)
def MixedPrecision(
    param_dtype: Any = None,
    reduce_dtype: Any = None,
    buffer_dtype: Any = None,
    keep_low_precision_grads: bool = False,
    cast_forward_inputs: bool = False,
    cast_root_forward_inputs: bool = True,
) -> None:
    """See `sp.parallel.MixedPrecision`."""
    refuse(
        "MixedPrecision", "gradients have the dtype of the slices", keep_low_precision_grads=keep_low_precision_grads
    )


class FSDPModule(parallel.FullySharded):
    """A module that was given to `fully_shard`. Groups are gathered ahead in the order of the step before."""

    def unshard(self, async_op: bool = False) -> Any:
        """Begin to gather the parameters; see `sp.parallel.FullySharded`."""
        super().unshard()
        return self if async_op else None

    def wait(self) -> None:
        """Return at once: the forward waits for parameters that `unshard` gathers."""

    def set_modules_to_forward_prefetch(self, modules: Any) -> None:
        """Note that it has no effect."""
        unused("FSDPModule", modules_to_forward_prefetch=modules)

    def set_modules_to_backward_prefetch(self, modules: Any) -> None:
        """Note that it has no effect."""
        unused("FSDPModule", modules_to_backward_prefetch=modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept any value: each backward ends its reductions."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Note that False has no effect: parameters are freed, and gathered again, as a step may change them."""
        unused("FSDPModule", reshard_after_backward=None if reshard_after_backward else False)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Refuse to leave slices unreduced over the replicas. Raises InputError."""
        refuse(
            "FSDPModule", "use set_requires_gradient_sync", requires_all_reduce=None if requires_all_reduce else "False"
        )

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Refuse other sums than the mean. Raises InputError."""
        refuse("FSDPModule", "gradients are means over the ranks; scale the loss", gradient_divide_factor=factor)


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: Any = None,
    shard_placement_fn: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Any = None,
) -> Any:
    """See `sp.parallel.fully_shard`; of a mesh of two axes the second one cuts."""
    refuse(
        "fully_shard", "whole modules are cut by rows, on their devices",
        shard_placement_fn=shard_placement_fn, offload_policy=offload_policy, ignored_params=ignored_params or None,
        module=module if isinstance(module, (list, tuple)) else None,
    )  # fmt: skip
    return _sharded(module, mesh, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy)


def _sharded(module: Any, mesh: Any, **settings: Any) -> Any:
    axes = {} if mesh is None else {"axis": mesh.axis_names if len(mesh.axis_names) > 1 else mesh.axis_names[0]}
    parallel.fully_shard(module, mesh, **axes, **settings)
    own = type(module)
    module.__class__ = type(own.__name__, (FSDPModule, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    return module


class ShardingStrategy(Enum):
    """What is cut."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class FullyShardedDataParallel(Module):
    """A wrapper of a module whose parts, chosen by `auto_wrap_policy`, and itself are given to `fully_shard`."""

    def __init__(
        self,
        module: Any,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Any = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        who = "FullyShardedDataParallel"
        refuse(
            who, "see sp.parallel.fully_shard", process_group=process_group, cpu_offload=cpu_offload,
            ignored_modules=ignored_modules, param_init_fn=param_init_fn, ignored_states=ignored_states,
        )  # fmt: skip
        unused(
            who, backward_prefetch=backward_prefetch, device_id=device_id, forward_prefetch=forward_prefetch or None,
            use_orig_params=use_orig_params or None,
        )  # fmt: skip
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        mesh, is_hybrid = device_mesh, "HYBRID" in strategy.name
        if is_hybrid and mesh is None:
            node = get_local_world_size()
            mesh = Mesh((get_world_size() // node, node), ("replicate", "shard"))
        settings: dict[str, Any] = {"mp_policy": mixed_precision}
        if strategy is ShardingStrategy.NO_SHARD:
            settings |= {"parameter": "R", "gradient": "P", "state": "R"}
        elif strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2):
            settings["reshard_after_forward"] = False
        if sync_module_states:
            parallel.broadcast_parameters(module.parameters())
        for part in [] if auto_wrap_policy is None else list(_parts(module, auto_wrap_policy)):
            _sharded(part, mesh, **settings)
        self.module = _sharded(module, mesh, **settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate whole gradients on each rank inside the block."""
        return self.module.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """See `sp.optim.clip_grad_norm_`."""
        return optim.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the wrapped module. Collective: yes."""
        return self.module.full_state_dict()

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load a whole state of the wrapped module."""
        return self.module.load_full_state_dict(state_dict, strict)
