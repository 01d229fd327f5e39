"""`stack_layers` and `scan_layers`: compile one layer for many repeated layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from .._convolutions.in_scans import with_scannable_gradients
from .._core.arguments import check_count, describe, leaf_name
from .._core.target import platform
from .._models.mutation import call_purely, update, with_changes
from .._models.split_model import SplitModel, is_model, is_module
from .._models.stacking import stack_models

if TYPE_CHECKING:
    from ._stack import Stack


def stack_layers(layers: Sequence[Any]) -> Stack:
    """Stack layers of one architecture into one module, for `scan_layers`.

    Call it once, when the model is built: if layers are stacked inside a compiled function, every layer is a separate
    input of the program again.

    Args:
      layers: a sequence of NNX modules; they are copied. Their current state is compared, so a layer that was changed
        after its construction is detected.

    Returns:
      A stack: an NNX module with `len(stack)`, `stack.unstack()` and `stack.layer`, one module that holds the arrays of
      all layers along axis 0 (so `stack.layer.kernel` has shape (layers, ...)).

    Raises:
      TypeError: `layers` is not a sequence, or has an entry that is not an NNX module; layers of different classes, or
        with a variable that is not an array.
      ValueError: `layers` is empty, has layers that share a variable (tied parameters, or a common `nnx.Rngs`), or
        layers that differ in the path, shape or dtype of an array or in their configuration. The error names the first
        difference and the index of the layer.

    Cost:
      One copy of every array. (The sharding annotations of variables remain those of a single layer.)

    Source:
      MindSpore, `mindspore.lazy_inline`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms.program import scan_layers, stack_layers
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.blocks = stack_layers([nnx.Linear(4, 4, rngs=rngs) for _ in range(48)])
      ...     def __call__(self, x):
      ...         x, _ = scan_layers(self.blocks, x)
      ...         return x
      >>> net = Net(nnx.Rngs(0))
      >>> net.blocks.layer.kernel.shape
      (48, 4, 4)
      >>> net(jnp.ones((2, 4))).shape
      (2, 4)
    """
    if not isinstance(layers, Sequence) or isinstance(layers, (str, bytes)):
        raise TypeError(f"stack_layers: layers must be a list of NNX modules, but got {describe(layers)}.")
    if not layers:
        raise ValueError("stack_layers: the list of layers is empty; pass at least one layer.")
    for i, layer in enumerate(layers):
        if not is_module(layer):
            what = f"layer {i} is {describe(layer)}, not an NNX module"
            mixed = any(map(is_module, layers))
            cure = "make it a part of the modules" if mixed else "stack the arrays of all layers for jax.lax.scan"
            raise TypeError(f"stack_layers: {what}; {cure}.")
    from ._stack import Stack

    return Stack(stack_models("stack_layers", "layer", _REMEDY, layers).merge(), len(layers))


_REMEDY = (
    "build all layers with one configuration, and pass numbers that differ as xs of scan_layers",
    "define it once, at module level",
)


def scan_layers(
    stack: Stack,
    carry: Any,
    *shared: Any,
    xs: Any = None,
    remat: bool | Callable[..., bool] = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Apply the layers of a stack in sequence, as a `lax.scan` that contains the operations of a single layer.

    As `for layer in layers: carry = layer(carry, *shared)`, but the compile time does not depend on the number of
    layers. Each layer has separate variables; changes (BatchNorm statistics, dropout keys) are stored in the stack.

    Args:
      stack: the result of `stack_layers`.
      carry: a pytree of arrays: the first argument of the first layer. Every layer must return the same structure,
        shapes and dtypes.
      *shared: further arguments that are the same for every layer, such as a mask. Flax raises if a layer changes a
        module among them, such as an `nnx.Rngs` that it draws from: pass `xs=jax.random.split(key, len(stack))`
        instead.
      xs: a pytree of arrays with the layers as axis 0: each layer receives its slice as its last argument, such as its
        part of a cache.
      remat: whether a gradient recomputes each layer instead of storing its intermediate results; or a policy of
        `jax.checkpoint_policies` that selects what to store.
      unroll: the number of layers in one iteration of the loop: the program grows, and has fewer iterations.

    Returns:
      The carry that the last layer returns, and `ys`. If layers return a carry, `ys` is None; if they return a pair
      (carry, y), `ys` has all y with the layers as axis 0. (A result with the structure of `carry` is a carry.)

    Raises:
      TypeError: `stack` is not a stack; a model is in `carry` or `xs`; a layer returns neither a carry nor a pair;
        `remat` is neither a bool nor a policy.
      ValueError: axis 0 of an array of `xs` or of the stack is not the layers; a layer returns a carry of other shapes
        or dtypes, or changes the structure of its variables; in a function that JAX transforms and that closes over the
        stack, a layer changes the values of its variables.

    Cost:
      Time and memory of the layers in sequence, and a copy of each layer's arrays in its iteration. A gradient stores
      the intermediate results of each layer, also those that XLA would compute again outside a loop (2 to 5
      times the memory of the layers in sequence, compiled for an H200 and TPU v5e), unless `remat` is set, which is
      also faster on a CPU. There, gradients of convolutions take 1.2 times as long as outside a loop.

    Source:
      `jax.lax.scan`; MindSpore, `mindspore.lazy_inline`; `flax.nnx.scan`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.transforms.program import scan_layers, stack_layers
      >>> class Block(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense = nnx.Linear(4, 4, rngs=rngs)
      ...     def __call__(self, x, mask, cache):
      ...         y = self.dense(x) * mask + cache
      ...         return y, y.sum()
      >>> stack = stack_layers([Block(nnx.Rngs(i)) for i in range(3)])
      >>> x, sums = scan_layers(stack, jnp.ones((2, 4)), jnp.ones(4), xs=jnp.zeros((3, 2, 4)))
      >>> x.shape, sums.shape
      ((2, 4), (3,))
    """
    if not hasattr(type(stack), "__plurax_layers__"):
        raise TypeError(f"scan_layers: stack must be the result of stack_layers, but got {describe(stack)}.")
    check_count("scan_layers", "unroll", unroll)
    if not isinstance(remat, bool) and not callable(remat):
        raise TypeError(f"scan_layers: remat must be a bool or a checkpoint policy, but got {describe(remat)}.")
    _check_arrays("carry", carry)
    _check_arrays("xs", xs, len(stack))
    parts = stack.parts()

    def call(layer: Any, carry: Any, *x: Any) -> Any:
        return layer(carry, *shared, *x)

    def one_layer(carry: Any, slices: Any) -> tuple[Any, Any]:
        """Apply one layer; return its carry, and the pair of its y and its changed arrays."""
        trainable, rest, x = slices
        # The slices of the stack's arrays have the shapes of one layer, so they merge to its module.
        arguments: Any = SplitModel(parts.structure, trainable, rest), (carry, *([] if xs is None else [x])), {}
        out, (changed,) = call_purely("scan_layers", call, arguments, may_assign=True)
        out, y = _carry_and_y(type(stack.layer).__name__, carry, out)
        return out, (y, changed)

    body: Any = one_layer
    if platform() == "cpu" and unroll < len(stack):
        # Gradients of convolutions are many times slower inside a loop of XLA's CPU backend than outside.
        body = with_scannable_gradients(one_layer)
    if remat:
        # XLA does not merge common subexpressions across loop iterations, so no barriers are needed.
        body = jax.checkpoint(body, policy=None if remat is True else remat, prevent_cse=False)
    # Changed arrays are outputs of the scan and not part of the carry: each layer changes only its own slice.
    carry, (ys, changed) = lax.scan(body, carry, (parts.trainable, parts.rest, xs), len(stack), unroll=unroll)
    update("scan_layers", [stack.layer], [parts], with_changes([parts], [changed]))
    return carry, ys


