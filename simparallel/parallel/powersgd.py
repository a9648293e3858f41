"""PowerSGD: gradients travel as matrices of low rank (Vogels et al. 2019, "PowerSGD: practical low-rank
gradient compression for distributed optimization").

With M the mean of the ranks' gradients of one weight, as a matrix (n, m), and Q (m, r) of the step
before: P = M Q, made orthonormal; Q = Mᵀ P; the gradient becomes P Qᵀ. That is one step of subspace
iteration. Both products are linear in M, so ranks average P and Q, (n + m) r numbers instead of n m.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.autograd.op import wider
from simparallel.backend import Array, get_namespace, random_normal, to_device_like
from simparallel.comm import Group, Work
from simparallel.errors import InputError
from simparallel.events import current_recorder
from simparallel.parallel.buckets import GradBucket


class PowerSGDState:
    """Settings and memory of `powerSGD_hook`. Names and meaning as in PyTorch; one for each model.

    Args:
        process_group: ranks to reduce over; None for the model's own.
        matrix_approximation_rank: r; more is more exact and more bytes.
        start_powerSGD_iter: steps that reduce the whole gradients, before compression begins.
        min_compression_rate: a weight is compressed if that makes it smaller by this factor, at least.
        use_error_feedback: add what was lost in a step to the gradient of the next one.
        warm_start: begin with the Q of the step before; else each step draws one.
        random_seed: of the first Q, the same on every rank.

    Attributes:
        iter: backwards so far that reduced.

    Raises:
        InputError: a setting out of range.
    """

    def __init__(
        self, process_group: Group | None = None, matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000, min_compression_rate: float = 2, use_error_feedback: bool = True,
        warm_start: bool = True, random_seed: int = 0,
    ) -> None:  # fmt: skip
        for name, value, low in (
            ("matrix_approximation_rank", matrix_approximation_rank, 1),
            ("start_powerSGD_iter", start_powerSGD_iter, 0),
            ("random_seed", random_seed, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
                raise InputError(f"PowerSGDState: {name}={value!r} must be an integer of {low} or more.")
        if not min_compression_rate > 0:
            raise InputError(
                f"PowerSGDState: min_compression_rate={min_compression_rate!r} must be more than 0."
            )
        self.process_group = process_group
        self.matrix_approximation_rank = int(matrix_approximation_rank)
        self.start_powerSGD_iter = int(start_powerSGD_iter)
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback, self.warm_start = bool(use_error_feedback), bool(warm_start)
        self.random_seed = int(random_seed)
        self.iter = 0
        self._factors: dict[int, _Factors] = {}
        self._num_before = self._num_after = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, numbers before, numbers after): what all backwards so far had to send, and sent."""
        rate = self._num_before / self._num_after if self._num_after else 0.0
        return rate, self._num_before, self._num_after

    def _count(self, bucket: GradBucket, num_sent: int) -> None:
        self._num_before += bucket.buffer().size
        self._num_after += num_sent
        self.iter += bucket.is_last()


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Any:
    """The mean of the gradients, as matrices of rank `state.matrix_approximation_rank`.

    A tensor (n, ...) counts as a matrix of n rows. Vectors, scalars and what would not become smaller
    travel whole. The P of a bucket travels while backward goes on, its Q after the end of backward.

    Collective: yes, two or three all-reduces for each bucket.
    """
    if not isinstance(state, PowerSGDState):
        raise InputError(f"powerSGD_hook: its state is a PowerSGDState, got {type(state).__name__}.")
    group = state.process_group or bucket.group
    factors = state._factors.get(bucket.index())
    if factors is None:
        factors = state._factors[bucket.index()] = _Factors(state, bucket)
    if state.iter < state.start_powerSGD_iter or not factors.matrices:
        state._count(bucket, bucket.buffer().size)
        return collectives.all_reduce(bucket.buffer(), "mean", group, async_op=True)
    start_ns = perf_counter_ns()
    factors.compress(state)
    state._count(bucket, factors.num_sent)
    factors.note("PowerSGD.compress", start_ns, 1)
    rest: Work | None = None
    if factors.rest.size:
        rest = collectives.all_reduce(factors.rest, "mean", group, async_op=True)
    work = collectives.all_reduce(factors.all_p, "mean", group, async_op=True)

    def finish(_: Any) -> Array:
        start_ns = perf_counter_ns()
        factors.project()
        factors.note("PowerSGD.project", start_ns, 2)
        collectives.all_reduce(factors.all_q, "mean", group)
        start_ns = perf_counter_ns()
        factors.decompress()
        factors.note("PowerSGD.decompress", start_ns, 1)
        if rest is not None:
            rest.wait()
            factors.store_rest()
        return bucket.buffer()

    return work.then(finish)


