"""What identifies a run of `Trainer.fit`; `transforms/_runs/identity.py` stores and compares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...transforms._runs.identity import Identity, digest, program_digest
from ...transforms._runs.run_directory import RunDirectory
from .._execution.executor import StepInputs
from .._execution.forms import State
from .._execution.stepper import Stepper
from .._step.state import TrainState
from ._data.batches import Batches, BatchIterator
from .checkpoint import one_row


def identify(store: RunDirectory, state: TrainState, batches: Any) -> Identity:
    """Return the identity of a run, given the state and the batches that were passed to `fit`."""
    settings = _settings(batches._batches if isinstance(batches, BatchIterator) else batches)
    return Identity(store.group, int(state.step), parts_of(state), state._size, settings, store.resume is True)


def parts_of(state: TrainState) -> dict[str, Any]:
    """Return the arrays of a state that are compared, by the names that errors use."""
    trainable, rest, opt_state, standing = state._arrays()
    found = {"weights": (trainable, rest), "optimizer states": opt_state, "member status": standing}
    return found if state._shared is None else {**found, "shared arrays": one_row(state._shared)}


def check_program(identity: Identity, stepper: Stepper, state: State, batch: Any) -> None:
    """Compare the program of a step with that of the checkpoint from which the run goes on; raise if they differ."""
    arguments, axes = stepper.arguments(batch, state._size)

    def digest_for(shapes: list[list[int]]) -> str:
        leaves, structure = jax.tree.flatten(arguments)
        shaped = [_with_shape(leaf, tuple(shape)) for leaf, shape in zip(leaves, shapes, strict=True)]
        inputs = StepInputs(state, jax.tree.unflatten(structure, shaped), axes)
        # Once for each kind of inputs, as the step is compiled: tracing a large model takes a second.
        if inputs.kind not in stepper.digests:
            stepper.digests[inputs.kind] = program_digest(stepper.executor.trace_member(inputs))
        return stepper.digests[inputs.kind]

    identity.check_program([list(np.shape(leaf)) for leaf in jax.tree.leaves(arguments)], digest_for)


def _settings(batches: Any) -> Mapping[str, Any]:
    """Return what determines the batches of `Batches`, as plain values; nothing is known of other iterables."""
    if not isinstance(batches, Batches):
        return {}
    # Not the number of epochs: a run may be continued for more of them.
    return {
        "key": digest(batches._to_shuffle),
        "batch_size": batches._batch_size,
        "members": batches._members,
        "draw": None if batches.indices is None else digest(batches.indices),
        "data": digest(batches._data),
    }


def _with_shape(leaf: Any, shape: tuple[int, ...]) -> Any:
    if not hasattr(leaf, "dtype"):  # a number
        return leaf
    kind = jax.typeof(leaf)  # with the dtype that JAX gives to a NumPy array
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)
