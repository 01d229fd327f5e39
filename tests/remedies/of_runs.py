"""Remedies of runs and their checkpoints."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from plurax.ensemble import Batches, Ensemble, Preempted, Trainer, load, save
from plurax.transforms._files import lock
from plurax.transforms._runs import checkpoint_writer, manifest, source
from plurax.transforms._runs.processes import Group
from plurax.transforms.privacy import DPSGD

from ._registry import Fails, remedy

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3) / 24, np.ones((8, 2), np.float32)


def make(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(3, 2, rngs=rngs)


def loss(model: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


ENSEMBLE = Ensemble.create(make, 2, seed=0)
ADAM = Trainer(loss, optax.adam(0.1), strategy="vmap")
BATCHES = Batches((X, Y), 4, key=jax.random.key(0))


def fit(trainer: Any = ADAM, ensemble: Any = ENSEMBLE, batches: Any = BATCHES, **options: Any) -> Any:
    """Return the state after a run."""
    return trainer.fit(trainer.init(ensemble), batches, progress=False, **{"steps": 2} | options)[0]


def private(optimizer: Any = None) -> DPSGD:
    options: dict[str, Any] = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-5}
    options |= {"num_examples": 8, "expected_batch_size": 4, "num_steps": 2}
    return DPSGD(loss, optimizer or optax.sgd(0.1), **options)


def same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        keys = jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(map(jax.random.key_data, (x, y)) if keys else (x, y)))


@remedy("pass as `like` an object with the saved structure")
def other_structure(fails: Fails) -> None:
    save("a", ENSEMBLE)
    other = Ensemble.create(lambda rngs: nnx.Linear(3, 4, rngs=rngs), 2, seed=0)
    fails(load, "a", other)
    fails(load, "a", ENSEMBLE[:1])
    same(load("a", Ensemble.create(make, 2, seed=1)), ENSEMBLE)


@remedy(" An interrupted save left the previous one at {}; rename it back.")
def interrupted_save(fails: Fails) -> None:
    save("a", ENSEMBLE)
    Path("a").rename(".a.00112233445566778899aabbccddeeff.0.replaced")
    said = fails(load, "a", ENSEMBLE)
    Path(said.partition("previous one at ")[2].partition(";")[0]).rename("a")
    same(load("a", ENSEMBLE), ENSEMBLE)


@remedy("was written in {}; use a release that reads version {}")
def other_version(fails: Fails) -> None:
    with patch.object(manifest, "_VERSION", 6):
        save("a", ENSEMBLE)
        whole = fit(checkpoint_dir="run")
    fails(load, "a", ENSEMBLE)
    fails(fit, checkpoint_dir="run")
    with patch.object(manifest, "_VERSION", 6):  # a release that reads it
        same(load("a", ENSEMBLE), ENSEMBLE)
        same(fit(checkpoint_dir="run"), whole)


@remedy(
    "{} holds {}, but no {}; read it with the function for what it holds.",
    "{} Or use another checkpoint_dir, or resume=False to start from `state`.",
)
def what_a_checkpoint_holds(fails: Fails) -> None:
    dp = private()
    state = dp.init(make(nnx.Rngs(0)), key=jax.random.key(0))
    dp.save("a", state)
    fails(load, "a", ENSEMBLE)
    same(dp.load("a", state), state)
    save("b", ENSEMBLE)
    fails(dp.load, "b", state)
    same(load("b", ENSEMBLE), ENSEMBLE)
    fit(checkpoint_dir="run")
    run = lambda **options: dp.fit(state, (X, Y), progress=False, **options)[0]
    said = fails(run, checkpoint_dir="run")
    assert "Or use another checkpoint_dir, or resume=False" in said
    same(load("run/step_00000002", ADAM.init(ENSEMBLE)), fit())
    same(run(checkpoint_dir="other"), run())
    same(run(checkpoint_dir="run", resume=False), run())


@remedy("{}: {}; pass another path, or move it.", "{}: {} also holds {}, which would be lost; move it.")
def files_in_the_way(fails: Fails) -> None:
    Path("notes").write_text("a")
    Path("folder").mkdir()
    for path in ("notes", "folder"):
        fails(save, path, ENSEMBLE)
    save("a", ENSEMBLE)
    same(load("a", ENSEMBLE), ENSEMBLE)
    Path("folder").rename("moved")
    save("folder", ENSEMBLE)
    Path("a/notes.txt").write_text("a")
    fails(save, "a", ENSEMBLE)
    Path("a/notes.txt").rename("notes.txt")
    save("a", jax.tree.map(jnp.zeros_like, ENSEMBLE))
    assert not load("a", ENSEMBLE)[0].kernel[...].any()


@remedy("{}: {} has no arrays, so there are no examples; pass arrays of examples.")
def data_without_arrays(fails: Fails) -> None:
    state = private().init(make(nnx.Rngs(0)), key=jax.random.key(0))
    data: Any
    for data in ({}, ((), ())):
        fails(private().fit, state, data, progress=False)
    private().fit(state, (X, Y), progress=False)


@remedy(
    "{}: {}; convert it, or leave it out.",
    "{}: `{}` is {}, not an array with the examples along axis 0; pass one.",
    "{}: `{}` has {} examples, but `{}` has {}; make them equal.",
)
def data_that_is_no_array(fails: Fails) -> None:
    named = lambda model, batch: loss(model, batch["x"], batch["y"])
    trainer = Trainer(named, optax.sgd(0.1), strategy="vmap")
    state = trainer.init(ENSEMBLE)
    fails(trainer.step, state, ({"x": X, "y": Y, "name": "a"},))
    trainer.step(state, ({"x": X, "y": Y},))
    trainer.step(state, ({"x": X, "y": Y, "name": np.zeros(8)},))
    dp = private()
    start = dp.init(make(nnx.Rngs(0)), key=jax.random.key(0))
    fails(dp.fit, start, (X, 1.0), progress=False)
    fails(dp.fit, start, (X, Y[:7]), progress=False)
    fails(dp.fit, start, (X, ["a"] * 8), progress=False)
    dp.fit(start, (X, Y), progress=False)


@remedy(
    "{} is of another run: {}. Use another checkpoint_dir or the settings of that run, or pass resume=True to go on "
    "from it all the same, or resume=False to start from `state`."
)
def another_run(fails: Fails) -> None:
    whole = fit(checkpoint_dir="run")
    slower, other_loss = (
        Trainer(loss, optax.adam(0.01), strategy="vmap"),
        Trainer(lambda model, x, y: jnp.mean(abs(model(x) - y)), optax.adam(0.1), strategy="vmap"),
    )
    other = [
        partial(fit, trainer=slower),
        partial(fit, trainer=other_loss),
        partial(fit, ensemble=Ensemble.create(make, 2, seed=1)),
        partial(fit, batches=Batches((X, Y), 4, key=jax.random.key(1))),
        partial(fit, batches=Batches((X, Y), 2, key=jax.random.key(0))),
    ]
    for i, run in enumerate(other):
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("run", "copy")
        for steps in (2, 4):
            fails(run, checkpoint_dir="copy", steps=steps)
        same(run(checkpoint_dir=f"another {i}"), run())
        same(fit(checkpoint_dir="copy"), whole)
        assert int(run(checkpoint_dir="copy", resume=True, steps=3).step) == 3
        same(run(checkpoint_dir="copy", resume=False), run())


@remedy("Use another checkpoint_dir or the settings of that run, or pass resume=False to start from `state`.")
def run_of_another_structure(fails: Fails) -> None:
    whole = fit(checkpoint_dir="run")
    sgd = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    wider = Ensemble.create(lambda rngs: nnx.Linear(3, 2, use_bias=False, rngs=rngs), 2, seed=0)
    for run in (partial(fit, sgd), partial(fit, ensemble=ENSEMBLE[:1]), partial(fit, ensemble=wider)):
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("run", "copy")
        said = fails(run, checkpoint_dir="copy")
        fails(run, checkpoint_dir="copy", resume=True)
        assert "resume=True" not in said
        same(fit(checkpoint_dir="copy"), whole)
        shutil.rmtree("another", ignore_errors=True)
        same(run(checkpoint_dir="another"), run())
        same(run(checkpoint_dir="copy", resume=False), run())


@contextlib.contextmanager
def running(directory: str, *, locks: bool = True) -> Iterator[Any]:
    """Another process with a run in a directory."""
    program = (
        "import sys, pathlib; from plurax.transforms._files import lock\n"
        f"if not {locks}: lock.fcntl = None\n"
        f"with lock.locked('fit', pathlib.Path({directory!r})): print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"locked\n"
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@remedy(
    "wait for its end, or use another directory",
    "; if it has been killed, delete {}",
    "{}: a run of {} is writing to {}; {}.",
)
def two_runs_in_a_directory(fails: Fails) -> None:
    Path("run").mkdir()
    with running("run"):
        said = fails(fit, checkpoint_dir="run")
        assert "delete" not in said
        fit(checkpoint_dir="other")
    fit(checkpoint_dir="run")
    # A file system without locks: of a run on another host it is not known whether it has been killed.
    Path("shared").mkdir()
    Path("shared/run.lock").write_text(json.dumps({"host": "elsewhere", "process": 1}))
    with patch.object(lock, "fcntl", None):
        said = fails(fit, checkpoint_dir="shared")
        Path(said.rpartition("delete ")[2].removesuffix(".")).unlink()
        fit(checkpoint_dir="shared")
        with running("shared", locks=False):
            fails(fit, checkpoint_dir="shared")
        fit(checkpoint_dir="shared")


@remedy(
    "{}: checkpoint_every needs a checkpoint_dir to write to; pass one.",
    "{}: resume={} needs a checkpoint_dir; pass one.",
)
def options_without_a_directory(fails: Fails) -> None:
    fails(fit, checkpoint_every=1)
    fit(checkpoint_every=1, checkpoint_dir="run")
    assert {path.name for path in Path("run").glob("step_*")} >= {"step_00000001", "step_00000002"}
    fails(fit, resume=True)
    fails(fit, resume=False)
    fit(resume=True, checkpoint_dir="run")


@remedy('{}: resume must be "auto", True or False, but got {}.')
def resume_of_another_kind(fails: Fails) -> None:
    fails(fit, resume="yes", checkpoint_dir="run")
    for resume in ("auto", True, False):
        fit(resume=resume, checkpoint_dir="run")


@remedy("Stopped by SIGTERM after step {}; start the same program again to go on.")
def stopped_by_a_signal(fails: Fails) -> None:
    def stops(batches: Any) -> Iterator[Any]:
        for i, batch in enumerate(batches):
            if i == 3:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    def run(batches: Any) -> Any:
        return ADAM.fit(ADAM.init(ENSEMBLE), batches, checkpoint_dir="run", progress=True)[0]

    batches = [(X[i : i + 1], Y[i : i + 1]) for i in range(6)]

    def stopped() -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                run(stops(batches))
            except Preempted:
                warnings.warn(out.getvalue(), stacklevel=1)

    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test with Ray leaves Ray's
    try:
        fails(stopped)
    finally:
        signal.signal(signal.SIGTERM, handler)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        after = run(batches)
    same(after, fit(batches=batches, steps=None))
    assert "going on from step" in out.getvalue()


@remedy(
    "use the optimizer that made it, or call init for a new state",
    "it has `{}`, which this optimizer does not use",
)
def state_of_another_optimizer(fails: Fails) -> None:
    sgd = Trainer(loss, optax.sgd(0.1), strategy="vmap")
    state = ADAM.init(ENSEMBLE)
    fails(sgd.step, state, (X, Y))
    ADAM.step(state, (X, Y))
    sgd.step(sgd.init(state.ensemble), (X, Y))
    dp, other = private(), private(optimizer=optax.adam(0.1))
    start = other.init(make(nnx.Rngs(0)), key=jax.random.key(0))
    fails(dp.fit, start, (X, Y), progress=False)
    other.fit(start, (X, Y), progress=False)


@remedy("It was the last one of the run; save the state that `fit` returns.")
def disk_is_full(fails: Fails) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    states: list[Any] = []
    with patch.object(checkpoint_writer, "_write_rows", side_effect=full):
        fails(lambda: states.append(fit(checkpoint_dir="run")))
    save("a", states[0])
    same(load("a", ADAM.init(ENSEMBLE)), fit())


class Iterated:
    """Batches whose iterator says where it is."""

    def __init__(self, state: Any = None, *, has_set: bool = True) -> None:
        self.batches = [(X[i : i + 1], Y[i : i + 1]) for i in range(6)]
        self.state, self.has_set = state, has_set

    def __iter__(self) -> Any:
        return _Iterator(self) if self.has_set else iter(self.batches)


class _Iterator:
    def __init__(self, batches: Iterated) -> None:
        self._batches, self._at = batches, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._batches.batches):
            raise StopIteration
        self._at += 1
        return self._batches.batches[self._at - 1]

    def get_state(self) -> Any:
        return self._at if self._batches.state is None else self._batches.state

    def set_state(self, state: int) -> None:
        self._at = state


@remedy(
    "{}: the checkpoint has used {} batches, but got {}; pass the same batches.",
    "{}: the checkpoint has used {} batches, but got none; pass the same batches.",
)
def fewer_batches(fails: Fails) -> None:
    for same_batches in (Iterated(), Iterated(has_set=False)):
        shutil.rmtree("run", ignore_errors=True)
        fit(batches=same_batches, checkpoint_dir="run", steps=4)
        fewer = Iterated(has_set=same_batches.has_set)
        fewer.batches = [] if same_batches.has_set else fewer.batches[:2]
        fails(fit, batches=fewer, checkpoint_dir="run", steps=6)
        same(fit(batches=same_batches, checkpoint_dir="run", steps=6), fit(batches=Iterated(), steps=6))


@remedy("{}: {}; pass batches without get_state, which are skipped when the run resumes.")
def state_that_is_not_json(fails: Fails) -> None:
    fails(fit, batches=Iterated(state=object()), checkpoint_dir="run", steps=2)
    fit(batches=Iterated(has_set=False), checkpoint_dir="other", steps=2)
    after = fit(batches=Iterated(has_set=False), checkpoint_dir="other", steps=4)
    same(after, fit(batches=Iterated(), steps=4))


@remedy("start as many, or pass batches whose iterator has no set_state, which are skipped instead")
def batches_of_other_processes(fails: Fails) -> None:
    states = [{"value": 2}, {"value": 2}]  # as two processes write them
    go_to = partial(source.go_to, "fit", count=2, states=states)
    fails(go_to, iter(Iterated()), group=Group((0,)))
    first = go_to(iter(Iterated(has_set=False)), group=Group((0,)))
    np.testing.assert_array_equal(first[0], X[:1])
    with patch.object(jax, "process_index", return_value=1):
        np.testing.assert_array_equal(go_to(iter(Iterated()), group=Group((0, 1)))[0], X[:1])
