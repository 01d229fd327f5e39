"""The settings in conftest.py do what they say."""

from pathlib import Path

import jax
import jax.numpy as jnp
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


def test_x64_as_a_context_is_no_leak() -> None:
    with jax.enable_x64(True):
        assert jnp.ones(3).dtype == jnp.float64


@pytest.mark.parametrize(("profile", "examples"), [("default", 25), ("fuzz", 2000)])
def test_profiles(profile: str, examples: int) -> None:
    assert settings.get_profile(profile).max_examples == examples
    assert settings.get_profile(profile).deadline is None
