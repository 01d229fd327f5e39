"""`DPState`: the state of private training, the checks of its parameters, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.arguments import describe, leaf_name
from ..._core.compat import Tracer
from ..._files.schema import decode
from ..._models.equinox import is_array, released
from ..._models.split_model import M, merge_tree, shared_variable
from ..._runs.checkpoint import Checkpoint
from ..._runs.checkpoint_writer import CheckpointWriter
from ..._runs.manifest import About, RunRecord, outline
from .accounting import Ledger
from .model_loss import warn_of_shared_keys

_PART = "private state"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class DPState(Generic[M]):
    """The state of a `DPSGD` run, a pytree; `DPSGD.init` creates it.

    For an ensemble, `opt_state`, `noise_state`, `clip_norms` and `mask_key` have the members along axis 0.

    Attributes:
      tree: the model, split into arrays and structure; see `model`.
      opt_state: the optax state.
      noise_state: the state of the noise, with its key.
      clip_norms: the clip norms of the next step with adaptive clipping: float32, shape (), or (groups,) for a pytree
        of them, in the order of `jax.tree.leaves`; otherwise None. They are as private as the model.
      mask_key: the key from which the random state of modules, such as dropout, is drawn.
      step: the number of steps taken, an int32 scalar.
      seed: the seed of the batches, words of uint32. Keep it as secret as the noise.
      ledger: the settings of a step that the accountant needs.
      target_delta: as for `DPSGD`.
      members: the number of members; None for a single model.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from plurax.transforms.privacy import DPSGD
      >>> dp = DPSGD(lambda w, x: jnp.sum(w * x), optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=2.0,
      ...            target_delta=1e-5, num_examples=1000, expected_batch_size=50, num_steps=100)
      >>> state = dp.init(jnp.zeros(3), key=jax.random.key(0))
      >>> int(state.step), state.model
      (0, Array([0., 0., 0.], dtype=float32))
      >>> state
      DPState(step=0, noise_multiplier=2, sampling_probability=0.05, target_delta=1e-05)
    """

    tree: Any
    opt_state: Any
    noise_state: Any
    clip_norms: jax.Array | None
    mask_key: jax.Array
    step: jax.Array
    seed: jax.Array
    ledger: Ledger = field(metadata={"static": True})
    target_delta: float = field(metadata={"static": True})
    members: int | None = field(metadata={"static": True})

    def __repr__(self) -> str:
        """Return the number of steps, σ and q; `DPSGD.epsilon` computes what was spent."""
        # A tracer, or states along an axis of `jax.vmap`, have no step to print.
        known = (
            isinstance(self.step, (jax.Array, np.ndarray)) and not isinstance(self.step, Tracer) and not self.step.ndim
        )
        step = str(int(self.step)) if known else "?"
        settings = f"step={step}, {self.ledger.summary()}, target_delta={self.target_delta:g}"
        members = "" if self.members is None else f"members={self.members}, "
        return f"DPState({members}{settings})"

    @property
    def model(self) -> M:
        """Return the model in the form that was passed to `init`: a module, a pytree of parameters, or an ensemble."""
        return merge_tree(released(self.tree))


def published(state: DPState, together: bool) -> int:
    """Return the number of models that are published together: all members if `together`, otherwise one."""
    return (state.members or 1) if together else 1


def check_state(api: str, state: Any, ledger: Ledger) -> None:
    """Raise if `state` is not a `DPState`, or was made with another ledger."""
    if not isinstance(state, DPState):
        raise TypeError(f"{api}: state must come from DPSGD.init, but got {describe(state)}.")
    _check_ledger(f"{api}: the state", state.ledger, ledger)


def _check_ledger(what: str, found: Ledger, mine: Ledger) -> None:
    """Raise if a state or a checkpoint was made with another ledger."""
    for name in vars(mine):
        if getattr(found, name) != getattr(mine, name):
            made = f"{what} was made with {name}={getattr(found, name)}, but this DPSGD has {getattr(mine, name)}"
            remedy = "use the same settings"
            if found.sampling == mine.sampling == "poisson":  # for others there is no event
                other = "call init(state.model, key=...) and compose both runs with DPSGD.event"
                remedy = f"{remedy}, or {other}"
            raise ValueError(f"{made}; {remedy}.")


def check_trainable(tree: Any, trainable: Any, models: Iterable[Any]) -> None:
    """Raise if there are no parameters, or if one is not an array, should not train, or is shared by two modules.

    Warn if all examples would draw the same random numbers.
    """
    leaves = jax.tree.leaves_with_path(tree)
    if not leaves:
        raise ValueError("DPSGD.init: there are no parameters to train; pass a model or a pytree of arrays.")
    for found in filter(_has_statistics, jax.tree.leaves(trainable, is_leaf=_has_statistics)):
        others = ", ".join(repr(name) for name in found if name != "params")
        what = (
            f"the Linen variables have {others} in addition to 'params', which would train, with noise, as parameters"
        )
        remedy = 'pass variables["params"] alone, and let the loss close over the rest'
        raise ValueError(f"DPSGD.init: {what}; {remedy}, or pass a member of Ensemble.from_apply(apply, [variables]).")
    # If nothing trains, report the first leaf. Complex parameters raise too: the noise would have half of its variance
    # in each part.
    train = jax.tree.leaves_with_path(trainable) or leaves
    wrong = [(path, x) for path, x in train if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating)]
    for path, x in [*wrong, *((path, x) for path, x in leaves if not is_array(x))]:
        what = f"`{leaf_name('params', path)}` is {describe(x)}, but parameters must be arrays of real floating point"
        raise TypeError(f"DPSGD.init: {what}; let the loss close over anything else.")
    warn_of_shared_keys(tree)
    if shared := shared_variable(list(models)):
        raise ValueError(f"DPSGD.init: two modules share `{shared[0][1]}`; put them into one, such as nnx.Dict.")


def _has_statistics(x: Any) -> bool:
    """Return whether `x` is variables of Linen with BatchNorm statistics that train."""
    return isinstance(x, Mapping) and "params" in x and bool(jax.tree.leaves(x.get("batch_stats")))


def begin_writing(
    api: str,
    path: Path,
    state: DPState,
    history: Mapping[str, np.ndarray] | None = None,
    run: RunRecord | None = None,
    *,
    copies: bool = False,
) -> CheckpointWriter:
    """Begin a checkpoint of a state, with its ledger, its step, optionally a history, and the run that writes it.

    Only the owner of the files can read them, since they hold the keys.
    """
    # The manifest holds the step and the ledger in readable form; JSON preserves Python's numbers exactly.
    about = About(step=int(state.step), ledger=asdict(state.ledger), run=run)
    parts, outlines = as_member(state)
    options: dict[str, Any] = {"about": about, "history": history, "copies": copies, "secret": True}
    return CheckpointWriter.begin(api, path, parts, 1, outlines=outlines, **options)


def read_state(checkpoint: Checkpoint, like: DPState[M]) -> DPState[M]:
    """Return the state of a checkpoint in the form of `like`; raise if its settings or its model differ."""
    read = checkpoint.load(*as_member(like), 1)[_PART]
    about = checkpoint.about
    if about.ledger is None or about.step is None:
        raise checkpoint.damaged("it has no ledger")
    try:
        ledger = decode(Ledger, about.ledger, "ledger")
    except ValueError as error:
        raise checkpoint.damaged(error) from error
    _check_ledger(f"{checkpoint}", ledger, like.ledger)
    step = jnp.asarray(about.step, like.step.dtype)
    return replace(like, **jax.tree.map(lambda x: x[0], read), step=step)


def as_member(state: DPState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a state to store, with an axis of one member in front, and their outlines."""
    names = ("tree", "opt_state", "noise_state", "clip_norms", "mask_key", "seed")
    arrays = {name: getattr(state, name) for name in names}
    return {_PART: jax.tree.map(lambda x: x[None], arrays)}, {_PART: outline(arrays)}
