"""Random streams of a module that several slices share, split so that each slice draws numbers of its own."""

from __future__ import annotations

from typing import Any

from .._core.arguments import describe
from .split_model import SplitModel, array_name, split


def check_filter(api: str, only: Any) -> None:
    """Raise if the argument `split_rngs` is not an NNX filter."""
    if isinstance(only, bool):
        return
    from flax.nnx import filterlib

    try:
        filterlib.to_predicate(only)
    except (TypeError, ValueError):  # the latter from a mistake in the error of Flax 0.12
        raise TypeError(f"{api}: split_rngs must be False, True or an NNX filter, but got {describe(only)}.") from None


def split_streams(api: str, parts: SplitModel, size: int, only: Any) -> tuple[SplitModel, dict[str, Any]]:
    """Split the random streams of a split NNX module, as `nnx.split_rngs` does.

    Args:
      api: the transform's name in errors.
      parts: the module.
      size: the number of slices.
      only: an NNX filter that selects the streams.

    Returns:
      The module with keys and counts of shape (size,) in the selected streams, and by path what these arrays are after
      the map: the same keys, and counts that are one higher.

    Raises:
      ValueError: a selected stream is a stack of streams.
    """
    from flax import nnx

    module = parts.merge()
    for path, key in nnx.to_flat_state(nnx.state(module, nnx.All(nnx.RngKey, only))):
        if key.shape:
            what = f"the random stream `{array_name(path)}` of {type(module).__name__} is a stack of shape {key.shape}"
            raise ValueError(f"{api}: split_rngs selects {what}; map the module, or pass a filter that leaves it out.")
    backups = nnx.split_rngs(module, splits=size, only=only, graph=True, graph_updates=True)
    divided = split(module)
    nnx.restore_rngs(backups)  # the counts as they are after one draw
    after = split(module).arrays()
    return divided, {path: after[path] for path in parts.changes(divided)}
