"""`strategy="auto"` in a trainer: what it starts with, tries, remembers and repeats."""

from __future__ import annotations

import functools
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax

from plurax.ensemble import Ensemble, Trainer
from plurax.ensemble._execution import autotune, search
from plurax.ensemble._execution.executor import Executor, StepInputs
from plurax.ensemble._members.strategy import Execution

from ..._files import entries_of

VMAP = Execution("vmap")


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the remembered choices, as in a new process."""
    monkeypatch.setattr(autotune, "_remembered", {})


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every trial pay, so that a short run tries all candidates, in short blocks."""
    for name, value in {"_SHARE": 1e9, "_PAYS": 0, "_SECONDS": 1e-3, "_SLACK": (1e9, 1e9), "_HOPELESS": 1e9}.items():
        monkeypatch.setattr(search, name, value)
    # Wait for each compilation, during which a short run would end.
    waiting = property(lambda one: one._thread is None or one._thread.join() is None)
    monkeypatch.setattr(search._Compilation, "done", waiting)


@functools.cache
def created(make: Any, size: int) -> Ensemble:
    return Ensemble.create(make, size, seed=0)


def tried(trainer: Trainer) -> set[str]:
    """Return the executions that were measured."""
    found = trainer.explain()
    assert found is not None
    return {str(one.execution) for one in found.candidates if one.ms is not None}


