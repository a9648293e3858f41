"""DistributedDataParallel: every rank has the whole model and a part of each batch.

Backward computes gradients from the last layer to the first. It writes them to flat buckets, in that order, and as soon
as a bucket is full its all-reduce begins, while backward goes on (Li et al. 2020, "PyTorch Distributed: experiences on
accelerating data parallel training"). The buckets are in the device's shared memory, so that peers can read large ones
in place, and `parameter.grad` is a view of its bucket. `reducer.py` does the work during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

from simparallel.autograd.tape import grad_mode
from simparallel.backend import random_state
from simparallel.base.attributes import setting
from simparallel.base.units import format_type_of
from simparallel.comm import Group, current
from simparallel.errors import InputError
from simparallel.nn import Module
from simparallel.nn.amp import InPrecision, check_unchanged
from simparallel.nn.hooks import summed_along
from simparallel.nn.sync_batchnorm import SyncBatchNorm
from simparallel.parallel.ddp.buckets import make_buckets
from simparallel.parallel.ddp.mixed_precision import MixedPrecision
from simparallel.parallel.ddp.reducer import Hook, Reducer, SyncMark
from simparallel.parallel.ddp.same_model import check_same_tensors
from simparallel.parallel.ddp.shared_buffers import SharedBuffers, broadcast_parameters
from simparallel.parallel.ddp.uneven_inputs import Join, Turn

MIB = 1 << 20
# In MiB. A small first bucket is full early, so communication starts early.
DEFAULT_CAP_MB, DEFAULT_FIRST_CAP_MB = 25.0, 1.0
_SETTINGS = (
    "device_ids", "output_device", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters",
    "gradient_as_bucket_view", "static_graph", "mixed_precision",
)  # fmt: skip


class DistributedDataParallel(Module):
    """A model whose gradients are averaged over the ranks during backward. Names and meaning as in PyTorch.

    The constructor copies parameters and buffers of the group's first rank to all ranks. After `loss.backward()` every
    rank has the same gradients, bit for bit: the mean over the ranks. For equal parts of a batch and a mean loss this
    is the gradient of the whole batch. `.grad` is reduced with its earlier content, for example after `no_sync()`.

    Gradients are reduced only if backward passes through an output of this wrapper's forward pass. After a forward
    pass of `.module` alone, or inside of `no_sync()`, they stay on this rank. `value_and_grad` does not reduce, and
    raises.

    A rank's parameters belong to its newest wrapper; an older one is refused from then on. A copy (`deepcopy`)
    has its own parameters and buckets, and no communication hook; to save or send a model, use `.module`.

    Args:
        module: the model; the same structure on every rank.
        device_ids, output_device: a rank is one device here, so at most one id may be given.
        broadcast_buffers: before a forward pass, copy the buffers of the group's first rank to all ranks.
        init_sync: compare the models, and copy parameters and buffers. With False the caller does that.
        process_group: ranks that share the work; by default all.
        group: another name for `process_group`.
        bucket_cap_mb: largest bucket [MiB]; None for 25, and 1 for the first bucket, so that it starts early.
        find_unused_parameters: allow unused parameters; which ones may differ by rank and step. Parameters that no
            rank used keep their `.grad`. Costs one more small all-reduce in each step.
        gradient_as_bucket_view: `.grad` is a view of the bucket, not a copy. The default, unlike PyTorch's, saves the
            copy; a `.grad` that the program keeps then changes in the next backward.
        static_graph: allow unused parameters that are the same in every step. The first step finds them, and reduces
            after its backward.
        mixed_precision: dtypes to compute and to reduce in, see `MixedPrecision`; None for the dtypes of the model. A
            communication hook gets the gradients in its `reduce_dtype`.

    Attributes:
        require_backward_grad_sync: False inside of `no_sync()`.

    Raises:
        InputError: no parameter requires a gradient, a bad argument, or `mixed_precision` for a model that
            `nn.auto_mixed_precision` has changed; or the ranks hold different slices of a cut parameter (as in tensor
            parallelism): `process_group` has to be the ranks that hold equal slices.
        CollectiveMismatchError: the ranks' models differ in names, shapes or dtypes.
        UnusedParameterError: (in backward) parameters got no gradient.

    Collective: yes, the constructor, every backward, and every forward of a model with buffers.
    Cost: 2 (P-1)/P of the parameters' bytes per rank and step.

    Example:
        >>> model = sp.parallel.DistributedDataParallel(sp.nn.Linear(3, 2))
        >>> model.module.weight.shape
        (2, 3)
    """

    _is_wrapper = True

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        *,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Group | None = None,
        group: Group | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        mixed_precision: MixedPrecision | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, Module):
            raise InputError(f"DistributedDataParallel: module is {format_type_of(module)}, expected a Module.")
        if mixed_precision is not None:
            if not isinstance(mixed_precision, MixedPrecision):
                raise InputError(
                    f"DistributedDataParallel: mixed_precision={mixed_precision!r} must be a MixedPrecision, such as "
                    "MixedPrecision(param_dtype=np.float16)."
                )
            check_unchanged(module, "DistributedDataParallel(mixed_precision=…)")
        if device_ids is not None and len(device_ids) > 1:
            raise InputError(
                f"device_ids={list(device_ids)!r}: a rank is one device; give one id or none, and start more ranks "
                "for more devices."
            )
        if process_group is not None and group is not None and process_group is not group:
            raise InputError("process_group and group are two names of one argument; give only one of them.")
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise InputError(f"bucket_cap_mb={bucket_cap_mb!r} must be more than 0.")
        self.mixed_precision = mixed_precision
        named = list(module.named_parameters())
        if stored := [name for name, p in named if summed_along(p) is not None]:
            raise InputError(
                f"DistributedDataParallel: {stored[0]} was given to fully_shard, which sums its gradient: use the "
                "model as it is; axis=('replicate', 'shard') also sums over replicas."
            )
        parameters = [p for _, p in named if p.requires_grad]
        # Frozen parameters are in no bucket; `forward` raises once they require gradients.
        self._frozen = [p for _, p in named if not p.requires_grad]
        if not parameters:
            raise InputError("DistributedDataParallel: no parameter of the module requires a gradient.")
        self.module = module
        self.device_ids, self.output_device = device_ids, output_device
        self.broadcast_buffers, self.static_graph = bool(broadcast_buffers), bool(static_graph)
        self.find_unused_parameters = bool(find_unused_parameters)
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.bucket_cap_mb = bucket_cap_mb
        self.require_backward_grad_sync = True
        self.process_group = process_group or group
        communicator = self._communicator = current()
        # The ranks that share the work; `process_group` stays None if that is all of them.
        self._share = self.process_group or communicator.world
        name = "a DDP that was not compared"
        # Compare before copying: a broadcast between different models would pair the wrong tensors.
        if init_sync:
            name = f"DDP {self._check_same_model()}"
            self._copy_from(self._share.ranks[0])
        cap_mb, first_cap_mb = bucket_cap_mb, None
        if cap_mb is None:
            cap_mb, first_cap_mb = DEFAULT_CAP_MB, DEFAULT_FIRST_CAP_MB * MIB
        self._reducer = Reducer(
            make_buckets(parameters, cap_mb * MIB, communicator, self.process_group, first_cap_mb),
            {id(p): name for name, p in named},
            communicator,
            self.process_group,
            as_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static=self.static_graph,
            has_other_communication=any(isinstance(m, SyncBatchNorm) for m in module.modules()),
            reduce_dtype=None if mixed_precision is None else mixed_precision.travel_dtype,
            purpose=name,
        )
        self._mark = SyncMark(self._reducer)
        self._shared = SharedBuffers(module, communicator, self.process_group, f"{name}, buffers")
        self._join: Join | None = None
        self._run: Callable[..., Any] | None = None
        if mixed_precision is not None:
            self._run = InPrecision(
                module, mixed_precision.param_dtype, None, (), buffers=mixed_precision.buffer_dtype, forward=module
            )
            self.__dict__["_mixed_precision"] = True  # see `check_unchanged`

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._reducer.attached:
            raise InputError(
                "DistributedDataParallel: this module was wrapped again, and the newer wrapper reduces its "
                "gradients. Use that wrapper."
            )
        # Checked in every pass, because `requires_grad_` gives no notice.
        if any(p.requires_grad for p in self._frozen):
            raise InputError(
                "DistributedDataParallel: a parameter that was frozen when the model was wrapped requires a gradient "
                "now, but no rank would reduce its gradient. Wrap the model again."
            )
        will_reduce = grad_mode.enabled and self.require_backward_grad_sync
        share, shared = self._share, self._shared
        # A recomputed part runs for the second time, inside backward: it must have no further effects.
        if not grad_mode.recomputing:
            self._reducer.settle()
            source = share.ranks[0]
            if self._join is not None:
                # Inside a `join` block every pass is reported. The rank whose buffers count may have changed: the first
                # one may have no more inputs.
                source = self._join.announce(Turn(will_reduce, shared.are_due))
            if shared.are_due and self.broadcast_buffers and any(shared.registries):
                shared.broadcast(source)
            # As in PyTorch: only after a pass whose backward reduces does the next pass broadcast.
            shared.are_due = will_reduce
        # Each rank draws its part of the random masks of the whole batch.
        before, random_state.given_part = random_state.given_part, (share.rank or 0, share.size)
        try:
            y = (self._run or self.module)(*inputs, **kwargs)
        finally:
            random_state.given_part = before
        # The mark is placed after the outputs, so that backward meets it before any parameter.
        return self._mark(y) if will_reduce else y

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients in each rank's `.grad` inside the block, without communication.

        The place of the forward pass decides: the backward of a forward pass inside the block does not reduce. The
        first backward after the block reduces the accumulated gradients. For a checkpointed part the second run
        decides, which happens in backward. Collective: no.
        """
        return setting(self, require_backward_grad_sync=False)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` reduce the buckets, instead of the mean over the ranks.

        Args:
            state: first argument of the hook.
            hook: gets a full `GradBucket`, starts the communication, and returns a `Work` whose result is the new
                content of the bucket, or an array if it has waited. It also divides by the number of ranks. See
                `parallel.comm_hooks`.

        Raises:
            InputError: not callable, or there is a hook already.

        Collective: no, but all ranks must register the same hook.
        """
        if not callable(hook):
            raise InputError(f"register_comm_hook: hook={hook!r} is not callable.")
        if self._reducer.hook is not None:
            raise InputError("register_comm_hook: this model has a hook already; only one can reduce its gradients.")
        self._reducer.hook = (hook, state)

    @property
    def comm_hook_state(self) -> Any:
        """The state of the communication hook; None without one."""
        return None if self._reducer.hook is None else self._reducer.hook[1]

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a block for a training loop in which ranks may have different numbers of inputs. See `Join`."""
        return Join(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    def extra_repr(self) -> str:
        sizes = ", ".join(str(bucket.flat.nbytes) for bucket in self._reducer.buckets)
        mixed = "" if self.mixed_precision is None else f", {self.mixed_precision}"
        return f"buckets of {sizes} bytes{mixed}"

    def sync_buffers(self) -> None:
        """Copy the buffers of the group's first rank to all ranks, if the last forward pass may have changed them.

        Forward also does this. Afterwards an inference pass needs no communication.

        Collective: yes.
        """
        if self._shared.are_due and self.broadcast_buffers:
            self._shared.broadcast(self._share.ranks[0])
        self._shared.are_due = False

    # --- the same model everywhere --------------------------------------------------------------------

    def _check_same_model(self) -> int:
        """Compare the ranks' models, and return a new number for this one, the same on every rank. Collective: yes."""
        communicator = self._communicator
        how = "" if self.mixed_precision is None else f" in {self.mixed_precision}"
        tensors = [
            *((n, p, ("trained" if p.requires_grad else "frozen") + how) for n, p in self.module.named_parameters()),
            *((n, buffer, "a buffer") for n, buffer in self.module.named_buffers()),
        ]
        who = "DistributedDataParallel"
        kind, group = DistributedDataParallel, self.process_group
        last = check_same_tensors(who, tensors, communicator, group, "process_group", communicator.kept.get(kind, 0))
        communicator.kept[kind] = last + 1
        return last + 1

    def _copy_from(self, source: int) -> None:
        """Copy parameters and buffers of rank `source` to all ranks. Collective: yes."""
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        broadcast_parameters(named.values(), self.process_group, source)

    # --- copies ---------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        copied = type(self)(deepcopy(self.module, memo), **settings, process_group=self.process_group, init_sync=False)
        # Not every rank may copy its model, so a copy gets no number of its own.
        copied._reducer.purpose = f"a copy of {self._reducer.purpose}"
        memo[id(self)] = copied
        # The wrapper's flag; the modules' own flags were copied with them.
        copied.__dict__["training"] = self.training
        # Members and attributes that were added to the wrapper itself, such as hooks or a forward in mixed precision.
        members = ("_parameters", "_buffers", "_modules")
        for own, there in [(self.__dict__, copied.__dict__), *((vars(self)[m], vars(copied)[m]) for m in members)]:
            there |= {name: deepcopy(own[name], memo) for name in own if name not in there}
        copied._not_saved |= self._not_saved
        return copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DistributedDataParallel belongs to its rank and cannot be saved or sent; take its .module, or its "
            "state_dict()"
        )

    # --- ranks without further inputs, see `Join` ---------------------------------------------------------

    def _shadow(self, turn: Turn, source: int) -> None:
        """Take part in the communication of a forward and a backward of the other ranks. Collective: yes."""
        if turn.sends_buffers and self.broadcast_buffers:
            self._shared.broadcast(source)
        self._shared.are_due = turn.reduces
        if turn.reduces:
            self._reducer.shadow()
