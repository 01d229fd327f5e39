"""The recipe of docs/dp-sgd.md for a model that is published: killed at random moments, and started again."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.transforms._runs import checkpoint_clock
from plurax.transforms.modules import load_params
from plurax.transforms.privacy import DPSGD

PAGE = Path(__file__).parents[4] / "docs/dp-sgd.md"
X = np.sin(np.arange(40 * 4.0)).reshape(40, 4).astype(np.float32)
Y = np.arange(40) % 3
STEPS, KILLS = 200, 5


def loss(model: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def network(seed: int) -> nnx.Linear:
    return nnx.Linear(4, 3, rngs=nnx.Rngs(seed))


def private() -> DPSGD:
    options: dict[str, Any] = {"l2_clip_norm": 0.7, "noise_multiplier": 1.3, "target_delta": 1e-3, "accountant": "rdp"}
    sizes: dict[str, Any] = {"num_examples": 40, "expected_batch_size": 8.0, "num_steps": STEPS}
    return DPSGD(loss, optax.adam(1e-2), **options, **sizes)


def recipe(folder: Path, dp: DPSGD) -> Callable[[], None]:
    """Return the function of the page, with another folder, data and settings."""
    (code,) = re.findall(r"```python\n(import secrets\n.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {"jax": jax, "np": np, "dp": dp, "model": network(0), "x": X, "y": Y}
    exec(code.partition("\n\n\ndef ")[0], namespace)
    namespace["folder"] = folder
    exec("def " + code.partition("\n\n\ndef ")[2].partition("\n\n\n")[0], namespace)
    found: Callable[[], None] = namespace["train_and_save"]
    return found


def started(folder: Path, told: int | None) -> None:
    """Run the recipe; write down the key that it draws, and tell each batch, which then takes 20 ms."""
    dp, batches, draw = private(), DPSGD.batches, secrets.token_bytes
    # Five minutes are 0.3 seconds, and the disk of the test's machine may be slow.
    checkpoint_clock.now, checkpoint_clock._SHARE = (lambda: 1000.0 * time.monotonic()), 1e9

    def drawn(nbytes: int | None = None) -> bytes:
        key = draw(nbytes)
        with (folder / "keys.txt").open("a") as file:
            file.write(f"{key.hex()}\n")
        return key

    def slowly(self: DPSGD, *args: Any, **options: Any) -> Iterator[Any]:
        for batch in batches(self, *args, **options):
            if told is not None:
                os.write(told, b"a batch\n")
                time.sleep(0.02)
            yield batch

    secrets.token_bytes = drawn
    dp.batches = slowly.__get__(dp)  # type: ignore[method-assign]
    recipe(folder, dp)()


def kill_again_and_again(folder: Path) -> None:
    """Kill the recipe after a random number of batches, and let it end the last time. Print what is told meanwhile."""
    generator = np.random.default_rng(0)
    for kill in range(KILLS + 1):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            started(folder, write)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            for _ in range(generator.integers(1, 40)) if kill < KILLS else ():
                lines.readline()
            if kill < KILLS:
                time.sleep(float(generator.uniform(0, 0.03)))
                os.kill(child, signal.SIGKILL)
            else:
                lines.read()
            os.waitpid(child, 0)


@pytest.mark.slow
def test_the_recipe_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    cached = {"JAX_COMPILATION_CACHE_DIR": f"{tmp_path / 'cache'}", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    folder = tmp_path / "recipe"
    folder.mkdir()
    options: Any = {"capture_output": True, "text": True, "timeout": 900, "env": {**os.environ, **cached}}
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder)], check=False, **options)
    assert done.returncode == 0, done.stderr
    going_on = r"^DPSGD.fit: going on from step (\d+) in \S+/secret, with the key of its checkpoint instead of .*$"
    lines = re.findall(going_on, done.stderr, re.MULTILINE)
    steps = [int(x) for x in lines]
    assert steps == sorted(steps)
    assert len({*steps}) > 1
    keys = (folder / "keys.txt").read_text().split()
    assert len({*keys}) == len(keys) == KILLS + 1
    assert sorted(path.name for path in folder.iterdir()) == ["keys.txt", "model.safetensors"]
    # The model is that of a run that was never killed, with the key that was drawn when its first checkpoint was made.
    found = load_params(folder / "model.safetensors", network(1))
    dp = private()
    trained = []
    for text in keys[: KILLS + 1 - len(steps)]:
        key = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(bytes.fromhex(text), np.uint32)))
        state, _ = dp.fit(dp.init(network(0), key=key), (X, Y), progress=False)
        trained.append(np.asarray(state.model.kernel[...]))
    assert sum(np.array_equal(found.kernel[...], kernel) for kernel in trained) == 1
    print(json.dumps(steps))  # noqa: T201 (shown where the test fails)


def test_the_recipe_that_is_killed_between_its_lines_ends_as_it_should(tmp_path: Path) -> None:
    """After the model is saved, and with half of the checkpoints deleted: no step is taken, and no key is drawn."""
    dp = private()
    run = recipe(tmp_path, dp)
    run()
    before = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "secret" / "step_00000200").mkdir(parents=True)
    run()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]))
