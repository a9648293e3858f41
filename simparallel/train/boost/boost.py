"""Boost: MindSpore's accelerations of training, as used by `Model`. `config` parses the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad
from simparallel.backend import get_namespace, to_host
from simparallel.base.attributes import setting
from simparallel.errors import InputError, StateDictError
from simparallel.nn import Module
from simparallel.optim import LossScaleManager, Optimizer
from simparallel.optim.blocks import widened
from simparallel.optim.loss_scale import all_finite
from simparallel.parallel import AdasumOptimizer, DistributedGradReducer, DistributedGradScaler, Nodes
from simparallel.train.boost.config import BoostConfig, parse
from simparallel.train.boost.dim_reduce import DimReduce, load_directions
from simparallel.train.boost.freeze import freeze_sequence, frozen_layers
from simparallel.train.boost.less_bn import centre, centred, misfit, normalize_head, remove_norms
from simparallel.train.ddp_wrappers import warn, wrappers
from simparallel.train.step import Cut, TrainStep
from simparallel.world.rank import get_num_nodes, get_world_size

# Devices on a node, as MindSpore assumes.
DEVICES_OF_A_NODE = 8


class Boost:
    """The accelerations of one model: changes the network and makes its training step.

    Args:
        level, config: see `config.parse`.

    Attributes:
        config: the parsed settings.
        removed_norms: names of the normalisations that less_bn removed.
    """

    def __init__(self, level: str = "O0", config: Mapping[str, Any] | None = None) -> None:
        self.config: BoostConfig = parse(level, config)
        self.removed_norms: list[str] = []

    def change(self, network: Module, optimizer: Optimizer | None) -> None:
        """Apply less_bn to the network. Call it before mixed precision, and before any parameter is copied.

        An acceleration that the level asks for but the network does not allow is left out with a warning.

        Raises:
            InputError: no optimizer, or a switch asks for a change that the network forbids. Nothing has changed.
        """
        if not self.config.on:
            return
        if optimizer is None or wrappers(network):
            raise InputError("boost: needs an optimizer, and the bare network instead of a DistributedDataParallel.")
        if "less_bn" in self.config:
            self._change_norms(network, optimizer)
        if "grad_accumulation" in self.config:
            steps = self.config.settings["grad_accumulation"]["grad_accumulation_step"]
            if steps == 1:
                warn(
                    "boost: grad_accumulation adds up the gradients of 1 step, so it changes nothing; set "
                    "boost_config_dict['grad_accumulation'] = {'grad_accumulation_step': 2} or more."
                )

    def _change_norms(self, network: Module, optimizer: Optimizer) -> None:
        with_head = self.config.settings["less_bn"]["fn_flag"]
        lacks = misfit(network, with_head)
        if lacks and not self.config.by_level:
            raise InputError(f"less_bn: {lacks}; switch less_bn off.")
        if lacks:
            warn(f"boost: less_bn is left out: {lacks}.")
            self.config = replace(self.config, on=self.config.on - {"less_bn"})
            return
        self.removed_norms = remove_norms(network)
        if with_head:
            normalize_head(network, optimizer)

    def make_step(
        self,
        network: Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        manager: LossScaleManager | None,
        is_parallel: bool,
        cut: Cut | None = None,
    ) -> TrainStep:
        """Return the training step; a plain `TrainStep` if nothing is switched on.

        Raises:
            InputError: Adasum on several ranks that are not in data-parallel mode, or boost in a mode that shards
                operators; otherwise as for `TrainStep`.

        Collective: yes, with Adasum.
        """
        if not self.config.on:
            return TrainStep(network, loss_fn, optimizer, manager, is_parallel, cut)
        if cut is not None:
            raise InputError("boost: works in the stand_alone and data_parallel modes, where no operator is sharded.")
        if "adasum" in self.config and not is_parallel and get_world_size() > 1:
            raise InputError(
                "boost: adasum is for data-parallel mode; set_auto_parallel_context(parallel_mode='data_parallel')."
            )
        return BoostedStep(self.config, network, loss_fn, optimizer, manager, is_parallel)


class BoostedStep(TrainStep):
    """A training step with the selected accelerations.

    grad_accumulation sums gradient / k over k calls, and reduces and steps in every k-th call. grad_freeze selects the
    trained parameters anew for each of these steps. adasum lets each node step on its own with the mean of its
    gradients, and combines the nodes' updates by Adasum. All of their state is in `state_dict`, so a checkpoint has it.

    Args:
        config: the accelerations.
        network, more: as for `TrainStep`.
    """

    def __init__(self, config: BoostConfig, network: Module, *more: Any) -> None:
        super().__init__(network, *more)
        self.config, optimizer, is_parallel = config, self.optimizer, self.is_parallel
        self._all = list(optimizer.parameters)
        self._fields: tuple[Any, ...] = ()
        settings = config.settings
        wants_centred = "less_bn" in config and settings["less_bn"]["gc_flag"]
        self._centred = {id(p) for p in centred(network)} if wants_centred else set()
        self._every = settings["grad_accumulation"]["grad_accumulation_step"] if "grad_accumulation" in config else 1
        # By position in `_all`: ids of parameters mean nothing after a resume.
        self._sums: dict[int, Any] = {}
        self._micro_steps = self._steps = 0
        self._prepare_freeze(optimizer, is_parallel)
        self._adasum = self._make_adasum(optimizer, is_parallel)
        self._dim_reduce: DimReduce | None = None
        if "dim_reduce" in config:
            # less_bn may have removed parameters of batch norms that the optimizer still lists.
            there = set(network.parameters())
            trained = [p for p in self._all if p.requires_grad and p in there]
            names = ("rho", "gamma", "alpha", "sigma")
            values = {name: settings["dim_reduce"][name] for name in names}
            self._dim_reduce = DimReduce(trained, load_directions(network, trained, settings["dim_reduce"]), **values)

    def _prepare_freeze(self, optimizer: Optimizer, is_parallel: bool) -> None:
        """Make an optimizer with its own state, and a gradient reducer, for each number j of frozen groups."""
        self._sequence: list[int] = [0]
        self._frozen: list[list[Tensor]] = [[]]
        self._optimizers, self._reducers = [optimizer], [self.reducer]
        if "grad_freeze" not in self.config:
            return
        freeze = self.config.settings["grad_freeze"]
        # Groups are formed in the order of the network's layers, not of the optimizer's groups.
        in_order = [p for p in self.network.parameters() if p in set(self._all)]
        self._sequence = freeze_sequence(
            freeze["param_groups"], freeze["freeze_type"], freeze["freeze_p"], freeze["total_steps"], freeze["seed"]
        )
        self._frozen = frozen_layers(in_order, freeze["param_groups"])
        for left_out in self._frozen[1:]:
            rest = [p for p in self._all if p not in set(left_out)]
            self._optimizers.append(optimizer.restricted_to(rest))
            self._reducers.append(DistributedGradReducer(rest) if is_parallel else None)

    def _make_adasum(self, optimizer: Optimizer, is_parallel: bool) -> AdasumOptimizer | None:
        if "adasum" not in self.config or not is_parallel:
            return None
        if self.scaler is not None:
            # Nodes step with different gradients, so they must agree on overflow before each step.
            self.scaler = DistributedGradScaler(self.scaler.manager)
        # Nodes come from the setting, else from the cluster's description, else they have MindSpore's 8 devices.
        count, world = self.config.settings["common"]["device_number"], get_world_size()
        if count is None and get_num_nodes() > 1:
            return AdasumOptimizer(optimizer, nodes=Nodes())
        count = count or DEVICES_OF_A_NODE
        if world % count and world > count:
            raise InputError(
                f"boost: adasum: {world} ranks are not divisible by common.device_number={count}; give a divisor."
            )
        count = min(count, world)
        nodes = [list(range(start, start + count)) for start in range(0, world, count)]
        return AdasumOptimizer(optimizer, nodes=nodes)

    # --- saving and loading -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return counters, accumulated gradients, the optimizers of frozen steps, and the state of dim_reduce.

        The optimizer of full steps and the loss scale are saved separately. Ranks differ in the middle of
        a grad_accumulation, and with adasum.
        """
        return {
            "on": sorted(self.config.on),
            "settings": self._compared,
            "ranks": get_world_size(),
            "micro_steps": self._micro_steps,
            "steps": self._steps,
            "sums": {i: to_host(total).copy() for i, total in self._sums.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers[1:]],
            "dim_reduce": None if self._dim_reduce is None else self._dim_reduce.state_dict(),
        }

    @property
    def _compared(self) -> dict[str, dict[str, Any]]:
        """The settings that a loaded state must match. Directions are compared by their checksum instead."""
        return {
            name: {key: value for key, value in section.items() if key not in ("pca_mat_path", "weight_load_dir")}
            for name, section in self.config.settings.items()
            if name in self.config
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state; the optimizer's and the loss scale's states are loaded separately.

        Raises:
            StateDictError: other switches, settings or network, or a state from the middle of an
                accumulation on another number of ranks.
        """
        self._check(state_dict)
        for optimizer, saved in zip(self._optimizers[1:], state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._dim_reduce is not None:
            self._dim_reduce.load_state_dict(state_dict["dim_reduce"])
        self._micro_steps, self._steps = state_dict["micro_steps"], state_dict["steps"]
        self._sums = {
            int(i): get_namespace(self._all[int(i)].data).array(total) for i, total in state_dict["sums"].items()
        }

    def _check(self, state_dict: Mapping[str, Any]) -> None:
        # A training without boost saves an empty state.
        then, now = state_dict.get("on", []), sorted(self.config.on)
        if then != now:
            raise StateDictError(
                f"boost: when this was saved, {', '.join(then) or 'nothing'} was on, and now {', '.join(now)}; give "
                "the same boost_level and boost_config_dict."
            )
        before = state_dict["settings"]
        differ = [
            f"{name}.{key} was {before[name].get(key)!r}, is {value!r}"
            for name, section in self._compared.items()
            for key, value in section.items()
            if before[name].get(key) != value
        ]
        if differ:
            raise StateDictError(f"boost: {'; '.join(differ)}. Give boost_config_dict as when it was saved.")
        ranks, world = state_dict["ranks"], get_world_size()
        if state_dict["sums"] and ranks != world:
            done = state_dict["micro_steps"] % self._every
            raise StateDictError(
                f"boost: saved after {done} of {self._every} steps of an accumulation, whose gradients {ranks} ranks "
                f"hold separately; there are {world} ranks now. Use {ranks} ranks, or save after a multiple of "
                f"{self._every} steps."
            )
        for i, total in state_dict["sums"].items():
            if int(i) >= len(self._all) or self._all[int(i)].shape != total.shape:
                raise StateDictError(
                    f"boost: a gradient of shape {total.shape} does not fit parameter {i} of this network."
                )

    # --- a step -----------------------------------------------------------------------------------------

    @property
    def _j(self) -> int:
        # Counted in steps of the optimizer: all gradients of one accumulation have the same trained groups.
        return self._sequence[self._steps % len(self._sequence)]

    def __call__(self, fields: tuple[Any, ...]) -> Tensor:
        self._fields = fields
        for p in self._all:
            p.grad = None
        # Freezing shortens backward: it ends before the first trained parameter.
        with setting(*self._frozen[self._j], requires_grad=False):
            return super().__call__(fields)

    def _update(self, loss: Tensor) -> None:
        for p in self._all:
            if p.grad is not None and id(p) in self._centred:
                # Before reducing: the mean is linear, so centring commutes with the sum over the ranks.
                centre(p.grad.data)
        if not self._accumulate():
            return
        # Each number of frozen groups has its own optimizer; settings and step counts are copied to it and back.
        whole, chosen = self._optimizers[0], self._optimizers[self._j]
        self.optimizer, self.reducer = chosen, self._reducers[self._j]
        if chosen is not whole:
            chosen.follow(whole)
        if self._dim_reduce is not None:
            self._step_in_few_directions(loss)
        elif self._adasum is not None:
            # Adasum combines updates; its wrapper averages inside the nodes itself.
            self._adasum.optimizer, self.reducer = chosen, None
            self.optimizer = self._adasum  # type: ignore[assignment]
            super()._update(loss)
        else:
            super()._update(loss)
        whole.follow(chosen)
        self._steps += 1

    def _accumulate(self) -> bool:
        """Add the gradients to the sums; return True if a step is due, with the sums in `.grad`."""
        if self._every == 1:
            return True
        for i, p in enumerate(self._all):
            if p.grad is not None:
                # Sum g / k, so that the step uses the mean of the k gradients.
                share = p.grad.data / self._every
                self._sums[i] = share if i not in self._sums else self._sums[i] + share
        self._micro_steps += 1
        if self._micro_steps % self._every:
            return False
        for i, total in self._sums.items():
            self._all[i].grad = self._all[i]._gradient(total)
        self._sums = {}
        return True

    def _step_in_few_directions(self, loss: Tensor) -> None:
        """Step by `DimReduce` instead of the optimizer, with gradients and losses of all ranks."""
        assert self._dim_reduce is not None
        self._reduce()
        scale = self._scale if self.scaler is None else self.scaler.get_scale()
        params = self._dim_reduce.parameters
        # Unscaled here, because the optimizer's own unscaling is bypassed.
        grads = [np.zeros(p.shape, p.dtype) if p.grad is None else widened(p.grad.data) / scale for p in params]
        overflow = self.scaler is not None and not all_finite(grads)
        if not overflow:
            self._dim_reduce.step(grads, self._mean(float(loss)), self._loss_again)
        if self.scaler is not None:
            # On an overflow the step was skipped and the scale falls, as with GradScaler.
            self.scaler.manager.update_loss_scale(overflow)

    def _loss_again(self) -> float:
        with no_grad():
            # The line search compares losses of the same batch, so the batch is kept until the step is done.
            return self._mean(float(self._forward(self._fields)))

    def _mean(self, loss: float) -> float:
        return float(collectives.all_reduce(np.array([loss]), "mean")[0]) if self.is_parallel else loss
