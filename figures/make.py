"""Draws the pictures of the README: `python figures/make.py`."""

import shutil
import tempfile
from pathlib import Path

from simparallel import demo

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        demo.main(out=folder)
        shutil.copy(Path(folder, "timeline.png"), Path(__file__).parent / "timeline.png")
