"""The training loop alone; `test_fit.py` of ensembles and of privacy test it with their steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from plurax.transforms._runs.loop import Preempted, run
from plurax.transforms._runs.processes import ALONE, Group


def taken(source: Iterator[Any], saved: list[int] | None, group: Group = ALONE) -> Any:
    """Run steps that sum their batches, and save the sum at the end."""
    return run(
        0,
        source,
        lambda state, batch: (state + batch, {}),
        step=0,
        target=None,
        record=lambda step, metrics: None,
        say=lambda step, metrics: "",
        save=None if saved is None else saved.append,
        checkpoint_every=None,
        progress=False,
        group=group,
        done=0,
        total=None,
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
