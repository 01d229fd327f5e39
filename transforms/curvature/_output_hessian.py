"""A square root of the Hessian of a loss by the outputs of one example, for any loss.

The Gauss-Newton matrix of a model is the mean over examples of JᵀHJ, with the Jacobian J of the outputs and the Hessian
H of the loss by the outputs. With H = RRᵀ it is a sum of outer products of the gradients Jᵀr, one for each column r of
R, or the expectation of one such product for r = Rε with normal ε.

H has a row for each output, so that for many outputs it cannot be stored. The program of the loss shows its form:

- a sum of functions of single outputs (squared errors, logistic losses) has a diagonal Hessian, which is its product
  with ones, and R is its elementwise root;
- z = logsumexp of a linear function of the outputs has the Hessian D - ppᵀ with p = softmax and D = diag(p), and
  R = D^½ (1 - √p √pᵀ), since 1 - √p √pᵀ is a projection;
- a linear combination of both (cross-entropies of labels or distributions, weighted or masked, per token) has the sum
  of these Hessians, and the columns of all their roots;
- any other Hessian is computed, and R is its matrix square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.compat import JaxprEqn, eval_jaxpr
from .._core.eigh import eigh
from .._core.jaxpr import CALLS, CUSTOM, ELEMENTWISE, IDENTITIES, aval, called, evaluate, interpret

# A Hessian without a known form may have this many rows.
_MOST = 1024
# Operations that move numbers, some of which they may leave out or repeat.
_MOVES = frozenset(["broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "pad", "reshape", "rev", "slice"])
_MOVES |= {"squeeze", "transpose"}
# Operations that are linear in all operands, elementwise or not.
_LINEAR = IDENTITIES | {"add", "add_any", "convert_element_type", "neg", "real", "sub"}
_SUMS = frozenset(["cumsum", "reduce_sum"])
# Operations that are linear in an operand at one of these positions if the other one does not depend on the outputs.
_LINEAR_IN_ONE = {"mul": (0, 1), "div": (0,), "dot_general": (0, 1)}
# Operations whose derivative is zero.
_FLAT = frozenset(["ceil", "floor", "round", "sign", "stop_gradient"])


class LogSumExp(NamedTuple):
    """A logsumexp in a loss.

    Attributes:
      inputs: its inputs, which are affine functions of the outputs.
      axes: the axes of the inputs that it sums over.
      value: the result, in some shape with as many numbers as there are sums.
    """

    inputs: Any
    axes: tuple[int, ...]
    value: Any


class Dependence(NamedTuple):
    """How a value in the program of a loss depends on the outputs.

    Unless it is `mixed`, it is a sum of an affine function, of linear functions of values that depend on one output
    each, and of linear functions of logsumexps.

    Attributes:
      single: whether each number depends on at most one output.
      in_order: whether this is the output at the same position.
      curved: whether it is not affine, apart from the logsumexps.
      sums: the numbers of the logsumexps.
      exp_of: the inputs, if this is an exponential of an affine function.
      sum_of: the inputs and axes, if this is a sum of such exponentials.
      mixed: whether this is such an exponential or sum, of a function of several outputs.
    """

    single: bool
    in_order: bool
    curved: bool
    sums: frozenset[int] = frozenset()
    exp_of: Any = None
    sum_of: Any = None
    mixed: bool = False

    @property
    def is_affine(self) -> bool:
        """Return whether the value is an affine function of the outputs."""
        return not self.curved and not self.sums


# A value that depends on the outputs in no known way.
_UNKNOWN = Dependence(False, False, True, mixed=True)


class _Evaluation:
    """One evaluation of the program of a loss, which finds how its values depend on the outputs.

    The values of the interpreter are pairs of a `Dependence`, or None for a constant, and an array.

    Args:
      perturbations: what to add to the logsumexps, in order; None for nothing.

    Attributes:
      sums: the logsumexps so far.
    """

    def __init__(self, perturbations: Sequence[Any] | None = None) -> None:
        self._perturbations = perturbations
        self.sums: list[LogSumExp] = []

    def run(self, closed: Any, outputs: Any, others: Sequence[Any]) -> tuple[Dependence | None, Any]:
        """Return how the loss depends on the outputs, and its value."""
        pairs = [(Dependence(True, True, False), outputs), *((None, x) for x in others)]
        return self._inside(closed.jaxpr, closed.consts, pairs)[0]

    def _inside(self, jaxpr: Any, consts: Sequence[Any], pairs: Sequence[Any]) -> list[Any]:
        return interpret(jaxpr, consts, pairs, self._visit, lambda x: (None, x))

    def _visit(self, eqn: JaxprEqn, pairs: list[Any]) -> list[Any]:
        name, values = eqn.primitive.name, [value for _, value in pairs]
        if all(found is None for found, _ in pairs):
            return [(None, x) for x in evaluate(eqn, *values)]
        if name in CALLS:
            if name not in CUSTOM:
                return self._inside(*called(eqn), pairs)
            return list(zip(self._of_custom(eqn, pairs), evaluate(eqn, *values), strict=True))
        results = evaluate(eqn, *values)
        known = self._dependence(eqn, pairs)
        if name == "log" and known is not None and known.sums and not known.mixed:
            if self._perturbations is not None:
                results[0] = results[0] + self._perturbations[len(self.sums)]
            inputs, axes = pairs[0][0].sum_of
            self.sums.append(LogSumExp(inputs, axes, results[0]))
        return [(known if jnp.issubdtype(x.dtype, jnp.inexact) else None, x) for x in results]

    def _of_custom(self, eqn: JaxprEqn, pairs: list[Any]) -> list[Dependence | None]:
        """Return how the results of a function with derivatives of its own depend on the outputs.

        Its program shows which outputs each number depends on. The derivatives may be others than those of the program,
        for example those of the identity for a function that rounds.
        """
        found: list[Dependence | None] = []
        for (known, _), out in zip(_Evaluation()._inside(*called(eqn), pairs), eqn.outvars, strict=True):
            if not jnp.issubdtype(aval(out).dtype, jnp.inexact):
                found.append(None)
            elif known is None or not known.single or known.sums or known.mixed:
                found.append(_UNKNOWN)
            else:
                found.append(known._replace(curved=True, exp_of=None))
        return found

    def _dependence(self, eqn: JaxprEqn, pairs: list[Any]) -> Dependence | None:
        """Return how the results of an operation depend on the outputs."""
        name, sizes = eqn.primitive.name, [aval(x).size for x in (*eqn.invars, *eqn.outvars)]
        known = [found for found, _ in pairs if found is not None]
        if name in _FLAT:
            return None
        one = known[0] if len(known) == 1 else None
        if one is not None and name == "convert_element_type" and not (one.exp_of is None and one.sum_of is None):
            return one
        if one is not None and one.sum_of is not None:
            if name == "abs" or (name in _MOVES and sizes[0] == sizes[-1] and name != "rev" and _keeps_order(eqn)):
                return one
            if name == "log":
                return Dependence(False, False, False, frozenset([len(self.sums)]))
        if one is not None and one.exp_of is not None and name == "reduce_sum":
            return one._replace(single=False, in_order=False, exp_of=None, sum_of=(one.exp_of, eqn.params["axes"]))
        if any(x.mixed for x in known) or any(jnp.iscomplexobj(aval(x)) for x in (*eqn.invars, *eqn.outvars)):
            return _UNKNOWN
        curved, sums = any(x.curved for x in known), frozenset[int]().union(*(x.sums for x in known))
        single = one.single if one is not None else all(x.in_order for x in known)
        in_order = all(x.in_order for x in known) and len({*sizes} - {1}) <= 1
        if name in _MOVES:
            if name == "concatenate" or all(found is None for found, _ in pairs[1:]):
                in_order = in_order and _keeps_order(eqn)
                return Dependence(all(x.single for x in known), in_order, curved, sums)
        elif name in _SUMS:
            return Dependence(False, False, curved, sums)
        elif name in _LINEAR or (name == "select_n" and pairs[0][0] is None):
            return Dependence(single, in_order, curved, sums)
        elif one is not None and any(pairs[i][0] is not None for i in _LINEAR_IN_ONE.get(name, ())):
            moved = name == "dot_general"
            return Dependence(single and not moved, in_order and not moved, curved, sums)
        if name in ELEMENTWISE and single and not sums:
            exp_of = pairs[0][1] if name == "exp" and not curved else None
            return Dependence(True, in_order, True, sums, exp_of)
        if name == "exp" and one is not None and one.is_affine:
            return Dependence(False, False, True, exp_of=pairs[0][1], mixed=True)
        return _UNKNOWN


def _keeps_order(eqn: JaxprEqn) -> bool:
    """Return whether an operation that moves as many numbers as it gets keeps their order."""
    name, order = eqn.primitive.name, eqn.params.get("dimensions")
    same = aval(eqn.invars[0]).size == aval(eqn.outvars[0]).size
    return same and (name in ("broadcast_in_dim", "squeeze") or (name == "reshape" and order is None))


class OutputHessian:
    """The Hessian of the loss of one example by its outputs, and its square root R.

    Args:
      api: the name for errors.
      loss: a function of the outputs of one example and of a list of other arrays that returns a real scalar.
      outputs: the shape and dtype of the outputs.
      others: those of the other arrays.

    Attributes:
      shapes: R is a sum of linear maps from arrays of these shapes.
      columns: the number of columns of R.
      form: the form of the Hessian, in words.

    Raises:
      ValueError: a Hessian without a known form has too many rows.
    """

    def __init__(self, api: str, loss: Callable[..., Any], outputs: Any, others: Sequence[Any]) -> None:
        self._closed = jax.make_jaxpr(loss)(outputs, list(others))
        size = math.prod(outputs.shape)
        found: list[Any] = []

        def run(outputs: Any, others: Any) -> Any:
            evaluation = _Evaluation()
            found.append((evaluation.run(self._closed, outputs, others)[0], evaluation.sums))
            return [(each.inputs, each.value) for each in evaluation.sums]

        shapes = jax.eval_shape(run, outputs, list(others))
        ((known, sums),) = found
        self._is_known = known is None or not known.mixed
        self._is_curved = known is not None and known.curved
        self._values = [value for _, value in shapes]
        # The numbers of the logsumexps that the loss depends on, and the axes of each.
        self._sums = {} if known is None else {n: sums[n].axes for n in sorted(known.sums)}
        if self._is_known:
            self.shapes = [outputs.shape] * self._is_curved + [shapes[n][0].shape for n in self._sums]
            self.form = " + ".join(["diagonal"] * self._is_curved + ["softmax"] * bool(self._sums)) or "zero"
        elif size <= _MOST:
            self.shapes, self.form = [(size,)], "dense"
        else:
            given = f"the loss has a Hessian of no known form by the {size:,} outputs of an example"
            forms = "write it with logsumexp or log_softmax and with functions of single outputs"
            raise ValueError(f"{api}: {given}; {forms}, or have at most {_MOST:,} outputs.")
        self.columns = sum(map(math.prod, self.shapes))

    def prepare(self, outputs: jax.Array, others: Sequence[Any]) -> list[Any]:
        """Compute what `apply` needs for one example, which is NaN where the Hessian is indefinite."""
        gradient = jax.grad(self._loss)
        # Where a negative log-likelihood is almost certain, its Hessian is a difference of numbers like squares of its
        # gradient.
        scale = jnp.minimum(jnp.square(gradient(outputs, others)).max(initial=0), 1)
        if not self._is_known:
            hessian = jax.hessian(self._loss)(outputs, others).reshape(2 * [outputs.size])
            values, vectors = eigh(hessian)
            return [vectors * _root(values, scale)]
        zeros = [jnp.zeros(x.shape, x.dtype) for x in self._values]
        weights = jax.grad(lambda some: _evaluated(self._closed, outputs, others, some)[0])(zeros)
        sums = _evaluated(self._closed, outputs, others)[1]
        found = []
        for n, axes in self._sums.items():
            kept = [1 if axis in axes else size for axis, size in enumerate(sums[n].inputs.shape)]
            inputs = sums[n].inputs.astype(outputs.dtype)
            found.append((jax.nn.softmax(inputs, axis=axes), weights[n].astype(outputs.dtype).reshape(kept)))
        roots: list[Any] = [(p, _root(weight, scale)) for p, weight in found]
        if not self._is_curved:
            return roots
        ones = jnp.ones_like(outputs)
        diagonal = with_softmax = jax.jvp(lambda outputs: gradient(outputs, others), (outputs,), (ones,))[1]
        for (n, axes), (p, weight) in zip(self._sums.items(), found, strict=True):
            like, back = self._inputs(n, outputs, others)
            moved = jax.linear_transpose(back, like)(ones)[0].astype(ones.dtype)
            moved = back(weight * p * (moved - (p * moved).sum(axes, keepdims=True)))
            scale = jnp.maximum(scale, jnp.maximum(jnp.abs(moved).max(initial=0), (jnp.abs(weight) * p).max(initial=0)))
            diagonal = diagonal - moved
        return [_root(diagonal, jnp.maximum(scale, jnp.abs(with_softmax).max(initial=0))), *roots]

    def apply(self, prepared: list[Any], outputs: jax.Array, others: Sequence[Any], noises: Sequence[Any]) -> Any:
        """Return the product of R with vectors, an array like the outputs.

        Args:
          prepared: the result of `prepare` for the example.
          outputs: the outputs of the example.
          others: the other arrays.
          noises: arrays of the shapes `shapes`.
        """
        if not self._is_known:
            return (prepared[0] @ noises[0]).reshape(outputs.shape)
        total = jnp.zeros_like(outputs)
        if self._is_curved:
            total = total + prepared[0] * noises[0]
        first = int(self._is_curved)
        for (n, axes), (p, weight), noise in zip(self._sums.items(), prepared[first:], noises[first:], strict=True):
            root = jnp.sqrt(p)
            moved = weight * (root * noise - p * (root * noise).sum(axes, keepdims=True))
            total = total + self._inputs(n, outputs, others)[1](moved)
        return total

    def _loss(self, outputs: Any, others: Sequence[Any]) -> Any:
        return eval_jaxpr(self._closed.jaxpr, self._closed.consts, outputs, *others)[0]

    def _inputs(self, n: int, outputs: Any, others: Sequence[Any]) -> tuple[Any, Callable[[Any], Any]]:
        """Return the shape and dtype of the inputs of a logsumexp, and the transpose of their linear part."""

        def inputs(outputs: Any) -> Any:
            return _evaluated(self._closed, outputs, others)[1][n].inputs

        # In reverse mode, since functions with a `jax.custom_vjp` elsewhere in the loss have no forward mode.
        found, pull = jax.vjp(inputs, outputs)
        return jax.ShapeDtypeStruct(found.shape, found.dtype), lambda x: pull(x.astype(found.dtype))[0]


def _evaluated(
    closed: Any, outputs: Any, others: Sequence[Any], perturbations: Sequence[Any] | None = None
) -> tuple[Any, list[LogSumExp]]:
    """Return the loss and its logsumexps, with perturbations added to these."""
    evaluation = _Evaluation(perturbations)
    return evaluation.run(closed, outputs, others)[1], evaluation.sums


def _root(values: jax.Array, scale: Any) -> jax.Array:
    """Return square roots: of zero for values that are negative by rounding, and NaN for other negative ones.

    Args:
      values: the values.
      scale: the size of what they may be a difference of, besides the largest of them.
    """
    eps = float(jnp.finfo(values.dtype).eps)
    least = -jnp.maximum(eps**0.5 * jnp.abs(values).max(initial=0), 256 * eps * scale)
    return jnp.sqrt(jnp.where((values < 0) & (values >= least), 0, values))
