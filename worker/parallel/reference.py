"""The reference that every strategy must equal in its first steps: one device, the plain model, the plain optimiser.

    reference = Reference(setting)                     # in a process of its own, on the first device
    reference.run("reference.npz", steps=3, how="shards", dropout=True, devices=2, batch_size=256)

- `shards`: the k shares of each batch in turn, each with its rank's random stream and its rank's BatchNorm statistics,
  gradients weighted by samples. What a data-parallel strategy must give, whatever the model.
- `whole`: the batch unsplit, dropout off. What every strategy must give where a sample's output depends on that sample
  alone, and with BatchNorm synchronised over ranks. For BatchNorm per device the distance from it is published.
- `rounds`: with BatchNorm synchronised and gradients accumulated, the parts that all ranks compute at once, in turn.
- `chunks`: the batch as DataParallel scatters it, with the BatchNorm statistics of the first share: for `replicate`.
- `parts`: so many parts of the unsplit batch in turn, with one set of BatchNorm statistics: pipeline's microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from worker.measure import roofline
from worker.parallel import forms
from worker.parallel.equality import PER_STEP, Found, Moved, gradients_apart, moved
from worker.parallel.feed import Feed
from worker.parallel.kinks import OtherSide, has_kinks
from worker.parallel.optimizers import make_optimizer, set_learning_rate
from worker.parallel.setting import Course, Setting, stream_seed
from worker.parallel.shards import (
    accumulated,
    default_generator,
    has_batch_norm,
    has_dropout,
    scores_by_batch,
    split_batch,
    without_dropout,
)
from worker.parallel.tensor import pairs

How = Literal["shards", "whole", "parts", "rounds", "chunks"]
_LAST_BITS = 1e-7
_NEAR_A_KINK = 3e-6
"""Of a layer's inputs: some times what they differ by when they are summed in another order."""
_ROOM = 0.3
"""Of the tolerance: what the reference's own rounding may take of it."""


