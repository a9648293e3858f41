"""Which backward of DistributedDataParallel reduces; copies; replaced buffers and parameters."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn, optim
from simparallel.autograd.tape import mark_changed
from simparallel.errors import AutogradError, CollectiveMismatchError, InputError, RunFailedError, UnusedParameterError
from simparallel.parallel import DistributedDataParallel, DistributedGradReducer

MEAN = 1.5  # of the local gradients, 1 and 2


class Weight(nn.Module):
    """y = w x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(np.ones(1, np.float32))

    def forward(self, x: Any) -> sp.Tensor:
        return self.w * x


def both(program: Any, ranks: int = 2) -> list[Any]:
    """Run `program(model, x)` on each rank, where x is the rank's gradient."""

    def run() -> Any:
        return program(DistributedDataParallel(Weight()), sp.Tensor([sp.get_rank() + 1.0]))

    return list(sp.launch(run, world_size=ranks, transport="inline"))


def grad_of(model: Any) -> float:
    return float(model.module.w.grad)


# --- which backward reduces -------------------------------------------------------------------------


def test_no_sync_keeps_an_earlier_pass_synchronised():
    def program(model, x):
        first = model(x).sum()
        with model.no_sync():
            second = model(x * 10).sum()
        first.backward()
        reduced = grad_of(model)
        model.zero_grad()
        second.backward()
        return reduced, grad_of(model)

    assert both(program) == [(MEAN, 10), (MEAN, 20)]


@pytest.mark.parametrize("in_no_sync", [False, True])
def test_unwrapped_module_does_not_reduce(in_no_sync):
    def program(model, x):
        if in_no_sync:
            with model.no_sync():
                model.module(x).sum().backward()
        else:
            model.module(x).sum().backward()
        return grad_of(model)

    assert both(program) == [1, 2]


def test_one_rank_alone_may_use_the_module():
    def program(model, x):
        if sp.get_rank() == 0:
            model.module(x).sum().backward()
            model.zero_grad()
        model(x).sum().backward()
        return grad_of(model)

    assert both(program) == [MEAN, MEAN]


def test_checkpointed_pass_reduces_in_the_rerun():
    def program(model, x):
        with model.no_sync():
            model(x)
            nn.checkpoint(model, x).sum().backward()
        local = grad_of(model)
        model.zero_grad()
        nn.checkpoint(model, x).sum().backward()
        return local, grad_of(model)

    assert both(program) == [(1, MEAN), (2, MEAN)]


def test_nested_backward_reduces_at_its_own_end():
    """A backward inside a hook of another one reduces at its own end."""

    def program(model, x):
        reduced: list[float] = []

        def also(_: Any) -> None:
            model(x).sum().backward()
            reduced.append(grad_of(model))

        other = sp.Tensor([1.0], requires_grad=True)
        other.register_post_accumulate_grad_hook(also)
        (other * 2.0).sum().backward()
        return reduced

    assert both(program) == [[MEAN], [MEAN]]


def test_each_backward_of_a_kept_graph_reduces():
    def program(model, x):
        y = model(x).sum()
        y.backward(retain_graph=True)
        first = grad_of(model)
        y.backward()
        return first, grad_of(model)

    assert both(program) == [(MEAN, 2 * MEAN)] * 2


