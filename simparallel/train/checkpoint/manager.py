"""`CheckpointManager`: the checkpoints of a training run, saved and restored by all its ranks together.

A save writes into a directory with a temporary name: each rank its file, the first rank the
manifest. All files are synced to disk (fsync) before the directory gets its final name. That rename is
atomic: a crash before it leaves the previous checkpoint as the last one, a crash after it the new one. Only
then are old checkpoints removed, by renaming them first.

    directory/
        ckpt-000300-0003/            step 300, the third save
            manifest.json
            rank_0.safetensors
            rank_1.safetensors
        ckpt-000400-0004.tmp-9f2c…/  being written, or left by a crash; the next save removes it
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from simparallel.base.checks import check_integer
from simparallel.base.files import FILES, Files, expanded, make_directories, remove_tree, write_file
from simparallel.comm import Group, current
from simparallel.errors import CheckpointError
from simparallel.layout.layout import Layout
from simparallel.train.checkpoint.arrays import listed, on_disk
from simparallel.train.checkpoint.barrier import RankBarrier
from simparallel.train.checkpoint.contents import OWN, Contents, TrainState, file_name, make_plan, merge_parts
from simparallel.train.checkpoint.reader import MANIFEST, CheckpointReader, to_bytes

# At least 6 and 4 digits, so that a listing is sorted in usual runs; larger numbers still match.
_NAME = re.compile(r"ckpt-([0-9]{6,18})-([0-9]{4,18})")
_TEMPORARY = re.compile(_NAME.pattern + r"\.tmp-[0-9a-f]+")


class Restored(NamedTuple):
    """The result of `CheckpointManager.restore`."""

    step: int
    extra: Any
    path: Path
    # The number of ranks that saved it.
    world_size: int


class Saved(NamedTuple):
    """A complete checkpoint; they sort in the order of saving."""

    serial: int
    step: int
    path: Path


class CheckpointManager:
    """The checkpoints in a directory.

    Args:
        directory: created by the first save, accessible to the owner only; "~" is the home directory. Only one
            training run at a time may write into it; on several machines it must be a shared directory.
        keep: number of checkpoints to keep, 1 or more; older ones are removed after a save.
        files: the system calls; replaced in tests.

    Raises:
        CheckpointError: `keep` is below 1.

    Example:
        >>> import tempfile
        >>> model = sp.nn.Linear(2, 1)
        >>> optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
        >>> manager = sp.CheckpointManager(tempfile.mkdtemp())
        >>> _ = manager.save(100, model=model, optimizer=optimizer, extra={"loss": 0.5})
        >>> manager.latest(), manager.restore(model=model, optimizer=optimizer).extra
        (100, {'loss': 0.5})
    """

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self.directory)!r}, keep={self.keep})"

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2, *, files: Files = FILES) -> None:
        self.directory = expanded(directory)
        self.keep = check_integer("CheckpointManager", "keep", keep, 1, CheckpointError)
        self._files = files

    # --- existing checkpoints ------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """List the steps of the complete checkpoints, ascending. Collective: no."""
        return sorted({saved.step for saved in self._saved()})

    def latest(self) -> int | None:
        """Return the step of the last save, None if there is none. Collective: no."""
        saved = self._saved()
        return saved[-1].step if saved else None

    def path(self, step: int | None = None) -> Path:
        """Return the directory of a checkpoint; None for the last save. Collective: no.

        Raises:
            CheckpointError: there is none.
        """
        return self._candidates(step)[0]

    def open(self, step: int | None = None, *, verify: bool = True) -> CheckpointReader:
        """Open a checkpoint to read single tensors, or slices of them. Collective: no.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        communicator, path = current(), self.path(step)
        try:
            return CheckpointReader(path, communicator.rank, communicator.world_size, verify)
        except CheckpointError:
            if path == self.path(step):
                raise
        # A concurrent training run has replaced the checkpoint.
        return self.open(step, verify=verify)

    # --- saving --------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        scaler: Any = None,
        random: bool = True,
        extra: Any = None,
        tensors: Mapping[str, Any] | None = None,
        layouts: Mapping[str, Layout] | None = None,
        own: Mapping[str, Any] | None = None,
        group: Group | None = None,
    ) -> Path:
        """Save the state of a training run. Values equal on all ranks are written once; each rank writes a share.

        Args:
            step: number of the step, 0 or more; saving it again replaces the older checkpoint.
            model, optimizer, scheduler, sampler, scaler: any object with `state_dict()` and
                `load_state_dict()`; None leaves it out. The sampler may be the `DataLoader`, which
                knows its position in the epoch. Of a `Pipeline` each rank saves its stages, under the
                names and numbers of one device. A `DistributedDataParallel` or `DataParallel` around the model
                is unwrapped; one inside the model stays part of the names ("head.module.weight").
            random: save the state of the random numbers.
            extra: plain data of the first rank (None acts as {}): numbers, text, and lists, tuples and dicts
                of them.
            tensors: name -> `TensorSlice`, or (global shape, slices, array): slices of further tensors,
                see `CheckpointReader.read`. Several ranks may hold the same slice; together they hold all.
            layouts: name of a parameter -> layout over the ranks; not needed for a sharded parameter, which
                has its own. The optimizer's state of that parameter is cut in the same way.
            own: name -> any object with a state, as above, that belongs to this rank alone (such as a callback):
                other ranks may hold another state under that name, or none.
            group: ranks that save together; by default all.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: the same on all ranks, naming the failure and its rank: a state that is not plain
                data, slices that do not fit together, a full disk. Earlier checkpoints stay unchanged.

        Collective: yes.
        Cost: one SHA-256 of this rank's state, one write of its share; memory for a copy of the
            state, as `state_dict()` makes it.
        """
        barrier = RankBarrier(group)
        name, contents = "", Contents(TrainState(), {}, None)
        try:
            # The ranks agree three times: on the contents, after writing the files, and after the rename. A failure on
            # one rank raises on all of them at the next agreement.
            parts = TrainState()
            with barrier.attempt():
                # First, because the ranks of a pipeline make it together.
                parts = TrainState(model, optimizer, scheduler, sampler, scaler, random, layouts, own)
                if barrier.rank == 0:
                    name = self._begin(step)
                contents = Contents(parts, tensors or {}, extra)
            everyones = barrier.agree((name, contents.claims, contents.trees))
            # Only the first rank has made a name; all write into its directory.
            temporary = self.directory / everyones[0][0]
            with barrier.attempt():
                # Every rank computes the same plan from the same claims, so it need not be sent.
                tensors_of_all, files = make_plan([claims for _, claims, _ in everyones])
                if barrier.rank in files:
                    # Synced here, before the agreement: the manifest and the rename follow only when all data are on
                    # disk.
                    self._write(temporary / file_name(barrier.rank), files[barrier.rank].pieces(contents.arrays))
            barrier.agree()
            final = self.directory / everyones[0][0].partition(".tmp-")[0]
            with barrier.attempt():
                if barrier.rank == 0:
                    manifest = {
                        "step": step,
                        "world_size": barrier.size,
                        "files": {file_name(rank): file.size_bytes for rank, file in files.items()},
                        "tensors": tensors_of_all,
                        "parts": merge_parts([trees for _, _, trees in everyones], parts.by_stage),
                        "extra": contents.extra,
                    }
                    self._commit(temporary, final, manifest)
                    # Only now: until the rename is on disk, the older checkpoints may be the only complete ones.
                    self._prune()
            barrier.agree()
        except BaseException:
            # Only the first rank has a name, so one rank cleans up.
            if name:
                with suppress(OSError):
                    remove_tree(self.directory / name, self._files)
            raise
        return final

    # --- restoring -----------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        sampler: Any = None,
        scaler: Any = None,
        random: bool = True,
        layouts: Mapping[str, Layout] | None = None,
        own: Mapping[str, Any] | None = None,
        verify: bool = True,
        group: Group | None = None,
    ) -> Restored:
        """Restore a checkpoint, on any number of ranks; on an error everything stays unchanged.

        Values equal on all saving ranks go to every rank. If they differed (such as running statistics of
        a batch norm), each rank gets its own back on the same number of ranks. On another number all ranks
        get the first rank's values, with a warning; but differing plain data is then an error, unless it is the
        random state or in `own`.

        Args:
            step: the step to restore; None takes the last one, or if that is damaged the one before, with a warning.
                If a concurrent training run removes the checkpoint, a newer one is used.
            model, optimizer, scheduler, sampler, scaler, random: objects to restore; each must be
                in the checkpoint.
            layouts: layouts of parameters now; they may differ from the saved ones.
            own: as for `save`. A name that this rank did not save gets the state of the first rank that saved
                it; a name that no rank saved stays unchanged.
            verify: compare checksums.
            group: ranks that restore together; by default all.

        Returns:
            Step, `extra`, path and number of saving ranks.

        Raises:
            CheckpointError: the same on all ranks, naming the failure and its rank: no such checkpoint, files
                missing or damaged, a state that does not fit.

        Collective: yes.
        Cost: each rank reads only the slices it needs; memory for two copies of the state, the new one and
            the old one, for a roll-back if any rank fails.
        """
        barrier = RankBarrier(group)
        # A placeholder, in case the attempt below fails before it is replaced.
        parts = TrainState()
        with barrier.attempt():
            parts = TrainState(model, optimizer, scheduler, sampler, scaler, random, layouts, own)
        failed: list[Path] = []
        error = None
        while True:
            path = None
            with barrier.attempt():
                # Only the first rank lists the directory: the ranks might otherwise see different checkpoints in it.
                if barrier.rank == 0:
                    path = self._next(step, failed, error)
            path = barrier.agree(path)[0]
            if path is None:
                assert error is not None
                raise error
            try:
                reader, states = read_states(barrier, path, parts, verify)
                break
            except CheckpointError as caught:
                failed, error = [*failed, path], caught
        load_states(barrier, reader, parts, states)
        return Restored(reader.step, reader.extra, path, reader.world_size)

    # --- internals -----------------------------------------------------------------------------------

    def _begin(self, step: int) -> str:
        """Make the temporary directory and return its name."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise CheckpointError(f"CheckpointManager.save: step={step!r} must be an integer of 0 or more.")
        with on_disk(self.directory, writing=True):
            make_directories(self.directory, self._files)
            self._remove_leftovers()
            saved = self._saved()
            # The serial number orders checkpoints by time of saving: a resumed run may save a smaller step again.
            serial = saved[-1].serial + 1 if saved else 1
            name = _temporary(f"ckpt-{step:06d}-{serial:04d}")
            self._files.make_directory(self.directory / name)
        return name

    def _write(self, path: Path, pieces: Iterable[Any]) -> None:
        with on_disk(path, writing=True):
            write_file(path, pieces, sync=True, files=self._files)

    def _commit(self, temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
        """Write the manifest, sync, and give the directory its final name."""
        with on_disk(temporary / MANIFEST, writing=True):
            # Last, by one rank, after all files that it describes.
            self._write(temporary / MANIFEST, [to_bytes(manifest)])
        with on_disk(final, writing=True):
            # The names of the files must be on disk before the rename that makes them a checkpoint.
            self._files.sync_directory(temporary)
            self._files.rename(temporary, final)
            # The rename is the commit point; syncing its directory makes the new name survive a power failure.
            self._files.sync_directory(self.directory)

    def _prune(self) -> None:
        """Remove all but the last `keep`. Rename first: a crash must not leave half a checkpoint under its name."""
        saved = self._saved()
        # A step that was saved again counts once, by its last save.
        stay = sorted({entry.step: entry for entry in saved}.values())[-self.keep :]
        try:
            for entry in saved:
                if entry not in stay:
                    self._files.rename(entry.path, entry.path.with_name(_temporary(entry.path.name)))
            self._files.sync_directory(self.directory)
            self._remove_leftovers()
        except OSError as error:
            warnings.warn(f"{self.directory}: an old checkpoint stays, {error}.", RuntimeWarning, stacklevel=2)

    def _remove_leftovers(self) -> None:
        """Remove the remains of interrupted saves and removals."""
        for path in sorted(self.directory.iterdir()):
            # Only names that this class makes, and no links: other files of the user in the directory are not touched.
            if _TEMPORARY.fullmatch(path.name) and not path.is_symlink():
                remove_tree(path, self._files)

    def _saved(self) -> list[Saved]:
        """List the complete checkpoints, in the order of saving."""
        with on_disk(self.directory), suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            return sorted(
                Saved(int(match[2]), int(match[1]), Path(entry.path))
                for entry in entries
                if (match := _NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
            )
        return []

    def _candidates(self, step: int | None) -> list[Path]:
        """List the checkpoints to try, in order. Raises CheckpointError if there is none."""
        paths = [entry.path for entry in self._saved()[::-1] if step in (None, entry.step)]
        if not paths:
            which = "" if step is None else f" of step {step!r}, only of {self.steps()}"
            raise CheckpointError(f"{self.directory} holds no checkpoint{which}.", path=str(self.directory))
        return paths

    def _next(self, step: int | None, failed: list[Path], error: CheckpointError | None) -> Path | None:
        """Return the checkpoint to try after some failed, the last one with `error`; None if there is no other."""
        there = self._candidates(step)
        left = [path for path in there if path not in failed]
        # One that is no longer there was removed by a concurrent run, after it had saved a newer one.
        if error is not None and failed[-1] in there:
            # Any older checkpoint can replace a damaged last one, but not a step that was requested by number.
            if step is not None or not left:
                return None
            warnings.warn(f"{error} Going back to {left[0]}.", RuntimeWarning, stacklevel=3)
        return left[0] if left else None


def _temporary(name: str) -> str:
    return f"{name}.tmp-{secrets.token_hex(8)}"


def read_states(
    barrier: RankBarrier, path: Path, parts: TrainState, verify: bool
) -> tuple[CheckpointReader, dict[str, Any]]:
    """Read the state dicts of the parts in the checkpoint into host memory; the reader is closed afterwards.

    Raises:
        CheckpointError: the same on all ranks; the checkpoint is damaged.
    """
    states: dict[str, Any] = {}
    digest = ""
    with barrier.attempt(), on_disk(path), CheckpointReader(path, barrier.rank, barrier.size, verify) as reader:
        for name in parts.objects:
            if name in reader.parts():
                states[name] = reader.state(name, partial(parts.read, reader))
        # Compared below: without a shared directory, ranks may find other checkpoints of the same name.
        digest = reader.digest
    digests = barrier.agree(digest)
    if len(set(digests)) > 1:
        raise CheckpointError(f"{path}: the ranks see different checkpoints there.", path=str(path))
    return reader, states


def load_states(barrier: RankBarrier, reader: CheckpointReader, parts: TrainState, states: Mapping[str, Any]) -> None:
    """Load the states into their objects. Raises CheckpointError on all ranks alike, with everything rolled back."""
    # A part in `own` that no rank saved stays unchanged.
    names = [name for name in parts.objects if name in states or not name.startswith(OWN)]
    before: dict[str, Any] = {}
    try:
        with barrier.attempt(), on_disk(reader.path):
            for name in names:
                # Called for its error: a missing part is refused before anything is changed.
                reader.tree(name)
                # For the roll-back if any rank fails.
                before[name] = parts.objects[name].state_dict()
            _check_substitutes(barrier, reader)
        barrier.agree()
        with barrier.attempt(), on_disk(reader.path):
            for name in names:
                try:
                    parts.objects[name].load_state_dict(states[name])
                except Exception as error:
                    raise CheckpointError(f"{name} does not fit: {type(error).__name__}: {error}") from error
        barrier.agree()
    except BaseException:
        # Roll back on every rank: another one has failed, or this one.
        for name, state in before.items():
            parts.objects[name].load_state_dict(state)
        raise


def _check_substitutes(barrier: RankBarrier, reader: CheckpointReader) -> None:
    """Refuse plain data of other ranks that differed between the saving ranks; warn of other such values."""
    held = f"{reader.world_size} ranks saved different values, and these are {barrier.size} ranks"
    # Plain data cannot be assigned to other ranks, unlike random states and parts in `own`, which restart from the
    # first rank's.
    plain = [x for x in reader.stood_in if x in reader.parts() and x != "random" and not x.startswith(OWN)]
    if plain:
        raise CheckpointError(
            f"{held}: {', '.join(plain)} cannot be assigned to them. Leave it out, or use {reader.world_size} ranks."
        )
    if reader.stood_in and barrier.rank == 0:
        text = f"{reader.path}: {held}: all ranks take {listed(reader.stood_in)} of the first one."
        warnings.warn(text, RuntimeWarning, stacklevel=4)
