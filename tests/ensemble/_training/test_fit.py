import errno
import functools
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest

from plurax.ensemble import Ensemble, Trainer
from plurax.ensemble._training import checkpoint as checkpoint
from plurax.transforms._files import reading
from plurax.transforms._runs import run_directory
from plurax.transforms._runs.history import Recorder

from ..._files import entries_of


@pytest.fixture(scope="module")
def ens(plain):
    return Ensemble.create(plain, 3, seed=0)


@pytest.fixture(scope="module")
def trainer(cross_entropy):
    return Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": [0.01, 0.02, 0.03]}, strategy="vmap")


@pytest.fixture(autouse=True)
def ctrl_c_is_pythons() -> Iterator[None]:
    """Restore Python's handler: background jobs of a shell ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_fit_takes_a_step_for_each_batch(trainer, ens, make_batches, assert_same):
    state = trainer.init(ens)
    for batch in make_batches(4):
        state, _ = trainer.step(state, batch)
    fitted, _ = trainer.fit(trainer.init(ens), make_batches(4), progress=False)
    assert_same(fitted, state)
    assert int(fitted.step) == 4


@pytest.mark.smoke
def test_the_history_is_a_tidy_table(trainer, ens, make_batches):
    _, history = trainer.fit(trainer.init(ens), make_batches(4), progress=False)
    table = pd.DataFrame(history)
    assert set(table) == {"step", "member", "learning_rate", "loss", "accuracy"}
    assert table.shape == (12, 5)
    assert list(table.step.unique()) == [1, 2, 3, 4]
    assert list(table[table.step == 2].member) == [0, 1, 2]
    state = trainer.init(ens)
    for batch in make_batches(4)[:2]:
        state, metrics = trainer.step(state, batch)
    np.testing.assert_array_equal(table[table.step == 2].loss.astype(np.float32), metrics["loss"])


def test_the_history_can_be_thinned(trainer, ens, make_batches):
    _, history = trainer.fit(trainer.init(ens), make_batches(7), progress=False, history_every=3)
    assert sorted({row["step"] for row in history}) == [3, 6]


def test_non_numeric_metrics_are_left_out_of_the_history(ens, make_batches):
    def loss(model, x, y):
        return (model(x) ** 2).mean(), {"logits": model(x), "size": x.mean(), "both": {"x": x.mean()}, "none": None}

    trainer = Trainer(loss, optax.sgd(0.1))
    _, history = trainer.fit(trainer.init(ens), make_batches(2), progress=False)
    assert set(history[0]) == {"step", "member", "loss", "size"}


def test_unused_batches_are_not_consumed(trainer, ens, make_batches):
    source = iter(make_batches(10))
    state, _ = trainer.fit(trainer.init(ens), source, steps=3, progress=False)
    state, _ = trainer.fit(state, source, steps=4, progress=False)
    assert int(state.step) == 7
    assert len(list(source)) == 3


def test_no_steps_change_nothing(trainer, ens, make_batches, assert_same):
    state = trainer.init(ens)
    for batches, steps, why in ((make_batches(2), 0, "steps=0"), ([], None, "there are no batches")):
        with pytest.warns(UserWarning, match=f"^Trainer.fit: no step was taken, since {why}.$") as warned:
            after, history = trainer.fit(state, batches, steps=steps, progress=False)
        assert warned[0].filename == __file__  # the caller's line
        assert_same(after, state)
        assert history == []


def test_a_finished_run_that_resumes_takes_no_step_without_a_warning(tmp_path, trainer, ens, make_batches, assert_same):
    state = trainer.init(ens)
    options = {"steps": 2, "progress": False, "checkpoint_dir": tmp_path}
    after, _ = trainer.fit(state, make_batches(2), **options)
    assert_same(trainer.fit(state, make_batches(2), **options)[0], after)


def test_batches_that_end_early_warn(trainer, ens, make_batches):
    with pytest.warns(UserWarning, match="the batches ended after step 2, 3 steps before the 5 requested"):
        state, _ = trainer.fit(trainer.init(ens), make_batches(2), steps=5, progress=False)
    assert int(state.step) == 2


def test_progress_shows_the_range_of_the_loss(trainer, ens, make_batches, capsys):
    trainer.fit(trainer.init(ens), make_batches(4))
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "step/s" in shown
    _, history = trainer.fit(trainer.init(ens), make_batches(4), progress=False)
    last = [row["loss"] for row in history[-3:]]
    assert f"loss {min(last):.4f} to {max(last):.4f}" in shown
    assert capsys.readouterr().err == ""


def test_progress_shows_the_number_of_non_finite_members(trainer, ens, make_batches, capsys):
    batches = [(x * np.float32("inf"), y) for x, y in make_batches(1)]
    with pytest.warns(UserWarning, match="members 0, 1, 2 stopped at step 1"):
        trainer.fit(trainer.init(ens), batches)
    assert "3 not finite" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_ctrl_c_ends_cleanly_after_the_current_step(ens, cross_entropy, make_batches, assert_same, strategy):
    trainer = Trainer(cross_entropy, optax.adam(0.01), strategy=strategy)

    def batches():
        for i, batch in enumerate(make_batches(9)):
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield batch

    source = batches()
    state, history = trainer.fit(trainer.init(ens), source, progress=False)
    assert int(state.step) == 4
    assert len(history) == 12
    assert len(list(source)) == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    expected, _ = trainer.fit(trainer.init(ens), make_batches(4), progress=False)
    assert_same(state, expected)


def test_a_second_ctrl_c_interrupts(trainer, ens, make_batches):
    def batches():
        yield make_batches(1)[0]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(trainer.init(ens), batches(), progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_from_the_batches_ends_cleanly(trainer, ens, make_batches):
    def batches():
        yield from make_batches(2)
        raise KeyboardInterrupt

    state, _ = trainer.fit(trainer.init(ens), batches(), progress=False)
    assert int(state.step) == 2


def test_the_programs_own_handler_stays(trainer, ens, make_batches):
    own = lambda *_: None
    signal.signal(signal.SIGINT, own)
    try:
        trainer.fit(trainer.init(ens), make_batches(1), progress=False)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.smoke
@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"), [("vmap", "stateful"), ("map", "plain"), ("unroll", "plain"), ("loop", "stateful")]
)
def test_interrupted_and_resumed_equals_uninterrupted_to_the_bit(
    request, tmp_path, kind, cross_entropy, make_batches, assert_same, strategy
):
    ens = Ensemble.create(request.getfixturevalue(kind), 3, seed=0)

    def trainer():
        return Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": [0.01, 0.02, 0.03]}, strategy=strategy)

    class Stopped(Exception):
        pass

    def stopping():
        yield from make_batches(9)[:5]
        raise Stopped

    whole, history = trainer().fit(trainer().init(ens), make_batches(9), progress=False)
    options = {"progress": False, "checkpoint_dir": tmp_path / "run", "checkpoint_every": 2}
    with pytest.raises(Stopped):
        trainer().fit(trainer().init(ens), stopping(), **options)
    assert sorted(os.listdir(tmp_path / "run")) == ["step_00000002", "step_00000004"]
    state, resumed = trainer().fit(trainer().init(ens), make_batches(9), steps=9, **options)
    assert_same(state, whole)
    assert resumed == history


def test_a_finished_run_is_only_loaded(tmp_path, trainer, ens, make_batches, assert_same):
    options = {"progress": False, "checkpoint_dir": tmp_path, "steps": 4}
    state, history = trainer.fit(trainer.init(ens), make_batches(4), **options)
    again, same = trainer.fit(trainer.init(ens), make_batches(4), **options)
    assert_same(again, state)
    assert same == history


def test_a_second_fit_goes_on_from_the_state_it_is_given(tmp_path, trainer, ens, make_batches, assert_same):
    batches = make_batches(8)
    state, _ = trainer.fit(trainer.init(ens), batches[:5], progress=False, checkpoint_dir=tmp_path)
    state, history = trainer.fit(state, batches[5:], progress=False, checkpoint_dir=tmp_path)
    whole, _ = trainer.fit(trainer.init(ens), batches, progress=False)
    assert_same(state, whole)
    assert sorted({row["step"] for row in history}) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_last_step_is_always_kept_and_older_ones_are_removed(tmp_path, trainer, ens, make_batches):
    trainer.fit(
        trainer.init(ens), make_batches(7), progress=False, checkpoint_dir=tmp_path, checkpoint_every=2,
        checkpoint_keep=3,
    )  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["step_00000004", "step_00000006", "step_00000007"]


def test_ctrl_c_writes_a_checkpoint(tmp_path, trainer, ens, make_batches):
    def batches():
        yield from make_batches(3)
        raise KeyboardInterrupt

    trainer.fit(trainer.init(ens), batches(), progress=False, checkpoint_dir=tmp_path, checkpoint_every=100)
    assert os.listdir(tmp_path) == ["step_00000003"]


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, trainer, ens, make_batches, assert_same):
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    trainer.fit(trainer.init(ens), make_batches(9)[:4], **options)
    with open(tmp_path / "step_00000004" / "history.bin", "r+b") as file:
        file.truncate(10)
    whole, _ = trainer.fit(trainer.init(ens), make_batches(9), progress=False)
    with pytest.warns(UserWarning, match=r"history.bin has 10 bytes instead of \d+; .* It is skipped"):
        state, _ = trainer.fit(trainer.init(ens), make_batches(9), **options)
    assert_same(state, whole)


# Orbax starts all its reads at once; after the first failure, the others fail unobserved.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["arrays/0/ensemble.bin", "history.bin", "plurax.json"])
def test_changed_bytes_damage_a_checkpoint_too(tmp_path, trainer, ens, make_batches, assert_same, name):
    """Training to its step again replaces it under the same name."""
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    trainer.fit(trainer.init(ens), make_batches(9)[:4], **options)
    file = tmp_path / "step_00000004" / name
    file.write_bytes(bytes(file.stat().st_size))
    whole, _ = trainer.fit(trainer.init(ens), make_batches(4), progress=False)
    with pytest.warns(UserWarning, match="It is skipped"):
        state, history = trainer.fit(trainer.init(ens), make_batches(4), **options)
    assert_same(state, whole)
    assert_same(checkpoint.load(tmp_path / "step_00000004", state), whole)
    assert [row["step"] for row in history[::3]] == [1, 2, 3, 4]
    _, again = trainer.fit(trainer.init(ens), make_batches(4), **options)
    assert again == history


def test_only_checkpoints_are_removed_and_counted(tmp_path, trainer, ens, make_batches):
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "thesis.txt").write_text("mine")
    (tmp_path / "step_5").mkdir()
    with pytest.warns(UserWarning, match="step_00000001 is not a checkpoint of this library, or is damaged"):
        trainer.fit(
            trainer.init(ens), make_batches(6), progress=False, checkpoint_dir=tmp_path, checkpoint_every=2,
            checkpoint_keep=2,
        )  # fmt: skip
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000004", "step_00000006", "step_5"]
    assert (tmp_path / "step_00000001" / "thesis.txt").read_text() == "mine"


def test_a_damaged_checkpoint_does_not_count_for_checkpoint_keep(tmp_path, trainer, ens, make_batches):
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_keep": 1}
    trainer.fit(trainer.init(ens), make_batches(8), checkpoint_every=4, **options)
    (tmp_path / "step_00000008" / "plurax.json").unlink()
    with pytest.warns(UserWarning, match="is damaged: it has no plurax.json. It is skipped"):
        trainer.fit(trainer.init(ens), make_batches(6), checkpoint_every=1, **options)
    assert sorted(os.listdir(tmp_path)) == ["step_00000006", "step_00000008"]


def damage(path):
    """Flip a byte of the arrays, which the sizes of the files do not show."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_skipped_is_renamed_and_does_not_count(tmp_path, trainer, ens, make_batches, assert_same, keep):
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_keep": keep, "checkpoint_every": 2}
    whole, _ = trainer.fit(trainer.init(ens), make_batches(9), progress=False)
    trainer.fit(trainer.init(ens), make_batches(8), **options)
    damage(tmp_path / "step_00000008" / "arrays" / "0" / "ensemble.bin")
    held = (tmp_path / "step_00000008" / "arrays" / "0" / "ensemble.bin").read_bytes()
    with pytest.warns(UserWarning, match=r"It is skipped, and will be renamed to \*.damaged when the next one is"):
        state, _ = trainer.fit(trainer.init(ens), make_batches(9), **options)
    assert_same(state, whole)
    (damaged,) = (name for name in os.listdir(tmp_path) if name.endswith(".damaged"))
    left = sorted({*os.listdir(tmp_path)} - {damaged})
    assert left == [f"step_{step:08d}" for step in (8, 9)[-keep:]]
    assert re.fullmatch(r"step_00000008\.[0-9a-f]{32}\.damaged", damaged)
    assert (tmp_path / damaged / "arrays" / "0" / "ensemble.bin").read_bytes() == held
    trainer.fit(trainer.init(ens), make_batches(9), **options)  # which is not damaged


