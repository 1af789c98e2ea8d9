"""Two CPU devices against one, and DDP here against plain torchrun running the same loop.

    python -m bench.train_scaling [--model lenet|resnet18] [--pairs 7] [--steps N]

In turns: `single` on one device; `ddp` on two, as a job runs it; a plain DistributedDataParallel loop started by
torchrun, one thread a rank, channels innermost as here; and two of `single` at once, on half a batch each, which tell
one another nothing. All train the same global batch of 256. Strong efficiency, T1 / 2 T2, is held to 0.85 for LeNet and
0.90 for the ResNet; DDP to 0.97 of torchrun's speed, that is: no slower than what 7 turns can tell. What the two apart
reach is what this machine's second device adds; no exchange of gradients, however fast, reaches more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.training import Ours, in_a_process_that_may_fork, setting_of, spec_of, take_turns, verdict, write_data

SYNTHETIC = {"synthetic": {"samples": 10240, "shape": [1, 28, 28], "classes": 10}}
STEPS = {"lenet": 20, "resnet18": 1}
EFFICIENCY = {"lenet": 0.85, "resnet18": 0.90}

PLAIN = """
import os, sys, time
import numpy as np, torch, torch.distributed as dist
folder, rank = sys.argv[1], int(os.environ["RANK"])
sys.path.insert(0, sys.argv[2])
from worker.models.presets import PRESETS
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo")
x, y = (torch.from_numpy(np.load(f"{folder}/data-{name}.npy")) for name in ("x", "y"))
module = PRESETS[sys.argv[3]]((1, 28, 28), 10).to(memory_format=torch.channels_last)
model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
commands, answers = open(f"{folder}/commands.{rank}"), open(f"{folder}/answers.{rank}", "w", buffering=1)
order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
at = 0
for line in commands:
    begun_s = time.perf_counter()
    for _ in range(int(line)):
        batch = order[at:at + 256][rank * 128:(rank + 1) * 128]
        at = (at + 256) % len(y)
        optimizer.zero_grad()
        images = x[batch].contiguous(memory_format=torch.channels_last)
        torch.nn.functional.cross_entropy(model(images), y[batch]).backward()
        optimizer.step()
    print(time.perf_counter() - begun_s, file=answers)
dist.destroy_process_group()
"""


class Torchrun:
    """The plain loop, its two ranks driven over named pipes."""

    def __init__(self, folder: str, model: str) -> None:
        script = Path(folder) / "plain.py"
        script.write_text(PLAIN)
        for rank in range(2):
            for name in ("commands", "answers"):
                os.mkfifo(f"{folder}/{name}.{rank}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        root = str(Path(__file__).parents[1])
        self.process = subprocess.Popen([*command, folder, root, model], env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.commands = [Path(f"{folder}/commands.{rank}").open("w", buffering=1) for rank in range(2)]  # noqa: SIM115
        self.answers = [Path(f"{folder}/answers.{rank}").open() for rank in range(2)]  # noqa: SIM115

    def steps(self, count: int) -> float:
        """Seconds of so many steps, of the slower rank."""
        for pipe in self.commands:
            print(count, file=pipe)
        return max(float(pipe.readline()) for pipe in self.answers)

    def close(self) -> None:
        """The ranks end where their commands do."""
        for pipe in self.commands:
            pipe.close()
        self.process.wait(timeout=60)


def measure(options: argparse.Namespace) -> None:
    """In a process that runs no tensor operation, since it forks."""
    from worker.parallel.ranks import Gang

    steps = options.steps or STEPS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        spec: Any = spec_of(options.model, SYNTHETIC)
        one, two = (setting_of(spec, *which, folder) for which in (("single", 1), ("ddp", 2)))
        # One device is what each of the two is.
        one = setting_of(spec, "single", 2, folder)
        one = replace(one, devices=two.devices[:1])
        half = replace(one, batch_size=one.batch_size // 2)
        write_data(one)
        torchrun = Torchrun(folder, options.model)
        gangs = {
            "one device": Gang.start("single", one.devices, None, lambda rank, life: Ours(one), 60),
            "ddp": Gang.start("ddp", two.devices, None, lambda rank, life: Ours(two, rank), 60),
            "apart": Gang.start("apart", two.devices, None, lambda rank, life: Ours(half), 60),
        }
        ways = {
            **{name: (lambda gang=gang: max(gang.ask("steps", {"count": steps}))) for name, gang in gangs.items()},
            "torchrun": lambda: torchrun.steps(steps),
        }
        for way in ways.values():
            way()
        seconds = take_turns(ways, options.pairs)
        for gang in gangs.values():
            gang.close()
        torchrun.close()
    for name, samples in seconds.items():
        print(f"{name}: {np.median(samples) / steps * 1e3:.1f} ms a step of {options.model}")
    verdict("ddp", "one device", seconds, EFFICIENCY[options.model], share=2)
    verdict("ddp", "apart", seconds, 0.97)
    verdict("apart", "one device", seconds, None, share=2)
    verdict("ddp", "torchrun", seconds, 0.97)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(STEPS), default="lenet")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0, help="in a turn; 0 = 20 of LeNet, 1 of the ResNet")
    in_a_process_that_may_fork(measure, parser.parse_args())


if __name__ == "__main__":
    main()
