"""CUDA graphs: the kernels of one call recorded, then launched all at once. CUDA only.

replay = build(model, (x,), setting)
replay(x)                              # copies x into the recorded input, replays, returns the recorded output
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.contestants.ways import Inputs, Runnable, Setting

_WARM_UP_CALLS = 3

_cuda: Any = torch.cuda
"""Its streams carry no types of their own."""


def build(model: nn.Module, example: Inputs, setting: Setting) -> Runnable:
    """One graph for each batch size, recorded when that size is first met."""
    recorded: dict[tuple[tuple[int, ...], ...], tuple[torch.cuda.CUDAGraph, Inputs, Any]] = {}

    def record(inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Inputs, Any]:
        held = tuple(x.clone() for x in inputs)
        side: Any = _cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(_WARM_UP_CALLS):
                model(*held)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = model(*held)
        return graph, held, output

    def replay(*inputs: Tensor) -> Any:
        shapes = tuple(tuple(x.shape) for x in inputs)
        if shapes not in recorded:
            recorded[shapes] = record(inputs)
        graph, held, output = recorded[shapes]
        for kept, x in zip(held, inputs, strict=True):
            kept.copy_(x, non_blocking=True)
        graph.replay()
        return output

    return replay
