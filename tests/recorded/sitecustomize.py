"""Processes that recorded tests start record, too: Python imports this file when it starts; see `tests/reach.py`."""

import os
import sys

if file := os.environ.get("RECORDED_REACH"):
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    import reach

    sys.path.pop()
    reach.Watch(lambda name: reach.append(file, name)).start()
