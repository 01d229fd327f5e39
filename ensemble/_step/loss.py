"""`MemberLoss`: a loss with hyperparameters, which may differ between members."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from .optimizer import sort_hyperparams


class MemberLoss:
    """A loss whose keyword-only arguments are hyperparameters.

    Args:
      fun: the loss, a function of a model and a batch.
      hyperparams: values by name; those that the loss does not take are left for the optimizer.
      optimizer: an optax factory, which must not take a hyperparameter of the same name, or an optimizer.

    Attributes:
      fun: the loss.
      per_member: the hyperparameters with one value for each member.
      numbers: the numeric hyperparameters, in a form that JSON can represent.
      others: the entries of `hyperparams` that the loss does not take; None if there are none.
    """

    def __init__(self, fun: Callable[..., Any], hyperparams: Any, optimizer: Any) -> None:
        self.fun = fun
        takes = {name: p for name, p in _parameters(fun).items() if p.kind is p.KEYWORD_ONLY}
        given = hyperparams if isinstance(hyperparams, Mapping) else {}
        own = {name: value for name, value in given.items() if name in takes}
        # If both took the name, one value would set two hyperparameters, though the user may mean only one of them.
        for name in own.keys() & _parameters(optimizer).keys():
            both = f"both the loss and {getattr(optimizer, '__name__', optimizer)} take a hyperparameter {name!r}"
            raise ValueError(f"Trainer: {both}; rename the argument of the loss.")
        for name, parameter in takes.items():
            if parameter.default is parameter.empty and name not in own:
                remedy = f"give it in hyperparams={{{name!r}: ...}}"
                raise ValueError(f"Trainer: the loss needs the argument `{name}`; {remedy}.")
        self.per_member, self._shared, self.numbers = sort_hyperparams(own)
        # None rather than an empty dict: a ready optimizer takes no hyperparameters.
        others = {name: value for name, value in given.items() if name not in own}
        self.others = (others or None) if own else hyperparams

    def of(self, values: Mapping[str, jax.Array]) -> Callable[..., Any]:
        """Return the loss of one member, with these values of its hyperparameters."""
        values = {**self._shared, **values}
        return partial(self.fun, **values) if values else self.fun


def _parameters(fun: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):  # functions that are not written in Python may have no signature
        return {}
