"""The site builds without a warning, reads nothing from a network, and shows executed notebooks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import ROOT

DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "extensions"))
from notebooks import to_markdown  # noqa: E402


def outside_loads(text: str) -> list[str]:
    """Return what a page or a style sheet would load from another host."""
    tags = r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//[^\"']*"
    return re.findall(rf"{tags}|@import\s+[^;]*//[^;]*", text)


def broken_links(site: Path) -> set[tuple[str, str, str]]:
    """Return (page, target, anchor) of each link inside the site that leads nowhere."""
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = set()
    for path, text in pages.items():
        for target, anchor in re.findall(r'\bhref="([^":#?]*)(?:#([^"]*))?"', text):
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and file in anchors and anchor not in anchors[file]):
                broken.add((path.relative_to(site).as_posix(), target, anchor))
    return broken


@pytest.mark.documents
@pytest.mark.timeout(300)
def test_site_builds(tmp_path: Path) -> None:
    """Without a warning, with all pages and links, and with nothing from a network; one test, for one build."""
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr

    assert "Run distributed deep learning on one machine" in (site / "docs" / "index.html").read_text()
    assert "集合通信" in (site / "docs" / "index_zh.html").read_text()
    assert "docs/index.html" in (site / "index.html").read_text()
    assert [page.stem for page in DOCS.glob("*.md") if not (site / "docs" / f"{page.stem}.html").exists()] == []
    texts = [path.read_text() for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]
    assert len(texts) > 100
    assert [load for text in texts for load in outside_loads(text)] == []
    assert broken_links(site) == set()

    # A name in a page leads to its entry in the API, a type in a signature to its class, an entry to its source.
    assert 'href="api/running.html#sp.launch"' in (site / "docs" / "running.html").read_text()
    entry = (site / "docs" / "api" / "running.html").read_text()
    assert 'href="hardware.html#sp.ClusterSpec"' in entry
    assert re.search(r'href="\.\./\.\./source/simparallel/runtime/launcher/launch\.html#line-\d+"', entry)


def test_broken_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#c"></a><a href="#d"></a><a href="e.html"></a><a href="#f" id="f">'
    )
    (tmp_path / "b.html").write_text('<p id="c">')
    assert broken_links(tmp_path) == {("a.html", "", "d"), ("a.html", "e.html", "")}
    for load in (
        '<script src="https://cdn.example/a.js">',
        '<link rel="x" href="//a.example/b.css">',
        '@import "//a.b";',
    ):
        assert outside_loads(load)
    assert outside_loads('<a href="https://a.example">') == []


def test_notebook_becomes_markdown() -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
        {"output_type": "display_data", "data": {"image/png": "iVBO\n", "text/plain": ["<Figure>"]}},
        {"output_type": "execute_result", "data": {"text/html": ["<b>x</b>"], "text/plain": ["x"]}},
        {"output_type": "error", "ename": "E", "evalue": "", "traceback": ["\x1b[31mE\x1b[0m: ```"]},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "[![Open](https://a.example/b.svg)](https://a.example/c)"]},
        {"cell_type": "code", "source": "print(1)", "outputs": outputs},
        {"cell_type": "code", "source": "", "outputs": []},
    ]
    text = to_markdown({"cells": cells})
    printed = "```{code-block} text\n:class: output\n\n1\n2\n```"
    assert text.startswith(f"# Title\n[Open](https://a.example/c)\n\n```python\nprint(1)\n```\n\n{printed}\n")
    assert "![Output of the code above](data:image/png;base64,iVBO)" in text
    assert "```{raw} html\n<b>x</b>\n```" in text
    assert ":class: output\n\nE: ```\n````" in text
