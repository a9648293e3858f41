"""PowerSGD: gradients are reduced as low-rank matrices.

Source: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization". Let M
(n, m) be the mean of the ranks' gradients of one weight, and Q (m, r) the factor of the previous step: P = M Q, made
orthonormal; Q = Mᵀ P; the gradient becomes P Qᵀ. That is one step of subspace iteration. Both products are linear in
M, so ranks average P and Q: (n + m) r numbers instead of n m.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.arrays.host.sums import wider
from simparallel.backend import Array, get_namespace, random_normal, to_device_like, to_host, views_of
from simparallel.base.checks import check_count, check_integer, check_number, check_state
from simparallel.clock.recorder import current_recorder
from simparallel.comm import Group, Work
from simparallel.errors import InputError, StateDictError
from simparallel.optim.loss_scale import all_finite
from simparallel.parallel.ddp.buckets import GradBucket


class PowerSGDState:
    """Settings and memory of `powerSGD_hook`, one for each model. Names and meaning as in PyTorch.

    A bucket with a NaN or infinite gradient, as loss scaling produces, leaves the memory unchanged: the next step
    continues from the errors kept before, with a new Q. Errors are kept in the scale of their step: after a change of
    the loss scale, the next step adds them too large or too small by that factor.

    `Model.train(resume=…)` saves and restores the memory; with a `CheckpointManager` of your own, list it in `own`,
    because the errors differ by rank.

    Args:
        process_group: ranks to reduce over; None for the model's own.
        matrix_approximation_rank: r; a larger rank is more exact and sends more bytes.
        start_powerSGD_iter: steps that reduce the whole gradients, before compression begins.
        min_compression_rate: a weight is compressed if that makes it smaller by at least this factor.
        use_error_feedback: add the compression error of a step to the gradient of the next step.
        warm_start: start from the Q of the previous step; else each step draws a new one.
        random_seed: of the first Q, the same on every rank.

    Attributes:
        iter: backward passes so far that reduced gradients.

    Raises:
        InputError: a setting out of range.
    """

    def __init__(
        self,
        process_group: Group | None = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> None:
        who = "PowerSGDState"
        self.matrix_approximation_rank = check_count(who, "matrix_approximation_rank", matrix_approximation_rank)
        self.start_powerSGD_iter = check_integer(who, "start_powerSGD_iter", start_powerSGD_iter)
        self.random_seed = check_integer(who, "random_seed", random_seed)
        self.process_group = process_group
        self.min_compression_rate = check_number(who, "min_compression_rate", min_compression_rate, above=0.0)
        self.use_error_feedback, self.warm_start = bool(use_error_feedback), bool(warm_start)
        self.iter = 0
        self._factors: dict[int, _Factors] = {}
        # Loaded states of buckets that have not been reduced yet.
        self._saved: dict[str, Any] = {}
        self._saved_ranks = 0
        self._warns_of_errors = False
        self._num_before = self._num_after = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before, elements after): elements of all gradients so far, and elements sent."""
        rate = self._num_before / self._num_after if self._num_after else 0.0
        return rate, self._num_before, self._num_after

    def state_dict(self) -> dict[str, Any]:
        """Return the memory between two steps, in host memory. Differs by rank. Collective: no."""
        made = {str(index): factors.state_dict() for index, factors in self._factors.items()}
        ranks = {factors.num_ranks for factors in self._factors.values()}
        return {
            "matrix_approximation_rank": self.matrix_approximation_rank, "iter": self.iter,
            "numbers": (self._num_before, self._num_after), "ranks": max(ranks, default=self._saved_ranks),
            "buckets": self._saved | made,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a state of this rank.

        On another number of ranks the errors cannot be assigned: they restart at zero, and the first rank warns of it
        in the next step.

        Raises:
            StateDictError: of another `matrix_approximation_rank`; (in the next step) of other buckets.

        Collective: no.
        """
        check_state("PowerSGDState", state_dict, self.state_dict())
        rank = state_dict["matrix_approximation_rank"]
        if rank != self.matrix_approximation_rank:
            raise StateDictError(
                f"PowerSGDState: saved with matrix_approximation_rank={rank}, this one has "
                f"{self.matrix_approximation_rank}. Use {rank}."
            )
        self.iter = int(state_dict["iter"])
        self._num_before, self._num_after = state_dict["numbers"]
        # Buckets exist only after the first backward, so their states wait here until then.
        self._saved, self._saved_ranks = dict(state_dict["buckets"]), int(state_dict["ranks"])
        self._warns_of_errors = self.use_error_feedback
        self._factors = {}

    def _factors_of(self, bucket: GradBucket) -> _Factors:
        factors = self._factors.get(bucket.index())
        if factors is None:
            factors = _Factors(self, bucket)
            saved = self._saved.get(str(bucket.index()))
            if saved is not None:
                factors.load(saved, self._saved_ranks)
                del self._saved[str(bucket.index())]
                # Warn once, on the first rank.
                if self._saved_ranks != factors.num_ranks and self._warns_of_errors and factors.is_first_rank:
                    warnings.warn(
                        f"PowerSGDState: saved on {self._saved_ranks} ranks, this run has {factors.num_ranks}: the "
                        "errors that the old ranks had not sent yet are dropped, and start from zero.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                self._warns_of_errors = False
            self._factors[bucket.index()] = factors
        return factors

    def _count(self, bucket: GradBucket, num_sent: int) -> None:
        self._num_before += bucket.buffer().size
        self._num_after += num_sent
        self.iter += bucket.is_last()


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Any:
    """Average the gradients, as matrices of rank `state.matrix_approximation_rank`.

    A tensor (n, ...) counts as a matrix of n rows. Vectors, scalars and tensors that compression would not shrink are
    reduced whole. The P of a bucket is reduced during backward, its Q after the end of backward.

    Raises:
        InputError: `state` is not a PowerSGDState.

    Collective: yes, two or three all-reduces for each bucket.
    """
    if not isinstance(state, PowerSGDState):
        raise InputError(f"powerSGD_hook: its state must be a PowerSGDState, got {type(state).__name__}.")
    group = state.process_group or bucket.group
    factors = state._factors_of(bucket)
    if state.iter < state.start_powerSGD_iter or not factors.matrices:
        state._count(bucket, bucket.buffer().size)
        return collectives.all_reduce(bucket.buffer(), "mean", group, async_op=True)
    recorder = current_recorder()
    now_ns = perf_counter_ns if recorder is None else recorder.now_ns
    start_ns = now_ns()
    # Compression runs inside backward; P is sent while backward continues.
    factors.compress(state)
    state._count(bucket, factors.num_sent)
    factors.note("PowerSGD.compress", start_ns, 1)
    rest: Work | None = None
    if factors.rest.size:
        # Vectors and small tensors are reduced whole, in a separate message while P is sent.
        rest = collectives.all_reduce(factors.rest, "mean", group, async_op=True)
    work = collectives.all_reduce(factors.all_p, "mean", group, async_op=True)

    def finish(_: Any) -> Array:
        start_ns = now_ns()
        factors.project()
        factors.note("PowerSGD.project", start_ns, 2)
        # Q needs the averaged P, so this second reduction cannot start during backward.
        collectives.all_reduce(factors.all_q, "mean", group)
        if rest is not None:
            rest.wait()
        start_ns = now_ns()
        factors.decompress()
        factors.note("PowerSGD.decompress", start_ns, 1)
        factors.store_rest()
        return bucket.buffer()

    return work.then(finish)


class _Matrix(NamedTuple):
    """One compressed weight."""

    # Index in its bucket.
    number: int
    # (n, m), a view of the bucket.
    m: Array
    # (n, r) and (m, r).
    p: Array
    q: Array
    # (n, m): the compression error of this rank, added to its next gradient.
    error: Array | None


class _Factors:
    """P and Q of all weights of a bucket, each in one array, and the tensors that are reduced whole."""

    def __init__(self, state: PowerSGDState, bucket: GradBucket) -> None:
        self._bucket = bucket
        group = state.process_group or bucket.group or bucket.communicator.world
        self.num_ranks, self.is_first_rank = group.size, group.rank == 0
        self._xp = get_namespace(bucket.buffer())
        # (number, n, m, r) of each compressed weight.
        sizes: list[tuple[int, int, int, int]] = []
        whole: list[Array] = []
        for number, view in enumerate(bucket.gradients()):
            # As in PyTorch, dim 0 (the output channels) gives the rows.
            n = view.shape[0] if view.ndim > 1 and view.size else 0
            m = view.size // n if n else 0
            r = min(n, m, state.matrix_approximation_rank)
            # Compress only if the factors are smaller by the requested rate.
            if (n + m) * r * state.min_compression_rate < n * m:
                sizes.append((number, n, m, r))
            else:
                whole.append(view)
        # All factors of a bucket are contiguous, so one all-reduce sends them.
        self.all_p = bucket.scratch("PowerSGD.P", sum(n * r for _, n, _, r in sizes))
        self.all_q = bucket.scratch("PowerSGD.Q", sum(m * r for _, _, m, r in sizes))
        self.rest = bucket.scratch("PowerSGD.rest", sum(view.size for view in whole))
        # (view of the bucket, its place in `rest`).
        self._whole = list(zip(whole, views_of(self.rest, [view.shape for view in whole]), strict=True))
        self.num_sent = self.all_p.size + self.all_q.size + self.rest.size
        # Flops of one product (M Q, Mᵀ P or P Qᵀ) over all weights.
        self._flops = sum(2 * n * m * r for _, n, m, r in sizes)
        self.matrices: list[_Matrix] = []
        all_p = views_of(self.all_p, [(n, r) for _, n, _, r in sizes])
        all_q = views_of(self.all_q, [(m, r) for _, _, m, r in sizes])
        for (number, n, m, _), p, q in zip(sizes, all_p, all_q, strict=True):
            matrix = bucket.gradients()[number].reshape(n, m)
            error = self._xp.zeros_like(matrix) if state.use_error_feedback else None
            self.matrices.append(_Matrix(number, matrix, p, q, error))
        self._has_q = False

    def compress(self, state: PowerSGDState) -> None:
        """Compute P = M Q of this rank's M, to be averaged."""
        # A Q that overflowed is not reused.
        draw = not (self._has_q and state.warm_start)
        for number, m, p, q, error in self.matrices:
            if error is not None:
                # Error feedback: add the part of earlier gradients that was not sent.
                m += error
            if draw:
                stream = f"powersgd/{self._bucket.index()}/{number}/{state.iter}"
                drawn = random_normal(state.random_seed, stream, 0, q.size).reshape(q.shape)
                # The stream depends on bucket, weight and step only, so all ranks draw the same Q without
                # communication.
                q[...] = self._orthonormal(to_device_like(drawn, q))
            p[...] = m @ q
        for view, place in self._whole:
            place[...] = view

    def project(self) -> None:
        """Make P orthonormal, and compute Q = Mᵀ P of this rank's M, to be averaged.

        The error is M minus this rank's own P Qᵀ, and waits in M's place. The mean of the ranks' errors is the same as
        with the averaged Q, and the next gradient depends on that mean alone; but these errors stay small.
        """
        # Equal on all ranks, because P is averaged: all take the same branch.
        all_is_well = all_finite([self.all_p])
        for _, m, p, q, error in self.matrices:
            if all_is_well or all_finite([p]):
                p[...] = self._orthonormal(p)
                q[...] = m.T @ p
                if error is not None:
                    # Here Q is still this rank's own.
                    m -= p @ q.T
            else:
                # QR needs finite numbers; NaN marks the gradient as overflowed.
                q[...] = np.nan

    def decompress(self) -> None:
        """Set the gradients to P Qᵀ of the averaged factors."""
        # Averages are equal on all ranks, so all agree whether to keep Q and the new errors.
        self._has_q = all_finite([self.all_q, self.rest])
        for _, m, p, q, error in self.matrices:
            if error is not None:
                if self._has_q:
                    error[...] = m
                # An infinite error would return in every step.
                elif not all_finite([error]):
                    error[...] = 0
            m[...] = p @ q.T

    def state_dict(self) -> dict[str, Any]:
        """Return Q, or None if the next step draws one, and the errors, or None if none are kept."""
        return {
            "q": to_host(self.all_q).copy() if self._has_q else None,
            "errors": [None if x.error is None else to_host(x.error).copy() for x in self.matrices],
        }

    def load(self, saved: Mapping[str, Any], num_ranks: int) -> None:
        """Resume from a state that was saved on `num_ranks` ranks. Raises StateDictError."""
        q, errors = saved["q"], saved["errors"]
        shapes = [(x.m.shape[0], x.m.shape[1]) for x in self.matrices]
        fits = len(errors) == len(shapes) and (q is None or q.size == self.all_q.size)
        if not fits or any(e is not None and e.shape != shape for e, shape in zip(errors, shapes, strict=True)):
            raise StateDictError(
                f"PowerSGDState: bucket {self._bucket.index()} compresses matrices of shapes {shapes}, others were "
                "saved. Use the model, bucket_cap_mb and min_compression_rate of the saved run."
            )
        if q is not None:
            self.all_q[...] = get_namespace(self.all_q).asarray(q)
            self._has_q = True
        for matrix, error in zip(self.matrices, errors, strict=True):
            # Errors belong to the data of one rank: on another number of ranks they cannot be assigned.
            if matrix.error is not None and error is not None and num_ranks == self.num_ranks:
                matrix.error[...] = get_namespace(matrix.error).asarray(error)

    def store_rest(self) -> None:
        """Copy the tensors that were reduced whole back to the bucket."""
        for view, place in self._whole:
            view[...] = place

    def note(self, name: str, start_ns: int, num_products: int) -> None:
        """Record the work on the simulated clock."""
        recorder = current_recorder()
        if recorder is not None:
            buffer = self._bucket.buffer()
            flops, itemsize = self._flops * num_products, recorder.cluster.itemsize(buffer.dtype)
            size_bytes = buffer.size * itemsize * num_products
            recorder.work(name, "backward", start_ns, flops, size_bytes, itemsize, 0, True)

    def _orthonormal(self, x: Array) -> Array:
        """Return an orthonormal basis of the column space of x (rows, r), computed in a wider dtype."""
        # NumPy's QR has no float16.
        return self._xp.linalg.qr(x.astype(wider(x.dtype), copy=False))[0]