@pytest.mark.usefixtures("forgotten", "eager")
class Test_a_trainer:
    def train(self, make: Any, loss: Any, batch: Any, size: int = 2, steps: int = 400, **options: Any) -> Trainer:
        trainer = Trainer(loss, optax.sgd(0.1), **{"tune_seconds": 1e9, **options})
        state = trainer.init(created(make, size))
        for _ in range(steps):
            state, _ = trainer.step(state, batch)
            if trainer._stepper.search is None or not trainer._stepper.search.is_open:
                break
        return trainer

    @pytest.mark.slow
    def test_starts_with_the_rule_and_tries_the_others_on_later_steps(self, plain, cross_entropy, make_batches) -> None:
        trainer = self.train(plain, cross_entropy, make_batches(1)[0], steps=1)
        assert trainer.explain().chosen == VMAP
        assert tried(trainer) == set()
        trainer = self.train(plain, cross_entropy, make_batches(1)[0], 5)
        assert tried(trainer) == {"vmap", "map", "unroll", "loop"}

    def test_later_steps_use_the_choice_and_not_the_candidate_tried_last(
        self, plain, cross_entropy, make_batches, monkeypatch
    ) -> None:
        monkeypatch.setattr(search, "_GAIN", 2.0)  # none can replace the first
        used, program = [], Executor.program

        def recorded(*args: Any) -> Any:
            used.append(args[1])
            return program(*args)

        monkeypatch.setattr(Executor, "program", recorded)
        trainer, batch = Trainer(cross_entropy, optax.sgd(0.1), tune_seconds=1e9), make_batches(1)[0]
        state, _ = trainer.step(trainer.init(created(plain, 2)), batch)
        while trainer._stepper.search.is_open:
            state, _ = trainer.step(state, batch)
        assert used[-1] != VMAP  # the program of the last trial
        for _ in range(3):
            state, _ = trainer.step(state, batch)
        assert used[-1] == trainer.explain().chosen == VMAP

    @pytest.mark.slow
    def test_steps_of_a_search_are_steps_of_the_run(self, plain, create, cross_entropy, make_batches, assert_same):
        batches = make_batches(30) * 20
        auto, fixed = (
            Trainer(cross_entropy, optax.sgd(0.01), **x) for x in ({"tune_seconds": 9}, {"strategy": "vmap"})
        )
        state, history = auto.fit(auto.init(create(plain, 4)), batches, progress=False)
        assert tried(auto) == {"vmap", "map", "unroll", "loop"}
        expected, rows = fixed.fit(fixed.init(create(plain, 4)), batches, progress=False)
        assert_same(state, expected, tolerance=1e-4)
        assert [row["step"] for row in history] == [row["step"] for row in rows]

    @pytest.mark.slow
    def test_each_kind_of_program_is_tried_once(self, plain, cross_entropy, make_batches) -> None:
        batch, other = make_batches(1)[0], jax.tree.map(lambda x: x[:3], make_batches(1)[0])
        assert len(tried(self.train(plain, cross_entropy, batch))) == 4
        assert len(tried(self.train(plain, cross_entropy, batch, steps=1))) == 4  # remembered in the process
        assert not tried(self.train(plain, cross_entropy, other, steps=1))
        assert not tried(self.train(plain, cross_entropy, batch, size=3, steps=1))
        assert not tried(self.train(plain, lambda model, x, y: cross_entropy(model, 2 * x, y), batch, steps=1))

    @pytest.mark.slow
    def test_remembers_in_files(self, tmp_path, plain, cross_entropy, make_batches, monkeypatch) -> None:
        batch, folder = make_batches(1)[0], tmp_path / "tuned"
        found = self.train(plain, cross_entropy, batch, tune_cache=folder).explain()
        (file,) = folder.iterdir()
        monkeypatch.setattr(autotune, "_remembered", {})
        again = self.train(plain, cross_entropy, batch, steps=1, tune_cache=folder).explain()
        assert [one for one in again.candidates if one.ms] == [one for one in found.candidates if one.ms]
        assert again.chosen == found.chosen
        for content in ("{", json.dumps({"chosen": 3}), "[]"):
            file.write_text(content)
            monkeypatch.setattr(autotune, "_remembered", {})
            assert not tried(self.train(plain, cross_entropy, batch, steps=1, tune_cache=folder))

    def test_follows_the_rule_without_time_to_try(self, plain, convolutional, cross_entropy, make_batches) -> None:
        trainer = self.train(plain, cross_entropy, make_batches(1)[0], tune_seconds=0)
        assert trainer.explain() is None

    def test_side_effects_happen_once_for_each_step(self, plain, cross_entropy, make_batches) -> None:
        calls: list[float] = []

        def talking(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            loss = cross_entropy(model, x, y)
            jax.debug.callback(lambda x: calls.append(float(x)), loss[0])
            return loss

        steps = 120
        trainer = Trainer(talking, optax.sgd(0.1), tune_seconds=9)
        state = trainer.init(created(plain, 2))
        for _ in range(steps):
            state, _ = trainer.step(state, make_batches(1)[0])
        jax.effects_barrier()
        assert len(calls) == 2 * steps
        assert len(tried(trainer)) > 1

    @pytest.mark.slow
    @pytest.mark.parametrize("broken", ["vmap", "map"])
    def test_an_execution_that_fails_is_replaced(self, plain, cross_entropy, make_batches, monkeypatch, broken) -> None:
        execute = Executor.execute

        def failing(self: Any, execution: Execution, *args: Any) -> Any:
            if execution.strategy == broken:
                raise NotImplementedError("no rule")
            return execute(self, execution, *args)

        monkeypatch.setattr(Executor, "execute", failing)
        trainer = self.train(plain, cross_entropy, make_batches(1)[0], 3)
        notes = {str(one.execution): one.note for one in trainer.explain().candidates}
        assert notes[broken] == "fails: NotImplementedError"
        assert broken not in tried(trainer)
        monkeypatch.setattr(Executor, "execute", lambda *_: (_ for _ in ()).throw(NotImplementedError("no rule")))
        with pytest.raises(NotImplementedError, match="no rule"):
            self.train(plain, lambda model, x, y: cross_entropy(model, 3 * x, y), make_batches(1)[0], 3)

    @pytest.mark.slow
    def test_the_choice_can_be_pinned(self, convolutional, create, cross_entropy, make_batches, assert_same) -> None:
        batch = make_batches(1, features=20)[0]
        trainer = self.train(convolutional, cross_entropy, batch, 3)
        chosen = trainer.explain().chosen
        for execution in (chosen, Execution("vmap", 2, products=True), Execution("map", products=True)):
            pinned = Trainer(cross_entropy, optax.sgd(0.1), strategy=execution)
            state = pinned.init(create(convolutional, 3))
            assert pinned._stepper.advance(state, batch)[2] == execution
            expected = Trainer(cross_entropy, optax.sgd(0.1), strategy="loop").step(state, batch)[0]
            assert_same(pinned.step(state, batch)[0], expected, tolerance=1e-5)
        with pytest.raises(ValueError, match="chunk_size needs"):
            Trainer(cross_entropy, optax.sgd(0.1), strategy=chosen, chunk_size=2)
        for wrong in (Execution("auto"), Execution("map", 2), Execution("vmap", 0), Execution("loop", devices=0)):
            with pytest.raises(ValueError, match="Trainer: strategy"):
                Trainer(cross_entropy, optax.sgd(0.1), strategy=wrong)

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [1, 3])
    def test_a_run_that_was_killed_is_repeated_to_the_bit(
        self, tmp_path, convolutional, create, cross_entropy, make_batches, assert_same, monkeypatch, count
    ) -> None:
        """From each of its checkpoints, and though a candidate is tried at other steps the second time."""
        batches, ens = make_batches(150, features=20) * 2, create(convolutional, 3)
        auto = lambda: Trainer(cross_entropy, optax.adam(0.01), tune_seconds=9)
        options = {"progress": False, "steps_per_call": count, "checkpoint_dir": tmp_path / "whole"}
        whole, history = auto().fit(auto().init(ens), batches, checkpoint_every=30, checkpoint_keep=20, **options)
        changes = json.loads((tmp_path / "whole" / "executions.json").read_text())["changes"]
        assert len({tuple(one) for _, one in changes}) > 3
        for step in (30, 60, 150) if count == 1 else (60,):
            directory = tmp_path / f"from {step}"
            shutil.copytree(tmp_path / "whole", directory)
            for path in directory.glob("step_*"):
                if int(path.name[5:]) > step:
                    shutil.rmtree(path)
            monkeypatch.setattr(autotune, "_remembered", {})
            options["checkpoint_dir"] = directory
            again, rows = auto().fit(auto().init(ens), batches, **options)
            assert_same(again, whole)
            assert rows == history

    @pytest.mark.slow
    def test_without_its_schedule_a_run_keeps_the_execution_of_the_checkpoint(
        self, tmp_path, plain, create, cross_entropy, make_batches, monkeypatch
    ) -> None:
        batches, ens = make_batches(60), create(plain, 3)
        auto = lambda: Trainer(cross_entropy, optax.adam(0.01), tune_seconds=9)
        options = {"progress": False, "checkpoint_every": 1}
        auto().fit(auto().init(ens), batches[:20], checkpoint_dir=tmp_path / "whole", **options)
        (tmp_path / "whole" / "executions.json").unlink()
        for i, content in enumerate((None, "", "{", "[]", '{"changes": [], "known": {}}')):
            directory = tmp_path / str(i)
            shutil.copytree(tmp_path / "whole", directory)
            if content is not None:
                (directory / "executions.json").write_text(content)
            before = entries_of(directory / "step_00000020" / "plurax.json")["about"]["settings"]
            monkeypatch.setattr(autotune, "_remembered", {})
            trainer = auto()
            trainer.fit(trainer.init(ens), batches, checkpoint_dir=directory, **options)
            assert trainer.explain() is None
            after = entries_of(directory / "step_00000060" / "plurax.json")["about"]["settings"]
            assert [after[name] for name in Execution._fields] == [before[name] for name in Execution._fields]

    def test_refuses_invalid_cache_locations(self, tmp_path, plain, cross_entropy, make_batches) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="tune_cache must be a directory, but '.*file' is a file"):
            Trainer(cross_entropy, optax.sgd(0.1), tune_cache=tmp_path / "file")
        with pytest.raises(TypeError, match="tune_cache must be the path of a directory, but got 3 of type int"):
            Trainer(cross_entropy, optax.sgd(0.1), tune_cache=3)
        with pytest.warns(UserWarning, match=r"tune_cache='.*file/inside' cannot be written"):
            self.train(plain, cross_entropy, make_batches(1)[0], tune_cache=tmp_path / "file" / "inside")

    @pytest.mark.slow
    def test_options_override_those_of_a_checkpoint(self, plain, create, cross_entropy, make_batches) -> None:
        state, batch = Trainer(cross_entropy, optax.sgd(0.1)).init(create(plain, 8)), make_batches(1)[0]
        batched = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap", memory_budget="1MiB")
        assert batched._stepper.advance(state, batch, Execution("loop"))[2] == Execution("vmap")
        bounded = Trainer(cross_entropy, optax.sgd(0.1), memory_budget="3KiB")
        assert bounded._stepper.advance(state, batch, Execution("vmap"))[2] != Execution("vmap")
        assert bounded._stepper.advance(state, batch, Execution("vmap", 1))[2] == Execution("vmap", 1)

    def test_explains_itself(self, plain, cross_entropy, make_batches, capsys) -> None:
        trainer = self.train(plain, cross_entropy, make_batches(1)[0], 5)
        found = trainer.explain()
        shown = capsys.readouterr().out
        assert shown == f"{found}\n"
        assert "5 × Plain on cpu, " in shown
        assert shown.count("chosen") == 1
        assert all(one.compile_s for one in found.candidates if one.ms)
        assert Trainer(cross_entropy, optax.sgd(0.1)).explain() is None
        assert "Nothing is tried" in capsys.readouterr().out

    def test_fit_says_what_it_used(self, plain, create, cross_entropy, make_batches, capsys) -> None:
        trainer = Trainer(cross_entropy, optax.sgd(0.1), tune_seconds=9)
        trainer.fit(trainer.init(create(plain, 2)), make_batches(2))
        text = 'strategy="auto" used vmap, by the rule, not compared; no other was tried: there were too few steps.'
        assert text in capsys.readouterr().err
        trainer.fit(trainer.init(create(plain, 2)), make_batches(2), progress=False)
        assert capsys.readouterr().err == ""

    def test_a_long_compilation_of_the_first_step_is_announced(
        self, plain, create, cross_entropy, make_batches, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr("plurax.ensemble._training.progress._LONG", 0.0)
        trainer = Trainer(cross_entropy, optax.sgd(0.1))
        trainer.fit(trainer.init(create(plain, 2)), make_batches(2), progress=False)
        assert capsys.readouterr().err == "Trainer.fit: compiling the first step ...\n"

    def test_a_traced_step_tries_nothing(self, plain, convolutional, create, cross_entropy, make_batches) -> None:
        trainer, batch = Trainer(cross_entropy, optax.sgd(0.1), tune_seconds=1.0), make_batches(1)[0]
        state = trainer.init(create(plain, 2))
        jax.jit(trainer.step)(state, batch)
        jax.jit(lambda i: trainer.step(state, batch)[1]["loss"] + i)(0.0)
        assert trainer.explain() is None
        trainer.step(state, batch)
        assert trainer.explain().chosen == VMAP

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["auto", "vmap"])
    @pytest.mark.parametrize("seconds", [0, 0.05])
    def test_stays_within_a_budget(
        self, plain, cross_entropy, make_batches, create, assert_same, strategy, seconds
    ) -> None:
        """Members with large temporaries: a batch of 64."""
        batch = tuple(np.concatenate([x] * 16) for x in make_batches(1)[0])
        options = {"memory_budget": "24KiB", "strategy": strategy, "tune_seconds": seconds}
        trainer = self.train(plain, cross_entropy, batch, 16, **options)
        execution = trainer._stepper.advance(trainer.init(create(plain, 16)), batch)[2]
        if strategy == "vmap":
            assert execution.strategy == "vmap"
            assert 1 <= execution.chunk_size < 16
        state = trainer.init(create(plain, 16))
        inputs = StepInputs(state, batch, (None, None))
        assert trainer._stepper.executor.temporaries(inputs, False, execution) <= 24 * 2**10
        whole = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap")
        assert_same(trainer.step(state, batch)[0].ensemble, whole.step(state, batch)[0].ensemble, tolerance=1e-5)
        traced = jax.jit(trainer.step)(state, batch)[0].ensemble
        assert_same(traced, whole.step(state, batch)[0].ensemble, tolerance=1e-5)
        assert jax.jit(trainer.step).lower(state, batch).compile().memory_analysis().temp_size_in_bytes <= 26 * 2**10
        with pytest.raises(ValueError, match=r"no (execution|chunk) fits into memory_budget=16 B: the smallest found"):
            self.train(plain, cross_entropy, batch, 16, **{**options, "memory_budget": 16})


