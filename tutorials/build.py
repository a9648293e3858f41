"""Build the notebooks of the lessons from their scripts, and execute them.

    python tutorials/build.py [NAME ...]

The scripts `NN_name.py` are the source. Each notebook gets the outputs of a run in an empty folder; its pictures are
reduced to 64 colours. It needs `pip install ".[notebook]"`.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

TUTORIALS = Path(__file__).parent
TIME_LIMIT_S = 120
# Metadata that do not change from run to run.
_KEPT = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def lessons() -> list[Path]:
    """Return the scripts of all lessons."""
    return sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))


def read(script: Path) -> nbformat.NotebookNode:
    """Return the notebook of a script, without outputs."""
    notebook = jupytext.read(script)
    notebook.metadata = dict(_KEPT)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


def build(script: Path) -> Path:
    """Execute the notebook of a script in an empty folder, and write it beside the script."""
    notebook = read(script)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=TIME_LIMIT_S, resources={"metadata": {"path": folder}})
        client.execute()
    notebook.metadata = dict(_KEPT)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = _reduced(output["data"]["image/png"])
    target = script.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


def _reduced(png: str) -> str:
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    # A backend without pictures would leave the notebooks without them.
    os.environ.pop("MPLBACKEND", None)
    for script in lessons():
        if not sys.argv[1:] or script.stem in sys.argv[1:]:
            written = build(script)
            print(f"{written.name}: {written.stat().st_size / 1000:.0f} kB")
