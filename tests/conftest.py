"""Settings of the whole suite.

Rank and dtype promotion stay as users have them: a test that wants them strict says so with
`jax.numpy_rank_promotion("raise")`. (Strict dtypes could not be the rule: `optax.adam` needs promotion.)
"""

import os
from collections.abc import Iterator

# Most of the suite's time is LLVM's, for programs that run once: without its optimisations they compile three times
# quicker. XLA's own passes stay. `XLA_FLAGS= make test` tests the optimised code.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest
from hypothesis import settings

settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def x64_stays_off() -> Iterator[None]:
    """A test asks for float64 as `with jax.enable_x64(True):`, so that the next one has float32 again."""
    yield
    leaked = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", False)
    assert not leaked, "this test left jax_enable_x64 on; use `with jax.enable_x64(True):`"
