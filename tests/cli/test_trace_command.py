"""`simparallel trace`: view, summary, export, diff, and what is refused."""

import webbrowser
from pathlib import Path

import pytest

import simparallel as sp
from simparallel.cli import main


@pytest.fixture(autouse=True)
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sp.Trace:
    monkeypatch.chdir(tmp_path)
    found = sp.launch(sp.barrier, world_size=2, transport="inline").trace
    found.save("trace.json")
    return found


def test_view_writes_the_page(trace: sp.Trace, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Beside the trace, or where it is told; a browser opens only if it is asked for."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main.main(["trace", "view", "trace.json"]) == 0
    assert capsys.readouterr().out == "written: trace.html\n"
    assert Path("trace.html").read_text() == trace.html()
    assert opened == []
    assert main.main(["trace", "view", "trace.json", "--out", "new/t.html", "--open"]) == 0
    assert opened == [Path("new/t.html").resolve().as_uri()]


def test_summary_is_the_default(trace: sp.Trace, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["trace", "trace.json"], ["trace", "summary", "trace.json"]):
        assert main.main(arguments) == 0
        assert capsys.readouterr().out == f"{trace.table()}\n"


def test_file_named_as_an_action(trace: sp.Trace) -> None:
    trace.save("view")
    assert main.main(["trace", "view"]) == 0
    assert main.main(["trace", "view", "view"]) == 0


@pytest.mark.parametrize("kind", ["chrome", "kineto", "csv"])
def test_export_writes_what_the_method_writes(kind: str, trace: sp.Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trace", "export", "trace.json", "--format", kind, "--out", "command"]) == 0
    told = capsys.readouterr().out.removeprefix("written: ").rstrip("\n").split(", ")
    for mine, others in zip(map(Path, told), trace.export("method", kind), strict=True):
        assert mine.read_bytes() == others.read_bytes()


REFUSED = {
    "two to view": (["view", "trace.json", "trace.json"], "trace view: 2 traces, but it takes 1."),
    "one to compare": (["diff", "trace.json"], "trace diff: 1 trace, but it takes 2."),
    "picture of a view": (
        ["view", "trace.json", "--picture", "t.png"],
        "--picture applies to trace summary, not to trace view",
    ),
    "export without a format": (["export", "trace.json", "--out", "x"], "trace export: give --format:"),
    "export to nowhere": (["export", "trace.json"], "give --format and --out:"),
    "no trace": (["view", "missing.json"], "missing.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_words_are_refused(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = REFUSED[case]
    assert main.main(["trace", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["trace.json"]
