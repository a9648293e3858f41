"""The zoo: small wrong programs for ranks, how each mistake is found, and how it is mended; `sp.zoo`."""

from simparallel.course.zoo.entry import Finding, WrongProgram
from simparallel.course.zoo.listing import check, get, names, table

__all__ = ["Finding", "WrongProgram", "check", "get", "names", "table"]
