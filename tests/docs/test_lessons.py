"""The lessons run as scripts, with warnings as errors, are the same programs in Chinese, and are built as notebooks."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from test_readme import ROOT, run_in

from simparallel import exercises

TUTORIALS = ROOT / "tutorials"
BUILD = runpy.run_path(str(TUTORIALS / "build.py"))
LESSONS = {source.stem: source for source in BUILD["lessons"]()}
ENGLISH = [name for name in LESSONS if not name.endswith("_zh")]
# Words of the text that every lesson has, in each language.
PREDICT = {"": "Predict first", "_zh": "先猜一猜"}
MAX_NOTEBOOK_BYTES = 800_000


def run_lesson(folder: Path, name: str, then: str = "") -> str:
    """Run a lesson in an empty folder, then code that finds its names in `found`, and return the standard output."""
    script = TUTORIALS / f"{name}.py"
    program = f"import json, runpy\nfound = runpy.run_path({str(script)!r}, run_name='__main__')\n{then}"
    done = run_in(folder, sys.executable, "-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def cells_of(name: str) -> list[nbformat.NotebookNode]:
    return BUILD["read"](LESSONS[name]).cells


def text_of(name: str) -> str:
    return "\n".join(cell.source for cell in cells_of(name))


def checks_of(name: str) -> list[str]:
    """Return the exercises that a lesson checks."""
    return re.findall(r'^sp\.exercises\.check\("(\w+)"', text_of(name), re.MULTILINE)


@pytest.mark.documents
@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in ENGLISH if name != "11_pipelines"])  # which has a test of its own
def test_lesson(tmp_path: Path, name: str) -> None:
    """It runs to its end, which asserts the numbers of its text, draws pictures, and leaves its exercises to do.

    In a checkout it leaves only files that git ignores.
    """
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".git" / "info" / "exclude").write_text(f"{(ROOT / '.gitignore').read_text()}\nfontlist-*.json\n")
    said = run_lesson(tmp_path, name)
    assert len(list(tmp_path.rglob("pictures/**/*.png"))) >= 4
    assert subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, capture_output=True, check=True).stdout == b""
    for exercise in checks_of(name):
        assert f"{exercise}: not written yet" in said


@pytest.mark.parametrize("name", LESSONS)
def test_form_of_a_lesson(name: str) -> None:
    """A title, predictions, pictures, and three exercises or more, all of this lesson."""
    text, language = text_of(name), "_zh" * name.endswith("_zh")
    number = int(name[:2])
    title = text.splitlines()[0]
    assert re.match(rf"# 第 {number} 课：" if language else rf"# Lesson {number}: ", title), title
    assert text.count(PREDICT[language]) >= 4
    assert checks_of(name) == exercises.names(number)
    assert len(checks_of(name)) >= 3
    if language:
        assert "| 中文 | English |" in text


def code_of(name: str) -> list[str]:
    """Return the cells of a lesson: the kind of each, and its code without comments and docstrings."""
    found = []
    for cell in cells_of(name):
        tree = ast.parse(cell.source if cell.cell_type == "code" else "")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                del node.body[0]
        found.append(f"{cell.cell_type} {ast.dump(tree)}")
    return found


@pytest.mark.parametrize("name", ENGLISH)
def test_lesson_has_the_same_code_in_chinese(name: str) -> None:
    assert code_of(name) == code_of(f"{name}_zh")


ENGLISH_CELLS = ["# %% [markdown]\n# Add.", "# %%\nx = 1  # one", '# %%\ndef f():\n    """Return 1."""\n    return 1']
CHINESE_CELLS = ["加。", "```python\nx = 1  # 一\n```", '```python\ndef f():\n    """返回 1。"""\n```']


def translated(folder: Path, english: list[str], chinese: list[str]) -> list[str]:
    """Return the cells of a lesson in Chinese with these cells in its two sources."""
    (folder / "01_add.py").write_text("\n\n".join(english))
    (source := folder / "01_add_zh.md").write_text("\n\n".join(chinese))
    return [cell.source for cell in BUILD["read"](source).cells]


def test_chinese_text_gets_the_code(tmp_path: Path) -> None:
    found = translated(tmp_path, ENGLISH_CELLS, CHINESE_CELLS)
    assert found == ["加。", "x = 1  # 一", 'def f():\n    """返回 1。"""\n    return 1']


@pytest.mark.parametrize("order", [[1, 2], [0, 2], [0, 1], [0, 2, 1]])
def test_cell_of_one_language_is_refused(tmp_path: Path, order: list[int]) -> None:
    """A cell that is missing or at another place, in either language."""
    for english, chinese in ((order, range(3)), (range(3), order)):
        with pytest.raises(ValueError, match=r"01_add_zh.md and 01_add.py differ in cell \d"):
            translated(tmp_path, [ENGLISH_CELLS[i] for i in english], [CHINESE_CELLS[i] for i in chinese])


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("x = 10  # 一", "comments and docstrings only, not '0"),
        ("y = 1  # 一", "English: x = 1\n  Chinese: y = 1"),
        ("x = 1", r"English: \['# one'\]\n  Chinese: \[\]"),
        ("x = 1  # 一\n# 二", r"Chinese: \['# 一', '# 二'\]"),
        ('x = 1\n"""一"""', r"Chinese: \['\"\"\"一\"\"\"'\]"),
        ("x = 1  # 一\nprint(x)", "not 'print"),
    ],
)
def test_block_unlike_its_cell_is_refused(tmp_path: Path, block: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        translated(tmp_path, ENGLISH_CELLS, [CHINESE_CELLS[0], f"```python\n{block}\n```", CHINESE_CELLS[2]])


@pytest.mark.parametrize("name", LESSONS)
def test_notebook_is_its_source(name: str) -> None:
    """The cells are equal, every code cell was executed without an error, and the pictures are small."""
    path = TUTORIALS / f"{name}.ipynb"
    assert path.stat().st_size < MAX_NOTEBOOK_BYTES
    notebook, expected = nbformat.read(path, as_version=4), BUILD["read"](LESSONS[name])
    BUILD["add_start"](expected, LESSONS[name])
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in expected.cells]
    start, *code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert (start.execution_count, start.outputs) == (None, [])
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = len(re.findall(r"^ *show\(", text_of(name), re.MULTILINE))
    assert sum("image/png" in output.get("data", {}) for output in outputs) == shown >= 4


# --- the text in Chinese ----------------------------------------------------------------------------

CHINESE_PAGES = [ROOT / "docs" / "index_zh.md", *(LESSONS[f"{name}_zh"] for name in ENGLISH)]
ITALICS = re.compile(r"(?<![*A-Za-z0-9_`])\*[^*\s`][^*\n`]*[\u4e00-\u9fff][^*\n`]*\*(?!\*)")


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("先发送，\n再接收。\n结束", "先发送，再接收。结束"),
        ("每一\n  步", "每一步"),
        ("数据\n**并行**", "数据**并行**"),
        ("**屏障。**\n它", "**屏障。**它"),
        ("有 8\n个", "有 8\n个"),
        ("调用\n`send`", "调用\n`send`"),
        ("有两种：\n- 环\n- 树", "有两种：\n- 环\n- 树"),
        ("先发送，\n1. 再接收", "先发送，\n1. 再接收"),
        ("第一段。\n\n第二段。", "第一段。\n\n第二段。"),
    ],
)
def test_lines_of_a_chinese_paragraph_are_joined(text: str, expected: str) -> None:
    assert BUILD["joined"](text) == expected


def test_page_in_chinese_has_no_gaps() -> None:
    text = prose(CHINESE_PAGES[0].read_text())
    assert BUILD["joined"](text) == text


@pytest.mark.parametrize("page", CHINESE_PAGES, ids=lambda page: page.stem)
def test_chinese_words(page: Path) -> None:
    """Emphasis is bold, because slanted characters touch the next one, and terms are those of the field."""
    text = page.read_text()
    assert ITALICS.findall("这是*部分和*，**结果**，`a * b` 和 2 * 3，以及*切分*") == ["*部分和*", "*切分*"]
    assert ITALICS.findall(prose(text)) == []
    assert re.findall("步子|二进制位完全|完全相同的二进制位|替身|楼层图|提前停止|比特", prose(text)) == []


def test_page_in_chinese_leads_to_lessons_in_chinese() -> None:
    text = CHINESE_PAGES[0].read_text()
    assert re.findall(r"\.\./tutorials/(\w+_zh)\.ipynb", text) == [f"{name}_zh" for name in ENGLISH]


# --- the lesson on pipelines ------------------------------------------------------------------------

FACTS = "losses alone stages shares bubbles refusal mesh_losses gpt_losses milliseconds behind exact loss parts"


@pytest.mark.documents
@pytest.mark.process
def test_pipeline_lesson(tmp_path: Path) -> None:
    """The losses of one device, the numbers of its text, and all pictures."""
    name = "11_pipelines"
    then = f"""
