"""Functions that are pickled by value keep their file, whatever cloudpickle's version."""

from __future__ import annotations

import pickle
import types
from typing import Any

import cloudpickle

from simparallel.base import pickling


def inner_functions() -> tuple[Any, ...]:
    def outer(x: int) -> Any:
        return lambda: x

    return lambda: 1 / 0, outer, lambda: "<dynamic-code>"


def files_of(code: types.CodeType) -> set[str]:
    return {code.co_filename}.union(*(files_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def test_functions_keep_their_file() -> None:
    for function in inner_functions():
        loaded = pickle.loads(pickling.dumps(function))
        assert files_of(loaded.__code__) == {__file__}
        assert loaded.__code__.co_firstlineno == function.__code__.co_firstlineno


def test_constants_stay_as_they_are() -> None:
    assert pickle.loads(pickling.dumps(inner_functions()[2]))() == "<dynamic-code>"


def test_other_values_are_cloudpickles() -> None:
    value = {"a": [1, 2.5, None], "b": ValueError("x")}
    assert pickling.dumps(value) == cloudpickle.dumps(value)
