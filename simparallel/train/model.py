"""`Model`: a network together with its loss, optimizer and metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from simparallel.autograd import no_grad
from simparallel.base.attributes import setting
from simparallel.base.checks import check_integer
from simparallel.base.units import format_object
from simparallel.comm import Group
from simparallel.errors import CheckpointError, InputError
from simparallel.nn import Module, auto_mixed_precision
from simparallel.nn.amp import BLACK_LIST, custom_mixed_precision
from simparallel.optim import DynamicLossScaleManager, LossScaleManager, Optimizer
from simparallel.parallel import AutoParallel, broadcast_parameters
from simparallel.parallel.operator.auto import cut_by_context
from simparallel.parallel.pipeline.module import PipelineModule
from simparallel.train.batch_stream import BatchStream
from simparallel.train.boost.boost import Boost
from simparallel.train.callback import CallbackList, CallbackParams, RunContext
from simparallel.train.checkpoint import CheckpointManager
from simparallel.train.control import History, ModelCheckpoint
from simparallel.train.ddp_wrappers import group_of, of_first_rank, warn, wrappers
from simparallel.train.loop import Training
from simparallel.train.metrics import Loss, get_metrics
from simparallel.train.step import TrainStep, loss_of
from simparallel.world.context import ParallelMode, SettingsRead, check_world, get_auto_parallel_context
from simparallel.world.rank import get_world_size


class Model:
    """A network, a loss, an optimizer and metrics, for training and evaluation. MindSpore's names and meaning.

    In data-parallel mode (call `set_auto_parallel_context` first) each step reduces the gradients over all
    ranks: the sum, or with `gradients_mean=True` the mean. With `parameter_broadcast=True` training
    begins with the parameters and buffers of rank 0. In stand-alone mode a `DistributedDataParallel` network, or one
    inside the network, does both by itself and reduces while backward still runs. With a `process_group` its ranks
    train together: losses, stops, metrics given by name, and checkpoints (a folder for each group) cover only them;
    all ranks save together only if tensors are sharded.

    Args:
        network: the model.
        loss_fn: called as `loss_fn(network(*data), label)`; the label is a batch's last field. None: the
            network takes all fields and returns the loss.
        optimizer: over the network's parameters; required for training.
        metrics: names in a set or list, or a dict of names and `Metric`s; for evaluation.
        eval_network: called with all fields of a batch, in place of network and loss.
        eval_indexes: positions of loss, prediction and label among the eval_network's outputs. None passes all
            outputs to every metric.
        amp_level: "O0" … "O3", see `nn.auto_mixed_precision`, which changes the network.
        boost_level, boost_config_dict: accelerations, "O0" (none), "O1" (less_bn where there are residual blocks,
            grad_freeze) or "O2" (these and adasum); or {"boost": {"mode": "manual", "adasum": True, ...}, ...}, with
            MindSpore's sections.
        loss_scale_manager: holds the loss scale. None scales nothing, except at O2, which uses a
            `DynamicLossScaleManager()`.
        keep_batchnorm_fp32: (at O2) False runs batch norms in float16 like the layers around them.

    Raises:
        InputError: settings that do not fit together, an unknown metric, a metric over all ranks while a process group
            trains, or `device_num` or `global_rank` of the context does not match the run.

    Example:
        >>> network = sp.nn.Linear(2, 2)
        >>> optimizer = sp.optim.SGD(network.parameters(), lr=0.1)
        >>> model = sp.Model(network, sp.nn.CrossEntropyLoss(), optimizer, {"accuracy"})
        >>> batches = [([[1.0, 0.0], [0.0, 1.0]], [0, 1])]
        >>> model.train(30, batches, progress=False).epoch[-1], model.eval(batches)
        (30, {'accuracy': 1.0})
    """

    __repr__ = format_object

    def __init__(
        self,
        network: Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Optimizer | None = None,
        metrics: Any = None,
        eval_network: Callable[..., Any] | None = None,
        eval_indexes: Sequence[int] | None = None,
        amp_level: str = "O0",
        boost_level: str = "O0",
        *,
        loss_scale_manager: LossScaleManager | None = None,
        keep_batchnorm_fp32: bool | None = None,
        boost_config_dict: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(network, Module):
            raise InputError(f"Model: network must be a Module, got {type(network).__name__}.")
        self.network, self.loss_fn, self.optimizer = network, loss_fn, optimizer
        self._group = group_of(network)
        self.metrics = get_metrics(metrics, self._group)
        self.eval_network, self.eval_indexes = eval_network, _indexes(eval_indexes, eval_network)
        self.parallel_mode = get_auto_parallel_context("parallel_mode")
        self._read = SettingsRead("parallel_mode", "gradients_mean", "dataset_strategy", "search_mode")
        check_world("Model")
        is_wrapped = bool(wrappers(network))
        reduces = self.parallel_mode == ParallelMode.DATA_PARALLEL
        if is_wrapped and reduces:
            raise InputError(
                "Model: the network is a DistributedDataParallel, or contains one, which reduces the gradients "
                "already; give the bare network, or stay in stand_alone mode."
            )
        is_pipeline = any(isinstance(module, PipelineModule) for module in network.modules())
        stages = get_auto_parallel_context("pipeline_stages")
        if stages > 1 and not is_pipeline:
            raise InputError(
                f"Model: pipeline_stages={stages}, but the network neither is nor contains a PipelineCell."
            )
        if is_pipeline and reduces:
            raise InputError("Model: a pipeline sums its gradients itself; leave the mode data_parallel out.")
        drops = loss_scale_manager.get_drop_overflow_update() if loss_scale_manager is not None else amp_level == "O2"
        if is_pipeline and drops:
            raise InputError(
                "Model: the ranks of a pipeline have gradients of different parameters, and do not agree on an "
                "overflow; take a FixedLossScaleManager with drop_overflow_update=False."
            )
        # O3 replaces the parameters by float16 copies, so state of the old ones would be lost.
        if amp_level == "O3" and optimizer is not None and optimizer.state:
            raise InputError(
                "Model: O3 replaces the parameters, but the optimizer has made steps with the old ones; make a new one."
            )
        boost = Boost(boost_level, boost_config_dict)
        # less_bn adds a parameter, so boost comes before mixed precision and before the step copies the parameters.
        boost.change(network, optimizer)
        _mix_precision(network, amp_level, keep_batchnorm_fp32)
        if loss_scale_manager is None and amp_level == "O2":
            loss_scale_manager = DynamicLossScaleManager()
        self.loss_scale_manager = loss_scale_manager
        # The ranks of a pipeline run whole stages, so no operator is sharded.
        cut = None if is_pipeline else cut_by_context()
        # Each is one object for all batches, which compares their shapes and calls between the ranks once. Parameters
        # of a sharded network are slices, so even prediction runs through the sharding layer.
        self._cut_outputs = cut and cut(self._outputs)
        self._cut_network = cut and AutoParallel(network)
        self._reduces = reduces and get_world_size() > 1
        # Ranks agree on losses and stops if anything reduces their gradients: this step, or a wrapper in the network.
        self._is_parallel = self._reduces or ((is_wrapped or is_pipeline) and get_world_size(self._group) > 1)
        self._step: TrainStep | None = None
        if optimizer is not None:
            cut = None if is_pipeline else cut_by_context(searches=True)
            self._step = boost.make_step(network, loss_fn, optimizer, loss_scale_manager, self._reduces, cut)

    def train(
        self,
        epoch: int,
        train_dataset: Any,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        resume: bool | str | os.PathLike[str] | None = False,
        progress: bool = True,
    ) -> History:
        """Train the network.

        Args:
            epoch: number of epochs in all, including those before `initial_epoch`.
            train_dataset: a `DataLoader`, a pipeline, or a list of batches; a batch is a tuple of fields. An epoch is
                one pass: `train(n, ds.repeat(n))` makes n passes, as `train(n, ds)` does, and not n * n. (This was
                MindSpore's rule when `repeat` was its only way to count epochs; later versions count all repeats as
                one epoch.) If a repeat is not a whole number of batches, all repeats together are one epoch.
            callbacks: a `Callback` or several.
            dataset_sink_mode: treat an epoch as one step: the hooks of a step are called only before the first and
                after the last step of the epoch. (In MindSpore, an accelerator then runs these steps without the host.)
            sink_size: steps per epoch in sink mode; -1 for one pass. The data repeat endlessly: each epoch
                continues after the previous one's last batch.
            initial_epoch: number of epochs that count as done.
            resume: checkpoint folder to resume from; True uses the folder of the `ModelCheckpoint` callback, if
                it holds a checkpoint yet; None and False start anew. A resumed run is bit-identical to one
                that was never interrupted. The order of the data follows the saved seed; to resume in the
                middle of an epoch, the data must be the same.
            progress: draw a progress bar, on rank 0.

        Returns:
            The mean loss of each epoch.

        Raises:
            InputError: no optimizer, a bad number, or `set_auto_parallel_context` was called after the Model was made.
            NonFiniteLossError: (in a step) the loss is NaN or infinite.
            CheckpointError: there is no checkpoint to resume from, or it does not fit.

        Collective: yes, if the ranks train together.
        """
        settings = dataset_sink_mode, False, sink_size, initial_epoch
        return self.fit(epoch, train_dataset, None, 1, callbacks, *settings, resume=resume, progress=progress)

    def fit(
        self,
        epoch: int,
        train_dataset: Any,
        valid_dataset: Any = None,
        valid_frequency: int | Sequence[int] = 1,
        callbacks: Any = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
        *,
        resume: bool | str | os.PathLike[str] | None = False,
        progress: bool = True,
    ) -> History:
        """Train, and evaluate at the end of epochs. Other arguments are those of `train`.

        Args:
            valid_dataset: batches for the evaluation; None for no evaluation.
            valid_frequency: number of epochs between evaluations, or a list of epochs (from 1) to evaluate after.
            valid_dataset_sink_mode: see `dataset_sink_mode` of `eval`.

        Returns:
            The mean loss of each epoch, and "eval_" with each metric's name.

        Raises:
            InputError: additionally, a valid_dataset without metrics.
        """
        self._read.check("Model")
        if self._step is None:
            raise InputError("Model: training needs an optimizer; Model(network, loss_fn, optimizer).")
        epochs = check_integer("Model", "epoch", epoch, 1)
        first = check_integer("Model", "initial_epoch", initial_epoch, 0)
        if sink_size != -1:
            check_integer("Model", "sink_size (or -1 for the whole dataset)", sink_size, 1)
        is_due = _schedule(valid_frequency)
        if valid_dataset is not None and not self.metrics:
            raise InputError("Model: evaluation needs metrics; Model(…, metrics={'accuracy'}).")
        params = self._params("train", train_dataset=train_dataset, valid_dataset=valid_dataset)

        def evaluate(number: int) -> dict[str, Any]:
            if valid_dataset is None or not is_due(number):
                return {}
            results = self._evaluate(valid_dataset, training.callbacks, params, valid_dataset_sink_mode)
            return {f"eval_{name}": value for name, value in results.items()}

        training = Training(
            self._step,
            params,
            callbacks,
            train_dataset,
            epochs=epochs,
            initial_epoch=first,
            steps_per_epoch=sink_size if dataset_sink_mode and sink_size > 0 else 0,
            is_sink=dataset_sink_mode,
            evaluate=evaluate,
            is_parallel=self._is_parallel,
            group=self._group,
        )
        # Programs for later MindSpore versions repeat the dataset and ask for one epoch: point out the difference.
        unused = training.stream.size // training.stream.pass_size - epochs
        if unused > 0 and training.steps_per_epoch == training.stream.pass_size:
            warn(
                f"Model: the dataset repeats {epochs + unused} times and an epoch is one pass, so {epochs} of them are "
                f"trained; ask for {epochs + unused} epochs, or leave out repeat.",
                self._group,
            )
        for callback in training.callbacks.callbacks:
            if isinstance(callback, ModelCheckpoint):
                # Only now is it known which ranks train together, and so which folder is theirs.
                callback.save_with(training.saving_group)
        manager = _to_resume_from(resume, training.callbacks, training.saving_group)
        if self._reduces and get_auto_parallel_context("parameter_broadcast"):
            # Before a resume, which then gives each rank its own saved values, such as running statistics.
            broadcast_parameters([*self.network.parameters(), *self.network.buffers()])
        return training.run(manager, progress)

    def eval(self, valid_dataset: Any, callbacks: Any = None, dataset_sink_mode: bool = False) -> dict[str, Any]:
        """Evaluate the metrics on a dataset, without training.

        Args:
            valid_dataset: as for `train`; always read in the order of its epoch 0. If it is
                sharded, the metrics cover all shards; a shard may be empty.
            callbacks: a `Callback` or several; the `on_eval_…` hooks are called.
            dataset_sink_mode: call the hooks of a step only before the first and after the last batch.

        Returns:
            Name of each metric -> value, the same on all ranks.

        Raises:
            InputError: no metrics, or neither a loss_fn nor an eval_network.

        Collective: yes, if there are several ranks.
        """
        if not self.metrics:
            raise InputError("Model: evaluation needs metrics; Model(…, metrics={'accuracy'}).")
        params = self._params("eval", valid_dataset=valid_dataset)
        listed = CallbackList(callbacks, RunContext(params))
        return self._evaluate(valid_dataset, listed, params, dataset_sink_mode)

    def predict(self, *predict_data: Any) -> Any:
        """Run the network on a batch in evaluation mode, without gradients.

        Collective: only in the modes that shard operators; otherwise one rank may call it alone. Exception: a
        `DistributedDataParallel` broadcasts the first rank's buffers, if it has any, in its first pass, and in the
        pass after each training pass outside of `Model`; call its `sync_buffers()` on all ranks beforehand.
        """
        with no_grad(), _evaluating(self.network):
            return (self._cut_network or self.network)(*predict_data)

    @property
    def plan(self) -> Any:
        """The `Plan` of the last training step in automatic parallel mode; None before, and in other modes."""
        return None if self._step is None else self._step.plan

    # --- internals -------------------------------------------------------------------------------------

    def _params(self, mode: str, **more: Any) -> CallbackParams:
        return CallbackParams(
            network=self.network,
            eval_network=self.eval_network,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            metrics=self.metrics,
            mode=mode,
            parallel_mode=self.parallel_mode,
            device_number=get_world_size(self._group),
            **more,
        )

    def _evaluate(self, dataset: Any, callbacks: CallbackList, params: CallbackParams, is_sink: bool) -> dict[str, Any]:
        if self.eval_network is None and self.loss_fn is None:
            raise InputError("Model: evaluation needs a loss_fn or an eval_network.")
        stream = BatchStream(dataset, may_be_empty=get_world_size(self._group) > 1)
        next_epoch = stream.epoch
        # Always in the same order: equal weights then give bit-identical results.
        stream.seek(0, 0)
        for metric in self.metrics.values():
            metric.clear()
        # Evaluation may run inside training: restore the callbacks' view afterwards.
        before = {"mode": params.mode, "net_outputs": params.get("net_outputs")}
        params.mode = "eval"
        callbacks("on_eval_begin")
        callbacks("on_eval_epoch_begin")
        evaluated = self.network if self.eval_network is None else self.eval_network
        for wrapper in dict.fromkeys((*wrappers(self.network), *wrappers(evaluated))):
            # Before the loop: ranks may have different numbers of batches, so passes inside it cannot communicate.
            wrapper.sync_buffers()
        with no_grad(), _evaluating(self.network), _evaluating(evaluated):
            for i in range(stream.size):
                if not is_sink or i == 0:
                    callbacks("on_eval_step_begin")
                params.net_outputs = self._evaluate_batch(stream.next())
                if not is_sink or i == stream.size - 1:
                    callbacks("on_eval_step_end")
        # Evaluation leaves the dataset's epoch as it was.
        stream.seek(next_epoch, 0)
        stream.close()
        results = {name: metric.eval() for name, metric in self.metrics.items()}
        params.eval_results = results
        callbacks("on_eval_epoch_end")
        callbacks("on_eval_end")
        params.update(before)
        return results

    def _evaluate_batch(self, fields: tuple[Any, ...]) -> Any:
        # Outputs and labels of a sharded run come back whole, so all ranks update with the same values.
        outputs, indexes = (self._cut_outputs or self._outputs)(*fields)
        for metric in self.metrics.values():
            if indexes is None:
                metric.update(*outputs)
            elif isinstance(metric, Loss):
                # A loss is a mean over the batch: weigh it by the batch size, since the last batch may be smaller.
                metric.update(outputs[indexes[0]], len(outputs[indexes[2]]))
            else:
                metric.update(outputs[indexes[1]], outputs[indexes[2]])
        return outputs

    def _outputs(self, *fields: Any) -> tuple[tuple[Any, ...], Sequence[int] | None]:
        """Return the metrics' inputs, and the positions of loss, prediction and label among them."""
        if self.eval_network is None:
            loss, output = loss_of(self.network, self.loss_fn, fields)
            return (loss, output, fields[-1]), (0, 1, 2)
        given = self.eval_network(*fields)
        return tuple(given) if isinstance(given, (tuple, list)) else (given,), self.eval_indexes


