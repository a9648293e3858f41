"""The pages: Python blocks run and print the block below them, links and pictures lead somewhere, indexes are whole."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from op_records import unregistered
from test_packaging import SOURCE, file_at

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
FIRST_PAGES = (DOCS / "index.md", DOCS / "index_zh.md")  # the list of all pages, and the README in Chinese
PAGES = [*sorted({*DOCS.glob("*.md")} - {*FIRST_PAGES}), ROOT / "CONTRIBUTING.md"]
LINKING = [*PAGES, *FIRST_PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"]
# A block of Python, and the output where a block without a language follows.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# `test_recipes.py` follows these blocks, which belong into files.
RECIPES = re.compile(r"^## How to add an algorithm.*?(?=^## )", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(code, output, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (code, output) in enumerate(BLOCK.findall(RECIPES.sub("", page.read_text())), 1)
]


@pytest.mark.documents
@pytest.mark.process
@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_block_prints_what_is_shown(code, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(code)
    with unregistered():
        runpy.run_path(str(script), run_name="__main__")
    plt.close("all")
    if output:
        assert capsys.readouterr().out == output


def test_every_python_block_is_found():
    recipes = RECIPES.search(ROOT.joinpath("CONTRIBUTING.md").read_text())
    assert recipes is not None
    followed = recipes[0].count("```python\n")
    assert len(BLOCKS) + followed == sum(page.read_text().count("```python\n") for page in PAGES) > 10


def test_output_is_read_from_the_block_below():
    (found,) = BLOCK.findall("```python\nprint(1)\n```\n\n```\n2\n```\n")
    assert found == ("print(1)\n", "2\n")
    assert sum(bool(block.values[1]) for block in BLOCKS) > 8


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ +(.*?) *$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def targets(text: str) -> list[str]:
    """Return the targets of links and pictures, written beside them or in lines of their own."""
    without_code = re.sub(r"```.*?```|`[^`]*`(?!\])", "", text, flags=re.DOTALL)
    return re.findall(r"(?:\]\(|^\[[^\]]+\]: )([^)\s]+)", without_code, re.MULTILINE)


def broken_links(page: Path, text: str) -> list[str]:
    """Return the targets of links and pictures that are not a file, or not a heading of it."""
    broken = []
    for target in targets(text):
        path, _, anchor = target.partition("#")
        file = file_at(path) or (page.parent / path if path else page)
        if target.startswith("https://") and file_at(path) is None:
            continue
        if not file.exists() or (anchor and anchor not in anchors(text if file == page else file.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text()) == []


def test_broken_link_is_found():
    text = (
        "# A `b`\n[a](nothing.md) [b](running.md) [c](https://x) [d](#a-b) [e](#c) [f](clusters.md#nowhere) ![g](g.png)"
        f"\n[h]: {SOURCE}/blob/main/docs/nothing.md\n[i]: {SOURCE}/blob/main/docs/running.md\n"
    )
    broken = ["nothing.md", "#c", "clusters.md#nowhere", "g.png", f"{SOURCE}/blob/main/docs/nothing.md"]
    assert broken_links(DOCS / "guide.md", text) == broken
    assert len(re.findall(r"\]\(", text)) > len(broken)


def test_indexes_name_every_page():
    """The guide links to each page, and the site's table of contents has it."""
    guide, contents = (DOCS / "guide.md").read_text(), (DOCS / "index.md").read_text()
    pages = [page for page in PAGES if page.parent == DOCS and page.stem != "guide"]
    assert [page.name for page in pages if f"({page.name})" not in guide] == []
    assert [page.name for page in pages if not re.search(rf"^{page.stem}$", contents, re.MULTILINE)] == []


def test_chinese_page_has_the_parts_of_the_readme():
    """The same blocks of code, pictures and links, in the same order."""

    def is_of_project(link):
        return file_at(link) is not None or not link.startswith("https://")

    def parts(page):
        text = page.read_text()
        links = [file_at(link) or (page.parent / link).resolve() for link in targets(text) if is_of_project(link)]
        return re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE), links

    (code, links), (code_zh, links_zh) = parts(ROOT / "README.md"), parts(DOCS / "index_zh.md")
    assert code_zh == code
    missing = {*links} - {*links_zh}
    assert {path.relative_to(ROOT).as_posix() for path in missing} <= {"docs/index_zh.md"}
