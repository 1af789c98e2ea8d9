"""The one Result: every kind answers with this shape, so tables, CSV, charts and clients are written once.

Every row is named by (`name`, `of`, `at`): what, of which contestant, at which point. Units stand in `unit` or in
the field's name. A number that could not be had is None; `to_json` turns NaN and infinities into null and names
the keys in a `non_finite` list beside them, so that the wire is strict JSON and nothing is hidden.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
Point = dict[str, Any]


class Row(BaseModel):
    """A named row of a result."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _flags_are_read_back(cls, body: Any) -> Any:
        """`to_json` names what was NaN or infinite beside it; the nulls stay."""
        if isinstance(body, dict) and "non_finite" in body:
            return {key: value for key, value in body.items() if key != "non_finite"}
        return body


class Timing(Row):
    """Statistics of one contestant's samples at one point; every one recomputes from the raw samples named."""

    name: str
    of: str
    at: Point = Field(default_factory=dict)
    unit: str = "s"
    n: int
    min: float | None
    median: float | None
    mean: float | None
    std: float | None = Field(description="sample standard deviation (n - 1)")
    iqr: float | None
    p05: float | None = None
    p10: float | None = None
    p90: float | None = Field(None, description="null under 64 samples")
    p95: float | None = Field(None, description="null under 130 samples")
    p99: float | None = Field(None, description="null under 662 samples")
    ci95: tuple[float, float] | None = Field(None, description="of the median")
    first_call_s: float | None = None
    build_cold_s: float | None = None
    build_warm_s: float | None = None
    calls_per_sample: int = Field(1, description="a fast call is timed in blocks of this many; samples are per call")
    outliers: int = 0
    samples: str | None = Field(None, description="artifact#key of the raw samples")


class Comparison(Row):
    """`of` against `against`: speedup = median(against) / median(of), over 1 is faster."""

    name: str
    of: str
    against: str
    at: Point = Field(default_factory=dict)
    speedup: float | None
    ci95: tuple[float, float] | None
    p10_speedup: float | None = None
    noise_floor: float | None
    verdict: Literal["faster", "slower", "same", "inconclusive", "withheld"]
    reason: str | None = None
    break_even_calls: float | None = None


class Check(Row):
    """What was proven equal to what, and how closely."""

    name: str
    of: str
    against: str
    at: Point = Field(default_factory=dict)
    passed: bool
    rtol: float | None = None
    atol: float | None = None
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    norm_rel_error: float | None = None
    bitwise: bool | None = None
    nan_count: int = 0
    detail: str | None = None


class Curve(Row):
    """y over x, e.g. accuracy by epoch."""

    name: str
    of: str
    at: Point = Field(default_factory=dict)
    x_name: str
    y_name: str
    x: list[float | None]
    y: list[float | None]
    ci95: list[tuple[float, float] | None] | None = Field(None, description="of each y; null where it is not known")


class Figure(BaseModel):
    """One number with its unit; kinds may add fields such as bytes, seconds, method."""

    model_config = ConfigDict(extra="allow")

    name: str
    of: str
    at: Point = Field(default_factory=dict)
    value: float | None
    unit: str
    reason: str | None = Field(None, description="why value is null")


class Span(Row):
    """A piece of a timeline."""

    name: str
    of: str
    at: Point = Field(default_factory=dict)
    start_s: float
    end_s: float


class Table(Row):
    """Anything tabular that has no better place."""

    name: str
    columns: list[str]
    rows: list[list[Any]]


class Artifact(Row):
    """A file that the job made."""

    name: str
    media_type: str
    bytes: int
    sha256: str


class Skipped(Row):
    """A contestant that could not take part, and why."""

    of: str
    reason: str
    status: Literal["skipped", "failed"] = "skipped"


class Code(Row):
    """One reason to trust a result less, with what was measured."""

    code: str
    severity: Literal["info", "warning", "error"]
    evidence: dict[str, Any] = Field(default_factory=dict)


class Quality(Row):
    """How far the numbers can be believed."""

    grade: Literal["valid", "suspect", "invalid"] = "valid"
    codes: list[Code] = Field(default_factory=list)


class Result(Row):
    """Everything that an experiment found."""

    schema_: int = Field(SCHEMA_VERSION, alias="schema")
    timings: list[Timing] = Field(default_factory=list)
    comparisons: list[Comparison] = Field(default_factory=list)
    checks: list[Check] = Field(default_factory=list)
    curves: list[Curve] = Field(default_factory=list)
    figures: list[Figure] = Field(default_factory=list)
    spans: list[Span] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)
    artifacts: list[Artifact] = Field(default_factory=list)
    skipped: list[Skipped] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=lambda: {"hosts": []})
    quality: Quality = Field(default_factory=Quality)
    noise_floor: float | None = None

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def to_json(self) -> str:
        """Strict JSON: no NaN, no infinity, `schema` by its wire name."""
        return dumps(self.model_dump(mode="python", by_alias=True))


def dumps(value: Any) -> str:
    """`value` as strict JSON text; see `strict`."""
    return orjson.dumps(strict(value), option=orjson.OPT_SERIALIZE_NUMPY).decode()


def strict(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None, and named in `non_finite` in the nearest object."""
    if isinstance(value, dict):
        clean = {str(key): strict(item) for key, item in value.items()}
        lost = [str(key) for key, item in value.items() if _is_non_finite(item)]
        return {**clean, "non_finite": lost} if lost else clean
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _is_non_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_non_finite(item) for item in value)
    return isinstance(value, float) and not math.isfinite(value)
