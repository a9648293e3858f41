"""Pipelines in the words of PyTorch and MindSpore: listings as their users write them, beside one device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel.compat import mindspore as ms, torch
from simparallel.compat.torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    SplitPoint,
    get_schedule_class,
    pipe_split,
    pipeline,
)
from simparallel.errors import InputError, RunFailedError, UnknownNameError
from simparallel.models import gpt

nn = torch.nn


def _batch(samples):
    rng = np.random.default_rng(0)
    return torch.tensor(rng.standard_normal((samples, 4))), torch.tensor(rng.standard_normal((samples, 2)))


def _loss(y, target):
    return ((y - target) ** 2).mean()


def _close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-11)


def _launch(program, *arguments, world_size=2, transport="inline"):
    return list(sp.launch(program, arguments, world_size=world_size, transport=transport))


def _refused_on_ranks(program, kind=InputError):
    with refused(RunFailedError) as info:
        sp.launch(program, world_size=2, transport="inline", echo=False)
    assert type(info.value.__cause__) is kind


# --- PyTorch: stages of one's own ---------------------------------------------------------------------


class Split(nn.Module):
    """A stage with two results; the next one gets two arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=np.float64)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, **named):
        y = self.drop(self.layer(x))
        return y, y.tanh()


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=np.float64)

    def forward(self, x, y, scale=1):
        return self.layer(x * y * scale)


def _stage(index, num_stages):
    """Return the stages Split, Linear(3, 3) with a skip, …, Join."""
    torch.manual_seed(index)
    if index == 0:
        return Split()
    return Join() if index == num_stages - 1 else Both()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=np.float64)

    def forward(self, x, y, **named):
        return self.layer(x), x + y


def _own_stages(name, count, samples, scale):
    rank, size = sp.get_rank(), sp.get_world_size()
    is_v = name in ("ZBVZeroBubble", "DualPipeV")
    is_single = name in ("gpipe", "1f1b")
    num_stages = size if is_single else 2 * size
    indexes = [rank] if is_single else [rank, 2 * size - 1 - rank if is_v else size + rank]
    torch.manual_seed(9)
    stages = [PipelineStage(_stage(i, num_stages), i, num_stages, torch.device("cpu")) for i in indexes]
    schedule = get_schedule_class(name)(stages[0] if is_single else stages, n_microbatches=count, loss_fn=_loss)
    x, target = _batch(samples)
    is_last, losses = stages[-1].is_last, []
    torch.manual_seed(9)
    for _ in range(2):
        named = {"scale": torch.tensor(np.full((samples, 1), scale))} if is_last else {}
        labels = {"target": target, "losses": losses} if is_last else {}
        y = schedule.step(*([x] if rank == 0 else []), **labels, **named)
    gradients = {stage.stage_index: stage.submod.layer.weight.grad.numpy() for stage in stages}
    return gradients, [loss.item() for loss in losses], None if y is None else y.numpy()


def _one_device(num_stages, samples, scale):
    parts = [_stage(i, num_stages) for i in range(num_stages)]
    x, target = _batch(samples)
    torch.manual_seed(9)
    for _ in range(2):
        y = (x,)
        for part in parts[:-1]:
            y = part(*y)
        y = parts[-1](*y, scale=scale)
        _loss(y, target).backward()
    return [part.layer.weight.grad.numpy() for part in parts], y.detach().numpy(), target.numpy()