class Reference:
    """One device that computes what several are to give."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting = replace(setting, strategy="reference")
        loaded = Feed.write(setting)
        self.input = {"input_mean": loaded.mean, "input_std": loaded.deviation}
        self.feed = Feed(setting, 0)
        self.course = Course(setting)

    def facts(self, devices: int, batch_sizes: list[int]) -> dict[str, Any]:
        """What the model has that decides which reference a strategy must equal; the work of a step by batch size."""
        module = forms.plain(self.setting)
        return {
            "work": {str(size): asdict(self._work(module, size)) for size in batch_sizes},
            "has_batch_norm": has_batch_norm(module),
            "has_dropout": has_dropout(module),
            "scores_by_batch": scores_by_batch(module),
            "has_kinks": has_kinks(module),
            "layers": len(module) if isinstance(module, nn.Sequential) else 1,
            "pairs": {str(k): len(list(pairs(module, k))) for k in {1, devices}},
            "parameters": sum(p.numel() for p in module.parameters()),
            "state_bytes": sum(value.nbytes for value in module.state_dict().values()),
            **self.input,
        }

    def _work(self, module: nn.Module, batch_size: int) -> roofline.Work:
        """Forward, loss and backward on so many samples of the data's shape."""
        sample = self.feed.x[:1]
        x = torch.empty((batch_size, *sample.shape[1:]), dtype=sample.dtype, device="meta")
        targets = torch.zeros(batch_size, dtype=torch.int64, device="meta")
        with forms.precision(self.setting):
            module, (x,) = roofline.on_shapes(module, (x,))
            return roofline.training(module, (x,), lambda output: nn.functional.cross_entropy(output.float(), targets))

    def write_data(self, file: str) -> None:
        """Write the whole data set, as the model takes it."""
        parts = {name: getattr(self.feed, name).cpu().numpy() for name in ("x", "y", "x_test", "y_test")}
        np.savez(file, **parts)

    def test_file(self, file: str) -> list[int]:
        """Write the test set for those who load exported models; its labels."""
        torch.save((self.feed.x_test.cpu(),), file)
        labels: list[int] = self.feed.y_test.tolist()
        return labels

    def steadiness(self, steps: int, devices: int, batch_size: int) -> tuple[int, float]:
        """How many of the first steps a comparison can judge, and how far rounding alone moves a gradient in them.

        The reference is compared with itself from weights that differ in their last bits. BatchNorm over few samples
        can amplify that ten thousand times in one step; what two correct programs then give is no closer than that.
        """
        found = []
        for disturbance in (0.0, _LAST_BITS):
            file = self.setting.folder / f"steady-{disturbance}.npz"
            losses = self.run(str(file), steps, "shards", False, devices, batch_size, disturbance)
            found.append(Found.read([loss for loss, _ in losses], [file]))
            file.unlink()
        tolerance = PER_STEP["float32"]["gradient"] * _ROOM
        alike = [gradients_apart(found[1], found[0], step, tolerance * (step + 1)) for step in range(steps)]
        steady = next((max(1, step) for step, row in enumerate(alike) if row["worst"] > row["rtol"]), steps)
        return steady, min(1.0, max(row["worst"] for row in alike[:steady]))

    def kinks(self, steps: int, devices: int, batch_size: int, dropout: bool) -> Moved:
        """How far each tensor of the first steps moves with the units that rounding could put beyond a kink."""
        found = []
        for share in (0.0, _NEAR_A_KINK):
            file = self.setting.folder / f"kinks-{share}.npz"
            with OtherSide(share) if share else nullcontext():
                losses = self.run(str(file), steps, "shards", dropout, devices, batch_size)
            found.append(Found.read([loss for loss, _ in losses], [file]))
            file.unlink()
        return moved(found[1], found[0], steps)

    def run(
        self,
        file: str,
        steps: int,
        how: How,
        dropout: bool,
        devices: int,
        batch_size: int,
        disturbance: float = 0.0,
        parts: int = 1,
        channels_last: bool = False,
    ) -> list[tuple[float, int]]:
        """Train the first steps as so many devices would; write what they gave to `file`.

        `disturbance`: by what share of itself each weight is changed at random first. `channels_last`: dropout draws
        its masks in the order in which its input lies in memory, so that has to be the strategy's. Returns the summed
        loss and the samples of each step.
        """
        one, self.parts = self.setting.devices[0], parts
        self.images = torch.channels_last if channels_last else torch.contiguous_format
        self.setting = setting = replace(self.setting, devices=(one,) * devices, batch_size=batch_size)
        self.feed.setting, self.course, spec = setting, Course(setting), setting.spec
        module = forms.plain(setting).to(memory_format=self.images)  # type: ignore[call-overload]
        _disturb(module, disturbance)
        optimizer = make_optimizer(spec.optimizer, module.parameters())
        arrays = {f"initial/{name}": _array(value) for name, value in module.state_dict().items()}
        device = forms.device_of(setting, 0)
        streams = [_Stream(module, stream_seed(spec.seed, rank), device) for rank in range(setting.world_size)]
        losses = []
        with without_dropout([module], not dropout):
            for step, batch in enumerate(self.feed.first_batches(steps, self.course)):
                optimizer.zero_grad()
                scale = 1 / len(batch) if spec.loss_reduction == "mean" else 1.0
                total = 0.0
                for rank, part in self._parts(batch, how):
                    with streams[rank]:
                        total += self._forward_backward(module, part, scale)
                losses.append((total, len(batch)))
                arrays |= {
                    f"gradient/{step}/{name}": _array(p.grad)
                    for name, p in module.named_parameters()
                    if p.grad is not None
                }
                set_learning_rate(optimizer, setting.learning_rate(step, self.course))
                optimizer.step()
        arrays |= {f"weights/{name}": _array(value) for name, value in module.state_dict().items()}
        ranks = streams if how == "shards" else streams[:1]
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and f"weights/{name}" in arrays:
                arrays[f"weights/{name}"] = np.mean([_array(stream.buffers[name]) for stream in ranks], axis=0)
        everything: dict[str, Any] = arrays
        np.savez(file, **everything)
        return losses

    def _parts(self, batch: Tensor, how: How) -> Iterable[tuple[int, Tensor]]:
        """(rank, indices) of what is computed in turn."""
        spec, setting = self.setting.spec, self.setting
        if how == "whole":
            return [(0, batch)]
        if how == "parts":
            return [(0, part) for part in accumulated(batch, self.parts, len(batch))]
        if how == "chunks":
            cut = [part.chunk(setting.world_size) for part in accumulated(batch, self.parts, len(batch))]
            return [(rank, chunk) for chunks in cut for rank, chunk in enumerate(chunks)]
        shards = split_batch(batch, setting.world_size)
        largest = len(shards[0])
        if how == "rounds":
            rounds = [accumulated(shard, spec.gradient_accumulation, largest) for shard in shards]
            return [(0, torch.cat(parts)) for parts in zip(*rounds, strict=True)]
        return [
            (rank, part)
            for rank, shard in enumerate(shards)
            for part in accumulated(shard, spec.gradient_accumulation, largest)
        ]

    def _forward_backward(self, module: nn.Module, part: Tensor, scale: float) -> float:
        if len(part) == 0:
            return 0.0
        x, y = self.feed.train(part)
        x = x.contiguous(memory_format=self.images) if x.dim() == 4 else x
        with forms.precision(self.setting):
            output = module(x)
        loss = nn.functional.cross_entropy(output.float(), y, reduction="sum")
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


class _Stream(AbstractContextManager["_Stream"]):
    """A rank's random numbers and BatchNorm statistics: put into the model on the way in, kept on the way out."""

    def __init__(self, module: nn.Module, seed: int, device: torch.device) -> None:
        self.module, self.generator = module, default_generator(device)
        self.state = torch.Generator(self.generator.device).manual_seed(seed).get_state()
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def __enter__(self) -> _Stream:
        self.generator.set_state(self.state)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(self.buffers[name])
        return self

    def __exit__(self, *_: object) -> None:
        self.state = self.generator.get_state()
        self.buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}


@torch.no_grad()
def _disturb(module: nn.Module, share: float) -> None:
    if share > 0:
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + share * noise)


def _array(tensor: Tensor | None) -> NDArray[Any]:
    assert tensor is not None
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
    return array.copy()
