"""What a rank answers: it gets ready, proves that it computes the right thing, trains epochs, counts right answers.

    trainer = Trainer(setting, rank, life)        # lives in a process of its own (`worker.parallel.ranks`)
    trainer.prepare(started_s)                    # joins the others, loads the data, builds the model
    trainer.check(steps=3)                        # the first steps, written to a file for comparison; then undone
    trainer.train_epoch(1, first=0, last=235); trainer.evaluate(); trainer.save()
    trainer.checkpoint(1), trainer.resume(files, steps=235)      # all that training has changed, to a file and back

All strategies share this loop; they differ in what one step does. Answers are plain numbers; tensors go through files
in the job's folder.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.contestants import inductor
from worker.parallel.feed import Feed
from worker.parallel.group import Group
from worker.parallel.ranks import Life
from worker.parallel.setting import Course, Setting
from worker.parallel.shards import without_dropout
from worker.parallel.single import Share

_LOOK_STEPS = 25
"""How often ranks agree on whether the loss is still a number."""

STRATEGIES: dict[str, tuple[str, str]] = {
    "single": ("worker.parallel.single", "Single"),
    "scratch": ("worker.parallel.scratch", "Scratch"),
    "replicate": ("worker.parallel.replicate", "Replicate"),
    "ddp": ("worker.parallel.ddp", "Ddp"),
    "fsdp": ("worker.parallel.fsdp", "Fsdp"),
    "tensor": ("worker.parallel.tensor", "TensorParallel"),
    "pipeline": ("worker.parallel.pipeline", "Pipeline"),
    "parameter_server": ("worker.parallel.parameter_server", "ParameterServer"),
}
ONE_PROCESS = ("single", "scratch", "replicate")
"""Strategies that hold all their devices in one process."""


class Trainer:
    """One rank, from start to end."""

    def __init__(self, setting: Setting, rank: int, life: Life) -> None:
        self.setting, self.rank, self.life = setting, rank, life
        self.course = Course(setting)
        self.steps_done = 0
        self.base_bytes = _resident_bytes("VmRSS")  # what was there before the fork

    def prepare(self, started_s: float) -> dict[str, Any]:
        """Join the others, load the data, build the model. `started_s`: when this process was asked for."""
        with self.life.at_work():
            setting = self.setting
            if setting.is_compiled:
                use_cache(setting.folder / f"cache-{setting.key}-{self.rank}")
            alone = setting.strategy in ONE_PROCESS
            self.group = Group() if alone else Group.join(setting, self.rank)
            self.feed = Feed(setting, self.rank)
            module, name = STRATEGIES[setting.strategy]
            make: Callable[..., Any] = getattr(import_module(module), name)
            self.strategy = make(setting, self.feed) if alone else make(setting, self.feed, self.rank, self.group)
            return {"start_s": time.perf_counter() - started_s}

    def check(self, steps: int) -> dict[str, Any]:
        """Run the first `steps` steps as training will, write what they gave to a file, and undo them."""
        with self.life.at_work():
            strategy = self.strategy
            strategy.restart()
            arrays: dict[str, Any] = {}
            shares = []
            begun_s = time.perf_counter()
            first_step_s = 0.0
            with without_dropout(strategy.modules, self.setting.checks_without_dropout):
                for step, batch in enumerate(self.feed.first_batches(steps, self.course)):
                    share = strategy.step(batch, self.setting.learning_rate(step, self.course))
                    strategy.settle()
                    shares.append(_numbers(strategy.shares(share)))
                    first_step_s = first_step_s or time.perf_counter() - begun_s
                    self.life.steps += 1
                    for name, gradient in strategy.gradients().items():
                        arrays[f"gradient/{step}/{name}"] = _array(gradient)
            compiled_graphs = inductor.compilations()
            spread = strategy.spread()
            for name, value in strategy.weights().items():
                arrays[f"weights/{name}"] = _array(value)
            file = self.setting.file(f"{self.rank}.check.npz")
            np.savez(file, **arrays)
            bytes_per_step = strategy.bytes_sent // max(1, steps)
            if self.setting.is_compiled and self.setting.checks_without_dropout:
                for batch in self.feed.first_batches(1, self.course):
                    strategy.step(batch, 0.0)  # compiled anew, with dropout: not on training's time
            strategy.restart()
            self.life.steps = 0
            return {
                "file": str(file),
                "shares": shares,
                "spread": _told(spread),
                "first_step_s": first_step_s,
                "compiled_graphs": compiled_graphs,
                "bytes_per_step": bytes_per_step,
            }

    def train_epoch(self, epoch: int, first: int, last: int) -> dict[str, Any]:
        """Steps [first, last) of an epoch (from 1); ends early where the loss is no number any more."""
        with self.life.at_work():
            setting, strategy = self.setting, self.strategy
            batches = self.feed.epoch(epoch)[first:last]
            shares: list[list[Share]] = []
            diverged = False
            strategy.settle()
            begun_s = time.perf_counter()
            for batch in batches:
                share = strategy.step(batch, setting.learning_rate(self.steps_done, self.course))
                shares.append(strategy.shares(share))
                self.steps_done += 1
                self.life.steps = self.steps_done
                if (first + len(shares)) % _LOOK_STEPS == 0 and not setting.spec.record_steps:
                    diverged = self._has_diverged(shares[-_LOOK_STEPS:])
                    if diverged:
                        break
            strategy.settle()
            seconds = time.perf_counter() - begun_s
            numbers = [_numbers(share) for share in shares]
            return {
                "seconds": seconds,
                "steps": len(numbers),
                "shares": numbers,
                "marks": strategy.marks(),
                "diverged": diverged or not all(math.isfinite(s) for row in numbers for s, n in row if n),
                "samples": sum(len(batch) for batch in batches[: len(numbers)]),
                "learning_rate": setting.learning_rate(max(0, self.steps_done - 1), self.course),
                "peak_bytes": self._peak_bytes(),
            }

    def evaluate(self) -> dict[str, Any]:
        """How many of this rank's share of the test set are right."""
        with self.life.at_work():
            begun_s = time.perf_counter()
            right, samples = self.strategy.evaluate()
            return {"right": right, "samples": samples, "seconds": time.perf_counter() - begun_s}

    def checkpoint(self, number: int) -> str | None:
        """Write what training has changed on this rank; the file, of which each `number` gives another, if it could."""
        with self.life.at_work():
            state = {name: value.cpu().contiguous() for name, value in self.strategy.state().items()}
            file = self.setting.file(f"{self.rank}.{number}.state")
            try:
                save_file(state, file)
            except (OSError, SafetensorError) as error:  # a full disk: training goes on
                file.unlink(missing_ok=True)
                print(f"a checkpoint could not be written: {error}", flush=True)
                return None
            return str(file)

    def resume(self, files: list[str], steps: int) -> None:
        """Go on from what each rank wrote after so many steps."""
        with self.life.at_work():
            self.strategy.resume(load_file(files[self.rank]))
            self.steps_done = self.life.steps = steps

    def save(self) -> dict[str, Any]:
        """Write the weights that this rank can tell as safetensors; whether they are numbers, and how far apart."""
        with self.life.at_work():
            weights = {name: value.cpu().contiguous() for name, value in self.strategy.weights().items()}
            spread = self.strategy.spread()
            file = self.setting.file(f"{self.rank}.safetensors")
            if self.rank == 0 or not self.strategy.tells_all:
                save_file(weights, file)
            else:
                save_file({}, file)
            finite = all(bool(torch.isfinite(value).all()) for value in weights.values())
            return {"file": str(file), "spread": _told(spread), "names": list(weights), "finite": finite}

    def _has_diverged(self, shares: list[list[Share]]) -> bool:
        """Whether any rank's loss is no number: all ranks come to the same answer, or one would wait for the rest."""
        total = torch.stack([loss.to(self.feed.device) for row in shares for loss, n in row]).sum().reshape(1)
        self.life.loss = float(total)
        bad = (~torch.isfinite(total)).float()
        return bool(self.group.allreduce(bad) > 0)

    def _peak_bytes(self) -> list[int]:
        """Of each device of this rank."""
        if not self.setting.is_cpu:
            ours = range(self.setting.world_size) if self.setting.strategy in ONE_PROCESS else (self.rank,)
            return [torch.accelerator.max_memory_allocated(self.setting.index_of(rank)) for rank in ours]
        return [max(0, _resident_bytes("VmHWM") - self.base_bytes)]


def _resident_bytes(field: str) -> int:
    """VmRSS: memory of this process now; VmHWM: the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _told(spread: float | None) -> dict[str, Any]:
    """A strategy's spread for the pipe, which carries what is no number as null."""
    return {"held_twice": spread is not None, "value": spread}


def _numbers(shares: list[Share]) -> list[tuple[float, int]]:
    return [(float(loss), samples) for loss, samples in shares]


def _array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    # A copy: what it was taken from is written again in the next step.
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()


def use_cache(folder: Path) -> None:
    """Have what this rank compiles kept in a folder of its own, compiled by this process itself."""
    inductor.use_cache(folder)
    inductor.draw_as_eager()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch._inductor")
