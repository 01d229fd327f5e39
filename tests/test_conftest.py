"""The settings of conftest.py take effect."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings


def test_a_leaked_x64_fails_its_test_and_not_the_next(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile("""
        import jax

        def test_leaks():
            jax.config.update("jax_enable_x64", True)

        def test_next():
            assert not jax.config.values["jax_enable_x64"]
    """)
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*this test left jax_enable_x64 on*"])


@pytest.mark.parametrize(("most", "expected"), [(None, 13), (1, 3), (2, 5), (3, 6), (20, 13)])
def test_cases_are_spread_evenly(pytester: pytest.Pytester, most: int | None, expected: int) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile("""
        import pytest

        def test_alone():
            pass

        @pytest.mark.parametrize("i", range(10))
        def test_many(i):
            print(f"case {i}.")

        @pytest.mark.parametrize("i", "ab")
        def test_two(i):
            pass
    """)
    result = pytester.runpytest_inprocess("-s", *([] if most is None else ["--cases", str(most)]))
    result.assert_outcomes(passed=expected, deselected=13 - expected)
    if most == 3:
        result.stdout.fnmatch_lines(["*case 0.*", "*case 4.*", "*case 9.*"])


def test_x64_as_a_context_does_not_leak() -> None:
    with jax.enable_x64(True):
        assert jnp.ones(3).dtype == jnp.float64


def test_a_half_written_entry_of_the_cache_is_compiled_again() -> None:
    def compiled() -> Callable[[jax.Array], jax.Array]:
        def half_written(x: jax.Array) -> jax.Array:
            return 2 * x

        return jax.jit(half_written)

    expected = compiled()(jnp.ones(3))
    entries = list(Path(jax.config.values["jax_compilation_cache_dir"]).glob("jit_half_written-*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry for 'jit_half_written'"):
        again = compiled()(jnp.ones(3))
    np.testing.assert_array_equal(again, expected)
    for entry in entries:
        entry.unlink()


@pytest.mark.parametrize(("profile", "examples"), [("default", 25), ("fuzz", 2000)])
def test_profiles(profile: str, examples: int) -> None:
    assert settings.get_profile(profile).max_examples == examples
    assert settings.get_profile(profile).deadline is None
