"""A simulated accelerator, `fakedev:0` to `fakedev:3`: several devices with streams, events and memory of their own.

    def test_something(fakedev: Path) -> None:        # the fixture: the compiled device
        call_fresh(_something, fakedev)

    def _something(library: Path) -> None:
        load(library)
        torch.ones(3, device="fakedev:2")

What it simulates, and what it does not, says fakedev.cpp. Registering it changes the whole process for good, with
`torch.accelerator`: only fresh processes load it, never pytest's own. It is compiled once a machine and kept by the
hash of what it is made of; without Python's headers, since all that Python calls is a torch operation.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KIND = "fakedev"
COUNT = 4
SOURCE = Path(__file__).with_name("fakedev.cpp")
SOURCES = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
_FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O1", "-w")  # torch's headers warn
_COMPILE_WITHIN_S = 280


class NoCompiler(Exception):
    """This machine has no C++ compiler."""


def build() -> Path:
    """The compiled device, made unless it is there. Raises NoCompiler; RuntimeError where it does not compile."""
    wanted = os.environ.get("CXX", "c++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise NoCompiler(f"no C++ compiler: {wanted} is not on PATH (Debian: apt install g++)")
    made_of = (*(source.read_bytes() for source in SOURCES), torch.__version__, torch.__file__, compiler, _FLAGS)
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"torchstone-fakedev-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is somebody else's"
    library = folder / f"{key}.so"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest-xdist come here at once
        if not library.exists():
            unfinished = folder / f"{key}.unfinished"
            _compile(compiler, unfinished)
            unfinished.replace(library)
    return library


def load(library: Path) -> None:
    """Have this process know the devices; for good."""
    of_torch: Any = torch  # what a backend calls carries no types
    of_torch.ops.load_library(library)
    of_torch.utils.rename_privateuse1_backend(KIND)
    of_torch._register_device_module(KIND, _module())
    dist.Backend.register_backend("fakeccl", _group, devices=[KIND])


def _compile(compiler: str, library: Path) -> None:
    home = Path(torch.__file__).parent
    headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    command = [compiler, *_FLAGS, *headers, str(SOURCE), "-o", str(library), *libraries]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_WITHIN_S, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"{SOURCE.name} does not compile:\n{made.stderr[:5000]}")


def _module() -> types.ModuleType:
    """`torch.fakedev`: what torch asks the module of a backend for."""
    module: Any = types.ModuleType(f"torch.{KIND}")
    module.is_available = lambda: True
    module.device_count = lambda: COUNT
    module.is_initialized = lambda: True
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.Stream = partial(torch.Stream, KIND)
    module.Event = partial(torch.Event, KIND)
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream if stream is not None else nullcontext()
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None  # its random numbers are the CPU's
    found: types.ModuleType = module
    return found


def _group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """What `init_process_group` makes of "fakeccl", the backend of these devices: see collectives.h."""
    group = dist.ProcessGroup(store, rank, size)
    link = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, link)
    of_torch: Any = torch
    of_torch.ops.fakedev.talk_over(group.boxed())
    return group
