"""Fronts: the names and argument orders of MindSpore and PyTorch, for programs that were written for them.

`install("mindspore")` makes `import mindspore` mean `simparallel.compat.mindspore` in this process; nothing else
changes what an import means. A front contains no mechanism: each name stands for one thing that exists elsewhere in
simparallel. What has no meaning here is accepted with one note; what would change the result is refused.

    simparallel run --as mindspore -n 8 train.py
    python -m simparallel.compat torch train.py
"""

from __future__ import annotations

from simparallel.compat.imports import FRONTS, install, installed

__all__ = ["FRONTS", "install", "installed"]
