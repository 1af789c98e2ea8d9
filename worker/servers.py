"""Forkservers: one for each set of modules that jobs want to find imported, started when the first job wants it.

    servers = ForkServers()
    servers.ensure(PLAIN)                                  # starts it, without waiting until it has imported
    process = servers.start(COMPILER, target, args, name)  # waits for that
    servers.pid(PLAIN), servers.pids

TorchScript needs torch alone, which is there in two seconds and forks in ten milliseconds; the compiler (dynamo,
inductor, export) takes five seconds more and doubles the price of a fork, so jobs that do without it have a forkserver
without it. The kernel ends a forkserver when the thread that started it ends: start from a thread that lasts, one for
each server, since it waits for that server's imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, spawn
from multiprocessing.process import BaseProcess
from typing import Any

from torchstone.parallel import Part
from torchstone.specs import AnySpec, JitSpec, ParallelSpec, Variant

PLAIN = "worker.preload"
COMPILER = "worker.preload_compiler"

_COMPILED = {
    Variant.compile,
    Variant.compile_reduce_overhead,
    Variant.compile_max_autotune,
    Variant.export_aot,
    Variant.onnxruntime,  # its export is torch's own
}


def preload_for(spec: AnySpec) -> str:
    """The module whose imports a job of this spec wants to find done."""
    compiles = isinstance(spec, JitSpec) and not _COMPILED.isdisjoint(spec.variants)
    distributes = spec.kind in ("train", "hardware") or (isinstance(spec, ParallelSpec) and Part.schedule in spec.parts)
    return COMPILER if compiles or distributes else PLAIN


class ForkServers:
    """Forkservers by the module that they import."""

    def __init__(self) -> None:
        self._servers: dict[str, forkserver.ForkServer] = {}
        self._context = multiprocessing.get_context("forkserver")

    def ensure(self, preload: str) -> None:
        """Have the forkserver that imports `preload` running. Raises OSError where its socket cannot be made."""
        if preload not in self._servers:
            server = forkserver.ForkServer()
            server.set_forkserver_preload([preload])
            self._servers[preload] = server
        self._servers[preload].ensure_running()

    def start(self, preload: str, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        """A process that runs `target(*args)`, forked from the server that imports `preload`."""
        self.ensure(preload)
        process = self._context.Process(target=target, args=args, name=name)
        with _through(self._servers[preload]):
            process.start()
        return process

    def pid(self, preload: str = PLAIN) -> int | None:
        """The pid of a forkserver; None before it was started."""
        server = self._servers.get(preload)
        pid: int | None = getattr(server, "_forkserver_pid", None)
        return pid

    @property
    def pids(self) -> list[int]:
        """The pids of all that were started."""
        return [pid for preload in list(self._servers) if (pid := self.pid(preload)) is not None]


_DETOUR = threading.Lock()


@contextlib.contextmanager
def _through(server: forkserver.ForkServer) -> Iterator[None]:
    """What multiprocessing does for every process alike, done otherwise until it has asked for this one.

    It asks one module-wide server: here it is `server`. And it has the new process import the program that this one
    was started as, for functions that were defined there: the command line of Torchstone, a tenth of a second. While it
    waits for the answer, which takes as long as the server's imports, others may start theirs.
    """
    modules: tuple[Any, Any] = (forkserver, spawn)
    with contextlib.ExitStack() as detour:
        detour.enter_context(_DETOUR)
        connect, prepare = forkserver.connect_to_new_process, spawn.get_preparation_data
        detour.callback(setattr, forkserver, "connect_to_new_process", connect)
        detour.callback(setattr, spawn, "get_preparation_data", prepare)

        def connect_there(fds: list[int]) -> Any:
            try:
                return server.connect_to_new_process(fds)
            except ConnectionRefusedError:  # it is dying, so that nobody saw it dead: then a new one is started
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, getattr(server, "_forkserver_pid", 0), os.WEXITED | os.WNOWAIT)
                return server.connect_to_new_process(fds)
            finally:
                detour.close()

        def prepare_without_main(name: str) -> dict[str, Any]:
            return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

        modules[0].connect_to_new_process, modules[1].get_preparation_data = connect_there, prepare_without_main
        yield
