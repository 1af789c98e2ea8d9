"""What the training benches share: our strategies as a job runs them, and turns taken in random order.

    ours = Ours(setting_of(spec, "single", devices, folder))      # in a process of its own (Contestant, Gang)
    ours.steps(20)                                                # seconds of so many training steps
    seconds = take_turns({"ours": ..., "theirs": ...}, pairs=7)   # each a function that returns seconds
    verdict("ours", "theirs", seconds, wanted=1.25)

Everything is measured in one run, side by side: each turn is so many steps of one, then of the other.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from torchstone.specs import parse_spec
from worker.bench import LeasedDevice
from worker.parallel.setting import Setting


def spec_of(model: str, dataset: dict[str, Any], **more: Any) -> Any:
    """A `train` spec for a preset."""
    optimizer = {"name": "sgd", "lr": 0.2 if model == "lenet" else 0.1}
    return parse_spec({"kind": "train", "model": {"preset": model}, "dataset": dataset, "optimizer": optimizer, **more})


def setting_of(spec: Any, strategy: str, devices: int, folder: str, data: str = "") -> Setting:
    """One strategy on so many CPU devices, which share this process's cores."""
    cores = sorted(os.sched_getaffinity(0))
    leased = tuple(LeasedDevice(f"cpu:{i}", "cpu", tuple(cores[i::devices])) for i in range(devices))
    return Setting(spec, strategy, leased, spec.batch_size, Path(folder), (data,), f"{strategy}-{devices}")


class Ours:
    """One rank of a strategy, as a job trains it."""

    def __init__(self, setting: Setting, rank: int = 0) -> None:
        from importlib import import_module

        from worker.parallel.feed import Feed
        from worker.parallel.group import Group
        from worker.parallel.loop import ONE_PROCESS, STRATEGIES, use_cache

        if setting.is_compiled:
            use_cache(setting.folder / f"cache-{setting.key}-{rank}")
        alone = setting.strategy in ONE_PROCESS
        self.group = Group() if alone else Group.join(setting, rank)
        self.setting, self.feed = setting, Feed(setting, rank)
        module, name = STRATEGIES[setting.strategy]
        make = getattr(import_module(module), name)
        self.strategy = make(setting, self.feed) if alone else make(setting, self.feed, rank, self.group)
        self.strategy.restart()
        self.epoch, self.batches = 0, iter(())

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        begun_s = time.perf_counter()
        for _ in range(count):
            batch = next(self.batches, None)
            if batch is None:
                self.epoch += 1
                self.batches = iter(self.feed.epoch(self.epoch))
                batch = next(self.batches)
            self.strategy.step(batch, self.setting.spec.optimizer.lr)
        return time.perf_counter() - begun_s


def write_data(setting: Setting) -> None:
    """Leave the data set where every `Ours` of this folder maps it; in a process that is forked for it."""
    from worker.measure.contestant import Contestant

    writer = Contestant.start("data", lambda: _Writer(setting), setting.devices[0].cores, 1)
    writer.ask("write")
    writer.close()


class _Writer:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def write(self) -> None:
        from worker.parallel.feed import Feed

        Feed.write(self.setting)


def take_turns(ways: dict[str, Callable[[], float]], pairs: int) -> dict[str, Any]:
    """The seconds of each way, `pairs` times in random order."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name in random.sample(list(ways), len(ways)):
            seconds[name].append(ways[name]())
    return {name: np.array(rows) for name, rows in seconds.items()}


def verdict(of: str, against: str, seconds: dict[str, Any], wanted: float | None, share: float = 1.0) -> None:
    """Print how many times as fast `of` is, over `share`; missed only if the whole interval lies below `wanted`."""
    from worker.measure import statistics

    ratio = statistics.compare(seconds[of], seconds[against])
    low, high = (end / share for end in ratio.interval)
    held = "" if wanted is None else f", wanted {wanted}: {'missed' if high < wanted else 'held'}"
    print(f"{of} / {against}: {ratio.ratio / share:.3f} [{low:.3f}, {high:.3f}]{held}", flush=True)


def in_a_process_that_may_fork(measure: Callable[[Any], None], options: Any) -> None:
    """Run `measure(options)` in a process like a job's: torch imported, and no tensor operation run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["worker.preload_compiler"])
    process = context.Process(target=measure, args=(options,))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