def test_a_call_that_fails_renames_nothing(tmp_path, trainer, ens, make_batches, cross_entropy):
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    trainer.fit(trainer.init(ens), make_batches(4), **options)
    damage(tmp_path / "step_00000004" / "arrays" / "0" / "ensemble.bin")
    other = Trainer(cross_entropy, optax.sgd(0.5))
    with pytest.warns(UserWarning, match="It is skipped"), pytest.raises(ValueError, match="is of another run"):
        other.fit(other.init(ens), make_batches(4), **options)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize("target", ["nothing", "step_00000008", "../elsewhere"])
def test_links_are_no_checkpoints(tmp_path, trainer, ens, make_batches, assert_same, target):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    options = {"progress": False, "checkpoint_dir": run, "checkpoint_every": 2, "checkpoint_keep": 1}
    whole, _ = trainer.fit(trainer.init(ens), make_batches(6), progress=False)
    trainer.fit(trainer.init(ens), make_batches(8), **options | {"checkpoint_dir": elsewhere})
    (elsewhere / "step_00000008").rename(tmp_path / "one")
    elsewhere.rmdir()
    (tmp_path / "one").rename(elsewhere)
    run.mkdir()
    (run / "step_00000008").symlink_to(target)
    with pytest.warns(UserWarning, match="step_00000008 is a link, not a checkpoint. It is skipped"):
        state, _ = trainer.fit(trainer.init(ens), make_batches(6), **options)
    assert_same(state, whole)
    assert int(checkpoint.load(elsewhere, state).step) == 8  # untouched
    assert sorted(name[:13] for name in os.listdir(run)) == ["step_00000006", "step_00000008"]


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "no"), OSError(errno.EMFILE, "too many"), MemoryError()], ids=str
)
def test_what_cannot_be_read_is_not_damaged(tmp_path, trainer, ens, make_batches, monkeypatch, error):
    """A run that began anew would have its checkpoints take the place of those that it could not read."""
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2, "checkpoint_keep": 1}
    trainer.fit(trainer.init(ens), make_batches(4), **options)
    opened = reading.open_file

    def fail(what, path, within=None):
        if path.name == "ensemble.bin":
            raise error
        return opened(what, path, within)

    monkeypatch.setattr("plurax.transforms._runs.checkpoint.open_file", fail)
    with pytest.raises(type(error)):
        trainer.fit(trainer.init(ens), make_batches(6), **options)
    with pytest.raises(type(error)):
        checkpoint.load(tmp_path / "step_00000004", trainer.init(ens))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["step_00000004"]


