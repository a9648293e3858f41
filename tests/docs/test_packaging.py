"""What a release says about itself: addresses, versions, requirements, and files are the same wherever they stand."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
import yaml

import simparallel

ROOT = Path(__file__).parents[2]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
METADATA = SETTINGS["metadata"]
URLS = dict(line.split(" = ") for line in METADATA["project_urls"].strip().splitlines())
SOURCE = URLS["Source"]
# What may stand before the name of the repository, for example in the address that opens a lesson in Colab.
HOSTS = ("https://github.com/", "https://colab.research.google.com/github/")
TEXTS = (
    "*.md", "*.cfg", "*.cff", "*.toml", "docs/**/*.md", "docs/**/*.py", "tutorials/*.*", "simparallel/**/*.py",
    ".github/**/*.*", "conda/*", "tools/*", "benchmarks/**/*.py", "figures/*.py", "examples/**/*.*",
)  # fmt: skip


def file_at(address: str) -> Path | None:
    """Return the file or folder of this checkout that an address of the project shows; None for any other address."""
    found = re.fullmatch(rf"{re.escape(SOURCE)}/(?:blob|raw|tree)/main/([^#]+)", address)
    return ROOT / found[1] if found else None


def wrong_addresses(text: str) -> list[str]:
    """Return the addresses of another project of this name, and those of files that are not in the checkout."""
    repository = SOURCE.removeprefix("https://github.com/")
    starts = tuple(host + repository for host in HOSTS)
    found = re.findall(r"https?://[^\s)\]>\"'`\\]*simparallel[^\s)\]>\"'`\\]*", text)
    here = [re.sub(rf"^({'|'.join(HOSTS)})", HOSTS[0], address.split("#")[0]) for address in found]
    is_wrong = [
        not address.startswith(starts) or ("/main/" in address and not (file_at(file) or Path()).exists())
        for address, file in zip(found, here, strict=True)
    ]
    return [address for address, wrong in zip(found, is_wrong, strict=True) if wrong]


def test_addresses_are_of_this_project():
    files = {path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
    texts = {path: path.read_text("utf-8") for path in files}
    wrong = {path.relative_to(ROOT).as_posix(): wrong_addresses(text) for path, text in texts.items()}
    assert {path: addresses for path, addresses in wrong.items() if addresses} == {}
    assert sum(SOURCE in text for text in texts.values()) >= 6


def test_wrong_addresses_are_found():
    right = [SOURCE, f"{SOURCE}/issues", f"{SOURCE}/blob/main/docs/guide.md#runs", f"{SOURCE}/raw/main/README.md"]
    lesson = SOURCE.replace(HOSTS[0], HOSTS[1]) + "/blob/main/tutorials/01_one_device.ipynb"
    wrong = [
        "https://elsewhere.example/simparallel/simparallel",
        f"{SOURCE}/blob/main/docs/nothing.md",
        lesson.replace("01", "91"),
    ]
    assert wrong_addresses("\n".join(f"[x]({address})" for address in (*right, lesson, *wrong))) == wrong


def test_index_shows_links_and_pictures():
    """An index of packages shows the README alone: no link in it may need the files beside it."""
    text = re.sub(r"```.*?```|`[^`]*`(?!\])", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert re.findall(r"\]\((?!https://)[^)]*\)|^\[[^\]]+\]: (?!https://)\S+", text, re.MULTILINE) == []
    pictures = re.findall(r"!\[[^\]]*\]\[([^\]]+)\]", text)
    assert pictures
    for name in pictures:
        assert f"[{name}]: {SOURCE}/raw/main/figures/" in text
    used = set(re.findall(r"\]\[([^\]]+)\]", text))
    assert used == set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))


def test_version_is_the_same_everywhere():
    assert METADATA["version"] == "attr: simparallel.__version__"
    version = simparallel.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())["context"]["version"] == version
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] in ("Unreleased", version)


def test_changelog_has_the_usual_form():
    """That of keepachangelog.com: versions, and below each its kinds of changes."""
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions
    for version in versions:
        assert re.fullmatch(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version)


def requirements(lines: list[str]) -> set[tuple[str, str]]:
    """Return (name, versions) of requirements as pip or conda write them, without markers."""
    found = [re.fullmatch(r"([\w-]+) *([^;]*?) *(;.*)?", line) for line in lines]
    return {(match[1].removesuffix("-base"), match[2]) for match in found if match}


def test_recipe_has_the_metadata():
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    options = SETTINGS["options"]
    python = {("python", options["python_requires"])}
    run = [line.replace("${{ python_min }}", recipe["context"]["python_min"]) for line in recipe["requirements"]["run"]]
    assert requirements(run) == requirements(options["install_requires"].strip().splitlines()) | python
    (script,) = SETTINGS["options.entry_points"]["console_scripts"].strip().splitlines()
    assert recipe["build"]["python"]["entry_points"] == [script]
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (METADATA["description"], METADATA["license_expression"])
    assert (about["homepage"], about["documentation"]) == (SOURCE, URLS["Documentation"])


def pythons(matrix: dict) -> set[str]:
    return {*matrix["python"], *(case["python"] for case in matrix["include"])}


def test_every_named_python_and_system_is_tested():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    named = set(re.findall(r"Python :: (3\.\d+)$", METADATA["classifiers"], re.MULTILINE))
    linux, others = (jobs[name]["strategy"]["matrix"] for name in ("linux", "other-systems"))
    assert pythons(linux) == named
    assert f">={min(named, key=lambda version: int(version[2:]))}" == SETTINGS["options"]["python_requires"]
    for matrix in (linux, others):
        assert {"newest", "oldest"} <= {*matrix["versions"], *(case["versions"] for case in matrix["include"])}
    assert pythons(others) <= named
    assert {system.split("-")[0] for system in others["system"]} == {"macos", "windows"}


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_workflows_name_files_that_exist(path):
    text = path.read_text()
    yaml.safe_load(text)
    for name in re.findall(r"(?<![\w/])((?:\.ci|tools|tutorials)/[\w.]+)(?![\w\[])", text):
        assert (ROOT / name).exists(), name