def _mix_precision(network: Module, level: str, keep_norms: bool | None) -> None:
    if keep_norms is not False or level != "O2":
        auto_mixed_precision(network, level)
    else:
        # O2 keeps the layers of the black list in float32, by default the batch norms among them.
        custom_mixed_precision(network, black_list=[n for n in BLACK_LIST if "BatchNorm" not in n])


def _evaluating(module: Any) -> AbstractContextManager[None]:
    """Set a module to evaluation mode inside the block; any other object is ignored."""
    return setting(*(module.modules() if isinstance(module, Module) else ()), training=False)


def _indexes(indexes: Sequence[int] | None, eval_network: Any) -> tuple[int, ...] | None:
    if indexes is None:
        return None
    if eval_network is None or len(indexes) != 3 or not all(isinstance(i, int) for i in indexes):
        raise InputError(
            f"Model: eval_indexes={indexes!r} must be the numbers of loss, prediction and label among the outputs "
            "of an eval_network."
        )
    return tuple(indexes)


def _schedule(frequency: int | Sequence[int]) -> Callable[[int], bool]:
    if isinstance(frequency, (list, tuple)):
        numbers = {check_integer("Model", "valid_frequency", number, 1) for number in frequency}
        return numbers.__contains__
    every = check_integer("Model", "valid_frequency", frequency, 1)
    return lambda number: number % every == 0


def _to_resume_from(resume: Any, callbacks: CallbackList, group: Group | None) -> CheckpointManager | None:
    if resume is None or resume is False:
        return None
    if resume is not True:
        return CheckpointManager(resume)
    for callback in callbacks.callbacks:
        if isinstance(callback, ModelCheckpoint):
            # One rank looks, so that all ranks resume or none does, whatever each sees on a shared disk.
            return callback.manager if of_first_rank(callback.manager.latest() is not None, group) else None
    raise CheckpointError("Model: resume=True needs a ModelCheckpoint among the callbacks; or name the folder.")
