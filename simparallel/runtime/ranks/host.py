"""The host process: a clean interpreter that starts the device processes and watches over them.

It is started by exec, so that it contains neither data nor threads of the user's program. It imports
the modules that devices need, wraps the log handlers with multiprocessing-logging, forks, and then only
waits. Where a fork is not safe it spawns the devices: each is a new interpreter that inherits the same
descriptors. It never runs user code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from simparallel.base import blas
from simparallel.base.system import python_command
from simparallel.comm.memory.memfd import is_disabled
from simparallel.comm.memory.segment import SharedSegment
from simparallel.runtime.ranks import log_records
from simparallel.runtime.ranks.device import Wiring, device_main, read_config
from simparallel.runtime.title import set_title

# Modules that functions on devices are likely to use: imported once here instead of once in every device.
PRELOADED = ("simparallel.nn", "simparallel.optim", "simparallel.data", "simparallel.parallel", "numpy.random")
LOG = "simparallel.host"
GRACE_S = 2.0
# Time between looks at the processes where no descriptor tells of their deaths.
LOOK_S = 0.02


def main(config_fd: int) -> None:
    """Run the host; `config_fd` is a file with the launcher's JSON."""
    config = read_config(config_fd)
    wiring = Wiring(**config["wiring"])
    sys.path[:] = wiring.path
    set_title(f"simparallel host of {wiring.world_size} ranks, started by process {config['launcher_pid']}")
    # The launcher alone handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # An inherited SIG_IGN would hide the devices' exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A launcher may have blocked signals, and exec keeps the mask.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    multiprocessing.current_process().name = "host"
    log = logging.getLogger(LOG)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(log_records.MergedLog(sys.stderr))
    if wiring.start_method == "fork":
        os.close(config_fd)
        for module in PRELOADED:
            import_module(module)
        # Detect the BLAS once here instead of once in every device.
        blas.core()
        _gather_records(root)
    devices, host_life = _start(wiring, config_fd)
    control = Connection(wiring.control_fd)
    log.info("%d device processes: %s", wiring.world_size, ", ".join(str(d.pid) for d in devices))
    try:
        _watch(devices, control, wiring, config["launcher_pid"], log)
    finally:
        _end(devices)
        os.close(host_life)
        log.info("all device processes have ended")
        _close_log()
    # Nothing is left to do, and finalising the interpreter takes a tenth of a second.
    os._exit(0)


def _gather_records(root: logging.Logger) -> None:
    """Send the log records of this process and of every device that it will fork to one stream: scheduler.log."""
    multiprocessing.set_start_method("fork")
    try:
        from multiprocessing_logging import install_mp_handler

        # The last step before the forks: its receiver thread must stay idle.
        install_mp_handler()
    except (ImportError, OSError) as error:
        # A checkout on a machine that installs nothing may lack it, and semaphores need /dev/shm.
        root.warning("records of the devices are not merged here, only in worker_N.log: %s", error)


def _close_log() -> None:
    """Write the records that are still queued.

    The receiver thread checks five times a second, and after every record, whether its handler is closed. One more
    record wakes it at once.
    """
    for handler in logging.getLogger().handlers:
        if hasattr(handler, "queue"):
            threading.Timer(0.01, _wake, (handler.queue,)).start()
    logging.shutdown()


def _wake(records: Any) -> None:
    last = logging.LogRecord(log_records.WAKE_UP, logging.INFO, __file__, 0, "", (), None)
    # The receiver woke by itself and has closed its queue.
    with contextlib.suppress(ValueError, OSError):
        records.put(last)


class SpawnedDevice(subprocess.Popen[bytes]):
    """A device that is a new interpreter, with what the host uses of a `multiprocessing.Process`.

    It inherits the descriptors of its rank, and as standard error the log of all ranks, to which it adds its records.
    """

    def __init__(self, rank: int, wiring: Wiring, config_fd: int, host_life_fd: int) -> None:
        command = python_command("simparallel.runtime.ranks.device", config_fd, rank, host_life_fd, os.getpid())
        own = wiring.segment_fd, wiring.life_fd, wiring.log_fds[rank], wiring.connection_fds[rank]
        super().__init__(command, pass_fds=[config_fd, host_life_fd, *own])

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(limit_s)


