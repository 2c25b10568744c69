"""Random small CNNs: unfused, fused by the search and fused at random they agree with onnxruntime.

``python -m scripts.fuzz`` runs more of them, and reduces what fails.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.differential import differences, relative_error
from tests.support.random_cnn import is_lively, random_cnn


@pytest.mark.parametrize("seed", range(100))
def test_every_plan_agrees_with_onnxruntime(seed):
    cnn = random_cnn(seed)
    assert differences(cnn.model, cnn.feed, cnn.expected, seed) == {}


@pytest.mark.parametrize("seed", range(100, 115))
def test_half_precision_agrees_with_onnxruntime(seed):
    cnn = random_cnn(seed)
    plans = ("search", "random")
    assert differences(cnn.model, cnn.feed, cnn.expected, seed, "float16", plans) == {}


def test_a_seed_always_gives_the_same_network():
    first, second = random_cnn(7), random_cnn(7)
    assert first.model == second.model
    assert all(np.array_equal(first.feed[name], second.feed[name]) for name in first.feed)
    assert first.model != random_cnn(8).model


def test_a_wrong_output_counts_as_an_error():
    right = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype("float32")
    wrong = right.copy()
    wrong[0, 0, 0, 0] += 0.01
    assert relative_error(right, right) == 0
    assert relative_error(wrong, right) > 1e-5
    assert relative_error(right[:1], right) == float("inf")
    assert relative_error(np.where(right > 2, np.nan, right), right) == float("inf")


def test_outputs_that_hardly_vary_are_not_lively():
    assert is_lively(np.linspace(-1, 1, 100))
    assert not is_lively(np.full(100, 3.0))
    assert not is_lively(np.zeros(2))
    assert not is_lively(np.linspace(-1e4, 1e4, 100))
