"""The state of `DPSGD` on disk: a checkpoint of one member, whose manifest holds the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._runs.checkpoint import Checkpoint, outline, write
from .accounting import Ledger
from .state import DPState

_PART = "private state"


def write_state(api: str, path: Path, state: DPState, history: Mapping[str, np.ndarray] | None = None) -> None:
    """Write a state, with its ledger, its steps and perhaps a history."""
    arrays = _arrays(state)
    # As a single member, since what `_runs/checkpoint.py` writes has members along axis 0.
    parts = {_PART: jax.tree.map(lambda x: x[None], arrays)}
    about = {"step": int(state.step), "ledger": _plain(state.ledger)}
    write(api, path, parts, 1, outlines={_PART: outline(arrays)}, about=about, history=history)


def read_state(checkpoint: Checkpoint, like: DPState) -> DPState:
    """Return the state of a checkpoint, like another; raise if it is of other settings or another model."""
    arrays = _arrays(like)
    order = checkpoint.order(_PART, outline(arrays))
    written, mine = checkpoint.manifest["ledger"], _plain(like.ledger)
    for name in mine:
        if written.get(name) != mine[name]:
            raise ValueError(
                f"{checkpoint.api}: the checkpoint at {checkpoint.path} was written with {name}={written.get(name)}, "
                f"but this DPSGD has {mine[name]}; make one with the settings of the run."
            )
    read = jax.tree.unflatten(jax.tree.structure(arrays), checkpoint.member(0, _PART, order))
    step = jnp.asarray(checkpoint.manifest["step"], like.step.dtype)
    return replace(like, **read, step=step)


def _arrays(state: DPState) -> dict[str, Any]:
    """Return the arrays of a state that are stored; its step is in the manifest, where a person can read it."""
    return {name: getattr(state, name) for name in ("tree", "opt_state", "noise_state", "mask_key", "seed")}


def _plain(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger as JSON has it, which gives back Python's numbers to the bit."""
    return {**asdict(ledger), "strategy": list(ledger.strategy)}
