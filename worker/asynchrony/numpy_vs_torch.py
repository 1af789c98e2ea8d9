"""numpy against torch on the same matrix work: the book's comparison first, called what it is, then an equal one.

The book times, once each, `repeats` times (normal numbers, their product): numpy in float64 with its legacy generator
and no warm-up, torch in float32 with its own after a warm-up, first without waiting for the result. So its ratio mixes
precision, generator, warm-up and, on a GPU, not having waited.

Equal work is: one type, one size, as many threads, outputs written into memory that is already there (`out=`), the
results checked; and the generation of numbers apart from the product, because the two libraries have different
generators (both run on one thread). On GPUs torch on the CPU takes part too: libraries and devices are two questions.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import threadpoolctl
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchstone.asynchrony import Part
from torchstone.results import Check, Comparison, Figure, Skipped, Table, Timing
from worker.asynchrony.contest import Contest, Point
from worker.asynchrony.stage import Stage, duration, synchronizer
from worker.measure import roofline
from worker.measure.contestant import Contestant, ContestantFailed, Unavailable
from worker.measure.equality import TOLERANCES, Equality, compare_outputs
from worker.measure.resting import Resting
from worker.measure.statistics import FEWEST_ROUNDS, TOO_FEW

PART = Part.numpy_vs_torch.value
WORKS = ("product", "random", "random_and_product")
_MOST_CHECK_FLOP = 4e9
_FAULTS = {
    "numpy": "float64, where torch has float32; numpy's legacy generator; cold: nothing ran before",
    "torch": "float32; another generator; after a warm-up; the clock is read without waiting for the results",
    "torch, synchronised": "float32; another generator; after a warm-up; waits for the results",
}
_BOOKS_REASON = "not equal work: float64 against float32, two generators, each timed once, one of them warm"

Array = NDArray[Any]


def measure(stage: Stage) -> None:
    """The book's comparison, then the race of equals."""
    books = _book(stage)
    with Contest(stage, PART, "numpy", stage.budget_s(Part.numpy_vs_torch)) as contest:
        _start(stage, contest)
        contest.check_modes()
        blas = contest.attempt("numpy", "libraries")
        stage.host["numpy_blas"] = blas
        points = [Point(work, {"work": work}) for work in WORKS]
        wrong = _check_all(stage, contest, "before the race")
        contest.race(points)
        for name, by_point in _check_all(stage, contest, "after the race").items():
            wrong.setdefault(name, {}).update(by_point)
        timings = contest.judge(wrong | contest.unfinished())
    _tell(stage, timings, books, blas)


# -- the book's own comparison ----------------------------------------------------------------------------------


def _book(stage: Stage) -> dict[str, float]:
    """Seconds of each of the book's three loops, as its code measures them; {} of those that could not run."""
    stage.say(f"{PART}: the book's own comparison")
    seconds: dict[str, float] = {}
    for library in ("numpy", "torch"):
        book = Book(stage.spec.size, stage.spec.repeats, stage.device)
        lane = Contestant.start(f"book {library}", lambda book=book: book, stage.bench.cores, stage.threads)  # type: ignore[misc]
        try:
            seconds |= lane.ask(library)
        except ContestantFailed as failure:
            stage.result.skipped.append(Skipped(of=f"the book's {library}", reason=failure.reason, status="failed"))
        finally:
            lane.close()
    rows = [
        [of, stage.spec.repeats, stage.spec.size, seconds[of], fault] for of, fault in _FAULTS.items() if of in seconds
    ]
    columns = ["of", "repeats", "size", "seconds, once", "what keeps it from being compared"]
    title = "the book's own comparison, which is not one of equals"
    stage.result.tables.append(Table(name=title, columns=columns, rows=rows))
    for of, value in seconds.items():
        at = {"repeats": stage.spec.repeats}
        stage.result.figures.append(Figure(name="book_loop", of=of, at=at, value=value, unit="s"))
    if "torch" in seconds and "numpy" in seconds:
        at = {"repeats": stage.spec.repeats}
        stage.result.comparisons.append(
            Comparison(
                name="book_loop",
                of="torch",
                against="numpy",
                at=at,
                speedup=None,
                ci95=None,
                noise_floor=None,
                verdict="withheld",
                reason=_BOOKS_REASON,
            )
        )
    return seconds


