"""The training loop alone; `test_fit.py` of ensembles and of privacy test it with their steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plurax.transforms._runs.loop import run


def taken(source: Iterator[Any], saved: list[int], interruptible: bool) -> Any:
    """Run steps that sum their batches, and save the sum at the end."""
    return run(
        0,
        source,
        lambda state, batch: (state + batch, {}),
        step=0,
        target=None,
        record=lambda step, metrics: None,
        say=lambda step, metrics: "",
        save=saved.append,
        checkpoint_every=None,
        progress=False,
        interruptible=interruptible,
        done=0,
        total=None,
    )


def test_an_interrupt_during_a_batch_ends_only_interruptible_loops() -> None:
    """With several processes, an interrupt must not end one of them alone."""

    def batches() -> Iterator[int]:
        yield from (1, 2)
        raise KeyboardInterrupt

    saved: list[int] = []
    assert taken(batches(), saved, True) == (3, 2, True)
    assert saved == [3]
    with pytest.raises(KeyboardInterrupt):
        taken(batches(), saved, False)
    assert saved == [3]
