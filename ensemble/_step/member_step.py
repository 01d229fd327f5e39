"""`MemberStep`: one training step of one member, which a strategy executes for all members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...transforms import value_and_grad
from ...transforms._core.arguments import describe
from ...transforms._models.mutation import check_structure
from ...transforms._models.split_model import SplitModel, Structure, named_arrays, to_pure
from ...transforms._models.split_model import split as split_model
from .._members.sharding import DATA, own_keys
from .._members.shared import SharedArrays, divided, separate, with_shared
from .._members.told import untold
from .loss import MemberLoss
from .member_status import Stop, finite
from .optimizer import MemberOptimizer
from .shared_step import Contribution
from .state import Arrays
from .update_where import update_where


class MemberStep:
    """One training step of one member.

    Args:
      loss: the loss, with the hyperparameters of the members.
      grad_fn: as for `Trainer`, or None.
      optimizer: updates the parameters.
      freeze: whether a member stops when its loss or gradients are not finite.
    """

    def __init__(
        self, loss: MemberLoss, grad_fn: Callable[..., Any] | None, optimizer: MemberOptimizer, freeze: bool
    ) -> None:
        self.loss = loss
        self.freeze = freeze
        self.optimizer = optimizer
        self.has_grad_fn = grad_fn is not None
        self._gradients_of = grad_fn or _value_and_grad

    def __call__(
        self,
        structure: Structure,
        arrays: Arrays,
        counts: jax.Array | None,
        shared: SharedArrays | None,
        *batch: Any,
        split: bool = False,
    ) -> Any:
        """Return the new arrays and the metrics of one member, and what it contributes to shared parameters.

        A strategy maps this function over the members.

        Args:
          structure: the static part of the model.
          arrays: the arrays of the member.
          counts: whether the member contributes to shared parameters; None if none of these trains.
          shared: the arrays that all members share.
          *batch: the arguments of the loss after the model.
          split: whether the batch is split over the mesh axis `data`; metrics and gradients are then averaged over it.

        Returns:
          A pair; with `counts`, the contribution comes third.
        """
        found = self.loss_and_gradients(structure, arrays, shared, batch, split)
        metrics, gradients, of_shared, after = found
        if split:
            metrics, gradients, of_shared = averaged((metrics, gradients, of_shared))
        checked = self.freeze or counts is not None
        is_finite = finite((metrics["loss"], gradients, of_shared)) if checked else jnp.array(True)
        result = self.updated(structure, arrays, shared, batch, split, metrics, gradients, after, is_finite)
        if counts is None:
            return result
        return *result, Contribution.of(counts & arrays[3].trains & is_finite, of_shared)

    def updated(
        self,
        structure: Structure,
        arrays: Arrays,
        shared: SharedArrays | None,
        batch: Any,
        split: bool,
        metrics: dict[str, Any],
        gradients: Any,
        after: tuple[Any, Any],
        is_finite: jax.Array,
    ) -> tuple[Arrays, dict[str, Any]]:
        """Return the new arrays and the metrics of one member from its gradients.

        The first arguments are those of a call. `metrics` are the loss and what it reports, `gradients` those by own
        parameters, and `after` the own trainable and other arrays after the loss; `is_finite` says whether the loss and
        all gradients are finite.
        """
        trainable, rest, opt_state, standing = arrays

        # For optimizers with a line search or second derivatives. In `shard_map` each device would end its search by
        # itself, and a collective inside the search would wait for devices that have finished.
        def loss_at(trainable: Any) -> jax.Array:
            """Return the loss at other parameters."""
            if split:
                why = "the optimizer evaluates the loss again (value_fn, as optax.lbfgs does)"
                raise ValueError(f'Trainer: {why}, which cannot be split; use a mesh without the axis "{DATA}".')
            loss = self.loss.of(standing.hyperparams)
            return metrics_of(loss(structure.merge(*with_shared(trainable, rest, shared)), *batch))["loss"]

        def gradients_at(trainable: Any, _: Any) -> Any:
            """Return the gradients at other parameters, on the same batch and with the same random keys."""
            there = (trainable, rest, opt_state, standing)
            gradients = self.loss_and_gradients(structure, there, shared, batch, split)[1]
            return averaged(gradients) if split else gradients

        fails = standing.trains & ~is_finite if self.freeze else jnp.array(False)
        takes = standing.trains & ~fails
        extra = {"value": metrics["loss"], "grad": gradients, "value_fn": loss_at, "grad_fn": gradients_at}

        def new_arrays() -> Any:
            """Return the arrays of the member if it takes the step."""
            return *self.optimizer.update(gradients, opt_state, after[0], standing.schedules, **extra), after[1]

        # The condition is known before the update, so XLA fuses the selection into it. Checking the new parameters too
        # would cost more passes over all arrays; if they are not finite, the next loss is almost never finite either.
        trainable, opt_state, rest = update_where(takes, new_arrays, (trainable, opt_state, rest))
        # Negative in the step that stops the member, so that the loop reports it once and then stops recording it.
        why = jnp.int32(Stop.NOT_FINITE)
        metrics["stopped"] = jnp.where(fails, -why, standing.stopped)
        standing = standing._replace(
            step=standing.step + standing.trains, stopped=jnp.where(fails, why, standing.stopped)
        )
        return (trainable, rest, opt_state, standing), metrics

    def loss_and_gradients(
        self, structure: Structure, arrays: Arrays, shared: SharedArrays | None, batch: Any, split: bool
    ) -> tuple[dict[str, Any], Any, Any, tuple[Any, Any]]:
        """Return the metrics, the gradients of own and of shared parameters, and the own arrays after the loss."""
        trainable, rest, _, standing = arrays
        model, drawn, batch = _drawn(structure, trainable, rest, shared, batch, split)
        result = self._gradients_of(self.loss.of(standing.hyperparams))(model, *batch)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            expected, found = "a pair (value, gradients)", type(result).__name__
            raise TypeError(f"Trainer: grad_fn(loss)(model, *batch) must return {expected}, but it returned {found}.")
        value, gradients = result
        metrics = self._metrics(value)
        # Shapes are checked, since an optimizer would broadcast a gradient of another shape against the parameter.
        gradients = _checked_gradients(gradients, with_shared(trainable, rest, shared)[0])
        of_shared: Any = {}
        if shared is not None:
            gradients, of_shared = divided(gradients, shared.paths)
        return metrics, gradients, of_shared, _left(structure, trainable, rest, drawn, shared, model)

    def value(
        self, structure: Structure, trainable: Any, shared: SharedArrays, arrays: Arrays, batch: Any, split: bool
    ) -> tuple[jax.Array, tuple[dict[str, Any], tuple[Any, Any]]]:
        """Return the loss of one member, the metrics and the own arrays after the loss; to be differentiated."""
        _, rest, _, standing = arrays
        model, drawn, batch = _drawn(structure, trainable, rest, shared, batch, split)
        metrics = self._metrics(self.loss.of(standing.hyperparams)(model, *batch))
        return metrics["loss"], (metrics, _left(structure, trainable, rest, drawn, shared, model))

    def _metrics(self, value: Any) -> dict[str, Any]:
        metrics = metrics_of(value)
        for name in metrics:
            if name in self.loss.per_member or name in self.optimizer.per_member:
                raise ValueError(_taken(name))
        return metrics


def _drawn(
    structure: Structure, trainable: Any, rest: Any, shared: SharedArrays | None, batch: Any, split: bool
) -> tuple[Any, Any, Any]:
    """Return a new module for this trace, to whose variables the loss may assign, its other arrays, and the batch.

    With `split`, the keys of both are those of this part of the batch.
    """
    drawn, batch = (own_keys(rest), own_keys(batch)) if split else (rest, batch)
    return structure.merge(*with_shared(trainable, drawn, shared)), drawn, batch


def _left(
    structure: Structure, trainable: Any, rest: Any, drawn: Any, shared: SharedArrays | None, model: Any
) -> tuple[Any, Any]:
    """Return the own trainable and other arrays that the loss left in a model; raise if it changed more.

    `drawn` are the other arrays that the model had: `rest`, in which a split batch has keys of its own.
    """
    after = split_model(model)
    _check_left(SplitModel(untold(structure), *with_shared(trainable, rest, shared)), after)
    own = after.trainable, after.rest
    if shared is not None:
        own, left = separate(after, shared.paths)
        _check_unchanged(shared, left)
    if drawn is rest:
        return own
    # Each part of the batch draws with its own key, so these keys differ between devices. A key that the loss did not
    # change is therefore reset to its value before.
    return own[0], jax.tree.map(lambda x, mine, old: old if x is mine else x, own[1], drawn, rest)


def _value_and_grad(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return `value_and_grad` of a loss that returns a scalar, or a scalar and a dict."""

    def with_aux(*args: Any) -> tuple[Any, Any]:
        out = loss(*args)
        metrics = metrics_of(out)
        return metrics.pop("loss"), metrics

    return value_and_grad(with_aux, has_aux=True)


