"""The zoo: small wrong programs for ranks, how each mistake is found, and how it is mended.

`print(zoo.table())` lists them; `print(zoo.get("no_all_reduce"))` shows one and runs it. To mend one yourself, copy its
`source`, and give your function to `zoo.check`.
"""

from simparallel.base.hints import answer_unknown_names
from simparallel.course.zoo import Finding, WrongProgram, check, get, given, names, table

__all__ = ["Finding", "WrongProgram", "check", "get", "given", "names", "table"]

answer_unknown_names(__name__)
