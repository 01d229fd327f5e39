"""The outputs of a model for each example of a batch, and square roots of the Hessian of a loss by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._calls.primals import dtype_of
from .._core.arguments import check_argnums, check_callable, describe, leaf_name
from .._core.compat import Tracer
from .._core.prng import check_key
from .._models.split_model import separate_filters
from .._statistics.use_gradients import OutputGradients, UseGradients, for_each_output
from ..privacy._per_example.gradient_forms import wide
from ..privacy._per_example.loss import PerExample, per_example
from ._output_hessian import OutputHessian

Fisher = Literal["exact", "mc", "empirical"]


# A function from some examples of a model, and a cotangent of the outputs of each, to the gradients at its uses.
UseGradientsOf = Callable[[Sequence[Any], jax.Array], list[UseGradients]]


class ModelAndLoss:
    """A model and a loss of its outputs, for a call `fun(*parameters, x, y, key)`.

    Args:
      api: the name for errors.
      model: a function of parameters and, after them, a batch, that returns the outputs.
      loss: a function of the outputs and of `y` that returns the mean over the examples.
      argnums: the parameters.
    """

    def __init__(self, api: str, model: Callable[..., Any], loss: Callable[..., Any], argnums: Any) -> None:
        check_callable(api, loss, "loss")
        self._api, self._loss = api, loss
        self.position = 1 + max(check_argnums(api, separate_filters(argnums)[0]))
        self._of_call = partial(per_example(api, model, argnums, self.position), scalar=False)

    def of(self, args: tuple[Any, ...], key: Any, *, samples: bool) -> tuple[OfBatch, Any]:
        """Return the outputs and the loss for a batch, and the key; None where no samples are drawn.

        Args:
          args: the arguments of the model, y, and the key if it is positional.
          key: the key if it is a keyword.
          samples: whether samples are drawn, which need a key.
        """
        if len(args) == self.position + 3 and key is None:
            args, key = args[:-1], args[-1]
        if len(args) != self.position + 2:
            raise TypeError(
                f"{self._api}: pass the parameters, a batch x and labels y, and possibly a key; "
                f"{len(args)} arguments came."
            )
        if samples or key is not None:
            check_key(self._api, key)
        *given, y = args
        batch = OfBatch(self._api, self._of_call(False, True, None, tuple(given), {}), self._loss, y)
        return batch, key if samples else None


class OfBatch:
    """The outputs and the loss for each example of a batch.

    Args:
      api: the name for errors.
      outputs: the outputs for an example.
      loss: as for `ModelAndLoss`.
      y: what the loss gets besides the outputs, with the examples along axis 0 of each array.

    Attributes:
      outputs: the outputs for an example.
      examples: what differs between examples: those of the model, the arrays of `y`, and the numbers of the examples.
      hessian: the Hessian of the loss of an example.
    """

    def __init__(self, api: str, outputs: PerExample, loss: Callable[..., Any], y: Any) -> None:
        self._api, self.outputs = api, outputs
        for name, x in zip(outputs.names(), outputs.parameters, strict=True):
            if jnp.iscomplexobj(x):
                raise TypeError(f"{api}: `{name}` is {describe(x)}; pass its real and imaginary parts.")
        leaves = jax.tree.leaves_with_path(y)
        for path, leaf in leaves:
            if tuple(getattr(leaf, "shape", ()))[:1] != (outputs.size,):
                raise ValueError(
                    f"{api}: `{leaf_name('y', path)}` is {describe(leaf)}, but x has {outputs.size} examples; y must "
                    "have as many along axis 0."
                )
        structure = jax.tree.structure(y)
        given = [jnp.asarray(leaf) for _, leaf in leaves]
        self._count = len(outputs.examples)
        self.examples = [*outputs.examples, *given, jnp.arange(outputs.size, dtype=jnp.uint32)]
        out = outputs.program.closed.out_avals[0]
        self._out = jax.ShapeDtypeStruct(out.shape, wide(out.dtype))

        def of_example(outputs: Any, given: list[Any]) -> Any:
            value = loss(outputs[None], jax.tree.unflatten(structure, [x[None] for x in given]))
            dtype = dtype_of(value)
            if dtype is None or jnp.shape(value) or not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(
                    f"{api}: loss must return the mean over the examples, a real scalar, but for one example it "
                    f"returned {describe(value)}."
                )
            return value

        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in given]
        self._loss = of_example
        self.hessian = OutputHessian(api, of_example, self._out, shapes)

    def gradients(
        self, examples: Sequence[Any], kind: Fisher, samples: int, key: Any, use: UseGradientsOf, *, mapped: bool
    ) -> tuple[list[OutputGradients], list[UseGradients]]:
        """Return the gradients Jᵀr of some examples for several r.

        Args:
          examples: as in `examples`.
          kind: "exact" for each column r of a root of H, "mc" for samples of the root times normal numbers, and
            "empirical" for the gradient of the loss.
          samples: the number of samples.
          key: the key of the samples.
          use: returns the gradients at each group of uses from the model's examples and from an r for each of them.
          mapped: whether JAX can map `use` over r.

        Returns:
          The gradients at each group of uses, with an axis for the r; and those of one of them.
        """
        of, hessian = self.outputs, self.hessian
        inputs, (*given, numbers) = list(examples[: self._count]), examples[self._count :]
        values = jax.vmap(lambda example: of.loss(of.parameters, example)[0])(inputs).astype(self._out.dtype)
        if kind == "empirical":
            seeds = jax.vmap(jax.grad(self._loss))(values, given)
            return for_each_vector(lambda v: use(inputs, seeds * v[0]), 1, self._out.dtype, mapped=mapped)
        prepared = jax.vmap(hessian.prepare)(values, given)

        def seed_of(vector: jax.Array, prepared: Any, outputs: Any, given: Any, number: Any) -> Any:
            """Return the column or the sample that a unit vector selects, for one example."""
            if kind == "exact":
                noises = _split(vector, hessian.shapes)
            else:
                own = jax.random.fold_in(key, number)
                noises = [
                    jnp.tensordot(
                        vector, jax.random.normal(jax.random.fold_in(own, i), (samples, *shape), self._out.dtype), 1
                    )
                    for i, shape in enumerate(hessian.shapes)
                ]
            return hessian.apply(prepared, outputs, given, noises)

        def gradients(vector: jax.Array) -> list[UseGradients]:
            return use(inputs, jax.vmap(seed_of, (None, 0, 0, 0, 0))(vector, prepared, values, given, numbers))

        count = hessian.columns if kind == "exact" else samples
        return for_each_vector(gradients, count, self._out.dtype, mapped=mapped)

    def columns(self, value: jax.Array, example: Sequence[Any], vectors: jax.Array) -> jax.Array:
        """Return the products of a root of H with some vectors, for one example: shape (vectors, *outputs).

        Args:
          value: the outputs of the example.
          example: as in `examples`.
          vectors: shape (vectors, columns).
        """
        value, given = value.astype(self._out.dtype), list(example[self._count : -1])
        prepared = self.hessian.prepare(value, given)

        def of_vector(vector: jax.Array) -> jax.Array:
            return self.hessian.apply(prepared, value, given, _split(vector, self.hessian.shapes))

        return jax.vmap(of_vector)(vectors.astype(self._out.dtype))

    def check_definite(self, results: Any) -> None:
        """Raise if results that are not traced are NaN because the Hessian of an example is indefinite."""
        found = jax.tree.leaves(results)
        if any(isinstance(x, Tracer) for x in (*found, *self.examples, *self.outputs.parameters)):
            return
        if not any(bool(jnp.isnan(x).any()) for x in found):
            return
        of, (*given, _) = self.outputs, self.examples[self._count :]
        values = jax.vmap(lambda example: of.loss(of.parameters, example)[0])(self.examples[: self._count])
        roots = jax.tree.leaves(jax.vmap(self.hessian.prepare)(values.astype(self._out.dtype), given))
        finite = bool(jnp.isfinite(values).all())
        if finite and any(bool(jnp.isnan(x).any()) for x in roots):
            raise ValueError(f"{self._api}: the Hessian of the loss by the outputs is indefinite; pass a convex loss.")


def for_each_vector(
    gradients: Callable[[jax.Array], list[UseGradients]], count: int, dtype: Any, *, mapped: bool
) -> tuple[list[OutputGradients], list[UseGradients]]:
    """Return the gradients for each unit vector of some length, and those for one of them."""
    found: list[list[UseGradients]] = []

    def of_vector(vector: jax.Array) -> list[UseGradients]:
        found.append(gradients(vector))
        return found[-1]

    return for_each_output(of_vector, count, dtype, mapped=mapped), found[-1]


def _split(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Split a vector into arrays of some shapes."""
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + math.prod(shape))
    return [vector[start:end].reshape(s) for start, end, s in zip(ends, ends[1:], shapes, strict=False)]
