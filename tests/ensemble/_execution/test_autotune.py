"""`strategy="auto"`: measuring, choosing and remembering an execution."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
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
from plurax.ensemble._execution import autotune
from plurax.ensemble._execution.autotune import tune
from plurax.ensemble._execution.executor import StepInputs
from plurax.ensemble._members.strategy import Execution

VMAP, MAP, UNROLL, LOOP = (Execution(name) for name in ("vmap", "map", "unroll", "loop"))


def made_up(seconds: Callable[[Execution], float], bytes_: Callable[[Execution], int] = lambda _: 100) -> Any:
    """Return mock measurements with given time and memory, and a count of the steps."""
    steps: dict[Execution, int] = {}

    def seconds_of(execution: Execution, count: int) -> float:
        steps[execution] = steps.get(execution, 0) + count
        return seconds(execution)

    return (bytes_, seconds_of), steps


def search(trial: Any, **options: Any) -> Any:
    return tune(
        *trial, **{"size": 8, "convolutions": False, "seconds": 5.0, "budget": None, "where": "here", **options}
    )


class Test_the_search:
    @pytest.mark.parametrize("best", [VMAP, MAP, UNROLL, LOOP, Execution("vmap", 2)], ids=str)
    def test_the_quickest_is_chosen(self, best: Execution) -> None:
        trial, _ = made_up(lambda execution: 0.01 if execution == best else 0.02)
        assert search(trial).chosen == best

    def of_products(self, quicker: bool, execution: Execution) -> float:
        return 0.01 if execution.products is quicker else 0.02

    def test_convolutions_are_products_where_that_is_quicker_for_one_member(self) -> None:
        for products in (True, False):
            trial, steps = made_up(partial(self.of_products, products))
            found = search(trial, convolutions=True)
            assert found.chosen.products is products
            assert {one.products for one in steps if one.strategy == "vmap"} == {products}
        trial, steps = made_up(lambda _: 0.01)
        search(trial)
        assert not any(one.products for one in steps)

    def test_chunks_become_smaller_while_that_is_quicker(self) -> None:
        trial, steps = made_up(lambda one: 0.01 + abs(math.log((one.chunk_size or 1000) / 16)) / 100)
        assert search(trial, size=1000).chosen == Execution("vmap", 15)
        assert list(dict.fromkeys(one.chunk_size for one in steps if one.strategy == "vmap")) == [None, 250, 59, 15, 3]

    def test_what_does_not_fit_is_dropped(self) -> None:
        need = lambda one: {"vmap": 100 * (one.chunk_size or 64), "loop": 10}.get(one.strategy, 5000)
        trial, steps = made_up(lambda one: {16: 0.01, 4: 0.015}.get(one.chunk_size or 0, 0.02), need)
        found = search(trial, size=64, budget=2000)
        assert found.chosen == Execution("vmap", 16)
        assert set(steps) == {LOOP, Execution("vmap", 16), Execution("vmap", 4)}
        assert {one.note for one in found.candidates if one.ms is None} == {"over the memory budget"}
        with pytest.raises(
            ValueError, match="no execution fits into memory_budget=5 B: the smallest found is 10 B, for loo"
        ):
            search(trial, size=64, budget=5)

        def one_fails(execution: Execution) -> int:
            if execution.strategy == "map":
                raise NotImplementedError("no rule")
            return need(execution)

        with pytest.raises(ValueError, match="memory_budget=5 B: the smallest found is 10 B, for loop"):
            search((one_fails, trial[1]), size=64, budget=5)

    def test_long_compilations_of_unrolled_members_are_avoided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(1000))
        monkeypatch.setattr(autotune.time, "perf_counter", lambda: float(next(now)))
        trial, steps = made_up(lambda _: 0.01)
        found = search(trial, size=64)
        assert UNROLL not in steps
        assert [one.note for one in found.candidates if one.execution == UNROLL] == ["about 64 s to compile"]

    def test_several_devices(self) -> None:
        trial, _ = made_up(lambda one: 0.01 / one.devices if one.strategy == "map" else 0.02)
        assert search(trial, devices=2).chosen == Execution("map", devices=2)

    def test_on_a_mesh_there_is_no_loop(self) -> None:
        trial, steps = made_up(lambda _: 0.01)
        search(trial, looped=False)
        assert LOOP not in steps

    @pytest.mark.parametrize("step", [0.001, 0.1, 3.0])
    def test_the_time_limit_is_kept(self, step: float) -> None:
        """Except for the step in progress, and one step of the first candidate."""
        trial, steps = made_up(lambda _: step)
        found = search(trial)
        assert found.seconds <= 5 + step
        assert found.seconds == pytest.approx(step * sum(steps.values()))
        if step == 3:
            assert "no time was left" in {one.note for one in found.candidates}

    def test_one_odd_step_does_not_decide(self) -> None:
        """The first step after compiling is slow, and an occasional later one."""
        count = {VMAP: 0}

        def seconds(execution: Execution) -> float:
            if execution != VMAP:
                return 0.012
            count[VMAP] += 1
            return 0.1 if count[VMAP] in (1, 3) else 0.01

        assert search(made_up(seconds)[0]).chosen == VMAP

    def test_what_fails_is_no_candidate_unless_all_do(self) -> None:
        trial, _ = made_up(lambda _: 0.01)

        def failing(execution: Execution) -> int:
            if execution.strategy != "map":
                raise NotImplementedError("no batching rule")
            return 100

        found = search((failing, trial[1]))
        assert found.chosen == MAP
        assert "fails: NotImplementedError" in str(found)

        def fail(_: Execution) -> int:
            raise NotImplementedError("no batching rule")

        with pytest.raises(NotImplementedError, match="no batching rule"):
            search((fail, trial[1]))

    def test_of_two_equally_fast_candidates_the_smaller_is_chosen(self) -> None:
        trial, _ = made_up(
            lambda one: {VMAP: 0.0100, MAP: 0.0102, LOOP: 0.011}.get(one, 0.02), lambda one: 100 * len(str(one))
        )
        found = search(trial)
        assert found.chosen == MAP

    def test_the_rule_applies_when_no_candidate_fits_memory(self) -> None:
        def fail(*_: Any) -> float:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

        assert search((lambda _: 100, fail)) is None

    def test_the_table(self) -> None:
        trial, _ = made_up(lambda one: 0.01 if one == MAP else 0.02, lambda _: 3 * 2**20)
        lines = str(search(trial)).splitlines()
        assert lines[0].startswith("here, measured in ")
        assert lines[1].split() == ["ms", "temporaries", "compile", "(s)"]
        assert lines[2].split() == ["map", "10", "3", "MiB", "0.00", "chosen"]
        assert len(lines) == 2 + 5


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the remembered choices, as in a new process."""
    monkeypatch.setattr(autotune, "_remembered", {})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of all measurements made so far."""
    found: list[Any] = []

    def measure(*args: Any, **kwargs: Any) -> Any:
        found.append(tune(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr("plurax.ensemble._execution.stepper.tune", measure)
    return found


@pytest.mark.usefixtures("forgotten")
class Test_a_trainer:
    def train(self, make: Any, loss: Any, batch: Any, size: int = 2, **options: Any) -> Trainer:
        trainer = Trainer(loss, optax.sgd(0.1), **{"tune_seconds": 0.05, **options})
        trainer.step(trainer.init(Ensemble.create(make, size, seed=0)), batch)
        return trainer

    def test_measures_each_kind_of_program_once(self, plain, cross_entropy, make_batches, measured) -> None:
        batch, other = make_batches(1)[0], jax.tree.map(lambda x: x[:3], make_batches(1)[0])
        self.train(plain, cross_entropy, batch)
        self.train(plain, cross_entropy, batch)
        assert len(measured) == 1
        trainer = self.train(plain, cross_entropy, other)
        assert len(measured) == 2
        self.train(plain, cross_entropy, batch, size=3)
        self.train(plain, lambda model, x, y: cross_entropy(model, 2 * x, y), batch)
        assert len(measured) == 4
        state = trainer.init(Ensemble.create(plain, 2, seed=1))
        trainer.step(state, other)
        assert len(measured) == 4
        for _ in range(2):  # with a donated state, another candidate may be the quickest
            trainer.fit(state, [other], progress=False)
            assert len(measured) == 5

    def test_more_time_than_before_measures_again(self, plain, cross_entropy, make_batches, measured) -> None:
        batch = make_batches(1)[0]
        short = self.train(plain, cross_entropy, batch, tune_seconds=1e-9)
        assert "no time was left" in {one.note for one in short.explain().candidates}
        long = self.train(plain, cross_entropy, batch, tune_seconds=0.5)
        assert "no time was left" not in {one.note for one in long.explain().candidates}
        self.train(plain, cross_entropy, batch, tune_seconds=1e-9)
        assert len(measured) == 2

    def test_remembers_in_files(self, tmp_path, plain, cross_entropy, make_batches, measured, monkeypatch) -> None:
        batch, folder = make_batches(1)[0], tmp_path / "tuned"
        self.train(plain, cross_entropy, batch, tune_cache=folder, tune_seconds=np.float32(0.05))
        (file,) = folder.iterdir()
        for content, count in ((None, 1), ("{", 2), (json.dumps({"chosen": 3}), 3)):
            if content is not None:
                file.write_text(content)
            monkeypatch.setattr(autotune, "_remembered", {})
            again = self.train(plain, cross_entropy, batch, tune_cache=folder, tune_seconds=np.float32(0.05))
            assert len(measured) == count
            assert str(again.explain()) == str(measured[-1])
        assert [path.name for path in folder.iterdir()] == [file.name]

    def test_follows_the_rule_where_nothing_can_be_measured(self, plain, cross_entropy, make_batches, measured) -> None:
        batch = make_batches(1)[0]
        self.train(plain, cross_entropy, batch, tune_seconds=0)

        def talking(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            jax.debug.callback(lambda _: None, x[0, 0])
            return cross_entropy(model, x, y)

        trainer = self.train(plain, talking, batch)
        assert not measured
        assert trainer.explain() is None

    def test_refuses_invalid_cache_locations(self, tmp_path, plain, cross_entropy, make_batches) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="tune_cache must be a directory, but '.*file' is a file"):
            Trainer(cross_entropy, optax.sgd(0.1), tune_cache=tmp_path / "file")
        with pytest.raises(TypeError, match="tune_cache must be the path of a directory, but got 3 of type int"):
            Trainer(cross_entropy, optax.sgd(0.1), tune_cache=3)
        with pytest.warns(UserWarning, match=r"tune_cache='.*file/inside' cannot be written"):
            self.train(plain, cross_entropy, make_batches(1)[0], tune_cache=tmp_path / "file" / "inside")

    def test_measures_nothing_inside_another_trace(self, plain, create, cross_entropy, make_batches, measured) -> None:
        trainer, batch = Trainer(cross_entropy, optax.sgd(0.1), tune_seconds=1.0), make_batches(1)[0]
        state = trainer.init(create(plain, 2))
        jax.jit(lambda i: trainer.step(state, batch)[1]["loss"] + i)(0.0)
        assert not measured

    def test_options_override_those_of_a_checkpoint(self, plain, create, cross_entropy, make_batches) -> None:
        state, batch = Trainer(cross_entropy, optax.sgd(0.1)).init(create(plain, 8)), make_batches(1)[0]
        batched = Trainer(cross_entropy, optax.sgd(0.1), strategy="vmap", memory_budget="1MiB")
        assert batched._stepper.advance(state, [batch], Execution("loop"))[2] == Execution("vmap")
        bounded = Trainer(cross_entropy, optax.sgd(0.1), memory_budget="3KiB")
        assert bounded._stepper.advance(state, [batch], Execution("vmap"))[2] != Execution("vmap")
        assert bounded._stepper.advance(state, [batch], Execution("vmap", 1))[2] == Execution("vmap", 1)

    def test_explains_itself(self, plain, cross_entropy, make_batches, capsys) -> None:
        trainer = self.train(plain, cross_entropy, make_batches(1)[0])
        found = trainer.explain()
        shown = capsys.readouterr().out
        assert shown == f"{found}\n"
        assert "2 × Plain on cpu, measured in" in shown
        assert shown.count("chosen") == 1
        assert {one.execution.strategy for one in found.candidates} == {"vmap", "map", "unroll", "loop"}
        assert all(one.temporaries is not None and one.compile_s for one in found.candidates if one.ms)
        assert Trainer(cross_entropy, optax.sgd(0.1)).explain() is None
        assert "Nothing was measured" in capsys.readouterr().out

    def test_resumes_with_the_same_products_bit_for_bit(
        self, tmp_path, convolutional, create, cross_entropy, make_batches, assert_same, monkeypatch
    ) -> None:
        choice = Execution("map", products=True)
        chosen = autotune.Tuning(choice, (autotune.CandidateExecution(choice, 1.0, 1, 1.0),), "here", 0.1)
        monkeypatch.setattr("plurax.ensemble._execution.stepper.tune", lambda *_, **__: chosen)
        batches, ens = make_batches(5, features=20), create(convolutional, 3)
        auto = lambda: Trainer(cross_entropy, optax.adam(0.01), tune_seconds=1.0)
        whole, _ = auto().fit(auto().init(ens), batches, progress=False)
        auto().fit(auto().init(ens), batches[:2], progress=False, checkpoint_dir=tmp_path)
        manifest = json.loads((tmp_path / "step_00000002" / "plurax.json").read_text())
        assert [manifest[name] for name in Execution._fields] == list(choice)
        monkeypatch.setattr("plurax.ensemble._execution.stepper.tune", lambda *_, **__: pytest.fail("measured again"))
        monkeypatch.setattr(autotune, "_remembered", {})
        resumed, _ = auto().fit(auto().init(ens), batches, progress=False, checkpoint_dir=tmp_path)
        assert_same(resumed, whole)
        native = Trainer(cross_entropy, optax.adam(0.01), strategy="loop")
        assert_same(native.fit(native.init(ens), batches, progress=False)[0].ensemble, whole.ensemble, tolerance=1e-5)

    def test_a_traced_step_measures_nothing(self, plain, create, cross_entropy, make_batches, measured) -> None:
        trainer, batch = Trainer(cross_entropy, optax.sgd(0.1), tune_seconds=1.0), make_batches(1)[0]
        state = trainer.init(create(plain, 2))
        jax.jit(trainer.step)(state, batch)
        assert not measured
        trainer.step(state, batch)
        assert len(measured) == 1

    @pytest.mark.parametrize("strategy", ["auto", "vmap"])
    @pytest.mark.parametrize("seconds", [0, 0.05])
    def test_stays_within_a_budget(
        self, plain, cross_entropy, make_batches, create, assert_same, strategy, seconds
    ) -> None:
        """Members with large temporaries: a batch of 64."""
        batch = tuple(np.concatenate([x] * 16) for x in make_batches(1)[0])
        options = {"memory_budget": "24KiB", "strategy": strategy, "tune_seconds": seconds}
        trainer = self.train(plain, cross_entropy, batch, 16, **options)
        execution = trainer._stepper.advance(trainer.init(create(plain, 16)), [batch])[2]
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


@pytest.mark.parametrize("strategy", ["vmap", "map", "unroll", "loop"])
@pytest.mark.parametrize("make", [linen_network, equinox_network, plain_network])
def test_products_are_exact_for_models_of_every_kind(make, strategy, cross_entropy, assert_same) -> None:
    apply, variables = make()
    ens = Ensemble.from_apply(apply, variables)
    generator = np.random.default_rng(0)
    batch = generator.normal(size=(5, 6, 5, 2)).astype(np.float32), np.arange(5) % 3
    trainer = Trainer(cross_entropy, optax.sgd(0.1))
    state, _, _ = trainer._stepper.advance(trainer.init(ens), [batch], Execution("loop"))
    found, _, execution = trainer._stepper.advance(trainer.init(ens), [batch], Execution(strategy, products=True))
    assert execution.products
    assert_same(found, state, tolerance=1e-5)
