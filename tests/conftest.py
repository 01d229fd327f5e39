"""Settings of the whole suite.

Rank and dtype promotion stay as users have them: a test that wants them strict says so with
`jax.numpy_rank_promotion("raise")`. (Strict dtypes could not be the rule: `optax.adam` needs promotion.)
"""

import os
from collections.abc import Iterator
from pathlib import Path

# Most of the suite's time is the compiler's, for programs that run once. With LLVM's optimisations at level 1 they
# compile three times quicker, to the same numbers; `XLA_FLAGS= make test` tests the default. What was compiled once is
# kept, for each worker apart, since entries are not written atomically.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
CACHE = Path(__file__).parents[1] / ".pytest_cache" / f"jax-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Only now, since JAX reads the variables when it is imported.
import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

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
