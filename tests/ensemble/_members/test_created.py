"""Each created member equals a model built from its own key, to an ulp.

The last bits depend on the compiler, which does not optimize while the tests run. So this file is also a script that
runs with the compiler's defaults.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from plurax.ensemble import Ensemble

pytestmark = pytest.mark.smoke

# For each name: the model, and the seed or the kind of key.
WAYS = {
    "0": ("Stateful", 0),
    "12": ("Stateful", 12),
    "int64": ("Stateful", np.int64(3)),
    "seeds": ("Stateful", [7, 0, 7]),
    "threefry2x32": ("Plain", "threefry2x32"),
    "rbg": ("Plain", "rbg"),
}


def leaves(module):
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(module)]


def assert_to_an_ulp(a, b):
    (np.testing.assert_array_max_ulp if a.dtype.kind == "f" else np.testing.assert_array_equal)(a, b)


def created(make, seed):
    seed = jax.random.key(5, impl=seed) if isinstance(seed, str) else seed
    ens = Ensemble.create(make, 3, seed=seed)
    key = jax.random.key(seed) if isinstance(seed, (int, np.integer)) else seed
    for i in range(3):
        alone = make(nnx.Rngs(key[i] if isinstance(key, list) else jax.random.fold_in(key, i)))
        for a, b in zip(leaves(ens[i]), leaves(alone), strict=True):
            assert_to_an_ulp(a, b)


@pytest.fixture(scope="module")
def outcomes():
    """Return a traceback, or an empty string, by name."""
    environment = {**os.environ, "XLA_FLAGS": ""}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.xdist_group("created")
@pytest.mark.parametrize("way", WAYS)
def test_created_members_are_those_of_their_own_keys(way, outcomes):
    assert not outcomes[way], outcomes[way]


def test_two_ulps_are_detected():
    with pytest.raises(AssertionError, match="1 ULP"):
        assert_to_an_ulp(np.ones(2, np.float32), np.ones(2, np.float32) + 2**-22)


def failure_of(way):
    name, seed = WAYS[way]
    try:
        created(getattr(importlib.import_module("conftest"), name), seed)
    except Exception:  # the test reports any error
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # for conftest.py, which pytest would find
    Path("/dev/stdout").write_text(json.dumps({way: failure_of(way) for way in WAYS}))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_seeds_are_the_keys_of_each(impl):
    """Thousands of seeds become keys at once."""
    with jax.default_prng_impl(impl):
        for seeds in ([0, 7, 2**31 - 1], [2**31, -1, 3], np.array([4, 5, 6]), range(3)):
            found = Ensemble.create(lambda rngs: nnx.Linear(2, 3, rngs=rngs), 3, seed=seeds)
            keys = [jax.random.key(int(seed)) for seed in seeds]
            expected = Ensemble.create(lambda rngs: nnx.Linear(2, 3, rngs=rngs), 3, seed=keys)
            np.testing.assert_array_equal(found.trainable["kernel"], expected.trainable["kernel"])
