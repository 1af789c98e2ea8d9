"""`reproduce.py` of an `async` job: a plain torch script, without Torchstone, that repeats its parts.

    Path("reproduce.py").write_text(reproduction(spec, threads=2, device="cpu"))

It measures in one process and one after the other, with less care than the job took: enough to see the same things.
"""

from __future__ import annotations

import json

from torchstone.asynchrony import AsyncSpec

_TEMPLATE = '''\
"""{title}: repeats a Torchstone job of kind "async" with torch alone.

    python reproduce.py
"""

from __future__ import annotations

import os

THREADS = {threads}
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(THREADS))  # read when numpy is imported
os.environ.setdefault("MKL_NUM_THREADS", str(THREADS))

import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

warnings.filterwarnings("ignore", category=DeprecationWarning)
SPEC = {spec}
SIZE, REPEATS, SEED, PARTS = {size}, {repeats}, {seed}, {parts}
DTYPE, NUMPY_DTYPE, DEVICE = torch.{dtype}, np.{dtype}, torch.device("{device}")
BRANCHES, STEPS = {branches}, 5


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def time_of(call, budget_s=1.0):
    """Medians of (seconds until done, seconds until the calls had returned) per call, after a warm-up."""
    call()
    synchronize()
    start_s = time.perf_counter()
    call()
    synchronize()
    calls = min(256, max(1, round(2e-3 / (time.perf_counter() - start_s))))
    done, returned, end_s = [], [], time.perf_counter() + budget_s
    while time.perf_counter() < end_s or len(done) < 3:
        synchronize()
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        returned.append((time.perf_counter() - start_s) / calls)
        synchronize()
        done.append((time.perf_counter() - start_s) / calls)
    return statistics.median(done), statistics.median(returned)


def numpy_vs_torch():
    print(f"the book's loops of {{REPEATS}}, not equal work: float64 against float32")
    start_s = time.perf_counter()
    for _ in range(REPEATS):
        a = np.random.normal(size=(SIZE, SIZE))
        np.dot(a, a)
    print(f"  numpy {{time.perf_counter() - start_s:.4f}} s")
    for waits in (False, True):
        start_s = time.perf_counter()
        for _ in range(REPEATS):
            a = torch.randn(size=(SIZE, SIZE), device=DEVICE)
            torch.mm(a, a)
        if waits:
            synchronize()
        print(f"  torch {{time.perf_counter() - start_s:.4f}} s, {{'waited for' if waits else 'not waited for'}}")
        synchronize()
    print(f"equal work: {{DTYPE}}, threads each: {{THREADS}}, written in place, generation apart")
    random, generator = np.random.default_rng(SEED), torch.Generator(DEVICE).manual_seed(SEED)
    a = random.standard_normal((SIZE, SIZE), dtype=NUMPY_DTYPE)
    b, at = np.zeros_like(a), torch.from_numpy(a).to(DEVICE)
    bt, drawn = torch.zeros_like(at), torch.zeros_like(at)
    pairs = {{
        "product": (lambda: np.matmul(a, a, out=b), lambda: torch.mm(at, at, out=bt)),
        "random": (
            lambda: random.standard_normal(dtype=NUMPY_DTYPE, out=a),
            lambda: drawn.normal_(generator=generator),
        ),
    }}
    for work, (numpys, torchs) in pairs.items():
        numpy_s, torch_s = time_of(numpys)[0], time_of(torchs)[0]
        print(f"  {{work}}: numpy {{numpy_s * 1e3:.3f}} ms, torch {{torch_s * 1e3:.3f}} ms, {{numpy_s / torch_s:.2f}}x")
        if work == "product":
            error = np.abs(bt.cpu().numpy() - b).max() / np.abs(b).max()
            print(f"  largest difference of the products, relative to the largest value: {{error:.2g}}")


def shift(size):
    """Products with it are exact: they only move rows."""
    return torch.eye(size, dtype=DTYPE).roll(1, 0).to(DEVICE)


def stream(size):
    e, buffers = shift(size), [torch.randn(size, size, dtype=DTYPE, device=DEVICE) for _ in range(2)]

    def step():
        torch.mm(e, buffers[0], out=buffers[1])
        buffers.reverse()
        return buffers[0]

    return step


def dispatch():
    print("a stream of products: until the calls had returned, and until the results were there")
    for size in {sizes}:
        done, returned = time_of(stream(size), 0.3)
        print(f"  size {{size}}: {{returned * 1e6:.2f}} us, {{done * 1e6:.2f}} us, {{100 * returned / done:.1f}} %")


def barriers():
    print("what a barrier adds to a step")
    with open(os.devnull, "w") as sink:
        kinds = {{
            "synchronize": lambda x: synchronize(),
            "item": lambda x: x[0, 0].item(),
            "print": lambda x: print(x, file=sink),
            "numpy": lambda x: x.cpu().numpy(),
            "numpy_copy": lambda x: np.array(x.cpu().numpy()),
        }}
        for size in sorted({{min(32, SIZE), min(256, SIZE)}}):
            step = stream(size)
            bare = time_of(step, 0.3)[0]
            for name, barrier in kinds.items():
                with_it = time_of(lambda: barrier(step()), 0.3)[0]
                print(f"  size {{size}}, {{name}}: {{(with_it - bare) * 1e6:.2f}} us on {{bare * 1e6:.2f}}")


def branch(e, x, steps: int):
    for _ in range(steps):
        x = torch.mm(e, x)
    return x


def forked(e, x, steps: int, branches: int):
    futures = [torch.jit.fork(branch, e, x, steps) for _ in range(branches)]
    total = torch.zeros_like(x)
    for future in futures:
        total = total + torch.jit.wait(future)
    return total


def graph():
    x = torch.ones((1, 2), device=DEVICE)
    y = torch.ones((1, 2), device=DEVICE)
    print("the chapter's graph:", (x * y + 2).tolist())
    if DEVICE.type == "cuda":
        sides = [torch.cuda.Stream(DEVICE) for _ in range(BRANCHES)]

        def at_once(e, x):
            results, main = [], torch.cuda.current_stream(DEVICE)
            for side in sides:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    results.append(branch(e, x, STEPS))
            for side, result in zip(sides, results):
                main.wait_stream(side)
                result.record_stream(main)
            return sum(results)

        forms = {{"streams": at_once}}
    else:
        torch.set_num_threads(1)
        program = torch.jit.script(forked)
        pool = ThreadPoolExecutor(BRANCHES, initializer=torch.set_num_threads, initargs=(1,))
        forms = {{
            "jit_fork": lambda e, x: program(e, x, STEPS, BRANCHES),
            "python_threads": lambda e, x: sum(pool.map(lambda _: branch(e, x, STEPS), range(BRANCHES))),
        }}
    for size in sorted({{min(64, SIZE), min(256, SIZE)}}):
        e, x = shift(size), torch.randn(size, size, dtype=DTYPE, device=DEVICE)
        serial = time_of(lambda: sum([branch(e, x, STEPS) for _ in range(BRANCHES)]), 0.5)[0]
        for name, form in forms.items():
            seconds = time_of(lambda: form(e, x), 0.5)[0]
            hidden = (1 - seconds / serial) / (1 - 1 / BRANCHES)
            told = f"{{serial / seconds:.2f}}x, {{100 * hidden:.0f}} % hidden"
            print(f"  {{BRANCHES}} branches of size {{size}}, {{name}}: {{told}}")


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    with torch.inference_mode():
        for part in PARTS:
            print("==", part)
            globals()[part]()
'''


def reproduction(spec: AsyncSpec, threads: int, device: str, branches: int, sizes: list[int]) -> str:
    """The script's text."""
    return _TEMPLATE.format(
        title=(spec.name or "A job").replace("\\", "").replace('"', "'"),
        spec=repr(json.loads(spec.model_dump_json())),
        threads=threads,
        size=spec.size,
        repeats=spec.repeats,
        seed=spec.seed,
        parts=[part.value for part in spec.parts],
        dtype=spec.dtype,
        device=device,
        branches=branches,
        sizes=sizes,
    )
