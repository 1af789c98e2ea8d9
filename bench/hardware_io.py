"""Are the storage and collectives probes right? Beside fio and a plain two-process gloo loop, pair by pair.

    python bench/hardware_io.py --folder /data        # at least 7 pairs; each pair in random order, one after the other

- storage: each O_DIRECT figure against fio on the same file (`--ioengine=psync` at depth 1, `libaio` at greater
  depths, as the probe does it): two files lie in other places of a disk that others share. fio's buffers are asked
  into huge pages as the probe's are: in small ones either's rate is a matter of chance. Goal: within 15 %.
- all-reduce: the probe's figure against `init_process_group` + `all_reduce` in two plain processes. Goal: within 10 %.

The ratio is ours / theirs with a 95 % interval over the pairs; a goal is missed only if the whole interval lies beyond.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from stopwatch import fresh

from worker.bench import LeasedDevice
from worker.hardware import collectives, storage
from worker.hardware.direct_io import HUGE_BYTES, open_unnamed
from worker.hardware.probe import ProbeBench, ProbeReport
from worker.measure.statistics import compare

FILE_BYTES = 256 << 20
CASES = [
    ("read", storage.CHUNK_BYTES, 1),
    ("read", storage.CHUNK_BYTES, 8),
    ("read", storage.BLOCK_BYTES, 1),
    ("read", storage.BLOCK_BYTES, 16),
    ("write", storage.CHUNK_BYTES, 1),
    ("write", storage.CHUNK_BYTES, 8),
    ("write", storage.BLOCK_BYTES, 1),
    ("write", storage.BLOCK_BYTES, 16),
]
"""Reads first: the probe compares what it reads, and fio writes over it."""
MESSAGE_BYTES = (1 << 20, 1 << 24)

PLAIN_GLOO = """
import os, sys, time
import torch, torch.distributed as dist
rank, size, count, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.sched_setaffinity(0, {int(sys.argv[5])})
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
x = torch.zeros(size // 4)
for _ in range(3):
    dist.all_reduce(x)
blocks = []
for _ in range(15):
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(x)
    took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    blocks.append(took.item() / count)
if rank == 0:
    print(sorted(blocks)[len(blocks) // 2])
"""


def main() -> None:
    """Run both and print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where files are written")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each storage measurement")
    parser.add_argument("--only", choices=["storage", "collectives"])
    arguments = parser.parse_args()
    pairs = max(7, arguments.pairs)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = bench_in(Path(folder))
        if arguments.only != "collectives":
            compare_storage(bench, pairs, arguments.seconds)
        if arguments.only != "storage":
            compare_gloo(bench, pairs)


def bench_in(folder: Path) -> ProbeBench:
    """Two CPU devices, as a job would hold them."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    devices = tuple(LeasedDevice(f"cpu:{i}", "cpu", cores[i::2] or cores) for i in range(2))
    return ProbeBench(cores, devices, folder, 4 << 30, 10.0)


def compare_storage(bench: ProbeBench, pairs: int, seconds: float) -> None:
    """Every case beside fio."""
    fio = shutil.which("fio")
    if fio is None:
        print("storage: fio is not installed (Debian: apt install fio): nothing to compare with")
        return
    with open_unnamed(bench.folder, FILE_BYTES) as file:
        if file.direct is None:
            print(f"storage: {bench.folder}: {file.refusal}: nothing to compare")
            return
        drive = storage.Drive(bench, file, FILE_BYTES)
        drive.lay_out(60.0, direct=True)
        same_file = Path(f"/proc/{os.getpid()}/fd/{file.cached}")  # it has no name
        for operation, block_bytes, depth in CASES:
            ours = partial(our_rate, bench, drive, operation, block_bytes, depth, seconds)
            theirs = partial(their_rate, fio, same_file, operation, block_bytes, depth, seconds)
            order = "sequential" if block_bytes == storage.CHUNK_BYTES else "random"
            tell(f"{order} {operation}, depth {depth:2}", ours, theirs, pairs, 1e6, "MB/s", 0.15)


def our_rate(
    bench: ProbeBench, drive: storage.Drive, operation: str, block_bytes: int, depth: int, seconds: float
) -> float:
    """The probe's bytes a second."""
    report = ProbeReport("storage")
    drive.time(report, operation, block_bytes, depth, seconds, direct=True)  # type: ignore[arg-type]
    assert drive.faults == 0 and report.readings[0].value is not None
    return report.readings[0].value


def their_rate(fio: str, file: Path, operation: str, block_bytes: int, depth: int, seconds: float) -> float:
    """fio's bytes a second."""
    random_or_not = "" if block_bytes == storage.CHUNK_BYTES else "rand"
    command = [
        fio,
        "--name=pair",
        f"--filename={file}",
        f"--size={FILE_BYTES}",
        f"--rw={random_or_not}{operation}",
        f"--bs={block_bytes}",
        f"--iodepth={depth}",
        f"--ioengine={'psync' if depth == 1 else 'libaio'}",
        "--direct=1",
        "--overwrite=1",
        "--time_based",
        f"--iomem_align={HUGE_BYTES}",
        f"--runtime={seconds}",
        "--output-format=json",
    ]
    in_huge_pages = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=in_huge_pages)
    return float(json.loads(told.stdout)["jobs"][0][operation]["bw_bytes"])


def compare_gloo(bench: ProbeBench, pairs: int) -> None:
    """The probe's all-reduce beside a plain loop."""
    for size in MESSAGE_BYTES:
        count = 8 if size < 1 << 22 else 1
        ours, theirs = (
            partial(fresh, partial(our_allreduce, bench.folder, size)),
            partial(plain_allreduce, bench, size, count),
        )
        tell(f"all-reduce of {size >> 20:2} MiB", ours, theirs, pairs, 1e6, "MB/s", 0.10)


def our_allreduce(folder: Path, size: int) -> float:
    """The probe's algbw."""
    collectives.SIZES_BYTES = (size,)  # type: ignore[assignment]
    report = collectives.run(replace(bench_in(folder), budget_s=3.0))  # a third of it is for all-reduce
    (reading,) = [reading for reading in report.readings if reading.name == "all_reduce_algbw"]
    assert reading.value is not None and report.checks[0].passed
    return reading.value


def plain_allreduce(bench: ProbeBench, size: int, count: int) -> float:
    """algbw of two plain processes."""
    meeting = bench.folder / f"plain-{time.monotonic_ns()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN_GLOO, str(rank), str(size), str(count), str(meeting), str(device.cores[0])],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank, device in enumerate(bench.devices)
    ]
    try:
        told = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return size / float(told[0])


def tell(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    pairs: int,
    unit: float,
    unit_name: str,
    goal: float,
) -> None:
    """Take the pairs and print the ratio."""
    draw, taken = random.Random(name), []
    for _ in range(pairs):
        first_is_ours = draw.random() < 0.5
        one, other = (ours(), theirs()) if first_is_ours else (theirs(), ours())
        taken.append((one, other) if first_is_ours else (other, one))
    our_rates, their_rates = np.array(taken).T
    # `compare` gives median(against) / median(of).
    found = compare(their_rates, our_rates)
    low, high = found.interval
    verdict = "met" if low <= 1 + goal and high >= 1 - goal else "MISSED"
    medians = f"{np.median(our_rates) / unit:8.1f} against {np.median(their_rates) / unit:8.1f} {unit_name}"
    print(f"{name:28} {medians}: {found.ratio:.3f} [{low:.3f}, {high:.3f}] {verdict} ({goal:.0%}, {pairs} pairs)")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
