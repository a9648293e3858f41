"""Wrong answers to the exercises on one device: exercise -> a part of the text about the failing case -> answer."""

from __future__ import annotations

import numpy as np


def layer_norm(forgets=()):
    def answer(x, dy, eps):
        """Compute the gradient, and forget a part of it."""
        variance = x.var(axis=1, keepdims=True)
        deviation = np.sqrt(variance) + eps if "root" in forgets else np.sqrt(variance + eps)
        y = (x - x.mean(axis=1, keepdims=True)) / deviation
        dx = dy.copy()
        if "mean" not in forgets:
            dx = dx - dy.mean(axis=1, keepdims=True)
        if "variance" not in forgets:
            dx = dx - y * (dy * y).mean(axis=1, keepdims=True)
        return dx / deviation

    return answer


def every_path(inputs, root):
    """Follow every path from the root."""
    return [root] + [node for source in inputs[root] for node in every_path(inputs, source)]


def once_per_node(inputs, root):
    """Note a node when it is first seen."""
    return list(dict.fromkeys(every_path(inputs, root)))


def by_breadth(inputs, root):
    """Go level by level from the root, and note a node when it is first seen."""
    order = [root]
    for node in order:
        order += [source for source in dict.fromkeys(inputs[node]) if source not in order]
    return order


def adam(forgets):
    def answer(parameters, gradients, lr, beta1, beta2, eps):
        """Make the steps, with a mistake."""
        first, second = np.zeros_like(parameters), np.zeros_like(parameters)
        for step, gradient in enumerate(gradients, 1):
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            corrections = (1, 1) if forgets == "correction" else (1 - beta1**step, 1 - beta2**step)
            m, v = first / corrections[0], second / corrections[1]
            below = np.sqrt(v + eps) if forgets == "eps" else v + eps if forgets == "root" else np.sqrt(v) + eps
            parameters = parameters - lr * m / below
            if forgets == "state":
                first, second = np.zeros_like(parameters), np.zeros_like(parameters)
        return parameters

    return answer


WRONG = {
    "layer_norm_backward": {
        "rows=1, columns=2: dx": layer_norm(["variance"]),
        "rows=1, columns=1: dx": layer_norm(["mean"]),
        "rows=1, columns=2: dx[0, 0]": layer_norm(["root"]),
        "rows=1, columns=1: dx[0, 0]": layer_norm(["mean", "variance"]),
    },
    "backward_order": {
        "'x twice'": every_path,
        "'diamond'": once_per_node,
        "'skip'": by_breadth,
        "b is not behind y": lambda inputs, root: [*reversed(inputs)] if root == [*inputs][-1] else [*inputs],
        "x comes before a": lambda inputs, root: [node for node in inputs if node != root][::1] + [root],
    },
    "adam": {
        "steps=1, size=1": adam("correction"),
        "steps=2, size=1": adam("state"),
        "steps=1, size=1, eps=0.5": adam("eps"),
        "steps=1, size=1, eps=1e-08": adam("root"),
    },
}
