"""One word for one thing on the command line, no abbreviations, and errors that suggest what was meant."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st

from simparallel import zoo
from simparallel.base.argparse_checks import Parser
from simparallel.base.names import did_you_mean
from simparallel.cli import main
from simparallel.machine.cluster import PRESETS

ROOT = Path(__file__).parents[2]
KNOWN = [*PRESETS, *zoo.names()]


def parsers(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from parsers(command, f"{name} {word}".strip())


def test_an_option_means_the_same_in_every_command() -> None:
    found: dict[str, set[str]] = {}
    for name, parser in parsers(main.parser()):
        assert isinstance(parser, Parser), name
        assert not parser.allow_abbrev, name
        for word, action in parser._option_string_actions.items():
            found.setdefault(word, set()).add(action.dest)
    assert {word: sorted(dests) for word, dests in found.items() if len(dests) > 1} == {}
    assert {"-n", "--world-size", "--cluster", "--device-memory", "--picture", "--out"} <= set(found)
    assert not {"-o", "--batch", "--device", "--memory", "--np", "--png", "--profiler", "--save", "--trace"} & set(
        found
    )


USAGE = {
    "hardware": ("run --device a100 x.py", "unrecognized arguments: --device. Did you mean --cluster?"),
    "hardware of msrun": ("msrun --device=a100 x.py", "--device=a100. Did you mean --cluster?"),
    "ranks": ("predict --np 4 x.py", "--np. Did you mean -n?"),
    "ranks of mpirun": ("run --np 4 x.py", "--np. Did you mean -n?"),
    "memory": ("plan mlp --cluster a100 --memory 1GB", "Did you mean --device-memory?"),
    "batch": ("plan mlp --cluster a100 --batch 8", "Did you mean --batch-size or --global-batch?"),
    "picture": ("trace t.json --png t.png", "Did you mean --picture?"),
    "events": ("predict --trace t.json --png t.png x.py", "--trace. Did you mean --out?"),
    "file": ("cluster a100 --save a.json", "Did you mean --out?"),
    "file of a table": ("rank-table make -o t.json", "make: error: unrecognized arguments: -o t.json. Did you"),
    "abbreviation": ("predict --clus a100 x.py", "--clus. Did you mean --cluster?"),
    "misspelt": ("msrun --worker_nmu=4 x.py", "Did you mean --worker-num"),
    "command": ("predit x.py", "invalid choice: 'predit' (choose from"),
    "meant command": ("predit x.py", "). Did you mean predict?"),
    "action": ("rank-table mrege a.json", "Did you mean merge?"),
    "choice": ("trace export t.json --format kinteo", "Did you mean kineto?"),
    "only in a checkout": ("figures", "invalid choice: 'figures'"),
}  # fmt: skip


@pytest.mark.parametrize("case", USAGE)
def test_unknown_words_suggest_ours(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, text = USAGE[case]
    with pytest.raises(SystemExit) as caught:
        main.main(words.split())
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("run --cluster h100 x.py", "Did you mean dgx-h100?\n"),
        ("plan resnet --cluster a100", "Did you mean resnet18 or resnet50?\n"),
        ("plan GPT --cluster a100", "Did you mean gpt?\n"),
        ("zoo tags", "Did you mean swapped_tags? "),
    ],
)
def test_unknown_names_suggest_known_ones(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.py").touch()
    assert main.main(words.split()) == 2
    assert text in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", ["trace t.json --pgn x", "run --gtx1080 x.py", "gtx1080"])
def test_far_words_suggest_nothing(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(words.split())
    assert "Did you mean" not in capsys.readouterr().err
    assert did_you_mean("gtx1080", PRESETS) == did_you_mean("tpu", PRESETS) == ""


@given(st.sampled_from(KNOWN).filter(lambda name: len(name) > 4), st.data())
def test_a_missing_letter_or_part_is_found(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    shorter = name[:at] + name[at + 1 :]
    assume(shorter not in KNOWN)
    assert did_you_mean(shorter, [name]) == f" Did you mean {name}?"
    assert did_you_mean(name.upper().replace("_", "-"), KNOWN) == f" Did you mean {name}?"
    assert did_you_mean("".join(chr(ord("α") + ord(x) % 24) for x in name), KNOWN) == ""


def test_options_of_the_tools_of_a_checkout() -> None:
    """They are commands of their own: `python -m benchmarks`, `python -m figures`."""
    for words, text in (
        ("benchmarks ddp --ranks 2", "unrecognized arguments: --ranks"),
        ("benchmarks ddpp", "Did you mean ddp?"),
        ("figures --lits", "Did you mean --list?"),
    ):
        told = subprocess.run([sys.executable, "-m", *words.split()], cwd=ROOT, capture_output=True, text=True)
        assert told.returncode == 2
        assert text in told.stderr
