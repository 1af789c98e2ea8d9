"""reproduce.py of a `hardware` job: STREAM and GEMM in plain torch, for whoever doubts the two ceilings."""

from __future__ import annotations

_SCRIPT = '''"""Memory bandwidth (STREAM's kernels) and GEMM of this machine, in plain torch: the best of all repeats.

    python reproduce.py            # needs torch alone

It covers STREAM's four kernels of the probe `memory` and float32 products of the probe `gemm`, both on all of the job's
cores. It does not cover anything else of these two, nor any other probe.
"""

import time

import torch

THREADS = {threads}
ARRAY_BYTES = 128 << 20


def best_s(call, seconds=2.0):
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


torch.set_num_threads(THREADS)
a, b, c = (torch.full((ARRAY_BYTES // 8,), value, dtype=torch.float64) for value in (1.0, 2.0, 0.0))
kernels = {{
    "copy": (2, lambda: c.copy_(a)),
    "scale": (2, lambda: torch.mul(c, 0.25, out=b)),
    "add": (3, lambda: torch.add(a, b, out=c)),
    "triad": (3, lambda: torch.add(b, c, alpha=0.25, out=a)),
}}
for name, (arrays, call) in kernels.items():
    print(f"{{name}}: {{arrays * ARRAY_BYTES / best_s(call) / 1e9:.2f}} GB/s read plus written, {{THREADS}} threads")
for size in (512, 1024, 2048):
    x, y = torch.randn(size, size), torch.randn(size, size)
    print(f"float32 GEMM of {{size}}: {{2 * size**3 / best_s(lambda: x @ y) / 1e9:.1f}} GFLOP/s, {{THREADS}} threads")
'''


def reproduction(threads: int) -> str:
    """The script for so many threads."""
    return _SCRIPT.format(threads=threads)
