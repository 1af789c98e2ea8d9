"""What every rank of a strategy is told, and the course that all of them follow: which samples, in which step.

    setting = Setting(spec, "ddp", devices, batch_size=256, folder=folder)
    course = Course(setting, samples=60_000)
    course.total_steps, course.epoch(1)[0]          # 2350, the indices of the first global batch
    setting.learning_rate(step=0, course=course)

No torch here: the coordinating process, which must never run a tensor operation, uses the counts.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from torchstone.training import TrainSpec
from worker.bench import LeasedDevice


@dataclass(frozen=True)
class Setting:
    """One strategy at work on some devices."""

    spec: TrainSpec
    strategy: str
    devices: tuple[LeasedDevice, ...]
    """Those that share each batch, in rank order."""
    batch_size: int
    """Global: of all devices together."""
    folder: Path
    data_folders: tuple[str, ...]
    """Where data sets may lie as files."""
    key: str
    """Tells this run from others of the same strategy (weak scaling) in file names."""

    @property
    def world_size(self) -> int:
        """How many devices share a batch."""
        return len(self.devices)

    @property
    def kind(self) -> str:
        """torch's name for the type of the devices: all are of one."""
        return self.devices[0].type

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_cpu(self) -> bool:
        """Whether an operation is done when it returns; else the devices run behind, and must be waited for."""
        return self.kind == "cpu"

    def index_of(self, rank: int) -> int:
        """The number by which this rank's process knows its device; ranks may share one."""
        names = list(dict.fromkeys(device.name for device in self.devices))
        return names.index(self.devices[rank].name)

    @property
    def splits_batch(self) -> bool:
        """Whether each rank takes a share of the batch; else every rank takes part in all of it."""
        return self.strategy not in ("replicate", "tensor", "pipeline")

    @property
    def is_channels_last(self) -> bool:
        """Whether images and convolution weights have their channels innermost.

        Unless told, on CPUs: measured there, LeNet and ResNet-18 train 1.2 to 1.4 times as fast. FSDP2 takes no weights
        in that layout, and the reference is the plain model.
        """
        wanted = self.is_cpu if self.spec.channels_last is None else self.spec.channels_last
        return wanted and self.strategy not in ("fsdp", "reference")

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is asked for and this strategy takes it: threads and split models do not."""
        return self.spec.compile and self.strategy not in ("scratch", "replicate", "fsdp", "tensor", "pipeline")

    @property
    def checks_without_dropout(self) -> bool:
        """Whether its first steps are compared with dropout off: no single device can draw the same masks."""
        return self.strategy in ("replicate", "tensor", "pipeline") or self.spec.batch_norm == "synchronized"

    @property
    def base_learning_rate(self) -> float:
        """`lr` as `lr_scaling` leaves it on this many devices, before warm-up and schedule."""
        return self.spec.optimizer.lr * self.spec.lr_factor(self.world_size)

    def learning_rate(self, step: int, course: Course) -> float:
        """Of the step with this number (from 0): warm-up first, then the schedule."""
        spec, full = self.spec, self.base_learning_rate
        if step < spec.warmup_steps:
            return full * (step + 1) / spec.warmup_steps
        if spec.schedule == "cosine":
            steps = max(1, course.total_steps - spec.warmup_steps)
            return full * 0.5 * (1 + math.cos(math.pi * (step - spec.warmup_steps) / steps))
        if spec.schedule == "step":
            return full * spec.step_gamma ** (step // course.steps_per_epoch // spec.step_epochs)
        return full

    def file(self, what: str) -> Path:
        """A file of this strategy in the job's folder."""
        return self.folder / f"{self.key}.{what}"


class Course:
    """How many steps an epoch and the whole training have."""

    def __init__(self, setting: Setting) -> None:
        spec = setting.spec
        self.samples = spec.dataset.samples
        batches = self.samples / setting.batch_size
        # A weak run's batch may be larger than the data: one step then takes all of it.
        whole = math.floor(batches) if spec.drop_last and batches >= 1 else math.ceil(batches)
        self.steps_per_epoch = whole
        self.total_steps = min(whole * spec.epochs, spec.max_steps or whole * spec.epochs)
        self.epochs = math.ceil(self.total_steps / whole)

    def steps_in(self, epoch: int) -> int:
        """Of the epoch with this number, from 1: fewer in the last where `max_steps` cuts it short."""
        return min(self.steps_per_epoch, self.total_steps - (epoch - 1) * self.steps_per_epoch)

    def is_whole(self, epoch: int) -> bool:
        """Whether this epoch is not cut short."""
        return self.steps_in(epoch) == self.steps_per_epoch


def stream_seed(seed: int, rank: int) -> int:
    """The seed of the random stream of one rank (dropout): another for each, the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8], "big") >> 1