class Book:
    """The book's loops, as printed there but for the names: each in a process in which nothing ran before."""

    def __init__(self, size: int, repeats: int, device: torch.device) -> None:
        self.shape, self.repeats, self.device = (size, size), repeats, device

    def numpy(self) -> dict[str, float]:
        """Normal numbers and their product, in float64."""
        start_s = time.perf_counter()
        for _ in range(self.repeats):
            a = np.random.normal(size=self.shape)
            np.dot(a, a)
        return {"numpy": time.perf_counter() - start_s}

    def torch(self) -> dict[str, float]:
        """The same in float32 after a warm-up, without and with waiting for the device."""
        synchronize = synchronizer(self.device)
        self._product()
        start_s = time.perf_counter()
        for _ in range(self.repeats):
            self._product()
        returned_s = time.perf_counter() - start_s
        synchronize()
        start_s = time.perf_counter()
        for _ in range(self.repeats):
            self._product()
        synchronize()
        return {"torch": returned_s, "torch, synchronised": time.perf_counter() - start_s}

    def _product(self) -> Tensor:
        a = torch.randn(self.shape, device=self.device)
        return torch.mm(a, a)


# -- equal work -------------------------------------------------------------------------------------------------


def _start(stage: Stage, contest: Contest) -> None:
    spec, threads = stage.spec, stage.threads
    contest.start("numpy", lambda: NumpyWork(spec.size, spec.dtype, spec.seed, threads))
    contest.start("torch", lambda: TorchWork(spec.size, spec.dtype, spec.seed, stage.device))
    if stage.on_cuda:
        contest.start("torch_cpu", lambda: TorchWork(spec.size, spec.dtype, spec.seed, torch.device("cpu")))


class _Work(Resting):
    """The three works on arrays that are there already; a library fills in `product`, `random` and what lies where."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(synchronizer(device), torch.inference_mode)
        self.calls = {f"{PART}/{work}": getattr(self, work) for work in WORKS}

    def product(self) -> None:
        """fixed x fixed."""
        raise NotImplementedError

    def random(self) -> None:
        """New normal numbers in a."""
        raise NotImplementedError

    def random_and_product(self) -> None:
        """a new, and b = a x a: what the book's loop does."""
        raise NotImplementedError

    def arrays(self) -> tuple[Array, Array, Array]:
        """a, a x a and fixed x fixed as they are now."""
        raise NotImplementedError

    def output(self, work: str, rows: int, file: str) -> dict[str, Any] | None:
        """One call of `work`, if none was made yet; then what the last call left, as fields of a Check row.

        The first `rows` rows of a product of known factors go to `file`, to be compared with other libraries'.
        """
        self.first_call(f"{PART}/{work}")
        a, b, fixed_product = self.arrays()
        if work == "product":
            np.save(file, fixed_product[:rows])
            return None
        if work == "random":
            return looks_normal(a)
        return vars(close_to(b[:rows], exact_rows(a, rows)))


class NumpyWork(_Work):
    """numpy's side: BLAS on as many threads as torch gets, set in this process by threadpoolctl."""

    def __init__(self, size: int, dtype: str, seed: int, threads: int) -> None:
        super().__init__(torch.device("cpu"))
        self.limits = threadpoolctl.threadpool_limits(threads, user_api="blas")
        self.generator = np.random.default_rng(seed)
        self.dtype: Any = np.dtype(dtype).type
        self.fixed = factor(size, dtype, seed)
        self.a, self.b, self.fixed_product = (np.zeros_like(self.fixed) for _ in range(3))

    def product(self) -> None:
        np.matmul(self.fixed, self.fixed, out=self.fixed_product)

    def random(self) -> None:
        self.generator.standard_normal(dtype=self.dtype, out=self.a)

    def random_and_product(self) -> None:
        self.generator.standard_normal(dtype=self.dtype, out=self.a)
        np.matmul(self.a, self.a, out=self.b)

    def arrays(self) -> tuple[Array, Array, Array]:
        return self.a, self.b, self.fixed_product

    def facts(self) -> dict[str, Any]:
        """What must be equal for all contestants, read back from the library."""
        return {"dtype": self.b.dtype.name, "threads": max(pool["num_threads"] for pool in blas_pools())}

    def libraries(self) -> list[dict[str, Any]]:
        """The BLAS that does numpy's products, and its threads as they are set."""
        return blas_pools()