Device = BaseProcess | SpawnedDevice


def _start(wiring: Wiring, config_fd: int) -> tuple[list[Device], int]:
    """Start all devices; return them and the write end of the host's life pipe.

    No record may be logged before the last fork: a device would inherit the log's locks in use.
    """
    life, host_life = os.pipe()
    of_devices = {*wiring.log_fds, *wiring.connection_fds}
    devices: list[Device] = []
    with warnings.catch_warnings():
        # The only other thread is the idle receiver of multiprocessing-logging.
        warnings.simplefilter("ignore", DeprecationWarning)
        # The devices' garbage collectors skip these objects, so that their pages stay shared.
        gc.freeze()
        for rank in range(wiring.world_size):
            try:
                if wiring.start_method == "fork":
                    own = {wiring.log_fds[rank], wiring.connection_fds[rank]}
                    others = {wiring.control_fd, host_life, *of_devices} - own
                    arguments = (rank, wiring, life, os.getpid(), others)
                    process = multiprocessing.Process(target=device_main, args=arguments, name=f"rank {rank}")
                    process.start()
                    devices.append(process)
                else:
                    devices.append(SpawnedDevice(rank, wiring, config_fd, life))
            except BaseException:
                # No more processes or memory. The launcher shows this traceback.
                for started in devices:
                    started.kill()
                raise
    # These belong to the devices: a connection must end with its device.
    for fd in (life, *of_devices):
        os.close(fd)
    return devices, host_life


def _death_of(pid: int | None) -> int | None:
    """Return a descriptor that becomes readable when this child, or our parent, ends; None without pidfds.

    A pipe is not enough: it stays open if the dead process has forked another one.
    """
    if pid is None or not hasattr(os, "pidfd_open") or is_disabled("pidfd"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _watch(devices: list[Device], control: Connection, wiring: Wiring, launcher_pid: int, log: logging.Logger) -> None:
    """Report each device that ends, at once, until the launcher closes its end of `control` or dies."""
    segment = SharedSegment(wiring.world_size, fd=wiring.segment_fd)
    alive = dict(enumerate(devices))
    deaths = {rank: _death_of(device.pid) for rank, device in alive.items()}
    launcher = _death_of(launcher_pid)
    limit_s = LOOK_S if None in (*deaths.values(), launcher) else None
    # Also a launcher that died before we began to watch it.
    while os.getppid() == launcher_pid:
        ready = wait([fd for fd in (*deaths.values(), launcher, control, wiring.life_fd) if fd is not None], limit_s)
        for rank, device in list(alive.items()):
            if (code := device.exitcode) is None:
                continue
            # First into shared memory, which ranks in a collective poll; only then to the launcher.
            del alive[rank], deaths[rank]
            segment.words[segment.map.exit_of(rank)] = code if code < 0 else code + 1
            log.info("rank %d (pid %d) ended with %d", rank, device.pid, code)
            # If the launcher has gone, the loop ends by its life pipe.
            with contextlib.suppress(OSError):
                control.send_bytes(json.dumps({"rank": rank, "exit_code": code}).encode())
        if launcher in ready or wiring.life_fd in ready:
            break
        # The launcher sends nothing here, so a readable end means that it has closed its own.
        if control in ready:
            return
    # Devices watch pipes by themselves, which may stay open, see `_death_of`.
    for device in alive.values():
        device.kill()


def _end(devices: list[Device]) -> None:
    """Wait `GRACE_S` for the devices to end, then kill the rest."""
    _wait_all(devices, GRACE_S)
    for device in devices:
        if device.is_alive():
            device.kill()
    _wait_all(devices, GRACE_S)


def _wait_all(devices: list[Device], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for device in devices:
        if device.is_alive():
            device.join(max(0.0, deadline - time.monotonic()))
