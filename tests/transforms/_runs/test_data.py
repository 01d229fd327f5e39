"""Arrays of other libraries are converted; anything else is refused with its place."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import pytest

from plurax.transforms._runs.data import as_arrays, examples, is_array_like


def test_what_needs_no_conversion_stays_the_same_object():
    tree = {"a": np.ones(2), "b": (jnp.ones(3), 1.5, True, None, 2j), "c": jax.random.key(0), "d": np.float16(1)}
    assert as_arrays("api", "batch", tree) is tree
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, np.uint8, np.complex64, bool):
        x = np.zeros(3, dtype)
        assert as_arrays("api", "batch", x) is x
    jax.jit(lambda x: as_arrays("api", "batch", x))(tree)  # tracers too


def test_arrays_of_other_libraries_become_arrays_of_numpy():
    table = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]})
    x, y = as_arrays("api", "batch", (table, table["y"]))
    assert isinstance(x, np.ndarray)
    np.testing.assert_array_equal(x, [[1.0, 3.0], [2.0, 4.0]])
    np.testing.assert_array_equal(y, [3.0, 4.0])
    assert is_array_like(table)
    assert not is_array_like([1.0])


@pytest.mark.parametrize(
    ("leaf", "described"),
    [
        ("a", "'a' of type str"),
        (b"a", "b'a' of type bytes"),
        (np.str_("a"), r".*<U1"),
        (pd.Series(["a"]), r"an array of shape \(1,\) and dtype \w+"),
        (np.zeros(2, [("x", float)]), r"an array of shape \(2,\) and dtype \[\('x', '<f8'\)\]"),
        (print, "<built-in function print> of type builtin_function_or_method"),
    ],
)
def test_what_holds_no_numbers_is_refused(leaf, described):
    with pytest.raises(TypeError, match=rf"^api: `batch\['a'\]\[1\]` is {described}, not a number or an array of numb"):
        as_arrays("api", "batch", {"a": (1.0, leaf)})


def test_examples_are_counted():
    data = {"x": np.ones((4, 3)), "y": pd.Series(range(4))}
    found, count = examples("api", data)
    assert count == 4
    assert isinstance(found["y"], np.ndarray)
    assert examples("api", np.ones((0, 2)))[1] == 0
    with pytest.raises(ValueError, match=r"^api: `data\['x'\]` has 4 examples, but `data\['y'\]` has 5; make"):
        examples("api", {**data, "y": np.ones(5)})
    with pytest.raises(TypeError, match=r"^api: `data\[1\]` is 2.0 of type float, not an array with the exam"):
        examples("api", (np.ones(3), 2.0))
    with pytest.raises(ValueError, match="^api: data has no arrays, so there are no examples"):
        examples("api", {"x": None})
