"""One training step: forward, backward, reduce, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simparallel import collectives
from simparallel.autograd import Tensor
from simparallel.autograd.tensor import scale_loss
from simparallel.backend import random_state
from simparallel.base.attributes import setting
from simparallel.base.units import format_type_of
from simparallel.errors import InputError, StateDictError
from simparallel.nn import Module
from simparallel.optim import GradScaler, LossScaleManager, Optimizer
from simparallel.parallel import DistributedGradReducer
from simparallel.world.rank import get_rank, get_world_size


def loss_of(network: Callable[..., Any], loss_fn: Callable[..., Any] | None, fields: tuple[Any, ...]) -> Any:
    """Return (loss, output) for a batch: `loss_fn(network(*data), label)`; the label is the last field.

    Without a loss function the network takes all fields and returns the loss, which is also the output.

    Raises:
        InputError: the batch has a single field, but there is a loss function.
    """
    if loss_fn is None:
        loss = network(*fields)
        return loss, loss
    if len(fields) < 2:
        raise InputError(
            f"Model: a batch of {len(fields)} fields, but loss_fn needs data and label; give pairs, or no loss_fn."
        )
    output = network(*fields[:-1])
    return loss_fn(output, fields[-1]), output


Cut = Callable[[Callable[..., Any]], Callable[..., Any]]


class TrainStep:
    """One training step on a batch. `step(fields)` returns the loss, detached.

    Args:
        network, loss_fn, optimizer: see `loss_of`.
        manager: of the loss scale; None for no scaling.
        is_parallel: this step reduces the gradients over all ranks, as the auto-parallel context says.
        cut: wraps the step in the modes that shard operators, as `AutoParallel` does; None for an unsharded step.

    Raises:
        InputError: the optimizer's `loss_scale` differs from the scale that this step leaves to it.
    """

    def __init__(
        self,
        network: Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        manager: LossScaleManager | None,
        is_parallel: bool,
        cut: Cut | None = None,
    ) -> None:
        self._run = self._run_whole if cut is None else cut(self._run_whole)
        self.network, self.loss_fn, self.optimizer = network, loss_fn, optimizer
        self.scaler: GradScaler | None = None
        self._scale = 1.0
        if manager is not None and manager.get_drop_overflow_update():
            self.scaler = GradScaler(manager)
        else:
            # A fixed scale without overflow checks: backward multiplies by it, and the optimizer divides.
            self._scale = 1.0 if manager is None else manager.get_loss_scale()
        # Either the scaler divides the gradients or the optimizer does, by the same scale; neither or both is an error.
        divided = getattr(optimizer, "loss_scale", 1.0)
        if divided != self._scale:
            raise InputError(
                f"Model: {type(optimizer).__name__} divides the gradients by {divided:g}, but must divide by "
                f"{self._scale:g}. Give it loss_scale={self._scale:g}; a FixedLossScaleManager with "
                "drop_overflow_update=False leaves the division to it."
            )
        self.is_parallel = is_parallel
        self.reducer = DistributedGradReducer(optimizer.parameters) if is_parallel else None

    @property
    def plan(self) -> Any:
        """The plan of the last step, if one was searched."""
        return getattr(self._run, "plan", None)

    def __call__(self, fields: tuple[Any, ...]) -> Tensor:
        """Run the step. Collective: yes, if gradients are reduced.

        Raises:
            InputError, ShapeError: the loss is not a Tensor of one element; NonFiniteLossError: it is NaN or infinite.
        """
        return self._run(*fields)

    def _run_whole(self, *fields: Any) -> Tensor:
        loss = self._forward(fields)
        if not isinstance(loss, Tensor):
            raise InputError(f"Model: the loss is {format_type_of(loss)}, expected a Tensor of one element.")
        # Log the loss without its scale.
        collectives.log(loss=loss)
        optimizer, scaler = self.optimizer, self.scaler
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
        else:
            (loss if self._scale == 1.0 else scale_loss(loss, self._scale)).backward()
        self._update(loss)
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state beyond network, optimizer and scaler: empty here."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateDictError: the state belongs to another kind of step.
        """
        if state_dict:
            raise StateDictError(
                f"Model: the state of a training with boost ({', '.join(state_dict['on'])}), and this one has none; "
                "give the same boost_level and boost_config_dict."
            )

    def _update(self, loss: Tensor) -> None:
        """Reduce the gradients and step the optimizer."""
        self._reduce()
        if self.scaler is not None:
            # All ranks hold the same reduced gradients, so they agree on overflow without communication.
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _reduce(self) -> None:
        if self.reducer is not None:
            params = self.optimizer.parameters
            for param, grad in zip(params, self.reducer([param.grad for param in params]), strict=True):
                param.grad = grad

    def _forward(self, fields: tuple[Any, ...]) -> Any:
        if not self.is_parallel:
            return loss_of(self.network, self.loss_fn, fields)[0]
        # Each rank draws its part of the random masks of the whole batch.
        with setting(random_state, given_part=(get_rank(), get_world_size())):
            return loss_of(self.network, self.loss_fn, fields)[0]
