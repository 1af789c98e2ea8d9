"""Which outputs count as the same, and which do not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from worker.measure.equality import compare_outputs

TRUTH = np.linspace(-1, 1, 50)
EAGER = TRUTH.astype(np.float32)


def compare(ours: NDArray[np.float32], eager: NDArray[np.float32] = EAGER, truth: NDArray[np.float64] = TRUTH) -> bool:
    return compare_outputs([ours], [eager], [truth], 1e-4, [eager]).passed


def test_small_rounding_passes_and_one_percent_does_not() -> None:
    assert compare(EAGER + np.float32(1e-6))
    assert not compare(EAGER * np.float32(1.01))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_rule_does_not_depend_on_the_size_of_the_outputs(scale: float) -> None:
    eager, truth = (EAGER * scale).astype(np.float32), TRUTH * scale
    assert compare((eager * np.float32(1 + 1e-6)), eager, truth)
    assert not compare((eager * np.float32(1.01)), eager, truth)


def test_a_far_output_passes_if_eager_is_as_far_from_the_truth() -> None:
    eager = (TRUTH + 0.01).astype(np.float32)
    equal = compare_outputs([(TRUTH - 0.01).astype(np.float32)], [eager], [TRUTH], 1e-4, [eager])
    assert equal.passed
    assert equal.detail is not None
    assert not compare_outputs([(TRUTH - 0.03).astype(np.float32)], [eager], [TRUTH], 1e-4, [eager]).passed


def test_nan_in_the_same_place_is_equal_and_counted_and_elsewhere_is_not() -> None:
    holed = EAGER.copy()
    holed[3] = np.nan
    both = compare_outputs([holed], [holed.copy()], [TRUTH], 1e-4, [holed])
    assert both.passed
    assert both.bitwise
    assert both.nan_count == 1
    assert not compare(holed)
    assert not compare(EAGER, holed)


def test_infinities_must_agree_in_sign() -> None:
    up, down = EAGER.copy(), EAGER.copy()
    up[0], down[0] = np.inf, -np.inf
    assert compare(up, up)
    assert not compare(up, down)


def test_another_shape_is_another_output() -> None:
    assert not compare(EAGER[:-1])
    assert not compare(EAGER.reshape(5, 10))


def test_zeros_equal_zeros_only() -> None:
    zeros = np.zeros(4, np.float32)
    assert compare(zeros, zeros, zeros.astype(np.float64))
    assert not compare(zeros + np.float32(1e-3), zeros, zeros.astype(np.float64))


def test_a_small_tensor_is_not_judged_by_a_large_one_beside_it() -> None:
    """A training step's output and gradients: a wrong gradient of 0.1 must not hide behind one of 100."""
    large, small = (100 * EAGER), (EAGER / 8)
    truth = [100 * TRUTH, TRUTH / 8]
    right = compare_outputs([large, small], [large, small], truth, 1e-3, [large, small])
    wrong = compare_outputs([large, -small], [large, small], truth, 1e-3, [large, small])
    assert right.passed
    assert not wrong.passed
    assert wrong.detail is not None
    assert "tensor 1 of 2" in wrong.detail


def test_what_cancellation_left_beside_a_large_tensor_is_noise() -> None:
    noise = np.random.default_rng(0).normal(0, 4e-8, (2, 50)).astype(np.float32)
    exact = [TRUTH, np.zeros(50)]
    assert compare_outputs([EAGER, 4 * noise[0]], [EAGER, noise[1]], exact, 1e-3, [EAGER, noise[1]]).passed


def test_an_engine_may_flush_denormals_to_zero() -> None:
    denormal = np.array([1e-40, -1e-42, 3e-44, -0.0], np.float32)
    assert compare(np.zeros(4, np.float32), denormal, denormal.astype(np.float64))
    assert not compare(np.zeros(4, np.float32), denormal * np.float32(1e4), denormal.astype(np.float64) * 1e4)


def test_nothing_overflows_near_the_largest_float32() -> None:
    large = (TRUTH * 3.3e38).astype(np.float32)
    assert compare(large, large, large.astype(np.float64))
    assert not compare(large * np.float32(0.9), large, large.astype(np.float64))


def test_an_output_of_another_type_is_another_output() -> None:
    found = compare_outputs([EAGER.astype(np.float16)], [EAGER], [TRUTH], 1.0, [EAGER])
    assert not found.passed and found.detail == "dtypes ['float16'] where eager gives ['float32']"
