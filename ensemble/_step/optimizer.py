"""`MemberOptimizer`: one optax optimizer for all members, each with its own hyperparameters in its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...transforms._core.arguments import describe
from ...transforms._runs.optimizer import as_transform, check_opt_state

# A schedule is identified by its values at these steps: a resumed run compares schedules, but functions have no `==`.
_SAMPLED_STEPS = (0, 1, 10, 100, 1000, 10000)


class MemberOptimizer:
    """One optimizer, whose state has the members along axis 0.

    Args:
      optimizer: an optax factory, such as `optax.adam`, or a ready `GradientTransformation` or `MultiSteps`.
      hyperparams: arguments of the factory: a list or a 1-D array holds one value per member, anything else is shared.

    Attributes:
      per_member: the hyperparameters with one value for each member.
      name: the name of the factory; None for a ready transformation.
      numbers: the numeric hyperparameters, in a form that JSON can represent; schedules as text that identifies them.
      schedules: the hyperparameters with one value for each member of which at least one is a function of the step.
      transform: the optax transformation.
    """

    def __init__(self, optimizer: Any, hyperparams: Mapping[str, Any] | None) -> None:
        self.per_member: dict[str, np.ndarray] = {}
        self.name: str | None = None
        self.numbers: dict[str, Any] = {}
        self.schedules: dict[str, Schedules] = {}
        self._checked_states: set[Any] = set()
        # Compiled, since each operation on its own would be compiled too.
        self._init_members = jax.jit(jax.vmap(self._init_member))
        transform = as_transform(optimizer)
        if transform is not None:
            if hyperparams is not None:
                expected = "an optax factory, or a loss with keyword-only arguments of these names"
                remedy = "pass the factory itself, or write them after a * in the loss"
                found = "the optimizer is a ready GradientTransformation"
                raise ValueError(f"Trainer: hyperparams need {expected}, but {found}; {remedy}.")
            self.transform = transform
            return
        if not callable(optimizer):
            expected = "an optax factory such as optax.adam, or a GradientTransformation"
            raise TypeError(f"Trainer: optimizer must be {expected}, but got {describe(optimizer)}.")
        if hyperparams is not None and not isinstance(hyperparams, Mapping):
            expected = "a dict from the names of the factory's arguments to values"
            raise TypeError(f"Trainer: hyperparams must be {expected}, but got {describe(hyperparams)}.")
        given = dict(hyperparams or {})
        for name, value in given.items():
            if _is_per_member(value) and any(map(callable, value)):
                self.schedules[name] = Schedules(name, value)
                given[name] = self.schedules[name].first
        self.per_member, self._shared, self.numbers = sort_hyperparams(given)
        self.numbers |= {name: str(schedules) for name, schedules in self.schedules.items()}
        self.name = getattr(optimizer, "__name__", type(optimizer).__name__)
        names, make = _check_names(optimizer, given), _made_by(optimizer)
        if self.per_member:
            # Only hyperparameters with a value per member become arrays: `1 - b1` in Python is not `1 - b1` in float32.
            make = optax.inject_hyperparams(make, static_args=[x for x in names if x not in self.per_member])
        self._make = partial(make, **self._shared)
        # Built with the values of the first member; updates read the values of each member from its state, where `init`
        # puts them. Python numbers, since optax stores these in the state.
        first = {name: values[0].item() for name, values in self.per_member.items()}
        self.transform = optax.with_extra_args_support(self._make(**first))

    def init(self, trainable: Any, size: int) -> Any:
        """Return the optimizer state of `size` members with stacked parameters."""
        for name, values in self.per_member.items():
            check_size(name, values, size)

        # Mapped over the members, so that the state of each has its own numbers in `hyperparams`, where `update` reads
        # them and `exploit` changes them.
        return self._init_members(trainable, self.per_member)

    def _init_member(self, params: Any, values: Mapping[str, Any]) -> Any:
        """Return the optimizer state of one member, with these values of its hyperparameters."""
        return (self._make(**values) if values else self.transform).init(params)

    def check_state(self, api: str, state: Any, trainable: Any) -> None:
        """Raise if the optimizer state of one member is from another optimizer."""
        # One member, since a state from `select` may have more or fewer members than there are hyperparameters.
        # Arrays, since optax does not take scalars of NumPy for hyperparameters.
        values = {name: jnp.asarray(values[0]) for name, values in self.per_member.items()}
        check_opt_state(api, state, partial(self._init_member, values=values), trainable, self._checked_states)

    def update(
        self,
        gradients: Any,
        state: Any,
        params: Any,
        schedules: Mapping[str, jax.Array],
        *,
        grad_fn: Callable[..., Any],
        **extra: Any,
    ) -> tuple[Any, Any]:
        """Return the new parameters and optimizer state of one member.

        Args:
          gradients: the gradients of the loss.
          state: the optimizer state.
          params: the parameters.
          schedules: the index of the member's schedule, for each hyperparameter with schedules.
          grad_fn: the gradients of the loss at other parameters, for `optax.contrib.sam`.
          **extra: extra arguments for optimizers that take them, such as `value_fn` for `optax.lbfgs`.
        """
        if schedules:
            # optax would evaluate one schedule for all members. Here the index of each member selects its schedule.
            now = {
                name: self.schedules[name](which, state.count).astype(state.hyperparams[name].dtype)
                for name, which in schedules.items()
            }
            state = state._replace(hyperparams={**state.hyperparams, **now})
        # optax passes the extra arguments only to transforms that take them. `sam` takes others, and no unknown ones;
        # `sophia` needs the loss under another name, which line searches do not take.
        try:
            updates, state = self.transform.update(gradients, state, params, **extra)
        except (TypeError, ValueError) as error:
            if "unexpected keyword argument" in str(error):
                extra = {"grad_fn": grad_fn}
            elif "obj_fn must be provided" in str(error):
                extra |= {"obj_fn": extra["value_fn"]}
            else:
                raise
            updates, state = self.transform.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state


def _made_by(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of transformations in the form of `as_transform`; raise if the factory makes something else."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = factory(*args, **kwargs)
        if (transform := as_transform(made)) is None:
            expected = "a GradientTransformation"
            raise TypeError(f"Trainer: the optax factory must return {expected}, but it returned {describe(made)}.")
        return transform

    return make


def check_size(name: str, values: np.ndarray, size: int) -> np.ndarray:
    """Return the values; raise if their number is not the number of members."""
    if len(values) != size:
        found = f"hyperparams[{name!r}] has {len(values)} values, but the ensemble has {size} members"
        raise ValueError(f"Trainer: {found}; give one for each, or a single number for all.")
    return values


class Schedules:
    """A hyperparameter that is a function of the step, with one schedule or number for each member.

    Args:
      name: the name of the hyperparameter.
      values: a sequence of optax schedules and numbers.

    Attributes:
      which: the index of the schedule of each member.
      first: the value of each member at the first step.
    """

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        if not all(callable(x) or (_is_number(x) and np.ndim(x) == 0) for x in values):
            expected = "a number or a schedule for each member"
            raise TypeError(f"Trainer: hyperparams[{name!r}] must have {expected}, but got {values!r}.")
        values = [x if callable(x) else float(x) for x in values]
        # Without duplicates, so that the compiled switch has one branch for each distinct schedule.
        different = list(dict.fromkeys(values))
        self.which = np.array([different.index(x) for x in values], np.int32)
        self._functions = [x if callable(x) else optax.constant_schedule(x) for x in different]
        self.first = np.array([float(self._functions[i](0)) for i in self.which])

    def __call__(self, which: jax.Array, step: jax.Array) -> jax.Array:
        """Return the value of schedule number `which` at a step."""
        branches = [lambda step, f=f: jnp.asarray(f(step), float) for f in self._functions]
        return jax.lax.switch(which, branches, step)

    def __str__(self) -> str:
        """Return sample values of the schedule of each member, by which a resumed run identifies them."""
        values = [[f"{float(f(step)):.5g}" for step in _SAMPLED_STEPS] for f in self._functions]
        return "schedules " + "; ".join(", ".join(values[i]) for i in self.which)


def sort_hyperparams(given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Split hyperparameters into those per member and those shared; return both, and their numbers for JSON."""
    per_member = {name: _values_of(name, value) for name, value in given.items() if _is_per_member(value)}
    shared = {name: value for name, value in given.items() if name not in per_member}
    numbers: dict[str, Any] = {name: values.astype(float).tolist() for name, values in per_member.items()}
    return per_member, shared, numbers | {name: float(x) for name, x in shared.items() if _is_number(x)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic, np.ndarray, jax.Array))