def test_files_that_a_user_put_into_a_checkpoint_are_not_removed(tmp_path, trainer, ens, make_batches):
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2, "checkpoint_keep": 1}
    trainer.fit(trainer.init(ens), make_batches(4), **options)
    (tmp_path / "step_00000004" / "notes.txt").write_text("the best one")
    trainer.fit(trainer.init(ens), make_batches(8), **options)
    assert sorted(os.listdir(tmp_path)) == ["step_00000004", "step_00000008"]
    assert (tmp_path / "step_00000004" / "notes.txt").read_text() == "the best one"


def drop(name):
    return lambda columns: columns.pop(name)


def put(name, change):
    return lambda columns: columns.update({name: change(columns[name])})


@pytest.mark.parametrize(
    "change",
    [
        drop("step"),
        drop("records of loss"),
        drop("values of loss"),
        put("step", lambda x: x[None]),
        put("step", lambda x: x.astype(np.complex64)),
        put("records of loss", lambda x: x + 1000),
        put("records of loss", lambda x: x - 1),
        put("records of loss", lambda x: np.repeat(x, 2)),
        put("values of loss", lambda x: x[:, :1]),
    ],
)
def test_a_history_that_was_never_written_is_damaged(tmp_path, trainer, ens, make_batches, monkeypatch, change):
    """Somebody wrote it with right checksums."""
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    trainer.fit(trainer.init(ens), make_batches(2), **options)
    arrays = Recorder.arrays

    def forged(self):
        columns = arrays(self)
        change(columns)
        return columns

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "arrays", forged)
        trainer.fit(trainer.init(ens), make_batches(4), **options)
    _, history = trainer.fit(trainer.init(ens), make_batches(4), progress=False)
    with pytest.warns(UserWarning, match="step_00000004 is damaged: history.bin: .* It is skipped"):
        _, again = trainer.fit(trainer.init(ens), make_batches(4), **options)
    assert again == history


