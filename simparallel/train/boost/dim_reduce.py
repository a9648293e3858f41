"""dim_reduce of MindSpore's boost: second-order steps in the few directions of the weights' earlier movement.

offline    P (k, n): the first right singular vectors of the centred weights in several checkpoints of one run
a step     g_k = P g;   d = -B g_k, B a k x k approximation of the inverse Hessian (BFGS)
           v = gamma v + (g - P^T g_k)
           w = w - alpha v + rho^m P^T d, m the first of 0, 1 (else 2) with
           loss(w + rho^m P^T d) < loss(w) + sigma rho^m g_k d
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from simparallel.autograd import Tensor
from simparallel.backend import Array, get_namespace, to_host, views_of
from simparallel.data.source import bad_file, open_file
from simparallel.errors import InputError, StateDictError
from simparallel.nn import Module

_LAST_TRY = 2
# The curvature y s above which B is updated.
_CURVED = 1e-20


def principal_directions(weights: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Return the directions in which flat weights differ most: (count, n), orthonormal rows.

    Args:
        weights: at least count + 1 vectors, from different steps of a training run.

    Raises:
        InputError: too few vectors.
    """
    if len(weights) <= count:
        raise InputError(
            f"dim_reduce: {len(weights)} checkpoints do not span {count} directions; give {count + 1} of them."
        )
    # In float64, because checkpoints of one run differ little.
    stacked = np.stack([np.asarray(w, np.float64) for w in weights])
    return np.linalg.svd(stacked - stacked.mean(axis=0), full_matrices=False)[2][:count]


def load_directions(network: Module, parameters: Sequence[Tensor], settings: Mapping[str, Any]) -> np.ndarray:
    """Load P from the file, or compute it from the folder of checkpoints, that the settings name.

    Raises:
        DataError, CheckpointError: a file is unreadable or does not fit; InputError: too few checkpoints.
    """
    from simparallel.train.checkpoint import load_checkpoint

    size, count = sum(p.size for p in parameters), settings["n_components"]
    if settings["weight_load_dir"] is None:
        path = Path(settings["pca_mat_path"])
        try:
            with open_file(path):
                # Mapped: no memory is used before its shape is known to fit.
                p = npy.open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise bad_file(path, f"{path} is not a .npy file of directions: {error}", who="dim_reduce") from error
        if p.ndim != 2 or p.shape[1] != size or len(p) < count:
            raise bad_file(path, f"{path} has shape {p.shape}, expected ({count} or more, {size}).", who="dim_reduce")
        return np.asarray(p[:count], np.float64)
    names = {id(p): name for name, p in network.named_parameters()}
    files = sorted(Path(settings["weight_load_dir"]).glob("*.safetensors"))
    weights = []
    for file in files:
        arrays = load_checkpoint(file)
        missing = [names[id(p)] for p in parameters if names[id(p)] not in arrays]
        if missing:
            raise bad_file(
                file,
                f"{file} has no {', '.join(missing[:3])}; it is a checkpoint of another network.",
                who="dim_reduce",
            )
        weights.append(np.concatenate([arrays[names[id(p)]].ravel() for p in parameters]))
    return principal_directions(weights, count)


class DimReduce:
    """The optimizer: quasi-Newton steps in the space of P, momentum outside of it.

    Args:
        parameters: of the network, in the order of P's columns.
        directions: P.
        rho, gamma, alpha, sigma: as in the formulas above.
    """

    def __init__(
        self, parameters: Sequence[Tensor], directions: np.ndarray, rho: float, gamma: float, alpha: float, sigma: float
    ) -> None:
        self.parameters = list(parameters)
        xp = get_namespace(self.parameters[0].data)
        self._p = xp.asarray(directions)
        self._rho, self._gamma, self._alpha, self._sigma = rho, gamma, alpha, sigma
        self.inverse_hessian = np.eye(len(directions))
        # Of the last step: the gradient projected on P (g_k), and the step s, also in the space of P.
        self._before: tuple[np.ndarray, np.ndarray] | None = None
        self._v: Any = 0.0

    def step(self, grads: Sequence[Array], loss: float, loss_at: Callable[[], float]) -> int:
        """Update the parameters in place.

        Args:
            grads: one for each parameter, the same on every rank.
            loss: at the current weights, the same on every rank.
            loss_at: returns the loss at the trial weights, which the parameters then hold; the same on every rank.

        Returns:
            m, the number of times that the step was shortened.
        """
        xp = get_namespace(self._p)
        g = xp.concatenate([grad.reshape(-1) for grad in grads]).astype(xp.float64)
        # The quasi-Newton step in the space of P ...
        projected = self._p @ g
        g_k = np.asarray(to_host(projected).__array__())
        self._update_hessian(g_k)
        d = -self.inverse_hessian @ g_k
        direction = self._p.T @ xp.asarray(d)
        # Kept for the line search, which restarts from here with each shorter step.
        start = xp.concatenate([p.data.reshape(-1) for p in self.parameters]).astype(xp.float64)
        slope = float(g_k @ d)
        # Backtracking line search (Armijo's condition); the last length is taken without a test.
        for m in range(_LAST_TRY + 1):
            self._put(start + self._rho**m * direction)
            if m == _LAST_TRY or loss_at() < loss + self._sigma * self._rho**m * slope:
                break
        self._before = g_k, self._rho**m * d
        # ... plus momentum on the part of the gradient outside that space.
        self._v = self._gamma * self._v + (g - self._p.T @ projected)
        self._put(start - self._alpha * self._v + self._rho**m * direction)
        return m

    def _update_hessian(self, g_k: np.ndarray) -> None:
        """Update B by BFGS from the change of gradient y over the last step s."""
        if self._before is None:
            return
        # The BFGS update keeps B positive definite only for positive curvature y s.
        y, s = g_k - self._before[0], self._before[1]
        curvature = float(y @ s)
        if curvature <= _CURVED:
            return
        left = np.eye(len(s)) - np.outer(s, y) / curvature
        self.inverse_hessian = left @ self.inverse_hessian @ left.T + np.outer(s, s) / curvature

    def _put(self, flat: Array) -> None:
        """Copy all weights, one after another in `flat`, into the parameters."""
        for p, view in zip(self.parameters, views_of(flat, [p.shape for p in self.parameters]), strict=True):
            p.data[...] = view

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulated state, and the SHA-256 of the directions that it refers to."""
        return {
            "directions": sha256(np.ascontiguousarray(to_host(self._p)).tobytes()).hexdigest(),
            "inverse_hessian": self.inverse_hessian.copy(),
            "before": None if self._before is None else [part.copy() for part in self._before],
            "v": to_host(self._v).copy(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateDictError: the state refers to other directions.
        """
        if state_dict["directions"] != self.state_dict()["directions"]:
            raise StateDictError(
                "dim_reduce: the state belongs to other directions; give pca_mat_path or weight_load_dir "
                "with their contents when it was saved."
            )
        before, v = state_dict["before"], np.array(state_dict["v"])
        self.inverse_hessian = np.array(state_dict["inverse_hessian"])
        self._before = None if before is None else (np.array(before[0]), np.array(before[1]))
        self._v = get_namespace(self._p).asarray(v) if v.ndim else float(v)
