"""A run that is given a directory and nothing else: killed at random moments, it loses what is promised at most."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Batches, EarlyStopping, Ensemble, Trainer
from plurax.transforms._runs import checkpoint_clock
from plurax.transforms._runs.checkpoint_clock import CHECKPOINT_EVERY, CheckpointClock

STEPS = 4000
X = np.sin(np.arange(64 * 3.0)).reshape(64, 3).astype(np.float32)
# So many times as quick as the real clock: the five minutes of the default are one and a half seconds.
SPEED = 200.0
PROMISED = CHECKPOINT_EVERY.total_seconds() / SPEED


class Noisy(nnx.Module):
    """A layer that draws a mask in each step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.linear(x))


def loss(model: Noisy, x: Any) -> Any:
    return jnp.mean((model(x) - x[:, :2]) ** 2)


@functools.cache
def trainer() -> Trainer:
    return Trainer(loss, optax.adam(1e-3), strategy="vmap")


def one_run(directory: Path | None, told: Callable[[str], None] | None = None, **options: Any) -> Any:
    """Train with the default; `told` gets a line for each step, which then takes 20 ms."""

    def tell(step: int, metrics: Any) -> None:
        if told is not None:
            told(f"step {step} {time.monotonic()}")
            time.sleep(0.02)

    return trainer().fit(
        trainer().init(Ensemble.create(Noisy, 2, seed=0)),
        Batches((X,), 16, key=jax.random.key(3)),
        steps=STEPS,
        progress=False,
        checkpoint_dir=directory,
        history_every=1 if told is not None else 40,
        callbacks=[tell],
        **options,
    )


def losses_of_killed(directory: Path, kills: int) -> list[dict[str, float]]:
    """Kill runs at random moments; return for each what is lost and what was promised, in seconds, and its steps."""
    generator, found = np.random.default_rng(0), list[dict[str, float]]()
    # Test machines have slow disks: that checkpoints take a small share of the time is tested without one.
    checkpoint_clock.now, checkpoint_clock._SHARE = (lambda: SPEED * time.monotonic()), 1e9
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            tell = partial(tell_of, write)
            tell_of_clock(tell)
            one_run(directory, tell)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as lines:
            first = lines.readline()
            time.sleep(float(generator.uniform(0.1, 2.5 * PROMISED)))
            os.kill(child, signal.SIGKILL)
            killed = time.monotonic()
            os.waitpid(child, 0)
            told = [line.split() for line in [first, *lines]]
        steps = {int(x[1]): float(x[2]) for x in told if x[0] == "step"}
        begun, ended = ([float(x[1]) for x in told if x[0] == name] for name in ("begin", "end"))
        costs = [end - start for start, end in zip(begun, ended, strict=False)]
        waited = max(PROMISED, *costs, 0.0)  # two are not written at once
        writing = killed - begun[-1] if len(begun) > len(ended) else 0.0
        newest = max((int(path.name[5:]) for path in directory.glob("step_*")), default=0)
        gaps = np.diff([*steps.values()], append=killed)
        found.append(
            {
                "lost": killed - steps.get(newest, min(steps.values())),
                "promised": waited + writing + 2 * float(max(gaps)),
                "from": min(steps) - 1,
                "newest": newest,
                "writing": writing,
            }
        )
    return found


def tell_of(pipe: int, line: str) -> None:
    os.write(pipe, f"{line}\n".encode())


def tell_of_clock(told: Callable[[str], Any]) -> None:
    """Tell when checkpoints are begun and ended."""
    begin, end = CheckpointClock.begin, CheckpointClock.end

    def begun(self: CheckpointClock) -> None:
        told(f"begin {time.monotonic()}")
        begin(self)

    def ended(self: CheckpointClock) -> None:
        end(self)
        told(f"end {time.monotonic()}")

    CheckpointClock.begin, CheckpointClock.end = begun, ended  # type: ignore[method-assign]


