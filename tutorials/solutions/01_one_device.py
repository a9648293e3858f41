"""Solutions to the exercises of the lesson on one device."""

from __future__ import annotations

import numpy as np


def layer_norm_backward(x: np.ndarray, dy: np.ndarray, eps: float) -> np.ndarray:
    """Exercise 1: dy, less its mean and its part along y, by the standard deviation."""
    deviation = np.sqrt(x.var(axis=1, keepdims=True) + eps)
    y = (x - x.mean(axis=1, keepdims=True)) / deviation
    along_y = (dy * y).mean(axis=1, keepdims=True)
    return (dy - dy.mean(axis=1, keepdims=True) - y * along_y) / deviation


def backward_order(inputs: dict[str, list[str]], root: str) -> list[str]:
    """Exercise 2: depth first, note each node after its inputs; then reverse."""
    order: list[str] = []

    def visit(node: str) -> None:
        if node not in order:
            for source in inputs[node]:
                visit(source)
            order.append(node)

    visit(root)
    return order[::-1]


def adam(
    parameters: np.ndarray, gradients: list[np.ndarray], lr: float, beta1: float, beta2: float, eps: float
) -> np.ndarray:
    """Exercise 3: means of g and of g², both corrected for their start at zero."""
    first, second = np.zeros_like(parameters), np.zeros_like(parameters)
    for step, gradient in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        corrected = first / (1 - beta1**step), second / (1 - beta2**step)
        parameters = parameters - lr * corrected[0] / (np.sqrt(corrected[1]) + eps)
    return parameters
