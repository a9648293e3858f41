"""One file per model, as in MindSpore: safetensors, replaced atomically."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from simparallel.base.files import expanded, open_file, write_atomically
from simparallel.base.system import memory_size_bytes
from simparallel.errors import CheckpointError, StateDictError
from simparallel.nn import Module
from simparallel.train.checkpoint import tree as trees
from simparallel.train.checkpoint.arrays import CODES, host_array, listed, on_disk, plan_file, raw
from simparallel.train.ddp_wrappers import bare

# The key of our entry in the file's metadata, which other readers of the format ignore.
_MARK = "simparallel"
# The key of the checksum in that entry.
_SUM = "sha256"


def save_checkpoint(save_obj: Module | Mapping[str, Any], ckpt_file_name: str | os.PathLike[str]) -> None:
    """Save the parameters and buffers of a model in one safetensors file, readable by any library of that format.

    Args:
        save_obj: a model, or a dict of arrays or Tensors by name.
        ckpt_file_name: path of the file; an existing file is replaced atomically, after the new one is
            complete and synced to disk.

    Raises:
        CheckpointError: `save_obj` is not such a model or dict, or writing fails.

    Collective: no. One rank calls it; `CheckpointManager` saves on all of them.
    """
    value = bare(save_obj)
    arrays = value.state_dict() if isinstance(value, Module) else value
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise CheckpointError(f"save_checkpoint: expected a Module or a dict of arrays, got {type(save_obj).__name__}.")
    _write(expanded(ckpt_file_name), arrays, {})


def load_checkpoint(
    ckpt_file_name: str | os.PathLike[str], net: Module | None = None, strict_load: bool = False
) -> dict[str, np.ndarray]:
    """Read a safetensors file, written by this library or another.

    Args:
        ckpt_file_name: path of the file.
        net: a model to load the arrays into, see `load_param_into_net`. Names that only one of them has
            cause a warning.
        strict_load: raise unless the names match exactly.

    Returns:
        Name -> array.

    Raises:
        CheckpointError: the file is missing, truncated, not a safetensors file or damaged (in files of this library
            any flipped bit that changes the result is detected); or it does not fit `net`, which then stays unchanged.

    Collective: no.
    """
    path = expanded(ckpt_file_name)
    arrays, _ = _read(path)
    if net is not None:
        with on_disk(path):
            missing, unused = load_param_into_net(net, arrays, strict_load)
        # No name in common: an error, because a warning might be overlooked.
        if len(missing) == len(bare(net).state_dict()) and missing:
            holds = f"it holds {listed(arrays)}, the model has {listed(missing)}"
            raise CheckpointError(
                f"{path} belongs to another model than {type(net).__name__}: {holds}.", path=str(path)
            )
        if missing or unused:
            who = type(bare(net)).__name__
            problems = [f"it lacks {listed(missing)} of {who}"] if missing else []
            problems += [f"{who} does not have its {listed(sorted(unused))}"] if unused else []
            hint = "strict_load=True makes this an error; load_param_into_net returns the names instead."
            warnings.warn(f"{path}: {'; '.join(problems)}. {hint}", RuntimeWarning, stacklevel=2)
    return arrays


def load_param_into_net(
    net: Module, parameter_dict: Mapping[str, Any], strict_load: bool = False
) -> tuple[list[str], list[str]]:
    """Copy arrays into a model, by name; on an error copy none.

    Args:
        net: the model.
        parameter_dict: name -> array or Tensor, as from `load_checkpoint`.
        strict_load: require that the names match exactly. Shapes and dtypes must match in any case.

    Returns:
        Names of the model without an array, and names of arrays that the model does not have.

    Raises:
        CheckpointError: lists the misfits; the model stays unchanged.
    """
    try:
        return tuple(bare(net).load_state_dict(parameter_dict, strict=strict_load))
    except StateDictError as error:
        raise CheckpointError(str(error)) from error


def save(obj: Any, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Save nested dicts, lists, numbers, text and arrays, such as a state dict, in one safetensors file.

    Args:
        obj: the value to save.
        path: the file; an existing one is replaced atomically. Or an open file, such as a BytesIO.

    Raises:
        CheckpointError: `obj` holds any other type, or writing fails.
    """
    arrays: dict[str, Any] = {}
    tree = trees.encode(obj, arrays)
    _write(expanded(path) if isinstance(path, (str, os.PathLike)) else path, arrays, {"tree": tree})


def load(path: str | os.PathLike[str] | IO[bytes]) -> Any:
    """Load a value written by `save`; of any other safetensors file a dict of its arrays. Raises CheckpointError.

    Args:
        path: the file, or an open one, which is read to its end.
    """
    source = expanded(path) if isinstance(path, (str, os.PathLike)) else path
    arrays, note = _read(source)
    with on_disk(source):
        return arrays if "tree" not in note else trees.decode(note["tree"], arrays.__getitem__)


def _write(path: Path | IO[bytes], given: Mapping[str, Any], note: dict[str, Any]) -> None:
    arrays = {name: host_array(name, value) for name, value in given.items()}
    # The format has no checksum. Ours covers the contents, not the header's layout.
    note = {**note, _SUM: _digest(arrays, note.get("tree"))}
    metadata = {"format": "np", _MARK: json.dumps(note, allow_nan=False)}
    plan = plan_file({name: (CODES[array.dtype], array.shape) for name, array in arrays.items()}, metadata)
    with on_disk(path, writing=True):
        if not isinstance(path, Path):
            path.writelines(plan.pieces(arrays))
            return
        # A crash leaves the old file or the new one: the bytes are synced before the rename.
        write_atomically(path, plan.pieces(arrays), sync=True)


def _read(source: Path | IO[bytes]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the arrays, and the metadata entry that `_write` adds. Raises CheckpointError."""
    # Once into memory: the checksum and the arrays are then of the same bytes.
    content = _content(source) if isinstance(source, Path) else source.read()
    try:
        # The library's order is random; sort, so that equal files load in one order.
        arrays = dict(sorted(safetensors.numpy.load(content).items()))
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
        if _MARK not in metadata and any(_SUM in value for value in metadata.values()):
            raise ValueError(f"its metadata entry is not called {_MARK!r}")
        note = json.loads(metadata.get(_MARK, "{}"))
        if _SUM in note and note[_SUM] != _digest(arrays, note.get("tree")):
            raise ValueError("its contents do not match their checksum")
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        # The marks of archives, which PyTorch puts its pickles into, and of pickles.
        if content[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
            reason = (
                "it looks like a pickle, which could run any program when it is read; where PyTorch is installed, "
                "write it again with safetensors.torch.save_file(state_dict, path)"
            )
        text = f"{source} ({len(content)} bytes) is damaged or not a safetensors file: {reason}."
        raise CheckpointError(text, path=str(source)) from None
    # Some versions of safetensors return views of read-only bytes.
    return {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}, note


def _content(path: Path) -> bytes:
    with on_disk(path), open_file(path, links=False) as file:
        # A sparse file may have any size.
        if 0 < memory_size_bytes() < os.fstat(file.fileno()).st_size:
            raise OSError(errno.ENOMEM, "the memory is too small for it")
        return file.read()


def _digest(arrays: Mapping[str, np.ndarray], tree: Any) -> str:
    """Return the SHA-256 of names, dtypes, shapes, plain data and bytes."""
    names = sorted(arrays)
    listing = [[name, arrays[name].dtype.str, list(arrays[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([listing, tree], sort_keys=True).encode())
    for name in names:
        digest.update(raw(np.ascontiguousarray(arrays[name])))
    return digest.hexdigest()
