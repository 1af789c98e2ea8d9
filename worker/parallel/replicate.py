"""`replicate`: nn.DataParallel, what the book's concise section uses: one process copies the model to every GPU in each
step, scatters the batch and gathers the outputs on the first. Only for GPUs: on CPU devices it falls through to one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from worker.parallel.single import Single


class Replicate(Single):
    """All GPUs of the job, in this process."""

    def prepare(self) -> None:
        self.wrapped = torch.nn.DataParallel(
            self.module, device_ids=[self.setting.index_of(rank) for rank in range(self.setting.world_size)]
        )

    def call(self, x: Tensor) -> Any:
        return self.wrapped(x)

    def spread(self) -> float | None:
        """The copies live for one step each."""
        return None
