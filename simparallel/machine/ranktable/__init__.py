"""Rank tables: files that map ranks to servers and devices. Read, check, convert and make them."""

from __future__ import annotations

from simparallel.machine.ranktable.reading import RankTableWarning, load, parse_rank_table, read_rank_table
from simparallel.machine.ranktable.table import FORMS, RankDevice, RankTable, Server, make_rank_table, merge_rank_tables
from simparallel.machine.ranktable.writing import format_rank_table

__all__ = [
    "FORMS", "RankDevice", "RankTable", "RankTableWarning", "Server", "format_rank_table", "load", "make_rank_table",
    "merge_rank_tables", "parse_rank_table", "read_rank_table",
]  # fmt: skip