@pytest.mark.slow
def test_ten_kills_lose_no_more_than_promised_and_change_no_bit(tmp_path: Path, assert_same: Any) -> None:
    """The promise is five minutes, the writing of a checkpoint, and the step before it."""
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path / "killed"), "10"]
    cached = {"JAX_COMPILATION_CACHE_DIR": f"{tmp_path / 'cache'}", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    options: Any = {"capture_output": True, "text": True, "timeout": 900, "env": {**os.environ, **cached}}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(*found, sep="\n")  # noqa: T201 (shown where the test fails)
    assert all(one["lost"] <= one["promised"] for one in found)
    assert [one["from"] for one in found[1:]] == [one["newest"] for one in found[:-1]]  # each went on from the newest
    assert len({one["newest"] for one in found}) > 3
    assert 0 < found[-1]["newest"] < STEPS
    state, history = one_run(tmp_path / "killed")
    whole, rows = one_run(None)
    assert_same(state, whole)
    assert [row for row in history if row["step"] % 40 == 0] == rows


def quick(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each look at the clock take so many seconds, of which checkpoints may have any share."""
    looks = itertools.count()
    monkeypatch.setattr(checkpoint_clock, "now", lambda: seconds * next(looks))
    monkeypatch.setattr(checkpoint_clock, "_SHARE", 1e9)


@pytest.mark.parametrize("together", [1, 4])
def test_a_checkpoint_by_time_changes_neither_calls_nor_results(
    tmp_path: Path, together: int, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    """A run that is cut where its checkpoints happened to be repeats the calls of the whole one, to the bit."""
    trainer, given = Trainer(loss, optax.adam(1e-2), strategy="vmap"), Batches((X,), 16, key=jax.random.key(3))
    quick(monkeypatch, 1.0)

    def fit(directory: Path | None, steps: int = 43, **options: Any) -> Any:
        state = trainer.init(Ensemble.create(Noisy, 3, seed=0))
        stopping = EarlyStopping(evaluate=lambda ens: ens.trainable["linear"]["bias"][:, 0] ** 2, every=8, patience=2)
        options = {"early_stopping": stopping, "steps_per_call": together, "checkpoint_keep": 99, **options}
        options["callbacks"] = [lambda step, metrics: time.sleep(0.02)]  # so that checkpoints are done meanwhile
        return trainer.fit(state, given, steps=steps, progress=False, checkpoint_dir=directory, **options)

    whole, rows = fit(None)
    result, history = fit(tmp_path / "whole", checkpoint_every=timedelta(seconds=3))
    assert_same(result, whole)
    assert history == rows
    places = sorted(int(path.name[5:]) for path in (tmp_path / "whole").glob("step_*"))
    assert len(places) > 2
    assert {place % together for place in places[:-1]} == {0}
    for place in places[:-1]:
        cut = tmp_path / f"cut {place}"
        cut.mkdir()
        (tmp_path / "whole" / f"step_{place:08d}").rename(cut / f"step_{place:08d}")
        result, history = fit(cut)
        assert_same(result, whole)
        assert history == rows


def test_none_writes_the_final_one_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, 1000.0)
    trainer, given = Trainer(loss, optax.adam(1e-2), strategy="vmap"), Batches((X,), 16, key=jax.random.key(3))
    cases: list[tuple[str, dict[str, Any]]] = [("final", {"checkpoint_every": None}), ("default", {})]
    for name, options in cases:
        state = trainer.init(Ensemble.create(Noisy, 3, seed=0))
        options |= {"checkpoint_dir": tmp_path / name, "callbacks": [lambda step, metrics: time.sleep(0.02)]}
        trainer.fit(state, given, steps=9, progress=False, checkpoint_keep=9, **options)
    assert [path.name for path in (tmp_path / "final").glob("step_*")] == ["step_00000009"]
    assert len([*(tmp_path / "default").glob("step_*")]) > 2


if __name__ == "__main__":
    os.write(1, json.dumps(losses_of_killed(Path(sys.argv[1]), int(sys.argv[2]))).encode())
