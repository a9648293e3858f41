"""The page `docs/zoo.md`, generated from the programs: `python docs/extensions/zoo_page.py docs/zoo.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from simparallel.base.files import write_atomically
from simparallel.course.zoo.entry import WrongProgram
from simparallel.course.zoo.listing import get, names

_HEAD = """\
# The zoo: wrong programs

Small programs that a student could have written, each with one mistake. The run itself finds it, or
`sp.testing.assert_equivalent` does: it runs a program on one rank and on several, and compares what they return.

```python
import simparallel as sp

entry = sp.zoo.get("padded_evaluation")
print(entry.seen)
print(entry.told)
print(entry.find(entry.mended))
```

```
{seen}
{told}
None
```

`print(sp.zoo.table())` and `simparallel zoo` list all programs, `simparallel zoo NAME` shows one and runs it. Find the
mistake yourself: copy `entry.source`, mend it, and call `sp.zoo.check(name, your_function)`. `X` and `Y` are 24
samples of four features and their targets, `LABELS` their classes: `simparallel.course.zoo.given`.

A line with - is in the wrong program only, a line with + in the mended one only. "Seen" is the symptom where nothing
checks the program. The texts below "Found" come from runs; their line numbers count in `entry.source`. This page
is written by `python docs/extensions/zoo_page.py docs/zoo.md`.

| lesson | program | mistake | found by |
|---|---|---|---|
"""


def page() -> str:
    """Return the page as Markdown; every wrong program runs once."""
    entries = [get(name) for name in names()]
    example = get("padded_evaluation")
    head = _HEAD.format(seen=example.seen, told=example.told)
    rows = [f"| {e.lesson} | [{e.name}](#{e.name}) | {e.title} | {e.found_by} |\n" for e in entries]
    return "".join([head, *rows, *map(_section, entries)])


def _section(entry: WrongProgram) -> str:
    return f"""
## {entry.name}

{entry.title}.

```diff
{entry.diff}```

**Seen.** {entry.seen}

**Found** by {entry.found_by}, on {entry.world_size} ranks:

```
{entry.told}
```

**Elsewhere.** {entry.elsewhere}
"""


if __name__ == "__main__":
    write_atomically(Path(sys.argv[1]), page().encode())