class TorchWork(_Work):
    """torch's side, on one device."""

    def __init__(self, size: int, dtype: str, seed: int, device: torch.device) -> None:
        super().__init__(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.fixed = torch.from_numpy(factor(size, dtype, seed)).to(device)
        self.a, self.b, self.fixed_product = (torch.zeros_like(self.fixed) for _ in range(3))

    def product(self) -> None:
        torch.mm(self.fixed, self.fixed, out=self.fixed_product)

    def random(self) -> None:
        self.a.normal_(generator=self.generator)

    def random_and_product(self) -> None:
        self.a.normal_(generator=self.generator)
        torch.mm(self.a, self.a, out=self.b)

    def arrays(self) -> tuple[Array, Array, Array]:
        return self.a.cpu().numpy(), self.b.cpu().numpy(), self.fixed_product.cpu().numpy()

    def facts(self) -> dict[str, Any]:
        """What must be equal for all contestants, read back from the library."""
        return {"dtype": str(self.b.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}


def blas_pools() -> list[dict[str, Any]]:
    """The BLAS libraries of this process that numpy uses: name, version, kernel, threads. Raises Unavailable."""
    telling = ("internal_api", "version", "architecture", "threading_layer", "num_threads")
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    if not pools:
        raise Unavailable("the threads of numpy's BLAS cannot be set: threadpoolctl does not know this library")
    return [{key: pool.get(key) for key in telling} for pool in pools]


def factor(size: int, dtype: str, seed: int) -> Array:
    """The (n, n) normal numbers that both libraries multiply."""
    numbers: Array = np.random.default_rng(seed).standard_normal((size, size), dtype=np.dtype(dtype).type)
    return numbers


def exact_rows(a: Array, rows: int) -> Array:
    """The first rows of a x a in float64."""
    wide: Array = a.astype(np.float64)
    product: Array = wide[:rows] @ wide
    return product


def close_to(found: Array, truth: Array) -> Equality:
    """Whether `found` is what float64 gives, but for the rounding of its own type."""
    return compare_outputs([found], [truth], [truth], TOLERANCES[found.dtype.name], [truth.astype(found.dtype)])


def looks_normal(a: Array) -> dict[str, Any]:
    """Whether the numbers in `a` may be independent draws from N(0, 1): five moments within six standard errors."""
    x = a.ravel().astype(np.float64)
    errors = {
        "mean": (x.mean(), 0.0, 1.0),
        "variance": ((x * x).mean(), 1.0, 2.0),
        "third moment": ((x**3).mean(), 0.0, 15.0),
        "fourth moment": ((x**4).mean(), 3.0, 96.0),
        "lag-1 product": ((x[1:] * x[:-1]).mean() if len(x) > 1 else 0.0, 0.0, 1.0),
    }
    off = [
        f"{name} {value:.4g} where {expected:g} is expected"
        for name, (value, expected, variance) in errors.items()
        if not abs(value - expected) <= 6 * np.sqrt(variance / len(x))
    ]
    return {"passed": not off, "detail": "; ".join(off) or None, "nan_count": int(np.isnan(x).sum())}


def _check_all(stage: Stage, contest: Contest, when: str) -> dict[str, dict[str, str]]:
    """Rows of checks for what every contestant's last calls left; why some get no speed-up, by name and work."""
    size = stage.spec.size
    rows = int(max(1, min(size, _MOST_CHECK_FLOP / (2 * size * size))))
    truth = exact_rows(factor(size, stage.spec.dtype, stage.spec.seed), rows)
    wrong: dict[str, dict[str, str]] = {}
    outputs: dict[str, Array] = {}
    for name in contest.names:
        for work in WORKS:
            file = stage.bench.file(f"{PART}-{name}-{work}.npy")
            told = contest.attempt(name, "output", work=work, rows=rows, file=str(file))
            if name not in contest.names:
                break
            if work == "product":
                outputs[name] = np.load(file)
                told = vars(close_to(outputs[name], truth))
            against = "N(0, 1)" if work == "random" else "float64"
            found = [("standard_normal" if work == "random" else "equal_to_float64", against, told)]
            if work == "product" and name != "numpy":
                tolerance = TOLERANCES[stage.spec.dtype]
                equal = compare_outputs([outputs[name]], [outputs["numpy"]], [truth], tolerance, [outputs["numpy"]])
                found.append(("equal_to_numpy", "numpy", vars(equal)))
            for check, other, fields in found:
                at = {"work": work, "when": when}
                row = Check.model_validate({"name": check, "of": name, "against": other, "at": at, **fields})
                if not row.passed:
                    wrong.setdefault(name, {})[work] = f"{when} it is not {check.replace('_', ' ')}: {row.detail}"
                if name != contest.twin:
                    stage.result.checks.append(row)
    return wrong


def _roofline(stage: Stage, timing: Timing) -> Figure:
    """How far a product is from what its device was measured to reach: two matrices read, one written."""
    flop, matrix_bytes = 2 * stage.spec.size**3, stage.spec.size**2 * np.dtype(stage.spec.dtype).itemsize
    return roofline.point(
        timing.of,
        timing.at,
        roofline.Work(flop, 3 * matrix_bytes),
        timing.median,
        stage.bench.ceilings,
        dtype=stage.spec.dtype,
        device_type="cuda" if stage.on_cuda and timing.of == "torch" else "cpu",
        cores=stage.threads,
    )


def _tell(stage: Stage, timings: list[Timing], books: dict[str, float], blas: list[dict[str, Any]]) -> None:
    """Figures of the product's rate, and the sentences."""
    spec = stage.spec
    for timing in timings:
        if timing.at["work"] == "product" and timing.median:
            rate = 2 * spec.size**3 / timing.median
            stage.result.figures.append(Figure(name="rate", of=timing.of, at=timing.at, value=rate, unit="FLOP/s"))
            stage.result.figures.append(_roofline(stage, timing))
    if {"numpy", "torch", "torch, synchronised"} <= books.keys():
        stage.find(
            PART,
            f"as the book does it: numpy {duration(books['numpy'])}, torch {duration(books['torch'])} without waiting "
            f"and {duration(books['torch, synchronised'])} with, a ratio of "
            f"{books['numpy'] / books['torch']:.3g}; {_BOOKS_REASON}",
        )
    pools = ", ".join(f"{pool['internal_api']} {pool['version']}" for pool in blas)
    threads = "1 thread" if stage.threads == 1 else f"{stage.threads} threads"
    stage.find(
        PART,
        f"equal work: {spec.dtype}, {spec.size} x {spec.size}, {threads} each (numpy's {pools} set by "
        "threadpoolctl, torch's by set_num_threads), results written in place; both generators run on one thread",
    )
    words = {
        "product": "the product alone",
        "random": "the numbers alone",
        "random_and_product": "both, as in the loop",
    }
    for row in [r for r in stage.result.comparisons if r.name == PART and r.speedup is not None]:
        times = {t.of: t.median for t in timings if t.at == row.at}
        ours, numpys = times.get(row.of), times.get("numpy")
        if ours and numpys:
            rounds = min(t.n for t in timings if t.at == row.at)
            ratio = f"{row.speedup:.3g}x, {row.verdict}" if rounds >= FEWEST_ROUNDS else TOO_FEW
            times_told = f"numpy {duration(numpys)}, {row.of} {duration(ours)}"
            stage.find(PART, f"{words[row.at['work']]}: {times_told}: {ratio}")
