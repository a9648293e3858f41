"""The mode in which a thread runs ops: `no_grad` and `enable_grad` say whether they are recorded for backward."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ContextDecorator
from functools import wraps
from inspect import isgeneratorfunction
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from simparallel.rank_local import RankLocal, per_rank

if TYPE_CHECKING:
    from simparallel.autograd.interpreter import AbstractInterpreter
    from simparallel.autograd.tensor import Tensor


class _GradMode(RankLocal):
    enabled: bool = True
    # True while a checkpointed part runs a second time: it must not repeat side effects.
    recomputing = False
    # Runs all ops of this thread, such as inside of `AutoParallel`; None leaves them to the interpreters of tensors.
    interpreter: AbstractInterpreter | None = None
    # The tensors that new nodes read, by id, while a part runs that backward will run again; else None.
    read: WeakValueDictionary[int, Tensor] | None = None
    # Numbers the nodes of all threads, so that nodes of one graph are in order whichever thread made them.
    numbers = count()
    # The modes that the open blocks of this thread will restore.
    before: list[bool] = per_rank(list)


grad_mode = _GradMode()


class _Switch(ContextDecorator):
    """A block, or a decorated function or generator, with the mode `enabled`; any threads may share it."""

    enabled: bool

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        """Decorate the function if the parentheses were left out: `@no_grad`."""
        switch = super().__new__(cls)
        return switch if function is None else switch(function)

    def __enter__(self) -> None:
        grad_mode.before.append(grad_mode.enabled)
        grad_mode.enabled = self.enabled

    def __exit__(self, *exc: object) -> None:
        grad_mode.enabled = grad_mode.before.pop()

    def __call__(self, function: Callable[..., Any]) -> Any:
        if not callable(function):
            raise TypeError(f"{type(self).__name__}: expected a function to decorate, got {function!r}.")
        return self._in_steps(function) if isgeneratorfunction(function) else super().__call__(function)

    def _in_steps(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
        """Wrap a generator: the mode applies while it runs and is restored at each yield."""

        @wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            steps = function(*args, **kwargs)
            go_on, given = steps.send, None
            while True:
                try:
                    with self:
                        value = go_on(given)
                except StopIteration as end:
                    return end.value
                try:
                    go_on, given = steps.send, (yield value)
                except GeneratorExit:
                    with self:
                        steps.close()
                    raise
                except BaseException as error:
                    go_on, given = steps.throw, error

        return generate


class no_grad(_Switch):
    """Record no op for backward inside the block, or the decorated function or generator."""

    enabled = False


class enable_grad(_Switch):
    """Record ops for backward inside the block, or the decorated function or generator, also within `no_grad`."""

    enabled = True
