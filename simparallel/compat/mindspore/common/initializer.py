"""`mindspore.common.initializer`."""

from simparallel.compat.front import take as _take
from simparallel.nn import init as _init

_take(globals(), _init, """
Constant HeNormal HeUniform Normal One TruncatedNormal Uniform XavierNormal XavierUniform Zero initializer
""")  # fmt: skip
