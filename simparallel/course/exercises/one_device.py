"""Exercises of lesson 1: the engine of one device."""

from __future__ import annotations

from simparallel import functions
from simparallel.autograd import Tensor
from simparallel.course.exercises.exercise import Case, Values, call_case, exercise, integers
from simparallel.course.exercises.remarks import Remark
from simparallel.optim import Adam

# Node -> the nodes that it reads; "y" is the result. Small graphs first.
_GRAPHS: dict[str, dict[str, list[str]]] = {
    "one leaf": {"y": []},
    "chain": {"x": [], "a": ["x"], "y": ["a"]},
    "x twice": {"x": [], "y": ["x", "x"]},
    "two leaves": {"x": [], "w": [], "y": ["x", "w"]},
    "unused": {"x": [], "b": ["x"], "y": ["x"]},
    "diamond": {"x": [], "a": ["x"], "b": ["x"], "y": ["a", "b"]},
    "skip": {"x": [], "a": ["x"], "b": ["a"], "y": ["x", "b"]},
    "long skip": {"x": [], "a": ["x"], "b": ["a"], "c": ["b"], "y": ["a", "c"]},
    "skip first": {"x": [], "a": ["x"], "b": ["a", "x"], "c": ["b", "a"], "y": ["a", "c", "b"]},
}


@exercise(lesson=1, rows=range(1, 4), columns=range(1, 5))
def layer_norm_backward(rows: int, columns: int) -> Case:
    """Return the gradient of x, given the gradient of y = (x - mean) / sqrt(variance + eps) by rows."""
    eps = 0.5
    x, dy = integers(rows, columns), integers(columns, rows).T + 1
    leaf = Tensor(x.copy(), requires_grad=True)
    y = functions.layer_norm(leaf, eps=eps)
    (y * Tensor(dy)).sum().backward()
    assert leaf.grad is not None
    return call_case({"x": x, "dy": dy, "eps": eps}, {"dx": leaf.grad.numpy()})


@exercise(lesson=1, graph=tuple(_GRAPHS), starts_at_result=(False, True))
def backward_order(graph: str, starts_at_result: bool) -> Case:
    """Return the nodes behind "y" in an order for backward: each one after all nodes that read it."""
    inputs = _GRAPHS[graph]
    if starts_at_result:
        inputs = dict(reversed(inputs.items()))
    behind, waiting = {"y"}, ["y"]
    while waiting:
        new = set(inputs[waiting.pop()]) - behind
        behind |= new
        waiting += new
    # In `_GRAPHS` each node stands after its inputs.
    right = [node for node in reversed(_GRAPHS[graph]) if node in behind]

    def judge(expected: Values, found: Values) -> str | None:
        order = list(found["order"])
        for node in order:
            if node not in behind:
                return Remark("{} is not behind y", node)
            if order.count(node) > 1:
                return Remark("{} comes {} times", node, order.count(node))
        if missing := sorted(behind - set(order)):
            return Remark("{} is missing", missing[0])
        for place, node in enumerate(order):
            for source in inputs[node]:
                if order.index(source) < place:
                    return Remark("{} comes before {}, which reads it", source, node)
        return None

    given = {node: sources or ["a leaf"] for node, sources in inputs.items()}
    return call_case(given, {"order": right}, judge, calls=[(inputs, "y")], form=list)


@exercise(lesson=1, steps=range(1, 5), size=range(1, 4), eps=(1e-8, 0.5))
def adam(steps: int, size: int, eps: float) -> Case:
    """Return the parameters after as many steps of Adam as there are gradients."""
    start, gradients = integers(size), integers(steps + 1, size)[1:]
    settings = {"lr": 0.1, "beta1": 0.5, "beta2": 0.75, "eps": eps}
    parameter = Tensor(start.copy(), requires_grad=True)
    optimizer = Adam([parameter], lr=0.1, betas=(0.5, 0.75), eps=eps)
    for gradient in gradients:
        parameter.grad = Tensor(gradient)
        optimizer.step()
    given = {"parameters": start, "gradients": gradients, **settings}
    calls = [(start, list(gradients), *settings.values())]
    return call_case(given, {"parameters": parameter.detach().numpy().copy()}, calls=calls)
