"""Build the sdist and the wheel of the last commit, for a package index: `python tools/release.py [FOLDER]`.

The same commit gives the same bytes, and the wheel is built from the sdist, so anyone can check both. Times are that of
the commit. Needs git and `build`; further arguments go to `build`, such as --no-isolation.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]


def repack(sdist: Path, target: Path, time_s: int) -> None:
    """Write an sdist again without what differs from build to build: times, users, the order of files."""
    with (
        tarfile.open(sdist) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, time_s) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time_s, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def release(folder: Path, *options: str) -> None:
    """Build both files of HEAD into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    time_s = subprocess.check_output(("git", "log", "-1", "--format=%ct"), cwd=ROOT, text=True).strip()
    commit = subprocess.check_output(("git", "archive", "HEAD"), cwd=ROOT)
    build = (sys.executable, "-m", "build", *options)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": time_s}
    os.umask(0o022)
    with TemporaryDirectory() as name:
        checkout, unpacked = Path(name, "checkout"), Path(name, "unpacked")
        with tarfile.open(fileobj=io.BytesIO(commit)) as archive:
            archive.extractall(checkout, filter="data")
        subprocess.run((*build, "--sdist", "--outdir", name, checkout), env=environment, check=True)
        (sdist,) = Path(name).glob("*.tar.gz")
        repack(sdist, folder / sdist.name, int(time_s))
        with tarfile.open(folder / sdist.name) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = unpacked.iterdir()
        subprocess.run((*build, "--wheel", "--outdir", folder, source), env=environment, check=True)


if __name__ == "__main__":
    release(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute(), *sys.argv[2:])