def test_gradients_before_the_sync_mark_are_reduced():
    """The bias is also used outside the wrapper, by the first op that backward meets."""

    class Two(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(np.zeros(1, np.float32))

    def program():
        model, x = DistributedDataParallel(Two(), bucket_cap_mb=1e-6), sp.Tensor([sp.get_rank() + 1.0])
        inner = model(x)
        (inner.sum() + (model.module.b * x).sum()).backward()
        return grad_of(model), float(model.module.b.grad)

    assert list(sp.launch(program, world_size=2, transport="inline")) == [(MEAN, MEAN)] * 2


@dataclass
class Output:
    logits: sp.Tensor
    loss: sp.Tensor | None = None


class Result(dict[str, Any]):
    """A dict with attributes, as some libraries return it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "own dict", "dataclass", "nested"])
def test_outputs_of_any_kind_are_reduced(kind):
    class Wrapped(Weight):
        def forward(self, x):
            y = super().forward(x)
            return {
                "tensor": y, "tuple": (y, None), "list": [1, y], "dict": {"y": y}, "own dict": Result(logits=y),
                "dataclass": Output(y), "nested": {"a": [({"b": y}, "text")]},
            }[kind]  # fmt: skip

    def of(out):
        return {
            "tensor": lambda: out,
            "tuple": lambda: out[0],
            "list": lambda: out[1],
            "dict": lambda: out["y"],
            "own dict": lambda: out.logits,
            "dataclass": lambda: out.logits,
            "nested": lambda: out["a"][0][0]["b"],
        }[kind]()

    def program():
        model, x = DistributedDataParallel(Wrapped()), sp.Tensor([sp.get_rank() + 1.0])
        of(model(x)).sum().backward()
        reduced = grad_of(model)
        model.zero_grad()
        with model.no_sync():
            of(model(x)).sum().backward()
        return reduced, grad_of(model)

    assert list(sp.launch(program, world_size=2, transport="inline")) == [(MEAN, 1), (MEAN, 2)]


def test_predictions_do_not_ask_for_a_reduction():
    class Predicts(Weight):
        def forward(self, x):
            y = super().forward(x)
            return y if self.training else y.argmax(0)

    def program():
        model, x = DistributedDataParallel(Predicts()), sp.Tensor([sp.get_rank() + 1.0])
        model.eval()
        model(x)
        model.train()
        with model.no_sync():
            model(x).sum().backward()
        return grad_of(model)

    assert list(sp.launch(program, world_size=2, transport="inline")) == [1, 2]


def test_value_and_grad_refuses_to_reduce():
    def program(model, x):
        step = sp.value_and_grad(lambda x: model(x).sum(), None, list(model.parameters()))
        with refused(AutogradError):
            step(x)
        with model.no_sync():
            _, grads = step(x)
        return float(DistributedGradReducer(list(model.parameters()), mean=True)(grads)[0])

    assert both(program) == [MEAN, MEAN]


def test_backward_without_parameters_is_refused():
    """A backward that reaches no parameter raises at the call."""

    def program(model, x):
        class Ignores(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(np.ones(1, np.float32))

            def forward(self, x):
                return x * 2

        wrapped, x = DistributedDataParallel(Ignores()), sp.Tensor([1.0], requires_grad=True)
        with refused(UnusedParameterError):
            wrapped(x).sum().backward()
        return "told"

    assert both(program) == ["told"] * 2


# --- hooks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inline", "shm"])
def test_hook_that_returns_nothing_is_an_error(transport):
    def program():
        model = DistributedDataParallel(Weight())

        def forgets(state, bucket):
            sp.all_reduce(bucket.buffer(), "mean", async_op=True)

        model.register_comm_hook(None, forgets)
        model(sp.Tensor([1.0])).sum().backward()

    with refused(RunFailedError) as caught:
        sp.launch(program, world_size=2, transport=transport)
    assert isinstance(caught.value.__cause__, InputError)


# --- parameters -------------------------------------------------------------------------------------


def test_unfrozen_parameter_needs_a_new_wrapper():
    """A parameter unfrozen after wrapping is refused; wrapping again trains it."""

    def program():
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        model[0].weight.requires_grad_(False)
        wrapped, x = DistributedDataParallel(model), sp.Tensor([[sp.get_rank() + 1.0]])
        wrapped(x).sum().backward()
        model[0].weight.requires_grad_(True)
        with refused(InputError):
            wrapped(x)
        DistributedDataParallel(model)(x).sum().backward()
        return model[0].weight.grad.item() / model[1].weight.item()

    a, b = sp.launch(program, world_size=2, transport="inline")
    assert a == b == pytest.approx(MEAN)


def changed_by_a_step(w):
    optim.SGD([w], 0.1).step()


def changed_by_a_load(w):
    module = nn.Linear(1, 1, bias=False)
    module._parameters["weight"] = w
    module.load_state_dict({"weight": np.ones(w.shape, np.float32)})


def changed_by_a_broadcast(w):
    sp.parallel.broadcast_parameters([w])


@pytest.mark.parametrize("change", [changed_by_a_step, changed_by_a_load, changed_by_a_broadcast])
def test_graph_with_changed_values_is_refused(change):
    """Changed saved values are refused before any gradient is added."""
    v, w = (sp.Tensor([[value]], requires_grad=True) for value in (3.0, 2.0))
    y = (sp.Tensor([[1.0]]) @ v @ w).sum()
    y.backward(retain_graph=True)
    change(w)
    v.grad = w.grad = None
    with refused(AutogradError):
        y.backward()
    assert v.grad is w.grad is None


def test_graph_without_saved_values_survives_a_step():
    """A sum saves no values, and a product saves a factor only for the other one's gradient."""
    b, x = sp.Tensor([1.0], requires_grad=True), sp.Tensor([2.0], requires_grad=True)
    y = ((x * 3.0) + b).sum()
    y.backward(retain_graph=True)
    optim.SGD([b, x], 0.1).step()
    y.backward()
    assert (b.grad.item(), x.grad.item()) == (2, 6)


@pytest.mark.parametrize("layer", [nn.Linear(2, 1), nn.Conv2d(2, 1, 1)])
def test_first_layer_of_kept_graph_survives_a_step(layer):
    x = np.full((1, 2, *[1] * (layer.weight.data.ndim - 2)), 3, np.float32)
    y = layer(x).sum()
    y.backward(retain_graph=True)
    optim.SGD(layer.parameters(), 0.1).step()
    y.backward()
    assert (layer.weight.grad.numpy() == 6).all()


@pytest.mark.parametrize("collective", [sp.all_reduce, sp.broadcast, lambda y: sp.all_reduce([y])])
def test_inplace_collective_on_saved_value_is_refused(collective):
    """A collective in place on a value that backward needs is an error."""

    def program(which):
        x = sp.Tensor([1.0], requires_grad=True)
        factor, y = sp.Tensor([3.0]), x.exp()
        loss = (y * factor).sum()
        collective({"the result of exp": y, "a factor": factor}[which])
        with refused(AutogradError):
            loss.backward()
        assert x.grad is None

    for which in ("the result of exp", "a factor"):
        sp.launch(program, (which,), world_size=2, transport="inline")


VIEWED = {
    "p * p": lambda p: p * p,
    "p @ p": lambda p: p @ p,
    "a view of a view": lambda p: p.reshape(4)[1:3] * p.reshape(4)[2:],
    "a view by a constant, and again": lambda p: p.transpose(0, 1) * 2.0 * p[0],
    "the other layer's transpose": lambda p: sp.functions.relu(p @ p.transpose(0, 1)) @ p.transpose(0, 1),
}


@pytest.mark.parametrize("change", [changed_by_a_step, changed_by_a_load, changed_by_a_broadcast])
@pytest.mark.parametrize("name", VIEWED)
def test_changes_through_views_are_found(name, change):
    """Changed values are also found through views, and in squares."""
    p = sp.Tensor(np.full((2, 2), 3.0, np.float32), requires_grad=True)
    loss = VIEWED[name](p).sum()
    loss.backward(retain_graph=True)
    change(p)
    p.grad = None
    with refused(AutogradError):
        loss.backward()
    assert p.grad is None


def test_unsaved_views_may_change():
    p = sp.Tensor(np.full((2, 2), 3.0, np.float32), requires_grad=True)
    x = sp.Tensor(np.ones((2, 2), np.float32), requires_grad=True)
    loss = (p.reshape(4) * 2.0).sum() + (x.detach() @ p.transpose(0, 1)).sum()
    mark_changed([p])
    loss.backward()
    assert p.grad.numpy().tolist() == [[4, 4]] * 2
    later = (p.transpose(0, 1) * p).sum()  # made after the change
    p.grad = None
    later.backward()
    assert p.grad.numpy().tolist() == [[6, 6]] * 2


def test_inplace_collective_on_unsaved_value():
    """A collective in place on a value that backward does not need is allowed."""

    def program():
        x = sp.Tensor([1.0, 2.0], requires_grad=True)
        loss = (x * 3.0).sum()
        sp.all_reduce(loss)  # for display; in place, as in many programs
        loss.backward()
        return x.grad.numpy().tolist()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [[3, 3]] * 2


def test_step_between_two_losses_is_refused():
    """As in a GAN: the second loss was computed with the weights before the step."""
    net, head = nn.Linear(2, 2), nn.Linear(2, 1)
    features = net(np.ones((1, 2), np.float32))
    first, second = head(features).sum(), (head(features) * 2.0).sum()
    first.backward(retain_graph=True)
    optim.SGD(head.parameters(), 0.1).step()
    with refused(AutogradError):
        second.backward()


# --- buffers ----------------------------------------------------------------------------------------


def test_replaced_buffers_are_broadcast():
    """A buffer that forward replaces has the first rank's value everywhere."""

    class Counts(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", np.zeros(1, np.float32))
            self.register_buffer("grows", np.zeros(1, np.float32))
            self.seen: list[Any] = []

        def forward(self, x):
            self.seen.append((self.steps.data.tolist(), self.grows.shape))
            self.steps = self.steps + float(sp.get_rank() + 1)
            self.grows = sp.Tensor(np.zeros(len(self.seen) + 1, np.float32))
            return super().forward(x)

    def program():
        model = DistributedDataParallel(Counts())
        for _ in range(4):
            model(sp.Tensor([1.0])).sum().backward()
        return model.module.seen

    expected = [([float(i)], (i + 1,)) for i in range(4)]
    assert list(sp.launch(program, world_size=3, transport="inline")) == [expected] * 3


def test_different_buffers_are_found_at_wrapping():
    class Buffers(Weight):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                self.register_buffer(name, np.zeros(1, np.float32))

    for names in ("ab", "ba"), ("ab", "a"):
        with refused(RunFailedError) as caught:
            sp.launch(
                lambda names=names: DistributedDataParallel(Buffers(names[sp.get_rank()])),
                world_size=2,
                transport="inline",
            )
        assert isinstance(caught.value.__cause__, CollectiveMismatchError)


# --- copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inline", "shm"])
def test_copies_reduce_independently(transport):
    def program():
        rank = sp.get_rank()
        model = DistributedDataParallel(Weight(), bucket_cap_mb=3, gradient_as_bucket_view=False)
        model(sp.Tensor([rank + 1.0])).sum().backward()
        plain, again = copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module.w))
        twin = copy.deepcopy(model)
        twin(sp.Tensor([10.0 * (rank + 1)])).sum().backward()
        plain(sp.Tensor([5.0])).sum().backward()
        return (
            grad_of(model),
            grad_of(twin),
            float(plain.w.grad),
            again.item(),
            float(again.grad),
            twin.bucket_cap_mb,
            twin.gradient_as_bucket_view,
            model.module,
        )

    for result in sp.launch(program, world_size=2, transport=transport):
        # A copy has the gradient of its original, and adds to it, also across the ranks.
        assert result[:-1] == (MEAN, MEAN + 10 * MEAN, MEAN + 5, 1, MEAN, 3, False)
        assert result[-1].w.item() == 1