def linen_network() -> tuple[Any, list[Any]]:
    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.relu(linen.Conv(4, (3, 2), strides=(2, 1))(x))
            return linen.Dense(3)(linen.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1))

    network, x = Network(), np.zeros((1, 6, 5, 2), np.float32)
    return network.apply, [network.init(jax.random.key(i), x) for i in range(3)]


def equinox_network() -> tuple[Any, list[Any]]:
    def member(key: jax.Array) -> Any:
        keys = jax.random.split(key)
        pool = eqx.nn.MaxPool2d(2, 2)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(2, 4, (3, 2), dilation=(2, 1), groups=2, key=keys[0]),
                eqx.nn.Lambda(jax.nn.gelu),
                pool,
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(4 * 1 * 2, 3, key=keys[1]),
            ]
        )

    def apply(model: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x.transpose(0, 3, 1, 2))

    return apply, [member(jax.random.key(i)) for i in range(3)]


def plain_network() -> tuple[Any, list[Any]]:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        x = lax.conv_general_dilated(x, params["kernel"], (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NCHW"))
        return jnp.tanh(x).mean((2, 3)) @ params["out"]

    draw = lambda i, *shape: jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
    return apply, [{"kernel": draw(i, 3, 3, 2, 4), "out": draw(i, 4, 3)} for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["vmap", "map", "unroll", "loop"])
@pytest.mark.parametrize("make", [linen_network, equinox_network, plain_network])
def test_products_are_exact_for_models_of_every_kind(make, strategy, cross_entropy, assert_same) -> None:
    apply, variables = make()
    ens = Ensemble.from_apply(apply, variables)
    generator = np.random.default_rng(0)
    batch = generator.normal(size=(5, 6, 5, 2)).astype(np.float32), np.arange(5) % 3
    trainer = Trainer(cross_entropy, optax.sgd(0.1))
    state, _, _ = trainer._stepper.advance(trainer.init(ens), batch, Execution("loop"))
    found, _, execution = trainer._stepper.advance(trainer.init(ens), batch, Execution(strategy, products=True))
    assert execution.products
    assert_same(found, state, tolerance=1e-5)
