"""Errors cross process borders: each one survives pickling and copying."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from simparallel import errors
from simparallel.errors import SimParallelError, StateDictError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, BaseException) and cls.__module__ == errors.__name__
]
FACTS = {"rank": 3, "calls": {0: "all_reduce"}, "names": ("a", "b"), "value": "nan", "cause": None}
BUILTINS = {
    "InputError": ValueError, "DTypeError": TypeError, "AutogradError": RuntimeError,
    "NonFiniteLossError": ArithmeticError, "StateDictError": KeyError, "CommError": RuntimeError,
    "DeadlineError": TimeoutError, "SharedMemoryError": MemoryError, "LayoutError": ValueError,
}  # fmt: skip


def test_all_classes_are_tested():
    assert len(CLASSES) > 15
    assert all(issubclass(cls, SimParallelError) for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("facts", [{}, FACTS], ids=["bare", "facts"])
def test_error_survives_pickle_and_copy(cls, facts):
    error = cls("rank 3: what happened, what to do", **facts)
    error.add_note("in step 7")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is cls
        assert (twin.args, twin.facts) == (error.args, error.facts) == (("rank 3: what happened, what to do",), facts)
        assert twin == error
        assert twin.__notes__ == ["in step 7"]
        assert str(twin) == str(error) == "rank 3: what happened, what to do"
        assert all(getattr(twin, name) == value for name, value in facts.items())


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_error_is_also_a_builtin_error(name, builtin):
    with pytest.raises(builtin, match="why"):
        raise getattr(errors, name)("why")


def test_errors_differ_by_class_message_and_facts():
    error = errors.InputError("why", rank=1)

    assert error != errors.InputError("why", rank=2)
    assert error != errors.InputError("who", rank=1)
    assert error != errors.ShapeError("why", rank=1)
    assert error != "why"


def test_state_dict_error_shows_its_text_not_its_repr():
    assert str(StateDictError("two\nlines")) == "two\nlines"