def test_wrapper_cannot_be_pickled():
    with refused(TypeError):
        pickle.dumps(DistributedDataParallel(Weight()))


def test_copied_tensor_has_no_hooks():
    w = sp.Tensor([1.0], requires_grad=True)
    heard: list[sp.Tensor] = []
    w.register_post_accumulate_grad_hook(heard.append)
    twin = copy.deepcopy(w)
    (twin * 2).sum().backward()
    assert not heard
    (w * 2).sum().backward()
    assert heard == [w]


# --- join -------------------------------------------------------------------------------------------


def test_two_models_cannot_be_joined_at_once():
    def program():
        a, b = DistributedDataParallel(Weight()), DistributedDataParallel(Weight())
        with a.join(), refused(InputError), b.join():
            pass
        with b.join():  # allowed after the first one
            pass
        return "told"

    assert list(sp.launch(program, world_size=2, transport="inline")) == ["told"] * 2


def test_gradient_of_other_ranks_is_on_param_device():
    """On the second device: the optimizer refuses gradients on other devices."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(np.ones(1, np.float32)), nn.Parameter(np.ones(1, np.float32))

        def forward(self, x):
            return (self.a if sp.get_rank() == 0 else self.b) * x

    def program():
        model = DistributedDataParallel(Either().to("sim:1"), find_unused_parameters=True)
        optimizer = optim.SGD(model.parameters(), 1.0)
        model(sp.Tensor([2.0]).to("sim:1")).sum().backward()
        optimizer.step()
        return model.module.a.item(), model.module.b.item()

    assert list(sp.launch(program, world_size=2, transport="inline", devices_per_rank=2)) == [(0, 0)] * 2