def _is_per_member(value: Any) -> bool:
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.ndim > 0
    # A transformation, as `optax.contrib.schedule_free` takes, is a named tuple.
    return isinstance(value, Sequence) and not isinstance(value, (str, optax.GradientTransformation))


def _values_of(name: str, value: Any) -> np.ndarray:
    """Return the values as an array, copied, since the caller may change them; raise if they are not numbers."""
    try:
        array = np.array(value)
    except ValueError:  # a ragged list
        array = np.array(None)
    if array.ndim != 1 or not array.size or not jnp.issubdtype(array.dtype, jnp.number):
        expected = "a number or a list with one number for each member"
        raise TypeError(f"Trainer: hyperparams[{name!r}] must be {expected}, but got {value!r}.")
    return array


def _check_names(factory: Callable[..., Any], hyperparams: Mapping[str, Any]) -> list[str]:
    """Return the names of the factory's parameters; raise for an unknown or a missing hyperparameter."""
    parameters = inspect.signature(factory).parameters
    known = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    label = getattr(factory, "__name__", repr(factory))
    for name in hyperparams:
        if name not in known:
            raise ValueError(f"Trainer: {label} takes no hyperparameter {name!r}; it takes {', '.join(known)}.")
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in hyperparams:
            raise ValueError(f"Trainer: {label} needs {name}; give it in hyperparams={{{name!r}: ...}}.")
    return known
