"""The data sets that a spec can name: two by name, made-up ones of any shape, and small ones within the spec.

    {"name": "digits"}        {"name": "fashion_mnist"}
    {"synthetic": {"samples": 1000, "shape": [1, 28, 28], "classes": 10}}
    {"inline": {"x": [[1.0], [2.0]], "y": [0, 0], "x_test": [[1.0]], "y_test": [0], "classes": 2}}

Each knows the shape of a sample, its classes and its sizes before anything is loaded, so that a model that does not
fit is refused with its spec. No numbers are touched here: see `worker.data`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, WrapValidator, model_validator

from torchstone.arguments import LIMIT, Size
from torchstone.shapes import Shape
from torchstone.strict import Strict, refusal

_MOST_DIMENSIONS = 8
_LARGEST = 3.4e38  # of float32
Classes = Annotated[int, Field(ge=1, le=1_000_000)]
Label = Annotated[int, Field(ge=0)]

_NAMED: dict[str, tuple[Shape, int, int, int]] = {
    "digits": ((1, 8, 8), 10, 1442, 355),
    "fashion_mnist": ((1, 28, 28), 10, 60_000, 10_000),
}


class NamedDataset(Strict):
    """`digits` comes with Torchstone; `fashion_mnist` is fetched by `torchstone data fetch fashion_mnist`."""

    name: Literal["digits", "fashion_mnist"]

    @property
    def shape(self) -> Shape:
        """Of one sample."""
        return _NAMED[self.name][0]

    @property
    def classes(self) -> int:
        return _NAMED[self.name][1]

    @property
    def samples(self) -> int:
        return _NAMED[self.name][2]

    @property
    def test_samples(self) -> int:
        return _NAMED[self.name][3]


class Synthetic(Strict):
    """Normal numbers around a centre of their class: easy to learn, of any shape and size."""

    samples: int = Field(1000, ge=1, le=100_000_000)
    test_samples: int | None = Field(None, ge=1, le=100_000_000, description="null = a fifth of samples.")
    shape: list[Size] = Field(default_factory=lambda: [1, 28, 28], min_length=1, max_length=_MOST_DIMENSIONS)
    classes: Classes = 10
    noise: float = Field(1.0, ge=0, le=1e6, description="Standard deviation around the centres, which are N(0, 1).")
    seed: int = Field(0, ge=0, lt=2**63, description="Of the data; the spec's own seed leaves them as they are.")

    @model_validator(mode="after")
    def _fits_somewhere(self) -> Self:
        numbers = math.prod(self.shape) * max(self.samples, self.classes)
        if numbers > 16 * LIMIT:
            detail = f"{self.samples} samples of {self.shape} and {self.classes} centres are more than a host can hold"
            raise refusal([(("samples",), detail)])
        return self


class SyntheticDataset(Strict):
    """A made-up data set."""

    synthetic: Synthetic

    @property
    def shape(self) -> Shape:
        return tuple(self.synthetic.shape)

    @property
    def classes(self) -> int:
        return self.synthetic.classes

    @property
    def samples(self) -> int:
        return self.synthetic.samples

    @property
    def test_samples(self) -> int:
        return self.synthetic.test_samples or max(1, self.synthetic.samples // 5)


class Inline(Strict):
    """Rows as nested lists of numbers, taken as they are: nothing is normalised."""

    x: list[Any] = Field(min_length=1, description="One entry a sample; all of one shape.")
    y: list[Label] = Field(min_length=1, description="The class of each, from 0.")
    x_test: list[Any] | None = Field(None, min_length=1, description="null = the training rows.")
    y_test: list[Label] | None = Field(None, min_length=1)
    classes: Classes

    @property
    def shape(self) -> Shape:
        """Of one sample."""
        return _shape_of(self.x[0])

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        faults: list[tuple[tuple[int | str, ...], str]] = []
        if (self.x_test is None) != (self.y_test is None):
            raise refusal([(("x_test",), "x_test and y_test are given together, or neither")])
        if not self.shape or len(self.shape) > _MOST_DIMENSIONS or 0 in self.shape:
            raise refusal([(("x", 0), f"a sample must be a list of numbers, nested at most {_MOST_DIMENSIONS} deep")])
        for x_name, y_name in (("x", "y"), ("x_test", "y_test")):
            x, y = getattr(self, x_name), getattr(self, y_name)
            if x is None:
                continue
            if len(x) != len(y):
                faults.append(((y_name,), f"has {len(y)} labels for {len(x)} samples"))
            for index, row in enumerate(x):
                fault = _row_fault(row, self.shape)
                if fault:
                    faults.append(((x_name, index), fault))
                    break
            for index, label in enumerate(y):
                if label >= self.classes:
                    detail = f"label {label} is not below classes ({self.classes})"
                    faults.append(((y_name, index), detail))
                    break
        if faults:
            raise refusal(faults)
        return self


class InlineDataset(Strict):
    """A small data set within the spec."""

    inline: Inline

    @property
    def shape(self) -> Shape:
        return self.inline.shape

    @property
    def classes(self) -> int:
        return self.inline.classes

    @property
    def samples(self) -> int:
        return len(self.inline.x)

    @property
    def test_samples(self) -> int:
        return len(self.inline.x if self.inline.x_test is None else self.inline.x_test)


def integers_fault(dataset: Dataset, high: int) -> str | None:
    """Why a model that begins with an Embedding of `high` entries cannot take these samples."""
    if not isinstance(dataset, InlineDataset):
        return "holds real numbers, but the model begins with an Embedding, which takes integers: give inline data"
    rows = [*dataset.inline.x, *(dataset.inline.x_test or [])]
    if all(_all_below(row, high) for row in rows):
        return None
    return f"must hold integers from 0 to {high - 1} for the Embedding"


def _shape_of(row: Any) -> Shape:
    shape: list[int] = []
    while isinstance(row, list) and len(shape) <= _MOST_DIMENSIONS:
        shape.append(len(row))
        if not row:
            break
        row = row[0]
    return tuple(shape)


def _row_fault(value: Any, shape: Shape) -> str | None:
    if shape:
        if not isinstance(value, list) or len(value) != shape[0]:
            return "has another shape than the first sample"
        return next((fault for item in value if (fault := _row_fault(item, shape[1:]))), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST <= value <= _LARGEST:
        return "must hold finite numbers only"
    return None


def _all_below(value: Any, high: int) -> bool:
    if isinstance(value, list):
        return all(_all_below(item, high) for item in value)
    return isinstance(value, int) and 0 <= value < high


_WAYS: dict[str, type[NamedDataset] | type[SyntheticDataset] | type[InlineDataset]] = {
    "name": NamedDataset,
    "synthetic": SyntheticDataset,
    "inline": InlineDataset,
}
Dataset = NamedDataset | SyntheticDataset | InlineDataset


def _dataset(body: Any, _: Any) -> Dataset:
    """Choose the class by the key that is there, so that every fault points into what the client wrote."""
    if isinstance(body, (NamedDataset, SyntheticDataset, InlineDataset)):
        return body
    if not isinstance(body, dict):
        raise refusal([((), 'must be an object such as {"name": "digits"}')])
    if "upload" in body:
        detail = "data sets that were uploaded cannot be named yet; for now name one, or give synthetic or inline data"
        raise refusal([(("upload",), detail)])
    ways = [key for key in _WAYS if key in body]
    if len(ways) != 1:
        found = f"has {' and '.join(ways)}" if ways else "has none of them"
        raise refusal([((), f"must name the data in one way, by name, synthetic or inline; this one {found}")])
    return _WAYS[ways[0]].model_validate(body)


DatasetSpec = Annotated[NamedDataset | SyntheticDataset | InlineDataset, WrapValidator(_dataset)]
