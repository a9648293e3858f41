"""Build the notebooks of the lessons, and execute them.

    python tutorials/build.py [NAME ...]

A script `NN_name.py` is the source of a lesson in English, and `NN_name_zh.md` that of its text in Chinese; the code of
both is that of the script. Each code block of the Chinese text stands for a code cell: it begins with the same
line of code, and then translates the comments and docstrings of the cell, all of them, in the same order:

    ```python
    def adasum_pair(a, b):
        \"\"\"练习 1：返回两个向量的 Adasum。\"\"\"
    ```

Each notebook gets the outputs of a run in an empty folder; its pictures are reduced to 64 colours. It needs
`pip install ".[notebook]"`. Then it gets a badge, which opens it in Colab, and a first cell, which installs the package
where it is missing. That cell is stored without an output, because it describes the machine of the reader.
"""

from __future__ import annotations

import base64
import configparser
import io
import os
import re
import sys
import tempfile
import tokenize
from itertools import zip_longest
from pathlib import Path

import jupytext
import nbformat

TUTORIALS = Path(__file__).parent
TIME_LIMIT_S = 120
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({address})"
FIRST_CELL = """\
# {comment}
import importlib.util
import subprocess
import sys

packages = {{"simparallel": "git+{source}", "hypothesis": "hypothesis", "pytest": "pytest"}}
missing = [address for name, address in packages.items() if importlib.util.find_spec(name) is None]
if missing:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *missing], check=True)
    importlib.invalidate_caches()

from simparallel.cli.doctor import summary

print(summary())"""
# By the end of a source's name.
_COMMENTS = {
    "": "Installs what is missing, as in a hosted notebook, and says what this machine offers.",
    "_zh": "安装缺少的软件包（例如在托管的 notebook 里），并说明这台机器能提供什么。",
}
# Metadata that do not change from run to run.
_KEPT = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(r'#[^\n]*|""".*?"""', re.DOTALL)
# A line break inside a paragraph of Chinese: beside full-width punctuation, or between two Chinese characters.
_WIDE = "\u3000-\u303f\uff00-\uffef”"
_BREAK = re.compile(r"(\S)(\**)\n *(?![-*+] |[|#>\n]|```|\d+\. )(\**)(\S)")
_GAP = re.compile(rf"[{_WIDE}].|.[{_WIDE}]|[\u4e00-\u9fff]{{2}}")
_BEFORE_DOCSTRING = (None, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def lessons() -> list[Path]:
    """Return the sources of all lessons, the Chinese ones after the English ones of the same name."""
    found = [*TUTORIALS.glob("[0-9][0-9]_*.py"), *TUTORIALS.glob("[0-9][0-9]_*_zh.md")]
    return sorted(found, key=lambda path: path.stem)


def read(source: Path) -> nbformat.NotebookNode:
    """Return the notebook of a lesson, without outputs.

    Raises:
        ValueError: a cell, a comment or a docstring of a lesson has no counterpart in the other language.
    """
    if source.suffix == ".md":
        script = source.with_name(f"{source.stem.removesuffix('_zh')}.py")
        notebook = jupytext.read(script)
        _translate(notebook.cells, source.read_text(), f"{source.name} and {script.name}")
    else:
        notebook = jupytext.read(source)
    notebook.metadata = dict(_KEPT)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


def joined(text: str) -> str:
    """Return a Chinese text without the line breaks that a browser would show as a space inside of a sentence."""
    return _BREAK.sub(lambda m: m[0] if not _GAP.match(m[1] + m[4]) else "".join(m.groups()), text)


def _translate(cells: list[nbformat.NotebookNode], text: str, files: str) -> None:
    """Put the text of a Chinese lesson into the cells of the English one."""
    parts = [(("markdown", "code")[i % 2], part.strip()) for i, part in enumerate(_BLOCK.split(text))]
    ours = [(cell.cell_type, cell.source) for cell in cells]
    theirs = [(kind, part) for kind, part in parts if part]
    for number, (our, their) in enumerate(zip_longest(ours, theirs, fillvalue=("no cell", ""))):
        where = f"{files} differ in cell {number}"
        if our[0] != their[0]:
            raise ValueError(f"{where}.\n  English: {our[0]} {_line(our[1])}\n  Chinese: {their[0]} {_line(their[1])}")
        cells[number].source = joined(their[1]) if our[0] == "markdown" else _translated(our[1], their[1], where)


def _translated(code: str, block: str, where: str) -> str:
    """Return the code with the comments and docstrings of a block."""
    notes = _notes(code)
    first = _line(_replaced(code, notes, [""] * len(notes)))
    if not block.startswith(first):
        raise ValueError(
            f"{where}: a block begins with the first line of code.\n  English: {first}\n  Chinese: {_line(block)}"
        )
    rest = block.removeprefix(first)
    texts = _NOTE.findall(rest)
    if other := _NOTE.sub("", rest).strip():
        raise ValueError(f"{where}: after {first!r}, a block has comments and docstrings only, not {_line(other)!r}.")
    if [text[0] for text in texts] != [note.string[0] for note in notes]:
        lists = [_line(note.string) for note in notes], [_line(text) for text in texts]
        raise ValueError(f"{where} in their comments and docstrings.\n  English: {lists[0]}\n  Chinese: {lists[1]}")
    return _replaced(code, notes, texts)


def _notes(code: str) -> list[tokenize.TokenInfo]:
    """Return the comments and docstrings of some code."""
    found, before = [], None
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and before in _BEFORE_DOCSTRING):
            found.append(token)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return found