def metrics_of(value: Any) -> dict[str, Any]:
    """Return the loss and the values that it reports, by name; raise for a loss with another output."""
    loss, aux = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, {})
    if isinstance(loss, (tuple, list, dict)) or jnp.shape(loss) != ():
        expected, found = "a scalar, or a pair of a scalar and a dict", jax.tree.map(jnp.shape, loss)
        remedy = "take its mean over the batch"
        if not hasattr(loss, "shape"):
            remedy = 'return other values in the dict, as (loss, {"name": x})'
        raise TypeError(f"Trainer: loss must return {expected}, but it returned {found} (shapes); {remedy}.")
    if not isinstance(aux, Mapping):
        raise TypeError(f"Trainer: the auxiliary output of the loss must be a dict, but it returned {describe(aux)}.")
    for name in ("loss", "step", "member", "members", "stopped", "validation"):
        if name in aux:
            raise ValueError(_taken(name))
    return {"loss": loss, **aux}


def _taken(name: str) -> str:
    return f'Trainer: loss reports a value named "{name}", a name that the history uses; rename it.'


def _checked_gradients(gradients: Any, trainable: Any) -> Any:
    """Return the gradients as a tree; raise if paths or shapes differ from the trainable arrays."""
    gradients = to_pure(gradients)
    expected, found = named_arrays(trainable), named_arrays(gradients)
    for path in [*expected, *found]:
        if path not in found or path not in expected or jnp.shape(found[path]) != jnp.shape(expected[path]):
            say = [describe(tree[path]) if path in tree else "nothing" for tree in (found, expected)]
            found_there = f"grad_fn gives {say[0]} for the parameter `{path}`, which is {say[1]}"
            raise ValueError(f"Trainer: {found_there}; return gradients as plurax.transforms.value_and_grad does.")
    return gradients


def _check_left(before: SplitModel, after: SplitModel) -> None:
    """Raise if the loss changed the variables of the model, or the shape or dtype of a value."""
    check_structure("Trainer: loss", "the model", before, after)
    then, now = before.arrays(), after.arrays()
    for path in then:
        if then[path].shape != now[path].shape or then[path].dtype != now[path].dtype:
            was, becomes = describe(then[path]), describe(now[path])
            raise ValueError(f"Trainer: loss changes `{path}` of the model, {was}, to {becomes}; keep shape and dtype.")


def _check_unchanged(before: SharedArrays, after: SharedArrays) -> None:
    """Raise if the loss changed an array that all members share."""
    then, now = (named_arrays(x.trainable) | named_arrays(x.rest) for x in (before, after))
    for path in then:
        if now[path] is not then[path]:
            cure = "keep it per member, or freeze it: batch norms with view(use_running_average=True)"
            raise ValueError(f"Trainer: loss changes `{path}`, which all members share; {cure}.")


def averaged(tree: Any) -> Any:
    """Return the mean over the parts of the batch; integers, such as counts, are equal in all parts."""
    return jax.tree.map(lambda x: lax.pmean(x, DATA) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x, tree)
