"""Refuse a loss that couples the examples of a batch, before a run takes its first step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

import jax
import numpy as np

from ..._models.split_model import split
from .._check_loss import RANDOM_REASONS, compared, with_both_keys, with_one_key
from .model_loss import of_batch, with_keys
from .sampling import Batch
from .state import DPState
from .step import PrivateStep

# The number of batches in which to look for two examples.
_LOOKED_AT = 10


def check_coupling(private: PrivateStep, state: DPState, batches: Iterable[Batch], progress: bool) -> None:
    """Compare the loss of a batch with those of its examples; see `check_loss`.

    Args:
      private: the step of the run.
      state: the first state.
      batches: the batches of the run. Those without two examples are skipped.
      progress: whether to say that the loss is a sum.

    Raises:
      ValueError: the loss couples the examples. The message has no number computed from the data.
    """
    from tqdm import tqdm

    tree, key = state.tree, state.mask_key
    if state.members is not None:
        # The members have one architecture and one loss: the first stands for all.
        first = jax.tree.map(lambda x: x[0], tree)
        tree, key = split(first.merge().__plurax_member__()), key[0]
    arrays = with_both_keys(*(with_keys(tree, jax.random.fold_in(key, i)) for i in range(2)))

    def evaluate(arrays: Any, batch: Any, number: jax.Array) -> jax.Array:
        return of_batch(private.loss, with_one_key(arrays, number), batch, private.has_aux)

    for batch in islice(batches, _LOOKED_AT):
        real = np.flatnonzero(~np.asarray(batch.is_padding_example))
        if len(real) < 2:
            continue
        found = compared(evaluate, arrays, batch.arguments, real)
        if found.kind == "neither":
            raise ValueError(found.refusal("DPSGD.fit"))
        if found.reason in RANDOM_REASONS:
            what = f"{found.reason}, so it was not compared with the losses of single examples"
            warnings.warn(f"DPSGD.fit: {what}; check_loss=False turns the comparison off.", stacklevel=4)
        if found.kind == "sum" and progress:
            what = 'the loss of a batch is the sum over its examples; the metric "loss" is their mean'
            tqdm.write(f"DPSGD.fit: {what}.", file=sys.stderr)
        return
