"""What counts as equal, and what is done with a strategy that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worker.fresh import call_fresh
from torchstone.results import Result
from torchstone.specs import parse_spec
from worker.bench import Bench
from worker.parallel import scratch
from worker.parallel.equality import Found, compare
from worker.workloads import train


def found(change: Any = lambda name, array: array) -> Found:
    random = np.random.default_rng(0)
    sizes = {"weight": 1.0, "bias": 0.05}
    arrays = {f"initial/{name}": random.normal(size=50) for name in sizes}
    arrays |= {f"gradient/0/{name}": size * random.normal(size=50) for name, size in sizes.items()}
    arrays |= {f"weights/{n}": arrays[f"initial/{n}"] - 0.1 * arrays[f"gradient/0/{n}"] for n in sizes}
    changed = {key: change(key, array) for key, array in arrays.items()}
    return Found([1.0], {key: array.astype(np.float32) for key, array in changed.items()})


def verdicts(of: Found, **options: Any) -> dict[str, bool]:
    told = compare(of, found(), 1, "float32", adaptive=False, **options)
    return {what: row["passed"] for what, row in told.items()}


def test_rounding_passes_and_is_measured() -> None:
    random = np.random.default_rng(1)
    of = found(lambda key, array: array * (1 + 1e-7 * random.normal(size=50)))
    assert verdicts(of) == {"loss": True, "gradient": True, "weights": True}
    row = compare(of, found(), 1, "float32", adaptive=False)["gradient"]
    assert row["bitwise"] is False and 0 < row["norm_rel_error"] < 1e-6


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_gradient_that_was_not_summed_fails_however_small_it_is(name: str) -> None:
    of = found(lambda key, array: array / 2 if key == f"gradient/0/{name}" else array)
    assert verdicts(of) == {"loss": True, "gradient": False, "weights": True}
    assert not verdicts(of, rounding=1.0)["gradient"], "no amount of rounding excuses half a gradient"


def test_a_step_twice_as_long_fails() -> None:
    initial = found().part("initial/")

    def twice(key: str, array: Any) -> Any:
        start = initial.get(key.removeprefix("weights/"))
        return array if not key.startswith("weights/") or start is None else start + 2 * (array - start)

    assert verdicts(found(twice)) == {"loss": True, "gradient": True, "weights": False}


def test_a_missing_weight_and_a_one_sided_nan_fail() -> None:
    fewer = found()
    del fewer.arrays["weights/bias"]
    assert not verdicts(fewer)["weights"]
    nan = found(lambda key, array: np.where(np.arange(50) == 3, np.nan, array) if key == "gradient/0/bias" else array)
    assert not verdicts(nan)["gradient"]


def _with_a_faulty_allreduce(folder: Path) -> str:
    def rebinds(data: list[Any]) -> None:
        data[0] = sum(data)  # the first device's own tensor stays as it was

    scratch.allreduce = rebinds
    spec = {"kind": "train", "model": {"preset": "mlp"}, "dataset": {"name": "digits"}, "max_steps": 3}
    spec |= {"strategies": ["single", "scratch"], "devices": {"count": 2}}
    return train.run(parse_spec(spec), Bench.local(folder, devices=2)).to_json()  # type: ignore[arg-type]


def test_an_allreduce_that_rebinds_is_found_and_gets_no_speed_up(tmp_path: Path) -> None:
    result = Result.model_validate_json(call_fresh(_with_a_faulty_allreduce, tmp_path))
    failed = {(c.name, c.of) for c in result.checks if not c.passed}
    assert failed == {("equal_to_single", "scratch"), ("replicas_equal", "scratch")}
    (efficiency,) = [f for f in result.figures if f.name == "scaling_efficiency"]
    assert efficiency.value is None and efficiency.reason
    assert {c.verdict for c in result.comparisons} == {"withheld"}
