"""Stacking models whose variables hold Python numbers, which no test of layers or ensembles covers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms._models.stacking import stack_models


class Step(nnx.Module):
    def __init__(self, size: Any) -> None:
        self.size = nnx.Variable(size)


def stacked(*sizes: Any) -> Any:
    return stack_models(
        "stack", "step", ("let them be alike", "define it once"), [Step(size) for size in sizes]
    ).merge()


def test_numbers_become_one_array() -> None:
    together = stacked(1, 2, 5).size.get_value()
    np.testing.assert_array_equal(together, [1, 2, 5])
    assert (together.dtype, together.weak_type) == (jnp.int32, False)
    np.testing.assert_array_equal(stacked(1.5, jnp.array(2.5)).size.get_value(), [1.5, 2.5])


def test_numbers_of_two_types_are_distinguished() -> None:
    match = (
        r"^stack: step 1 differs from step 0 at `size`: it has shape \(\) and dtype float32, but step 0 has .* int32;"
    )
    with pytest.raises(ValueError, match=match):
        stacked(1, 2.0)