def test_old_checkpoints_that_cannot_be_removed_are_said(tmp_path, trainer, ens, make_batches, monkeypatch):
    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 2, "checkpoint_keep": 1}
    remove = run_directory.remove_directory

    def fail(path):
        if path.name == "step_00000002":
            raise PermissionError(errno.EACCES, "no")
        remove(path)

    monkeypatch.setattr(run_directory, "remove_directory", fail)
    with pytest.warns(UserWarning, match="Trainer.fit: old checkpoints in .* cannot be removed: .*no"):
        trainer.fit(trainer.init(ens), make_batches(8), **options)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000008"]


def test_a_checkpoint_of_an_earlier_format_is_not_taken_for_damaged(tmp_path, trainer, ens, make_batches):
    options = {"progress": False, "checkpoint_dir": tmp_path}
    trainer.fit(trainer.init(ens), make_batches(2), **options)
    (tmp_path / "step_00000002" / "plurax.json").write_text('{"format": "plurax checkpoint", "version": 4, "size": 3}')
    with pytest.raises(ValueError, match="was written in version 4 of its format, but plurax .* reads version 5;"):
        trainer.fit(trainer.init(ens), make_batches(4), **options)
    assert os.listdir(tmp_path) == ["step_00000002"]


@pytest.mark.slow
def test_metrics_may_change_between_steps(tmp_path, ens, make_batches):
    """A later run, or another kind of batch, may report other metrics."""

    def loss(model, x, y, *extra):
        return (model(x) ** 2).mean(), {"file": x.mean(), **({"extra": x.max()} if extra else {})}

    def other(model, x, y):
        return (model(x) ** 2).mean().astype(jnp.bfloat16), {"other": jnp.int32(y.max())}

    batches = make_batches(4)
    for strategy in ("vmap", "loop"):
        trainer = Trainer(loss, optax.sgd(0.1), strategy=strategy)
        options = {"progress": False, "checkpoint_dir": tmp_path / strategy}
        mixed = [batches[0], (*batches[1], np.ones(1, np.float32))]
        trainer.fit(trainer.init(ens), mixed, **options)
        trainer = Trainer(other, optax.sgd(0.1), strategy=strategy)
        _, history = trainer.fit(trainer.init(ens), batches, resume=True, **options)
        assert [set(row) for row in history[::3]] == [
            {"step", "member", "loss", "file"},
            {"step", "member", "loss", "file", "extra"},
            *[{"step", "member", "loss", "other"}] * 2,
        ]
        table = pd.DataFrame(history)
        assert table.other.isna().sum() == 6
        assert table.extra[3] == batches[1][0].max()
        _, again = trainer.fit(trainer.init(ens), batches, **options)
        assert again == history