def _check_own_stages(name, count=4, samples=8, transport="inline"):
    results = _launch(_own_stages, name, count, samples, 1.5, transport=transport)
    num_stages = sum(len(each) for each, _, _ in results)
    gradients, y, target = _one_device(num_stages, samples, 1.5)
    for own, losses, output in results:
        for stage, gradient in own.items():
            _close(gradient, gradients[stage])
        if num_stages - 1 in own:
            _close(output, y)
            spans = [slice(samples * m // count, samples * (m + 1) // count) for m in range(count)]
            _close(losses, [((y[s] - target[s]) ** 2).mean() for s in spans])
        else:
            assert (losses, output) == ([], None)


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_own_stages_train_as_one_device(name):
    """Several values between stages, dropout, and named inputs of all stages of the last rank."""
    _check_own_stages(name)


def test_micro_batches_of_own_stages_may_differ():
    _check_own_stages("1f1b", 3, 8)


@pytest.mark.process
def test_own_stages_on_processes():
    _check_own_stages("Interleaved1F1B", transport="shm")


def test_gradients_of_the_sum_of_losses():
    def program(scale_grads):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, dtype=np.float64) if sp.get_rank() == 0 else nn.Linear(4, 2, dtype=np.float64)
        stage = PipelineStage(layer, sp.get_rank(), 2)
        schedule = ScheduleGPipe(stage, 4, _loss, scale_grads=scale_grads)
        x, target = _batch(8)
        losses = []
        schedule.step(x, target=target, losses=losses)
        return layer.weight.grad.numpy(), [loss.item() for loss in losses]

    for (gradient, losses), (sums, same) in zip(_launch(program, True), _launch(program, False), strict=True):
        _close(sums, 4 * gradient)
        _close(same, losses)


def test_eval_leaves_gradients():
    def program(loss_fn):
        rank = sp.get_rank()
        torch.manual_seed(rank)
        layer = nn.Linear(4, 4, dtype=np.float64) if rank == 0 else nn.Linear(4, 2, dtype=np.float64)
        schedule = ScheduleGPipe(PipelineStage(layer, rank, 2), 2, loss_fn)
        x, target = _batch(5)
        run = schedule.eval if loss_fn else schedule.step
        losses = []
        y = run(x, target=target, losses=losses) if rank else run(x)
        return layer.weight.grad, None if y is None else y.numpy(), [loss.item() for loss in losses]

    for loss_fn in (_loss, None):
        first, (gradient, y, losses) = _launch(program, loss_fn)
        assert first == (None, None, [])
        assert gradient is None
        assert y.shape == (5, 2)
        target = _batch(5)[1].numpy()
        _close(losses, [((y[s] - target[s]) ** 2).mean() for s in (slice(2), slice(2, 5))] if loss_fn else [])


def test_dry_events_are_the_real_ones():
    def program():
        rank = sp.get_rank()
        layer = nn.Linear(8, 8)
        schedule = Schedule1F1B(PipelineStage(layer, rank, 2), 4, nn.CrossEntropyLoss())
        x, target = torch.ones(8, 8), torch.zeros(8, dtype=torch.int64)
        for _ in range(2):
            schedule.step(*([x] if rank == 0 else []), target=target if rank else None)

    def events(trace):
        return sorted((event.rank, event.sim_start_ps, event.sim_end_ps, event.name) for event in trace.events)

    predicted = sp.dry_run(program, world_size=2, fold=False)
    results = sp.launch(program, world_size=2, transport="inline", record="full")
    assert events(predicted.trace) == events(results.trace)


# --- PyTorch: a model that is cut ---------------------------------------------------------------------

TOKENS, LENGTH = 11, 5


def _gpt():
    torch.manual_seed(5)
    network = gpt(TOKENS, LENGTH, num_layers=4, num_heads=2, width=8)
    for parameter in network.parameters():
        parameter.data = parameter.data.astype(np.float64)
    return network


def _tokens(samples):
    numbers = np.random.default_rng(3).integers(0, TOKENS, (samples, LENGTH + 1))
    return torch.tensor(numbers[:, :-1]), torch.tensor(numbers[:, 1:])


def _cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits.reshape(-1, TOKENS), labels.reshape(-1))


def _cut_gpt(schedule, split_spec):
    rank, size = sp.get_rank(), sp.get_world_size()
    network = _gpt()
    x, labels = _tokens(9)
    pipe = pipeline(network, mb_args=(x[:2],), split_spec=split_spec)
    assert isinstance(pipe, Pipe)
    stages = [pipe.build_stage(i, torch.device("cpu")) for i in range(rank, pipe.num_stages, size)]
    run = schedule(stages if len(stages) > 1 else stages[0], 4, loss_fn=_cross_entropy)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            run.step(x)
        elif rank == size - 1:
            run.step(target=labels, losses=losses)
        else:
            run.step()
        optimizer.step()
        found.append(np.mean([loss.item() * n for loss, n in zip(losses, (2, 2, 2, 3), strict=True)]) if losses else 0)
    named = {name: p for stage in stages for name, p in stage.submod.named_parameters()}
    return {name: p.grad.numpy() for name, p in named.items()}, found


