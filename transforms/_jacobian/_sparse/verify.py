"""`check=True`: compare a sparse Jacobian with a product with a random vector, to detect entries that are missing."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._calls.call import Call
from ..._core.arguments import leaf_name
from ..._core.compat import Tracer
from ..mode import product_in
from .pattern import Entries, Pattern, blocks_of

# The number of random splits of the vector into two parts, and the allowed multiple of the largest difference of these.
_PARTS, _ROUNDING = 4, 50


def verify(mode: str, api: str, call: Call, out: Any, pattern: Pattern, entries: Entries) -> None:
    """Raise if the product of the entries with a random vector differs from the Jacobian's: entries are missing."""
    random = np.random.default_rng(0)

    def vector(x: Any) -> np.ndarray:
        return np.asarray(random.standard_normal(jnp.shape(x))).astype(jnp.result_type(x))

    forward = mode == "forward"
    given = jax.tree.map(vector, call.primals if forward else out)
    # J v = J p + J (v - p) up to rounding: the difference of both sides estimates the rounding of each element. Bounds
    # from magnitudes alone would fail where large terms cancel inside the function.
    parts = [given]
    for _ in range(_PARTS):
        part = jax.tree.map(lambda x: x * random.integers(0, 2, x.shape).astype(x.dtype), given)
        parts += [part, jax.tree.map(lambda x, y: x - y, given, part)]
    together = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *parts)
    products = jax.tree.leaves(jax.vmap(partial(product_in(mode, call), call.primals))(together))
    vectors = [x.reshape(-1) for x in jax.tree.leaves(given)]
    outputs, inputs = jax.tree.leaves(out), jax.tree.leaves(call.primals)
    places = [block[3] for block in blocks_of(pattern, outputs, inputs)]
    off = _differences(forward, products, vectors, entries, places)
    named = [("output", out)] if forward else [(call.form.names[k], primal) for k, primal in enumerate(call.primals)]
    names = [
        (leaf_name(name, path), jnp.shape(x)) for name, tree in named for path, x in jax.tree.leaves_with_path(tree)
    ]

    def raise_if(*off: Any) -> None:
        """Raise with the name of the first wrong element of the product, and the number of wrong elements."""
        wrong = [(name, shape, np.flatnonzero(x)) for (name, shape), x in zip(names, off, strict=True) if np.any(x)]
        if wrong:
            name, shape, places = wrong[0]
            index = f"[{', '.join(map(str, np.unravel_index(places[0], shape)))}]" if shape else ""
            count, kind = sum(len(places) for *_, places in wrong), "row" if forward else "column"
            lacks = f"the sparsity pattern lacks entries of {kind} `{name}{index}` of the result, {count} in all"
            raise ValueError(f"{api}: {lacks}; add every entry that can differ from zero, or leave sparsity out.")

    if any(isinstance(x, Tracer) for x in off):  # inside `jit` or `vmap`, values exist only at run time
        jax.debug.callback(raise_if, *off)
    else:
        raise_if(*off)


# With known values this runs as one compiled program, instead of one for each operation.
@partial(jax.jit, static_argnames="forward", inline=True)
def _differences(
    forward: bool,
    products: list[jax.Array],
    vectors: list[jax.Array],
    entries: Entries,
    places: list[tuple[jax.Array, jax.Array]],
) -> list[jax.Array]:
    """Return a mask of wrong elements for each array of the product; `products` are J v, J p, J (v - p), J p', ...."""
    expected = [x[0] for x in products]
    noise = [jnp.abs(x[1::2] + x[2::2] - x[0]).max(0) for x in products]
    sums = [jnp.zeros(x.size, jnp.promote_types(x.dtype, np.float32)) for x in expected]
    sizes = [jnp.abs(x) for x in sums]
    blocks = [(j, i) for j, row in enumerate(entries) for i in range(len(row))]
    for (j, i), (rows, cols) in zip(blocks, places, strict=True):
        (to, at), (source, where) = ((j, rows), (i, cols)) if forward else ((i, cols), (j, rows))
        terms = entries[j][i].astype(sums[to].dtype) * vectors[source][where]
        sums[to] = sums[to].at[at].add(terms)
        sizes[to] = sizes[to].at[at].add(jnp.abs(terms))
    off = []
    for found, size, *pair in zip(sums, sizes, expected, noise, strict=True):
        right, rounding = (x.reshape(-1) for x in pair)
        eps = float(jnp.finfo(right.dtype).eps)
        largest = jnp.where(jnp.isfinite(right), jnp.abs(right), 0).max(initial=0)
        usual = jnp.where(jnp.isfinite(rounding), rounding, 0).mean() if rounding.size else 0
        rounding = jnp.maximum(rounding, usual)  # a single element's estimate may be 0 by chance
        # |found - right| <= sqrt(eps) (sum_k |J_k v_k| + |right|) + 10 eps max|right| + 50 rounding. NaN fails it.
        bound = eps**0.5 * (size + jnp.abs(right)) + 10 * eps * largest + _ROUNDING * rounding
        off.append(jnp.isfinite(right) & ~(jnp.abs(found - right) <= bound))
    return off