def _check_arrays(name: str, tree: Any, size: int | None = None) -> None:
    """Raise if `carry` or `xs` holds a model, or an array whose axis 0 is not the `size` layers."""
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_model):
        if is_model(leaf):
            what = f"`{leaf_name(name, path)}` is a {type(leaf).__name__}"
            if size is None:
                raise TypeError(f"scan_layers: {what}, but carry holds arrays; pass models as shared arguments.")
            raise TypeError(f"scan_layers: {what}, but xs holds arrays; make models parts of the layers of the stack.")
        if size is not None and (not hasattr(leaf, "shape") or leaf.shape[:1] != (size,)):
            what = f"`{leaf_name(name, path)}` is {describe(leaf)}, but axis 0 must be the {size} layers"
            raise ValueError(f"scan_layers: {what}; pass values that all layers share as shared arguments.")


def _carry_and_y(name: str, carry: Any, out: Any) -> tuple[Any, Any]:
    """Split the result of a layer into carry and y; raise unless the next layer can take the carry."""
    # This is unambiguous: a pair that contains a pytree of the structure of `carry` has more nodes than `carry`.
    structure: Any = jax.tree.structure(carry)
    y = None
    if structure != jax.tree.structure(out):
        if type(out) not in (tuple, list) or len(out) != 2 or structure != jax.tree.structure(out[0]):
            wanted = f"a carry of structure {structure}, or a pair of a carry and a y"
            raise TypeError(f"scan_layers: {name} must return {wanted}, but it returned {jax.tree.structure(out)}.")
        out, y = out
    for (path, before), after in zip(jax.tree.leaves_with_path(carry), jax.tree.leaves(out), strict=True):
        weak = jax.typeof(before).weak_type  # a scan casts a weakly typed carry to the dtype that is returned
        if jnp.shape(before) != jnp.shape(after) or (not weak and before.dtype != jnp.result_type(after)):
            takes = f"takes `{leaf_name('carry', path)}`, {describe(before)}, but returns {describe(after)}"
            raise ValueError(f"scan_layers: {name} {takes}; return a carry of the same shapes and dtypes.")
    return out, y
