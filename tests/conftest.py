"""Settings of the whole suite.

Rank and dtype promotion keep JAX's defaults. A test that needs them strict uses
`jax.numpy_rank_promotion("raise")`. (Strict dtypes cannot be the default: `optax.adam` needs promotion.)
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Most of the suite's time is spent compiling programs that run once. So LLVM optimization is off, and loops are emitted
# as LLVM directly: the default, MLIR, takes twice as long for a small program. (A jaxlib that does not know this extra
# option ignores it.) `make test-all` sets the variable to nothing, for the compiler's defaults; so does `make test` for
# what is marked `optimized`.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
# Workers and scripts share a compilation cache. Entries are not written atomically. An entry that is read half written
# fails to decompress; JAX warns (pyproject.toml allows the warning) and compiles again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# JAX reads the variables when it is imported.
import jax
import numpy as np
import pytest
from hypothesis import settings

# Tracing makes many objects, but few reference cycles: with its defaults the collector takes 3 % of the time and more.
gc.set_threshold(50_000, 20, 20)

settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# The states of the generators of modules after their import.
_STATES: dict[int, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="run at most so many cases of each parametrized test, spread evenly")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Run the tests of a file in one worker, so that they share traces and compiled programs.

    xdist starts with the largest groups. Each script is a group of one, so that scripts fill the workers at the end.
    """
    # Before fixtures of modules draw numbers.
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        own = [x for x in vars(module).values() if isinstance(x, np.random.Generator)]
        _STATES.update({id(x): x.bit_generator.state for x in own})
    for item in items:
        if item.path.name != "test_examples.py" and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    yield  # here xdist reads the groups, and pytest applies -k and -m
    if (most := config.getoption("cases")) is not None:
        kept = spread_evenly(items, most)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def spread_evenly(items: list[pytest.Item], most: int) -> set[pytest.Item]:
    """Return at most `most` cases of each test: the first, the last, and some between them."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    steps = max(1, most - 1)
    return {own[round(i * (len(own) - 1) / steps)] for own in cases.values() for i in range(most)}


@pytest.fixture(autouse=True)
def generators_start_anew(request: pytest.FixtureRequest) -> None:
    """Let each test draw the same numbers alone and after others: generators of its module start again."""
    for generator in vars(request.module).values():
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = _STATES[id(generator)]


@pytest.fixture(autouse=True)
def x64_stays_off() -> Iterator[None]:
    """Fail a test that leaves float64 on; use `with jax.enable_x64(True):` instead."""
    yield
    leaked = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", False)
    assert not leaked, "this test left jax_enable_x64 on; use `with jax.enable_x64(True):`"
