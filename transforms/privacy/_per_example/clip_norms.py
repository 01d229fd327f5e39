"""Clip norms: one for the whole gradient or one for each group of parameters, and the weights of the examples."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._core.arguments import check_count, check_number
from ..._core.axes import broadcast_axes
from ..._core.compat import Tracer, setting
from ..._models.split_model import to_pure


class ClipGroups(NamedTuple):
    """Groups of parameters, each of which has a clip norm of its own.

    Attributes:
      of_leaf: the group of each parameter.
      number: the number of groups.
    """

    of_leaf: tuple[int, ...]
    number: int

    def common(self, leaves: Iterable[int]) -> int | None:
        """Return the group of some parameters; None if they are in several."""
        found = {self.of_leaf[leaf] for leaf in leaves}
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class ClipNorms:
    """The clip norm of each group of parameters, and how gradients are scaled by it.

    Attributes:
      norms: the clip norm of each group.
      structure: the tree of the groups, a prefix of the tree of the gradients; None for a single clip norm.
      rescale: whether to divide clipped gradients by their clip norm.
      automatic: γ of automatic clipping, or None.
      nan_safe: whether an example contributes zero if the norm of any of its groups is not finite.
    """

    norms: tuple[Any, ...]
    structure: Any
    rescale: bool
    automatic: float | None
    nan_safe: bool

    def groups(self, api: str, gradients: Any) -> ClipGroups | None:
        """Return the group of each leaf of a tree like the gradients; raise if the groups are no prefix of it."""
        if self.structure is None:
            return None
        tree = _plain(gradients)
        numbered = jax.tree.unflatten(self.structure, range(len(self.norms)))
        try:
            found = tuple(broadcast_axes(numbered, tree))
        except (ValueError, TypeError, KeyError):
            given = (
                f"l2_clip_norm has the structure {self.structure}, which is not a prefix of {jax.tree.structure(tree)}"
            )
            raise ValueError(f"{api}: {given}; pass a number for each part of the parameters, or one number.") from None
        if None in found:
            raise ValueError(f"{api}: l2_clip_norm is None for some parameters; pass a number for each part of them.")
        return ClipGroups(found, len(self.norms))

    def weights(self, norms: jax.Array) -> jax.Array:
        """Return the factor of each example's gradients, in the shape of `norms`: (batch,), or (batch, groups)."""
        if self.structure is None:
            weights = self._weights(norms, self.norms[0])
            return jnp.where(jnp.isfinite(norms), weights, 0.0 if self.nan_safe else jnp.nan)
        by_group = [self._weights(norms[:, i], norm) for i, norm in enumerate(self.norms)]
        weights, finite = jnp.stack(by_group, axis=-1), jnp.isfinite(norms)
        if self.nan_safe:
            return jnp.where(finite.all(axis=-1, keepdims=True), weights, 0.0)
        return jnp.where(finite, weights, jnp.nan)

    def _weights(self, norms: jax.Array, clip_norm: Any) -> jax.Array:
        """Return min(1, C / norm), or C / (norm + γ) for automatic clipping; divided by C to rescale to unit norm."""
        bound = jnp.maximum(clip_norm, 0.0)  # a traced one may be negative
        if self.automatic is not None:
            return jnp.where(bound > 0, 1.0 if self.rescale else bound, 0.0) / (norms + self.automatic)
        weights = jnp.minimum(1.0, bound / norms)
        if self.rescale:
            weights = jnp.where(bound > 0, weights / bound, 1 / norms)
        return jnp.where(jnp.isfinite(weights), weights, 0.0)  # a zero gradient stays zero for any bound

    def shaped(self, norms: jax.Array) -> Any:
        """Return norms of shape (batch, groups) in the structure of the groups, each of shape (batch,)."""
        if self.structure is None:
            return norms
        return jax.tree.unflatten(self.structure, list(jnp.moveaxis(norms, -1, 0)))

    def within(self, norms: Any) -> jax.Array:
        """Return whether each norm is at most its clip norm, shape (batch, groups).

        Args:
          norms: norms in the structure of the groups, each of shape (batch,). A NaN is not within any clip norm.
        """
        pairs = zip(jax.tree.leaves(norms), self.norms, strict=True)
        return jnp.stack([found <= most for found, most in pairs], axis=-1)

    def array(self) -> jax.Array:
        """Return the clip norms, shape (groups,), or () if there is a single one."""
        norms = jnp.asarray(self.norms, jnp.float32)
        return norms[0] if self.structure is None else norms

    def replaced(self, norms: jax.Array) -> ClipNorms:
        """Return other clip norms, in the form of `array`."""
        return replace(self, norms=tuple(jnp.atleast_1d(norms)))

    def before_rounding(self, api: str, grid_scale: int, count: int) -> ClipNorms:
        """Return the clip norm that leaves room for rounding `count` numbers to the grid, half a step each.

        After rounding, in steps of C / grid_scale, the norm is then at most C. Raise without 64-bit integers, to which
        the numbers are rounded.
        """
        if not setting("jax_enable_x64"):
            raise ValueError(f"{api}: grid_scale needs 64-bit integers; call it with jax.enable_x64(True).")
        (norm,) = self.norms
        room = 1 - 0.5 * math.sqrt(count) / grid_scale
        if room <= 0:
            given = f"grid_scale={grid_scale} is too small for {count} numbers, whose rounding may exceed the clip norm"
            raise ValueError(f"{api}: {given}; pass more than {0.5 * math.sqrt(count):.0f}.")
        return replace(self, norms=(norm * room,))

    def given(self) -> Any:
        """Return the clip norms as the argument `l2_clip_norm`."""
        return self.norms[0] if self.structure is None else jax.tree.unflatten(self.structure, self.norms)

    def l2_norm_bound(self) -> Any:
        """Return the largest norm of one example's contribution."""
        if self.structure is None:
            return 1.0 if self.rescale else self.norms[0]
        if self.rescale:
            return math.sqrt(len(self.norms))
        return sum(norm**2 for norm in self.norms) ** 0.5