facts = {{name: found[name] for name in {FACTS.split()}}}
facts["failed"] = found["failed"]["rank"]
costs = {{schedule.name: found["cost_of"](schedule) for schedule in found["schedules"]}}
facts["bubble_of"] = {{name: cost.bubble for name, cost in costs.items()}}
facts["messages_of"] = {{name: cost.messages for name, cost in costs.items()}}
print(json.dumps(facts))
"""
    said = run_lesson(tmp_path, name, then)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["losses"][-1] < found["losses"][0]
    assert [sum(int(layer) % 2 == 0 for layer in names) for names in found["stages"]] == [2] * 4
    assert found["shares"]["1"] == 0.75
    assert found["shares"]["8"] == pytest.approx(3 / 11)
    expected = {"gpipe": 9, "1f1b": 9, "interleaved_1f1b": 4.5, "zb_h1": 3, "zbv": 1.5}
    assert {name: found["bubble_of"][name] for name in expected} == expected
    assert found["messages_of"]["interleaved_1f1b"] > 2 * found["messages_of"]["1f1b"]
    slower = {name: row[-1] - row[0] for name, row in found["bubbles"].items()}
    assert slower["gpipe"] == slower["eager_1f1b"] < slower["1f1b"] < slower["interleaved_1f1b"]
    assert "0B0 waits for 1B0" in found["refusal"]
    assert "micro-batch 7 reads: [4, 5, 6, 7]" in said
    assert found["mesh_losses"] == pytest.approx(found["gpt_losses"], rel=1e-4)
    assert min(found["milliseconds"], key=found["milliseconds"].get) == "zbv"
    assert found["behind"]["0.01"] < found["behind"]["0.04"]
    assert found["loss"] == pytest.approx(found["exact"], rel=1e-5)
    assert np.mean(found["parts"]) != pytest.approx(found["exact"], rel=1e-3)
    assert found["failed"] == 2
    pictures = list((tmp_path / "pictures" / "11_pipelines").glob("*.png"))
    assert len(pictures) == text_of(name).count("show(") - 1
