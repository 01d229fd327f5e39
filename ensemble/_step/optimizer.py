"""`MemberOptimizer`: an optax optimiser for every member, each with its own hyperparameters, kept in its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...transforms._core.arguments import describe

# A schedule is described by its values at these steps: two functions cannot be compared, as a resumed run has to.
_SAMPLED_STEPS = (0, 1, 10, 100, 1000, 10000)


class MemberOptimizer:
    """One optimiser, whose state has the members along axis 0.

    Args:
      optimizer: an optax factory, such as `optax.adam`, or a ready `GradientTransformation`.
      hyperparams: arguments of the factory: a list or a 1-D array holds one value per member, anything else is shared.

    Attributes:
      per_member: the hyperparameters with one value for each member.
      name: what the factory is called; None for a ready transformation.
      numbers: the hyperparameters that are numbers, as JSON has them; schedules as text that tells them apart.
      schedules: the hyperparameters with a value for each member that are functions of the step.
    """

    def __init__(self, optimizer: Any, hyperparams: Mapping[str, Any] | None) -> None:
        self.per_member: dict[str, np.ndarray] = {}
        self.name: str | None = None
        self.numbers: dict[str, Any] = {}
        self.schedules: dict[str, Schedules] = {}
        if isinstance(optimizer, optax.GradientTransformation):
            if hyperparams is not None:
                found = "the optimizer is a ready GradientTransformation"
                raise ValueError(f"Trainer: hyperparams need an optax factory, but {found}; pass the factory itself.")
            self._transform = optax.with_extra_args_support(optimizer)
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
        names, make = _check_names(optimizer, given), optimizer
        if self.per_member:
            # Only what differs between members becomes an array: `1 - b1` in Python is not `1 - b1` in float32.
            make = optax.inject_hyperparams(optimizer, static_args=[x for x in names if x not in self.per_member])
        self._make = partial(make, **self._shared)
        # Of the first member, to look at shapes and to update with: each member's own values are in its state, where
        # `init` puts them. As numbers of Python, the kind that optax takes for what it keeps in the state.
        first = {name: values[0].item() for name, values in self.per_member.items()}
        self._transform = optax.with_extra_args_support(self._make(**first))

    def init(self, trainable: Any, size: int) -> Any:
        """Return the state for `size` members with stacked parameters."""
        for name, values in self.per_member.items():
            check_size(name, values, size)

        def init_member(params: Any, values: dict[str, Any]) -> Any:
            return (self._make(**values) if values else self._transform).init(params)

        # Mapped over the members, so that each has its own number in `hyperparams` of its state. That is where
        # `update` reads it, and where `exploit` changes it.
        return jax.vmap(init_member)(trainable, self.per_member)

    def update(
        self, gradients: Any, state: Any, params: Any, schedules: Mapping[str, jax.Array], **extra: Any
    ) -> tuple[Any, Any]:
        """Return one member's new parameters and state.

        Args:
          gradients: those of the loss.
          state: that of the optimiser.
          params: the parameters.
          schedules: by the name of a hyperparameter, which of its schedules is the member's.
          **extra: for optimisers that ask for it, such as `optax.lbfgs`.
        """
        if schedules:
            # optax would evaluate one schedule for all members. Here each member's index selects its own.
            now = {
                name: self.schedules[name](which, state.count).astype(state.hyperparams[name].dtype)
                for name, which in schedules.items()
            }
            state = state._replace(hyperparams={**state.hyperparams, **now})
        # The extra arguments reach those transforms alone that ask for them.
        updates, state = self._transform.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state


def check_size(name: str, values: np.ndarray, size: int) -> np.ndarray:
    """Return the values; raise if there is not one for each member."""
    if len(values) != size:
        found = f"hyperparams[{name!r}] has {len(values)} values, but the ensemble has {size} members"
        raise ValueError(f"Trainer: {found}; give one for each, or a single number for all.")
    return values


class Schedules:
    """A hyperparameter that is a function of the step, with one function, or a number, for each member.

    Args:
      name: of the hyperparameter.
      values: a sequence of schedules as those of optax, and of numbers.

    Attributes:
      which: for each member the index of its function.
      first: for each member its value at the first step.
    """

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        if not all(callable(x) or (_is_number(x) and np.ndim(x) == 0) for x in values):
            expected = "a number or a schedule for each member"
            raise TypeError(f"Trainer: hyperparams[{name!r}] must have {expected}, but got {values!r}.")
        values = [x if callable(x) else float(x) for x in values]
        # Equal ones once, so that the compiled switch has as few branches as there are different schedules.
        different = list(dict.fromkeys(values))
        self.which = np.array([different.index(x) for x in values], np.int32)
        self._functions = [x if callable(x) else optax.constant_schedule(x) for x in different]
        self.first = np.array([float(self._functions[i](0)) for i in self.which])

    def __call__(self, which: jax.Array, step: jax.Array) -> jax.Array:
        """Return the value of one member at a step."""
        branches = [lambda step, f=f: jnp.asarray(f(step), float) for f in self._functions]
        return jax.lax.switch(which, branches, step)

    def __str__(self) -> str:
        """Return some values of each member's schedule, by which a resumed run recognizes them."""
        values = [[f"{float(f(step)):.5g}" for step in _SAMPLED_STEPS] for f in self._functions]
        return "schedules " + "; ".join(", ".join(values[i]) for i in self.which)


def sort_hyperparams(given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Return those with one value for each member, those that are shared, and the numbers of both, as JSON has them."""
    per_member = {name: _values_of(name, value) for name, value in given.items() if _is_per_member(value)}
    shared = {name: value for name, value in given.items() if name not in per_member}
    numbers: dict[str, Any] = {name: values.astype(float).tolist() for name, values in per_member.items()}
    return per_member, shared, numbers | {name: float(x) for name, x in shared.items() if _is_number(x)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic, np.ndarray, jax.Array))


def _is_per_member(value: Any) -> bool:
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str)


def _values_of(name: str, value: Any) -> np.ndarray:
    """Return the values as an array, a copy that later changes of the caller's do not reach; raise for others."""
    try:
        array = np.array(value)
    except ValueError:  # a ragged list
        array = np.array(None)
    if array.ndim != 1 or not array.size or not jnp.issubdtype(array.dtype, jnp.number):
        expected = "a number or a list with one number for each member"
        raise TypeError(f"Trainer: hyperparams[{name!r}] must be {expected}, but got {value!r}.")
    return array


def _check_names(factory: Callable[..., Any], hyperparams: Mapping[str, Any]) -> list[str]:
    """Return the names of the factory's parameters; raise for a hyperparameter that it does not take, or lacks."""
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