@pytest.mark.parametrize(
    ("schedule", "split_spec"),
    [
        (Schedule1F1B, {"blocks.1": SplitPoint.END}),
        (ScheduleInterleaved1F1B, {f"blocks.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}),
        (ScheduleLoopedBFS, {"blocks.0": SplitPoint.BEGINNING, "blocks": SplitPoint.END, "blocks.2": SplitPoint.END}),
    ],
)
def test_a_cut_model_trains_as_one_device(schedule, split_spec):
    """With tied embeddings: the last stage has the token table, too."""
    results = _launch(_cut_gpt, schedule, split_spec)
    network, (x, labels) = _gpt(), _tokens(9)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = _cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = {name: p.grad.numpy() for name, p in network.named_parameters()}
    assert {name for own, _ in results for name in own} == expected.keys()
    for own, _ in results:
        for name, gradient in own.items():
            _close(gradient, expected[name])
    _close(np.array(results[-1][1]) * 4 / 9, losses)


class Skip(nn.Module):
    """The last child needs the input of the model."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4, dtype=np.float64), nn.ReLU())
        self.head = nn.Linear(4, 2, dtype=np.float64)

    def forward(self, x, *, mask):
        return self.head(self.body(x) + x * mask)


def test_inputs_reach_later_stages():
    def program(is_whole):
        torch.manual_seed(0)
        network = Skip()
        x, target = _batch(6)
        mask = torch.tensor(np.arange(24.0).reshape(6, 4))
        if is_whole:
            _loss(network(x, mask=mask), target).backward()
            return {name: p.grad.numpy() for name, p in network.named_parameters()}
        pipe = pipeline(network, (x,), {"mask": mask}, {"head": SplitPoint.BEGINNING})
        rank = sp.get_rank()
        schedule = ScheduleGPipe(pipe.build_stage(rank), 3, _loss)
        schedule.step(*([x] if rank == 0 else []), **({"mask": mask} if rank == 0 else {"target": target}))
        return {name: p.grad.numpy() for name, p in pipe.get_stage_module(rank).named_parameters()}

    (expected,) = _launch(program, True, world_size=1)
    first, last = _launch(program, False)
    assert {*first} == {"body.0.weight", "body.0.bias"}
    for name, gradient in (first | last).items():
        _close(gradient, expected[name])


def test_torch_refusals():
    layer, (x, target) = nn.Linear(4, 2, dtype=np.float64), _batch(4)
    stage = PipelineStage(layer, 0, 1)
    for call in (
        pipe_split,
        lambda: get_schedule_class("2F2B"),
        lambda: PipelineStage(layer, 2, 2),
        lambda: ScheduleGPipe(stage, 1, _loss, ()),
        lambda: Schedule1F1B(PipelineStage(layer, 0, 2), 2, _loss),
        lambda: ScheduleGPipe(stage, 2, _loss).step(target=target),
        lambda: ScheduleGPipe(stage, 2, _loss).step(x),
        lambda: ScheduleGPipe(stage, 2, _loss).step(x, target=target, loss_kwargs={"a": 1}),
        lambda: ScheduleGPipe(PipelineStage(Split(), 0, 1), 2, _loss).step(x, target=target),
        lambda: pipeline(_gpt(), (_tokens(2)[0],), split_spec={"layers.4": SplitPoint.BEGINNING}),
        lambda: pipeline(_gpt(), (_tokens(2)[0],), split_spec={"tokens": SplitPoint.BEGINNING}),
        lambda: pipeline(_gpt(), (_tokens(2)[0],), split_policy=len),
        lambda: pipeline(_gpt(), (_tokens(2)[0],)).get_stage_module(1),
        lambda: pipeline(_gpt(), (_tokens(2)[0],)).get_stage_module(0)(x),
    ):
        with refused(InputError):
            call()
    _refused_on_ranks(
        lambda: PipelineStage(layer, 0, 1, group=sp.new_group([sp.get_rank()], use_local_synchronization=True))
    )


# --- MindSpore ----------------------------------------------------------------------------------------

MICRO_SIZE = 4


class Network(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        sizes = (4, 5, 6, 5, 3)
        self.layers = ms.nn.CellList([ms.nn.Dense(*pair, dtype=ms.float64) for pair in pairwise(sizes)])
        self.relu = ms.nn.ReLU()

    def construct(self, x):
        for layer in self.layers:
            x = self.relu(layer(x))
        return x


def _with_loss(network=Network):
    ms.set_seed(1)
    return ms.nn.WithLossCell(network(), ms.nn.MSELoss())


def _samples(samples=8):
    rng = np.random.default_rng(0)
    return rng.standard_normal((samples, 4)), rng.standard_normal((samples, 3))


def _config(layers_of_stage):
    return {f"_backbone.layers.{layer}": stage for stage, layers in enumerate(layers_of_stage) for layer in layers}


def _alone(cell, steps):
    """Train on one device with the sum of the micro-batches' losses; return losses and parameters."""
    optimizer = ms.nn.Momentum(cell.trainable_params(), 0.05, 0.9)
    x, y = map(ms.Tensor, _samples())
    losses = []
    for _ in range(steps):
        loss, grads = ms.value_and_grad(lambda: cell(x, y) * MICRO_SIZE, None, optimizer.parameters)()
        optimizer(grads)
        losses.append(loss.item())
    return losses, cell.state_dict()


def _check_states(results, losses, expected):
    for found, state in results:
        _close(found, losses)
        assert state.keys() == expected.keys()
        for name, value in state.items():
            _close(value, expected[name])


def _model(stages):
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", pipeline_stages=stages, pipeline_config={"pipeline_scheduler": "gpipe"}
    )
    network = _with_loss()
    for number, layer in enumerate(network._backbone.layers):
        layer.pipeline_stage = number * stages // 4
    cell = ms.nn.PipelineCell(network, MICRO_SIZE)
    model = ms.Model(cell, optimizer=ms.nn.Momentum(cell.trainable_params(), 0.05, 0.9))
    history = model.train(3, [_samples()], progress=False)
    ms.nn.sync_pipeline_shared_parameters(cell)
    return history.history["loss"], network.state_dict()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_model_trains_over_stages(stages):
    _check_states(_launch(_model, stages, world_size=stages), *_alone(_with_loss(), 3))


@pytest.mark.process
def test_model_on_processes():
    _check_states(_launch(_model, 2, transport="shm"), *_alone(_with_loss(), 3))


def _functional(interleave, scheduler, layers_of_stage, segments):
    network = _with_loss()
    cell = ms.parallel.Pipeline(network, MICRO_SIZE, _config(layers_of_stage), segments)
    optimizer = ms.nn.Momentum(cell.trainable_params(), 0.05, 0.9)
    reducer = ms.parallel.PipelineGradReducer(optimizer.parameters)
    grad_fn = ms.value_and_grad(cell, None, optimizer.parameters)

    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        optimizer(reducer(grads))
        return loss

    parallel_step = ms.AutoParallel(train_step, parallel_mode="semi_auto")
    parallel_step.pipeline(stages=2, interleave=interleave, scheduler=scheduler, output_broadcast=True)
    losses = [parallel_step(*map(ms.Tensor, _samples())).item() for _ in range(3)]
    ms.parallel.sync_pipeline_shared_parameters(cell)
    return losses, network.state_dict()


@pytest.mark.parametrize(
    ("scheduler", "layers_of_stage", "segments"),
    [
        ("1f1b", ([0], [1, 2, 3]), {}),
        ("gpipe", ([0, 1], [2, 3]), {}),
        ("1f1b", ([0, 2], [1, 3]), {"_backbone.layers.2": 1, "_backbone.layers.3": 1}),
        ("gpipe", ([0, 2], [1, 3]), {"_backbone.layers.2": 1, "_backbone.layers.3": 1}),
        ("zero_bubble_v", ([0, 3], [1, 2]), {"_backbone.layers.2": 1, "_backbone.layers.3": 1}),
    ],
)
def test_value_and_grad_of_a_pipeline(scheduler, layers_of_stage, segments):
    results = _launch(_functional, bool(segments), scheduler, layers_of_stage, segments)
    _check_states(results, *_alone(_with_loss(), 3))


class Tied(ms.nn.Cell):
    """The weight of the first cell is used again at the end, by code of the network, and the ends say their stages."""

    def __init__(self):
        super().__init__()
        self.first = ms.nn.Dense(4, 3, dtype=ms.float64)
        self.middle = ms.nn.SequentialCell(ms.nn.Dense(3, 4, dtype=ms.float64), ms.nn.Tanh())
        self.first.pipeline_stage, self.middle.pipeline_stage = 0, 1

    def construct(self, x):
        return self.middle(self.first(x)) @ self.first.weight.T


def test_train_one_step_cell_with_tied_weights():
    def program():
        ms.set_auto_parallel_context(pipeline_stages=2)
        network = _with_loss(Tied)
        cell = ms.nn.PipelineCell(network, MICRO_SIZE)
        step = ms.nn.TrainOneStepCell(cell, ms.nn.Momentum(cell.trainable_params(), 0.05, 0.9, loss_scale=64), 64)
        losses = [step(*_samples()).item() for _ in range(3)]
        with sp.no_grad():
            loss = cell(*_samples()).item()
        ms.nn.sync_pipeline_shared_parameters(step)
        _close(loss / MICRO_SIZE, network(*map(ms.Tensor, _samples())).item())
        return losses, network.state_dict()

    _check_states(_launch(program), *_alone(_with_loss(Tied), 3))


def test_one_stage_needs_no_marks():
    cell = ms.nn.PipelineCell(network := _with_loss(), MICRO_SIZE)
    loss = cell(*_samples())
    loss.backward()
    alone = network(*map(ms.Tensor, _samples())) * MICRO_SIZE
    _close(loss.item(), alone.item())
    gradients = [parameter.grad.numpy() for parameter in network.get_parameters()]
    network.zero_grad()
    alone.backward()
    for gradient, parameter in zip(gradients, network.get_parameters(), strict=True):
        _close(gradient, parameter.grad.numpy())


def test_mindspore_refusals():
    def refusal(config=None, segments=None, micro_size=4, samples=8, network=Network, stages=2, **context):
        def program():
            ms.set_auto_parallel_context(pipeline_stages=stages, **context)
            cell = ms.nn.PipelineCell(_with_loss(network), micro_size, config, segments)
            cell(*_samples(samples))

        _refused_on_ranks(program, UnknownNameError if config and "layer1" in config else InputError)

    halves = _config([[0, 1], [2, 3]])
    refusal({"layer1": 0})
    refusal()
    refusal(_config([[0, 1, 2, 3]]))
    refusal(_config([[0, 1], [2], [3]]))
    refusal(halves, micro_size=1)
    refusal(halves, samples=6)
    refusal(halves, stages=1)
    refusal(halves, {"_backbone.layers.2": 1})
    refusal(halves, {"_backbone.layers.2": 1}, pipeline_config={"pipeline_interleave": True})

    def no_loss():
        ms.set_auto_parallel_context(pipeline_stages=2)
        network = Tied()
        ms.nn.PipelineCell(network, 2)(_samples()[0])

    _refused_on_ranks(no_loss)
    _refused_on_ranks(lambda: ms.nn.PipelineCell(_with_loss(), 2).state_dict())


def test_models_of_stages_refuse():
    def model(cell, manager=None, **context):
        ms.set_auto_parallel_context(**context)
        optimizer = ms.nn.Momentum(cell.trainable_params(), 0.1, 0.9)
        return ms.Model(cell, optimizer=optimizer, loss_scale_manager=manager)

    _refused_on_ranks(
        lambda: model(ms.nn.PipelineCell(_with_loss(), 2), ms.DynamicLossScaleManager(), pipeline_stages=2)
    )
    _refused_on_ranks(lambda: model(_with_loss(), pipeline_stages=2))
    _refused_on_ranks(
        lambda: model(ms.nn.PipelineCell(_with_loss(), 2), pipeline_stages=2, parallel_mode="data_parallel")
    )
