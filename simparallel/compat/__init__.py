"""Fronts: the names and argument orders of MindSpore and PyTorch, for programs written for them.

`install("mindspore")` makes `import mindspore` mean `simparallel.compat.mindspore` in this process; imports never
change otherwise. A front contains no mechanism: each name stands for one thing in another package of
simparallel. Settings without meaning here are accepted with one note; settings that would change results are refused.

    simparallel run --as mindspore -n 8 train.py
    python -m simparallel.compat torch train.py
"""

from __future__ import annotations

from simparallel.compat.imports import FRONTS, install, installed

__all__ = ["FRONTS", "install", "installed"]