def test_a_key_is_left_out_of_the_history(ens, make_batches):
    trainer = Trainer(lambda m, x, y: ((m(x) ** 2).mean(), {"key": jax.random.key(0)}), optax.sgd(0.1))
    _, history = trainer.fit(trainer.init(ens), make_batches(1), progress=False)
    assert set(history[0]) == {"step", "member", "loss"}


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_batches_may_be_refilled_in_place(ens, cross_entropy, make_batches, assert_same, strategy):
    trainer = Trainer(cross_entropy, optax.adam(0.01), strategy=strategy)

    def refilled():
        x, y = (np.empty_like(a) for a in make_batches(1)[0])
        for batch in make_batches(20):
            x[...], y[...] = batch
            yield x, y
            x[...], y[...] = np.nan, 0

    state, _ = trainer.fit(trainer.init(ens), refilled(), progress=False)
    expected, _ = trainer.fit(trainer.init(ens), make_batches(20), progress=False)
    assert_same(state, expected)


def test_the_chosen_strategy_is_part_of_the_checkpoint(tmp_path, ens, cross_entropy, make_batches, monkeypatch):
    def auto():
        return Trainer(cross_entropy, optax.sgd(0.1), tune_seconds=0.1)

    auto().fit(auto().init(ens), make_batches(2), progress=False, checkpoint_dir=tmp_path)
    monkeypatch.setattr("plurax.ensemble._execution.stepper.recall", lambda *_: pytest.fail("chosen again"))
    auto().fit(auto().init(ens), make_batches(3), progress=False, checkpoint_dir=tmp_path)