def _replaced(code: str, notes: list[tokenize.TokenInfo], texts: list[str]) -> str:
    """Return the code with these texts in place of its comments and docstrings."""
    lines = code.split("\n")
    for note, text in reversed([*zip(notes, texts, strict=True)]):
        (first, start), (last, end) = note.start, note.end
        lines[first - 1 : last] = (lines[first - 1][:start] + text + lines[last - 1][end:]).split("\n")
    return "\n".join(lines)


def _line(text: str) -> str:
    """Return the first line of a text that is not empty."""
    return text.strip().partition("\n")[0].rstrip()


def source_address() -> str:
    """Return the address of the project's repository."""
    settings = configparser.ConfigParser()
    settings.read(TUTORIALS.parent / "setup.cfg")
    urls = dict(line.split(" = ") for line in settings["metadata"]["project_urls"].strip().splitlines())
    return urls["Source"]


def add_start(notebook: nbformat.NotebookNode, source: Path) -> None:
    """Put the badge below the title of a lesson, and the cell that installs the package before all its code."""
    address = source_address()
    colab = address.replace("https://github.com/", "https://colab.research.google.com/github/")
    badge = BADGE.format(address=f"{colab}/blob/main/tutorials/{source.stem}.ipynb")
    title, _, rest = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = f"{title}\n\n{badge}\n{rest}"
    comment = _COMMENTS["_zh" * source.stem.endswith("_zh")]
    cell = nbformat.v4.new_code_cell(FIRST_CELL.format(comment=comment, source=address), id="start")
    notebook.cells.insert(1, cell)


def build(source: Path) -> Path:
    """Execute the notebook of a lesson in an empty folder, and write it beside its source."""
    from nbclient import NotebookClient  # not needed to read lessons, which the tests do

    notebook = read(source)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=TIME_LIMIT_S, resources={"metadata": {"path": folder}})
        client.execute()
    notebook.metadata = dict(_KEPT)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = _reduced(output["data"]["image/png"])
    add_start(notebook, source)
    target = source.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


def _reduced(png: str) -> str:
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    # A backend without pictures would leave the notebooks without them.
    os.environ.pop("MPLBACKEND", None)
    for source in lessons():
        if not sys.argv[1:] or source.stem in sys.argv[1:]:
            written = build(source)
            print(f"{written.name}: {written.stat().st_size / 1000:.0f} kB")
