"""Train with Linux's own calls removed, as on another system: `python no_linux.py`. Called by test_inline."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import shutil
import signal
import sys
import sysconfig
import tempfile

WINDOWS = "--windows" in sys.argv
# Modules and names that macOS lacks; and further ones that Windows lacks.
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "posix_fallocate", "eventfd"):
    if hasattr(os, name):
        delattr(os, name)
if WINDOWS:
    for module in ("fcntl", "resource", "termios", "pwd", "grp"):
        sys.modules[module] = None  # type: ignore[assignment]
    posix = (
        "fork", "register_at_fork", "killpg", "getpgid", "setsid", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY",
        "O_NONBLOCK", "sysconf", "getuid", "geteuid", "getloadavg", "mkfifo",
    )  # fmt: skip
    for name in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_SHARED"):
        delattr(mmap, name)
    for name in posix:
        if hasattr(os, name):
            delattr(os, name)
    os.supports_dir_fd.clear()
    importlib.reload(shutil)  # it chose calls of Linux when it was imported
    for name in ("SIGKILL", "SIGUSR1", "SIGHUP", "SIGSTOP", "SIGCHLD", "SIGCONT", "pthread_sigmask", "SIGALRM"):
        if hasattr(signal, name):
            delattr(signal, name)

    class NoLibrary(ctypes.CDLL):
        def __init__(self, name: str | None, *args: object, **kwargs: object) -> None:
            if name is None:
                raise TypeError("Windows has no library without a name")
            super().__init__(name, *args, **kwargs)  # type: ignore[arg-type]

    ctypes.CDLL = NoLibrary  # type: ignore[misc]

import numpy as np  # noqa: E402

sysconfig.get_config_vars()  # before the platform's name changes
if not WINDOWS:  # its name would make the standard library look for Windows itself
    sys.platform = "darwin"

import simparallel as sp  # noqa: E402
from simparallel.data.imagefile import read_npy  # noqa: E402


def train() -> float:
    sp.set_seed(1)
    net = sp.parallel.DistributedDataParallel(sp.nn.Linear(3, 1))
    optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
    x = sp.Tensor(np.ones((4, 3), np.float32) * sp.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        optimizer.step()
    return float(sp.all_reduce(loss.detach()).item())


if __name__ == "__main__":
    results = sp.launch(train, world_size=3, transport="inline")
    assert len(set(results)) == 1
    assert sp.models.gpt().explain is not None
    assert sp.data.DataLoader(sp.data.TensorDataset(np.zeros((4, 2))), 2)
    with tempfile.TemporaryDirectory() as folder:
        np.save(path := os.path.join(folder, "image.npy"), np.zeros((2, 2), np.uint8))
        assert read_npy(path).shape[:2] == (2, 2)
    assert sp.train.Model is not None
    if WINDOWS:
        try:
            sp.launch(train, world_size=2)
        except sp.errors.LaunchError as error:
            assert 'transport="inline"' in str(error)  # noqa: PT017
    else:
        assert sp.launch(train, world_size=3) == results
    print("trained inline:", results[0])
