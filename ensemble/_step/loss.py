"""`MemberLoss`: a loss, and the hyperparameters that it takes, which may differ between members."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from .optimizer import is_number, is_per_member, values_of


class MemberLoss:
    """A loss whose keyword-only arguments are hyperparameters.

    Args:
      fun: the loss of a model and a batch.
      hyperparams: values by name; those of other names are left for the optimiser.
      optimizer: a factory of optimisers, which must take none of the same name; or an optimiser.

    Attributes:
      fun: the loss.
      per_member: the hyperparameters with one value for each member.
      numbers: the hyperparameters that are numbers, as JSON has them.
      others: those of `hyperparams` that the loss does not take; None where there are none.
    """

    def __init__(self, fun: Callable[..., Any], hyperparams: Any, optimizer: Any) -> None:
        self.fun = fun
        self.per_member: dict[str, np.ndarray] = {}
        self.numbers: dict[str, Any] = {}
        self.others = hyperparams
        self._shared: dict[str, Any] = {}
        takes = {name: p for name, p in _parameters(fun).items() if p.kind is p.KEYWORD_ONLY}
        given = hyperparams if isinstance(hyperparams, Mapping) else {}
        for name in [name for name in given if name in takes]:
            # One name for both would be one value for two things, of which the user may mean either.
            if not isinstance(optimizer, optax.GradientTransformation) and name in _parameters(optimizer):
                raise ValueError(
                    f"Trainer: both the loss and {getattr(optimizer, '__name__', optimizer)} take a hyperparameter "
                    f"{name!r}; rename that of the loss."
                )
            value = given[name]
            if is_per_member(value):
                self.per_member[name] = values_of(name, value)
                self.numbers[name] = self.per_member[name].astype(float).tolist()
            else:
                self._shared[name] = value
                if is_number(value):
                    self.numbers[name] = float(value)
        for name, parameter in takes.items():
            if parameter.default is inspect.Parameter.empty and name not in given:
                raise ValueError(
                    f"Trainer: the loss needs the argument `{name}`; give it in hyperparams={{{name!r}: ...}}."
                )
        if self.per_member or self._shared:
            # None rather than an empty dict: a ready optimiser takes no hyperparameters.
            self.others = {name: value for name, value in given.items() if name not in takes} or None

    def of(self, values: Mapping[str, jax.Array]) -> Callable[..., Any]:
        """Return the loss of one member, whose hyperparameters have these values."""
        values = {**self._shared, **values}
        return partial(self.fun, **values) if values else self.fun


def _parameters(fun: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):  # functions that are not written in Python may have no signature
        return {}