def clip_norms(
    api: str, l2_clip_norm: Any, automatic: Any, *, rescale: bool = False, nan_safe: bool = True
) -> ClipNorms:
    """Return the clip norms of a call; raise if one is negative or no number.

    Args:
      api: the caller's name in errors.
      l2_clip_norm: a number, or a pytree of numbers.
      automatic: γ of automatic clipping, or None.
      rescale: whether to divide clipped gradients by their clip norm.
      nan_safe: as for `clipped_grad`.
    """
    if automatic is not None:
        automatic = check_number(api, "automatic", automatic, lambda x: 0 < x < math.inf, "positive and finite")

    # Automatic clipping multiplies by the clip norm.
    most, what = (math.inf, "at least 0") if automatic is None else (sys.float_info.max, "at least 0 and finite")

    def checked(norm: Any) -> Any:
        if isinstance(norm, Tracer):
            return norm
        return check_number(api, "l2_clip_norm", norm, lambda x: 0 <= x <= most, what)

    leaves = jax.tree.leaves(_plain(l2_clip_norm))
    structure: Any = jax.tree.structure(_plain(l2_clip_norm))
    if l2_clip_norm is None or structure == jax.tree.structure(0):
        return ClipNorms((checked(l2_clip_norm),), None, rescale, automatic, nan_safe)
    if not leaves:
        raise ValueError(f"{api}: l2_clip_norm is {l2_clip_norm!r}, which has no number; pass one, or a tree of them.")
    return ClipNorms(tuple(map(checked, leaves)), structure, rescale, automatic, nan_safe)


def check_grid(api: str, grid_scale: Any, clipping: ClipNorms, normalize_by: float, dtype: Any) -> None:
    """Raise if sums of numbers on a grid do not go with the other options."""
    if grid_scale is None:
        return
    check_count(api, "grid_scale", grid_scale)
    given = {
        "a tree as l2_clip_norm": clipping.structure is not None,
        "automatic": clipping.automatic is not None,
        "rescale_to_unit_norm": clipping.rescale,
        "normalize_by": normalize_by != 1.0,
        "dtype": dtype is not None,
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise ValueError(f"{api}: grid_scale gives sums of integers, without {' or '.join(wrong)}; omit either.")


def sum_on_grid(each: Any, weights: jax.Array, clip_norm: Any, grid_scale: int) -> Any:
    """Sum weighted arrays over the examples, each rounded to a grid with `grid_scale` steps up to the clip norm.

    Args:
      each: a pytree with the examples along axis 0.
      weights: shape (batch,); examples of weight zero contribute zero.
      clip_norm: the norm of `grid_scale` steps.
      grid_scale: the number of steps.

    Returns:
      The sums in units of steps, int64.
    """

    def summed(x: jax.Array) -> jax.Array:
        factors = weights.reshape(-1, *[1] * (x.ndim - 1))
        clipped = (x.astype(factors.dtype) * factors).astype(x.dtype)
        rounded = jnp.round(clipped * (grid_scale / clip_norm)).astype(jnp.int64)
        return jnp.where(factors != 0, rounded, 0).sum(0)

    return jax.tree.map(summed, each)


def sum_by_group(groups: ClipGroups | None, terms: Iterable[tuple[int | None, Any]], zero: jax.Array) -> jax.Array:
    """Sum terms of shape (batch,) for each clip group.

    Args:
      groups: the clip groups; None without groups.
      terms: pairs of a group, which does not matter without groups, and what to add to it.
      zero: zeros of shape (batch,).

    Returns:
      An array of shape (batch,); with groups (batch, groups).
    """
    if groups is None:
        return sum((term for _, term in terms), zero)
    totals = [zero] * groups.number
    for group, term in terms:
        assert group is not None
        totals[group] = totals[group] + term
    return jnp.stack(totals, axis=-1)


def of_group(weights: jax.Array, group: int | None) -> jax.Array:
    """Return the weights of one clip group, shape (batch,); without groups, the weights."""
    return weights if group is None else weights[:, group]


def _plain(tree: Any) -> Any:
    """Return a tree with plain dicts in place of each `nnx.State`."""
    return jax.tree.map(to_pure, tree, is_leaf=lambda x: to_pure(x) is not x)
