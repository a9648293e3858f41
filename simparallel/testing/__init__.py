"""Tools for users' own tests. Hypothesis strategies: `from simparallel.testing import strategies`."""

from simparallel.base.hints import answer_unknown_names
from simparallel.testing import faults
from simparallel.testing.comm_counter import CommCounter, expect_no_redistribution
from simparallel.testing.equivalence import assert_equivalent
from simparallel.testing.gradients import check_gradients, gradcheck
from simparallel.testing.leaks import no_leaks
from simparallel.testing.ranks import Ranks

__all__ = [
    "CommCounter", "Ranks", "assert_equivalent", "check_gradients", "expect_no_redistribution", "faults", "gradcheck",
    "no_leaks",
]  # fmt: skip

answer_unknown_names(__name__)
