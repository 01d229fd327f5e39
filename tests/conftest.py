"""Settings of the whole suite.

Rank and dtype promotion stay as users have them: a test that wants them strict says so with
`jax.numpy_rank_promotion("raise")`. (Strict dtypes could not be the rule: `optax.adam` needs promotion.)
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Most of the suite's time is the compiler's, for programs that run once. So LLVM optimizes nothing, and loops are
# emitted as LLVM directly: through MLIR, the default, takes a small program twice as long. (As an extra option it is
# ignored by a jaxlib that does not know it.) `XLA_FLAGS= make test` tests the default.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
# What one worker or script compiled is kept for the others. Entries are not written atomically; one that is read half
# written fails to decompress, of which JAX warns (pyproject.toml lets it), and it is compiled again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Only now, since JAX reads the variables when it is imported.
import jax
import pytest
from hypothesis import settings

# Tracing makes many objects, few of them in cycles: by its defaults the collector takes 3 % of the time and more.
gc.set_threshold(50_000, 20, 20)

settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file run in one worker, so that what several of them trace and compile is made once.

    xdist begins with the largest groups. Scripts are processes of their own: each by itself, they fill up the end.
    """
    for item in items:
        if item.path.name != "test_examples.py" and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.fixture(autouse=True)
def x64_stays_off() -> Iterator[None]:
    """A test asks for float64 as `with jax.enable_x64(True):`, so that the next one has float32 again."""
    yield
    leaked = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", False)
    assert not leaked, "this test left jax_enable_x64 on; use `with jax.enable_x64(True):`"