def settings(path):
    settings = entries_of(path / "plurax.json")["about"]["settings"]
    return settings["strategy"], settings["chunk_size"]


@pytest.mark.slow
def test_the_chunk_is_part_of_the_checkpoint(tmp_path, ens, cross_entropy, make_batches):
    """A resumed trainer keeps options that it leaves unset, and uses those that it sets."""
    for i, (options, expected) in enumerate(
        (
            ({"chunk_size": 2}, ("vmap", 2)),
            ({}, ("vmap", 2)),
            ({"strategy": "vmap"}, ("vmap", 2)),
            ({"chunk_size": 3}, ("vmap", 3)),
            ({"strategy": "loop"}, ("loop", None)),
            ({"chunk_size": np.int64(2)}, ("vmap", 2)),
        )
    ):
        trainer = Trainer(cross_entropy, optax.sgd(0.1), **options)
        trainer.fit(trainer.init(ens), make_batches(i + 1), progress=False, checkpoint_dir=tmp_path)
        assert settings(tmp_path / f"step_{i + 1:08d}") == expected


def test_leftovers_of_a_killed_run_are_ignored(tmp_path, trainer, ens, make_batches):
    (tmp_path / ".step_00000009.abc.unfinished").mkdir()
    (tmp_path / "step_notes").mkdir()
    state, _ = trainer.fit(trainer.init(ens), make_batches(2), progress=False, checkpoint_dir=tmp_path)
    assert int(state.step) == 2


def test_a_checkpoint_is_written_with_the_state_of_its_step(tmp_path, trainer, ens, make_batches, assert_same):
    trainer.fit(trainer.init(ens), make_batches(5), progress=False, checkpoint_dir=tmp_path, checkpoint_every=3)
    three, _ = trainer.fit(trainer.init(ens), make_batches(3), progress=False)
    assert_same(checkpoint.load(tmp_path / "step_00000003", trainer.init(ens)), three)


