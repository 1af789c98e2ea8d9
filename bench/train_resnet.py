"""The chapter's ResNet-18, batch 256, on all cores: seconds for 20 steps here against the plain eager loop.

    python -m bench.train_resnet [--pairs 7] [--steps 1] [--compile]

The plain loop: the plain model, SGD, batches by index, as many threads. Ours: `single`, as a job runs it. A turn is so
many steps; 20 are told by scaling (a step takes seconds). Held to 1.25.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np

from bench.training import Ours, in_a_process_that_may_fork, setting_of, spec_of, take_turns, verdict, write_data

SYNTHETIC = {"synthetic": {"samples": 2560, "shape": [1, 28, 28], "classes": 10}}


class Plain:
    """The loop that one would write."""

    def __init__(self, setting: Any) -> None:
        import torch

        from worker.data import load
        from worker.models import build

        data = load(setting.spec, ())
        self.x, self.y = data.x, data.y
        self.model = build(setting.spec.fitted_model, 0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        import torch

        begun_s = time.perf_counter()
        for _ in range(count):
            batch = torch.randint(len(self.y), (256,))
            self.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
            self.optimizer.step()
        return time.perf_counter() - begun_s


def measure(options: argparse.Namespace) -> None:
    """In a process that runs no tensor operation, since it forks the two."""
    from worker.measure.contestant import Contestant

    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        setting = setting_of(spec_of("resnet18", SYNTHETIC, compile=options.compile), "single", 1, folder)
        write_data(setting)
        both = {
            name: Contestant.start(name, make, cores, len(cores))
            for name, make in (("plain", lambda: Plain(setting)), ("ours", lambda: Ours(setting)))
        }
        for one in both.values():
            one.ask("steps", count=1)
        ways = {name: (lambda one=one: one.ask("steps", count=options.steps)) for name, one in both.items()}
        seconds = take_turns(ways, options.pairs)
        for one in both.values():
            one.close()
    for name, samples in seconds.items():
        print(f"{name}: {np.median(samples) / options.steps * 20:.0f} s for 20 steps")
    verdict("ours", "plain", seconds, 1.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    in_a_process_that_may_fork(measure, parser.parse_args())


if __name__ == "__main__":
    main()
