"""`torch.distributed.fsdp`: see `sp.parallel.fully_shard`, which also has PyTorch's defaults."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any

from simparallel import Mesh, get_local_world_size, get_world_size, optim, parallel
from simparallel.compat.front import front, refuse, unused
from simparallel.compat.torch.distributed.fsdp.wrap import _parts
from simparallel.nn import Module
from simparallel.parallel import FullySharded as FSDPModule, MixedPrecision


@front(parallel.MixedPrecision)
def MixedPrecisionPolicy(
    param_dtype: Any = None, reduce_dtype: Any = None, output_dtype: Any = None, cast_forward_inputs: bool = True
) -> None:
    """See `sp.parallel.MixedPrecision`."""
    is_cast = None if cast_forward_inputs else "False"
    refuse("MixedPrecisionPolicy", "cast inside of forward", output_dtype=output_dtype, cast_forward_inputs=is_cast)


def fully_shard(
    module: Any, *, mesh: Any = None, reshard_after_forward: Any = None, mp_policy: Any = None, **more: Any
) -> Any:
    """See `sp.parallel.fully_shard`; of a mesh of two axes the second one cuts."""
    refuse("fully_shard", "whole modules are cut by rows, on their devices", **more)
    axis = "shard" if mesh is None else mesh.axis_names
    return parallel.fully_shard(module, mesh, axis, reshard_after_forward=reshard_after_forward, mp_policy=mp_policy)


class ShardingStrategy(Enum):
    """What is cut."""

    FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _HYBRID_SHARD_ZERO2 = (auto() for _ in range(5))


# PyTorch's settings of when parameters are gathered, and where they are created.
_UNUSED = ("backward_prefetch", "device_id", "forward_prefetch", "limit_all_gathers", "use_orig_params")


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
        *,
        sync_module_states: bool = False,
        device_mesh: Any = None,
        **more: Any,
    ) -> None:
        super().__init__()
        who, strategy = "FullyShardedDataParallel", (sharding_strategy or ShardingStrategy.FULL_SHARD).name
        more |= {"backward_prefetch": backward_prefetch, "process_group": process_group, "cpu_offload": cpu_offload}
        unused(who, **{name: more.pop(name) for name in _UNUSED if name in more})
        refuse(who, "see sp.parallel.fully_shard", **more)
        mesh = device_mesh
        if "HYBRID" in strategy and mesh is None:
            node = get_local_world_size()
            mesh = Mesh((get_world_size() // node, node), ("replicate", "shard"))
        settings: dict[str, Any] = {"mp_policy": mixed_precision}
        if strategy == "NO_SHARD":
            settings |= {"parameter": "R", "gradient": "P", "state": "R"}
        elif strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            settings["reshard_after_forward"] = False
        if sync_module_states:
            parallel.broadcast_parameters(module.parameters())
        for part in _parts(module, auto_wrap_policy):
            parallel.fully_shard(part, mesh, mesh.axis_names if mesh else "shard", **settings)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside the block, see `FSDPModule.no_sync`."""
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