@contextmanager
def full_disk():
    """Let the operating system fail all writes beyond 4 KiB of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("to", [5, 9])
def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path, plain, cross_entropy, make_batches, assert_same, to):
    trainer = Trainer(cross_entropy, optax.adam(0.1), strategy="vmap")
    start = trainer.init(Ensemble.create(functools.partial(plain, width=400), 3, seed=0))
    whole, history = trainer.fit(start, make_batches(7), progress=False)

    def batches():
        for i, batch in enumerate(make_batches(7)):
            if i == 2:
                disk.enter_context(full_disk())
            if i == to:
                disk.close()
            yield batch

    options = {"progress": False, "checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with ExitStack() as disk, pytest.warns(UserWarning, match="cannot be written") as warned:
        state, rows = trainer.fit(start, batches(), **options)
    assert_same(state, whole)
    assert rows == history
    named = [re.search(rf"the checkpoint of step (\d+) in {tmp_path}", str(x.message)) for x in warned]
    steps = [int(x[1]) for x in named if x is not None]
    # A checkpoint is written while the next batch is made, which fills the disk, or frees it.
    assert set(range(3, min(to, 8))) <= set(steps) <= set(range(2, min(to, 7) + 1))
    assert {x.filename for x in warned} == {__file__}
    written = [step for step in range(1, 8) if step not in steps][-2:]
    assert sorted(os.listdir(tmp_path)) == [f"step_{step:08d}" for step in written]
    again, rows = trainer.fit(start, make_batches(7), **options)
    assert_same(again, whole)
    assert rows == history


def test_a_directory_without_room_is_noticed_before_the_first_step(tmp_path, trainer, ens, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    batches = iter([None])
    with pytest.raises(OSError, match=f"a checkpoint after step 0 needs .*, but the disk has 100 B left: '{tmp_path}'"):
        trainer.fit(trainer.init(ens), batches, progress=False, checkpoint_dir=tmp_path)
    assert list(batches) == [None]
    assert os.listdir(tmp_path) == []


def test_two_runs_do_not_share_a_directory(tmp_path, trainer, ens, make_batches):
    """The second is refused before it takes a batch, and the first goes on."""

    def batches():
        yield from make_batches(2)
        rest = iter([None])
        by = f"a run of process {os.getpid()} on {socket.gethostname()} is writing"
        with pytest.raises(BlockingIOError, match=by):
            trainer.fit(trainer.init(ens), rest, progress=False, checkpoint_dir=tmp_path)
        assert list(rest) == [None]
        yield from make_batches(1)

    state, _ = trainer.fit(trainer.init(ens), batches(), progress=False, checkpoint_dir=tmp_path)
    assert int(state.step) == 3
    assert os.listdir(tmp_path) == ["step_00000003"]


def test_warnings_about_checkpoints_name_the_line_of_the_caller(tmp_path, trainer, ens, make_batches):
    for i in range(2):
        trainer.fit(trainer.init(ens), make_batches(i + 1), progress=False, checkpoint_dir=tmp_path)
    (tmp_path / "step_00000002" / "plurax.json").unlink()
    with pytest.warns(UserWarning, match="It is skipped") as warned:
        trainer.fit(trainer.init(ens), make_batches(2), progress=False, checkpoint_dir=tmp_path)
    assert warned[0].filename == __file__


def test_fit_moves_few_bytes_and_no_arrays_of_the_caller_are_donated(trainer, ens, make_batches):
    state = trainer.init(ens)
    trainer.fit(state, make_batches(2), progress=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, ens)) if isinstance(leaf, jax.Array))


class Test_refusals:
    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"steps": -1}, ValueError, "steps must be at least 0, but got -1"),
            ({"steps": 1.5}, TypeError, "steps must be an int or None, but got 1.5"),
            ({"checkpoint_every": 0, "checkpoint_dir": "x"}, ValueError, "checkpoint_every must be at least 1"),
            ({"checkpoint_every": 3}, ValueError, "checkpoint_every needs a checkpoint_dir"),
            ({"checkpoint_keep": 0}, ValueError, "checkpoint_keep must be at least 1"),
            ({"history_every": 0}, ValueError, "history_every must be at least 1"),
            ({"history_every": None}, TypeError, "history_every must be an int"),
            ({"checkpoint_every": 2.0, "checkpoint_dir": "x"}, TypeError, "checkpoint_every must be an int"),
            ({"checkpoint_keep": True}, TypeError, "checkpoint_keep must be an int"),
        ],
    )
    def test_counts(self, trainer, ens, options, error, match):
        with pytest.raises(error, match=match):
            trainer.fit(trainer.init(ens), [], progress=False, **options)

    def test_invalid_states_and_batches(self, trainer, ens):
        with pytest.raises(TypeError, match="Trainer.fit: state must be a TrainState"):
            trainer.fit(ens, [])
        with pytest.raises(TypeError, match="batches must be an iterable of batches, but got 3"):
            trainer.fit(trainer.init(ens), 3)

    def test_a_checkpoint_of_other_hyperparameters(self, tmp_path, trainer, ens, cross_entropy, make_batches):
        trainer.fit(trainer.init(ens), make_batches(1), progress=False, checkpoint_dir=tmp_path)
        other = Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": [0.01, 0.02, 0.04]})
        with pytest.raises(ValueError, match=r"has learning_rate=\[0.01, 0.02, 0.03\], but the trainer has"):
            other.fit(other.init(ens), make_batches(1), progress=False, checkpoint_dir=tmp_path)

    def test_a_checkpoint_of_another_optimizer(self, tmp_path, trainer, ens, cross_entropy, make_batches):
        """Both have the same state structure, so only the name differs."""
        first = Trainer(cross_entropy, optax.adam, hyperparams={"learning_rate": 0.1})
        first.fit(first.init(ens), make_batches(1), progress=False, checkpoint_dir=tmp_path)
        other = Trainer(cross_entropy, optax.adamw, hyperparams={"learning_rate": 0.1})
        with pytest.raises(ValueError, match="has optimizer=adam, but the trainer has optimizer=adamw"):
            other.fit(other.init(ens), make_batches(1), progress=False, checkpoint_dir=tmp_path)

    def test_a_directory_that_cannot_be_made(self, tmp_path, trainer, ens):
        """Fails before the first step, not after the last."""
        (tmp_path / "file").write_text("mine")
        batches = iter([None])
        for path in (tmp_path / "file", tmp_path / "file" / "inside"):
            with pytest.raises(OSError, match=r"(File exists|Not a directory): '.*file.*'"):
                trainer.fit(trainer.init(ens), batches, progress=False, checkpoint_dir=path)
        assert list(batches) == [None]

    def test_a_checkpoint_of_another_size(self, tmp_path, ens, cross_entropy, make_batches):
        trainer = Trainer(cross_entropy, optax.sgd(0.1))
        trainer.fit(trainer.init(ens), make_batches(1), progress=False, checkpoint_dir=tmp_path)
        with pytest.raises(ValueError, match="its state has 3 members, but `state` has 2"):
            trainer.fit(trainer.init(ens[:2]), [], progress=False, checkpoint_dir=tmp_path)

    def test_a_checkpoint_of_another_ensemble(self, tmp_path, trainer, ens, cross_entropy, stateful, make_batches):
        trainer.fit(trainer.init(ens), make_batches(1), progress=False, checkpoint_dir=tmp_path)
        with pytest.raises(ValueError, match="in `ensemble`, for each member, but `state` has"):
            trainer.fit(trainer.init(Ensemble.create(stateful, 3, seed=0)), [], progress=False, checkpoint_dir=tmp_path)

    def test_a_checkpoint_beyond_the_requested_steps(self, tmp_path, trainer, ens, make_batches):
        trainer.fit(trainer.init(ens), make_batches(4), progress=False, checkpoint_dir=tmp_path)
        with pytest.raises(ValueError, match="is at step 4, after step 2; take more steps"):
            trainer.fit(trainer.init(ens), make_batches(4), steps=2, progress=False, checkpoint_dir=tmp_path)

    def test_batches_too_few_to_skip(self, tmp_path, trainer, ens, make_batches):
        trainer.fit(trainer.init(ens), make_batches(4), progress=False, checkpoint_dir=tmp_path)
        with pytest.raises(ValueError, match="has used 4 batches, but got 3; pass the same batches"):
            trainer.fit(trainer.init(ens), make_batches(3), progress=False, checkpoint_dir=tmp_path)

    def test_a_bad_batch_leaves_the_state_usable(self, trainer, ens, make_batches):
        state = trainer.init(ens)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            trainer.fit(state, [make_batches(1)[0], (np.ones((2, 4)),)], progress=False)
        trainer.step(state, make_batches(1)[0])
