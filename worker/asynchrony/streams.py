"""What lives in a contestant's process of the dispatch part: a stream of products at every size, and its clocks.

    contestant = Contestant.start("cpu:0", lambda: Stream(sizes, dtype, device, seed), cores, threads)
    contestant.ask("turn", key="256", calls=8, settle_s=5e-4, call_s=3e-4)
    contestant.ask("arrival", key="256", trials=25)

`ThroughThread` is the same stream with a worker thread in the place of a device that works by itself.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from worker.asynchrony.chain import Chain
from worker.asynchrony.stage import synchronizer
from worker.measure import cuda
from worker.measure.resting import Resting
from worker.measure.stopwatch import Stopwatch

_ARRIVES_WITHIN_S = 30.0
_cuda: Any = torch.cuda
"""Its properties and its sleep carry no types of their own."""


class Stream(Resting):
    """A chain of products for every size on one device; `turn` times a block of them (key: the size)."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__(synchronizer(device), torch.inference_mode)
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.chains = {str(size): Chain(size, dtype, device, seed + size) for size in sizes}
        self.calls = {key: chain.step for key, chain in self.chains.items()}

    def turn(self, key: str, calls: int, settle_s: float, call_s: float) -> list[float]:
        """[seconds until done, seconds until the last call returned]; on CUDA also by the device's own clock."""
        took = Stopwatch.turn(self, key, calls, settle_s, call_s)  # rests when asked to: turns come one after another
        if self.device.type == "cuda":
            with self.mode():
                took.append(cuda.device_seconds(self.calls[key], calls, took[1]))
        return took

    def check(self, key: str) -> dict[str, Any]:
        """Whether the whole stream's result is exactly right; fields of a Check row."""
        self.synchronize()
        return {**self.chains[key].check(), "detail": f"after {self.chains[key].steps} products"}

    def arrival(self, key: str, trials: int) -> dict[str, Any]:
        """Single products on a CPU device: seconds until the call returned, and until its result was seen.

        The output is filled with NaN before; `looks` is how often it was read until both its ends were there.
        """
        chain = self.chains[key]
        returned_s, arrived_s, looks, right = [], [], [], True
        with self.mode():
            for _ in range(trials):
                chain.y.fill_(math.nan)
                ends = chain.y.view(-1)[:: max(1, chain.y.numel() - 1)].numpy()
                seen = 1
                start_s = time.perf_counter()
                chain.step()
                back_s = time.perf_counter()
                while np.isnan(ends).any():
                    seen += 1
                    if time.perf_counter() > back_s + _ARRIVES_WITHIN_S:
                        raise RuntimeError(f"a product of size {key} never arrived")
                there_s = time.perf_counter()
                np.isnan(ends).any()  # the same look again: what looking takes is no part of the arrival
                look_s = time.perf_counter() - there_s
                returned_s.append(back_s - start_s)
                arrived_s.append(max(back_s, there_s - look_s) - start_s)
                looks.append(seen)
                right = right and bool(chain.check()["passed"])
        return {"returned_s": returned_s, "arrived_s": arrived_s, "looks": max(looks), "right": right}

    def queue_depth(self, most: int = 1 << 15, hold_s: float = 0.4) -> dict[str, Any]:
        """Operations that were queued before a call blocked, while the device was kept from starting any of them.

        `depth` is None where none of `most` blocked.
        """
        x = torch.zeros(1, device=self.device)
        cycles = int(hold_s * 1e3 * float(_cuda.get_device_properties(self.device).clock_rate))
        with self.mode():
            x.add_(1)
            self.synchronize()
            _cuda._sleep(cycles)
            start_s, depth = time.perf_counter(), None
            for queued in range(most):
                before_s = time.perf_counter()
                x.add_(1)
                now_s = time.perf_counter()
                if now_s - before_s > hold_s / 4:
                    depth = queued
                    break
                if now_s - start_s > hold_s / 2:
                    most = queued + 1
                    break
            self.synchronize()
        return {"depth": depth, "tried": most, "hold_s": hold_s}


class ThroughThread(Stream):
    """The same stream, but a worker thread does it: the front end only puts operations into a queue."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device, seed: int, threads: int) -> None:
        super().__init__(sizes, dtype, device, seed)
        self.operations: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.fault: Exception | None = None
        self.calls = {key: self._putter(chain.step) for key, chain in self.chains.items()}
        self.synchronize = self._wait
        threading.Thread(target=self._work, args=(threads,), daemon=True).start()

    def _putter(self, step: Callable[[], object]) -> Callable[[], object]:
        put = self.operations.put
        return lambda: put(step)

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            while True:
                operation = self.operations.get()
                try:
                    operation()
                except Exception as error:  # told to whoever waits for it
                    self.fault = error

    def _wait(self) -> None:
        done = threading.Event()
        self.operations.put(done.set)
        done.wait()
        if self.fault is not None:
            raise self.fault
