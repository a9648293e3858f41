"""The pictures of the documentation: a script for each, the same bytes each time, and the command that draws them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from simparallel.view import save_figure

sys.path.append(str(Path(__file__).parents[2]))
from figures.__main__ import FOLDER, main, scripts

ROOT = FOLDER.parent
SCRIPTS = scripts(FOLDER)
DRAWN = [name for name, script in SCRIPTS.items() if not script.measured]
# The pictures in the repository were drawn with this version; another one places letters and lines differently.
MATPLOTLIB = "3.11.2"
SLOW = {"landscape"}
# These train with data, so their last bits are those of the BLAS of the machine.
TRAINED = {"orthogonality"}


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.mark.documents
@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in DRAWN if name not in SLOW])
def test_figure_is_the_same_each_time(name, tmp_path):
    """Compares with the picture in the repository if its matplotlib drew it, else with a second drawing."""
    (path,) = SCRIPTS[name].write(tmp_path, (".svg",))
    if matplotlib.__version__ == MATPLOTLIB and name not in TRAINED:
        expected = FOLDER / path.name
    else:
        (expected,) = SCRIPTS[name].write(tmp_path / "again", (".svg",))
    assert path.read_bytes() == expected.read_bytes(), f"draw it again: python -m figures {name}"


def test_landscape_is_the_same_each_time(tmp_path, monkeypatch):
    """Of a small model, and with few other plans: the search for the picture's takes a minute."""
    module = SCRIPTS["landscape"].load()
    monkeypatch.setattr(module, "NEIGHBOURS", 40)
    one, two = (save_figure(module.draw(model="mlp", batch_size=256), tmp_path / f"{n}.svg") for n in range(2))
    assert one.read_bytes() == two.read_bytes()


def test_every_script_has_its_pictures():
    without = {name: [s for s in (".png", ".svg") if not (FOLDER / f"{name}{s}").exists()] for name in SCRIPTS}
    # These are written at the next measurement.
    assert {name for name, missing in without.items() if missing} <= {"calibration", "plans"}
    assert (FOLDER / "algorithms.gif").read_bytes().startswith(b"GIF89a")


def test_every_picture_is_small_enough():
    limits = {".png": 300_000, ".gif": 300_000, ".svg": 500_000}
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.suffix in limits}
    assert {name: size for name, size in sizes.items() if size > limits[Path(name).suffix]} == {}


def test_every_picture_is_in_the_gallery():
    text = (ROOT / "docs" / "figures.md").read_text()
    assert [name for name in SCRIPTS if f"python -m figures {name}`" not in text] == []
    shown = set(re.findall(r"\(\.\./figures/(\w+)\.", text))
    assert shown >= set(SCRIPTS)


def test_captions_are_single_sentences():
    for script in SCRIPTS.values():
        assert script.caption.endswith("."), script.name
        assert len(script.caption) <= 120, script.name


def test_command_draws_chosen_figures(tmp_path, capsys):
    assert main(["adasum", "redistribution", "--out", str(tmp_path)]) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["adasum.png", "adasum.svg", "redistribution.png", "redistribution.svg"]
    assert capsys.readouterr().out.count("written: ") == 4


def test_command_lists_all_figures(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCRIPTS)
    assert {line.split()[0] for line in lines if "Measures: " in line} == set(SCRIPTS) - set(DRAWN)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["timelines"], "figures: there is no 'timelines'"),
        (["timelines"], "Did you mean timeline?"),
        (["calibration", "--out", "pictures"], "--out: a page of docs/ is written with calibration"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, told, capsys):
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
