"""Whether the loss of a batch is the mean, or the sum, of the losses of its examples, as it is said to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from .._core.arguments import check_choice
from .._core.compat import Tracer
from .._models.split_model import bound_model
from ..privacy._check_loss import LossCheck, check_loss

ReductionName = Literal["mean", "sum"]


class Reduction:
    """What the loss of a batch is said to be, and what was found out about it for arguments of some shapes.

    Args:
      api: the name for errors.
      model: as for `ggn_diagonal`.
      loss: as for `ggn_diagonal`.
      position: the position of the batch among the arguments; that of `y` is the next.
      check: whether to compare losses.
      name: "mean" or "sum".

    Attributes:
      is_sum: whether it is said to be the sum.
    """

    def __init__(
        self, api: str, model: Callable[..., Any], loss: Callable[..., Any], position: int, check: bool, name: Any
    ) -> None:
        check_choice(api, "reduction", name, get_args(ReductionName))
        self._api, self._position, self._check = api, position, check
        self._name, self.is_sum = name, name == "sum"
        self._model, self._loss = model, loss
        self._known: dict[Any, LossCheck] = {}

    def check(self, args: Sequence[Any]) -> LossCheck | None:
        """Compare the loss of a batch with those of its examples, once for each shapes of the arguments.

        Args:
          args: the arguments of the model, and `y` at least.

        Returns:
          What was found; None if it was not compared, because it was not asked for or an argument is traced.

        Raises:
          ValueError: the loss of a batch is not what it is said to be.
        """
        args = args[: self._position + 2]
        owner, function = bound_model(self._model)
        leaves = jax.tree.leaves((owner, args))
        if not self._check or any(isinstance(x, Tracer) for x in leaves):
            return None
        shapes = tuple((jnp.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        if shapes not in self._known:
            self._known[shapes] = self._compared(owner, function, args)
        found = self._known[shapes]
        if found.kind == "neither":
            raise ValueError(found.refusal(self._api))
        if found.kind in ("mean", "sum") and found.kind != self._name:
            what = f"the loss of a batch is the {found.kind} of the losses of its examples, not the {self._name}"
            raise ValueError(f'{self._api}: {what}; pass reduction="{found.kind}", or return the {self._name}.')
        return found

    def check_data(self, params: Any, batches: Sequence[Sequence[Any]]) -> None:
        """Compare as `check` does for the first batch with two examples."""
        for batch in batches:
            found = self.check((params, *batch))
            if found is None or found.examples > 1:
                return

    def _compared(self, owner: Any, function: Callable[..., Any], args: Sequence[Any]) -> LossCheck:
        """Return what `check_loss` finds."""

        def of_batch(owner: Any, *args: Any) -> Any:
            return self._loss(function(owner, *args[:-1]), args[-1])

        try:
            positions = self._position + 1, self._position + 2
            return check_loss(of_batch, owner, *args, batch_argnums=positions)
        except (TypeError, ValueError) as error:  # of arguments, for which the caller raises in words of its own
            return LossCheck("unknown", None, None, 0, str(error))
