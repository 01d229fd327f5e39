"""The training loop alone; `test_fit.py` of ensembles and of privacy test it with their steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from plurax.transforms._runs.checkpoint_clock import CheckpointClock
from plurax.transforms._runs.loop import Preempted, run
from plurax.transforms._runs.processes import ALONE, Group


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Restore the defaults: Ray handles SIGTERM in this process, and shells ignore Ctrl-C in the background."""
    ours = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def taken(source: Iterator[Any], saved: list[int] | None, group: Group = ALONE, **options: Any) -> Any:
    """Run steps that sum their batches, and save the sum at the end."""
    return run(
        0,
        source,
        lambda state, batch: (state + batch, {}),
        step=0,
        target=options.pop("target", None),
        record=lambda step, metrics: None,
        say=lambda step, metrics: "",
        save=None if saved is None else saved.append,
        clock=options.pop("clock", CheckpointClock(None)),
        progress=False,
        group=group,
        done=0,
        total=None,
        **options,
    )


def test_an_interrupt_during_a_batch_ends_only_interruptible_loops() -> None:
    """With several processes, an interrupt must not end one of them alone."""

    def batches() -> Iterator[int]:
        yield from (1, 2)
        raise KeyboardInterrupt

    saved: list[int] = []
    assert taken(batches(), saved) == (3, 2, True)
    assert saved == [3]
    with pytest.raises(KeyboardInterrupt):
        taken(batches(), saved, Group((0, 1)))
    assert saved == [3]


def told_to_leave() -> Iterator[int]:
    yield 1
    signal.raise_signal(signal.SIGTERM)
    yield from (2, 3)


def test_sigterm_ends_the_step_and_saves() -> None:
    saved: list[int] = []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(Preempted) as left:
        taken(told_to_leave(), saved)
    assert (left.value.step, left.value.code, saved) == (2, 143, [3])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("saved", [None, []])
def test_a_handler_of_the_program_stays(saved: list[int] | None) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        assert taken(told_to_leave(), saved) == (6, 3, False)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert told == [signal.SIGTERM]


def test_sigterm_in_the_last_step_or_while_it_is_written_is_not_lost() -> None:
    saved: list[int] = []
    with pytest.raises(Preempted):
        taken(told_to_leave(), saved, target=2)
    assert saved == [3]
    finished: list[int] = []

    def written() -> None:
        signal.raise_signal(signal.SIGTERM)
        finished.append(1)

    with pytest.raises(Preempted) as left:
        taken(iter([1, 2]), saved, written=written)
    assert (left.value.step, saved, finished) == (2, [3, 3], [1])


def test_ctrl_c_while_the_last_checkpoint_is_written_returns_the_result() -> None:
    assert taken(iter([1, 2]), [], written=lambda: signal.raise_signal(signal.SIGINT)) == (3, 2, True)


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_process_forked_in_a_run_ends_by_sigterm() -> None:
    """A worker of a data loader, which its parent ends."""
    found: list[int] = []

    def batches() -> Iterator[int]:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(1)
        time.sleep(0.5)  # Python drops a signal that a process gets while it is forked
        os.kill(child, signal.SIGTERM)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        yield 1

    assert taken(batches(), []) == (1, 1, False)
    assert found == [-signal.SIGTERM]