class _Matrix(NamedTuple):
    """One compressed weight."""

    number: int  # in its bucket
    m: Array  # (n, m), a view of the bucket
    p: Array  # (n, r)
    q: Array  # (m, r)
    error: Array | None  # (n, m): what this rank has not sent yet


class _Factors:
    """P and Q of all weights of a bucket, each in one array, and the tensors that travel whole."""

    def __init__(self, state: PowerSGDState, bucket: GradBucket) -> None:
        self._bucket = bucket
        self._xp = get_namespace(bucket.buffer())
        sizes: list[tuple[int, int, int, int]] = []  # number, n, m, r
        self._whole: list[Array] = []
        for number, view in enumerate(bucket.gradients()):
            n = view.shape[0] if view.ndim > 1 and view.size else 0
            m = view.size // n if n else 0
            r = min(n, m, state.matrix_approximation_rank)
            if (n + m) * r * state.min_compression_rate < n * m:
                sizes.append((number, n, m, r))
            else:
                self._whole.append(view)
        self.all_p = bucket.scratch("PowerSGD.P", sum(n * r for _, n, _, r in sizes))
        self.all_q = bucket.scratch("PowerSGD.Q", sum(m * r for _, _, m, r in sizes))
        self.rest = bucket.scratch("PowerSGD.rest", sum(view.size for view in self._whole))
        self.num_sent = self.all_p.size + self.all_q.size + self.rest.size
        self._flops = sum(2 * n * m * r for _, n, m, r in sizes)  # of one product
        self.matrices: list[_Matrix] = []
        p_at = q_at = 0
        for number, n, m, r in sizes:
            matrix = bucket.gradients()[number].reshape(n, m)
            p = self.all_p[p_at : p_at + n * r].reshape(n, r)
            q = self.all_q[q_at : q_at + m * r].reshape(m, r)
            error = self._xp.zeros_like(matrix) if state.use_error_feedback else None
            self.matrices.append(_Matrix(number, matrix, p, q, error))
            p_at, q_at = p_at + n * r, q_at + m * r
        self._has_q = False

    def compress(self, state: PowerSGDState) -> None:
        """P = M Q of this rank's M, to be averaged."""
        draw = not (self._has_q and state.warm_start)
        for number, m, p, q, error in self.matrices:
            if error is not None:
                m += error
            if draw:
                stream = f"powersgd/{self._bucket.index()}/{number}/{state.iter}"
                drawn = random_normal(state.random_seed, stream, 0, q.size).reshape(q.shape)
                q[...] = self._orthonormal(to_device_like(drawn, q))
            p[...] = m @ q
        self._has_q = True
        _store(self._whole, self.rest)

    def project(self) -> None:
        """P orthonormal, and Q = Mᵀ P of this rank's M, to be averaged.

        The error is what this rank's own P Qᵀ leaves of M. The mean of the ranks' errors is the same as
        with the averaged Q, and the next gradient depends on that mean alone; but this one stays small.
        """
        for _, m, p, q, error in self.matrices:
            p[...] = self._orthonormal(p)
            q[...] = m.T @ p
            if error is not None:
                error[...] = m - p @ q.T

    def decompress(self) -> None:
        """The gradients: P Qᵀ of the averaged factors."""
        for _, m, p, q, _ in self.matrices:
            m[...] = p @ q.T

    def store_rest(self) -> None:
        """Tensors that travelled whole, back to their places."""
        start = 0
        for view in self._whole:
            view[...] = self.rest[start : start + view.size].reshape(view.shape)
            start += view.size

    def note(self, name: str, start_ns: int, num_products: int) -> None:
        """This much work, on the clock."""
        recorder = current_recorder()
        if recorder is not None:
            buffer = self._bucket.buffer()
            recorder.work(
                name, "backward", start_ns, self._flops * num_products, buffer.nbytes * num_products,
                buffer.itemsize,
            )  # fmt: skip

    def _orthonormal(self, x: Array) -> Array:
        """An orthonormal basis of what the columns of x (rows, r) span; of any space for columns of 0."""
        return self._xp.linalg.qr(x.astype(wider(x.dtype), copy=False))[0]


def _store(views: Sequence[Array], flat: Array) -> None:
    start = 0
    for view in views:
        flat[start : start + view.size] = view.reshape(-1)
        start += view.size
