"""The plan of a fold: the chains to fold and their weights, the new parameters, and the new program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.jaxpr import at_source, evaluate
from .._ir.flat_program import FlatProgram, Node, Rewrite, Value, needed, read, run
from .affine_chains import Chain, ChannelStep, axes_of, sizes_only, step_of
from .report import FoldReport, candidate, kept
from .weighted_ops import WeightedOp, weighted_op


@dataclass(frozen=True, eq=False)
class Fold:
    """A product and the chains that are folded into its weights.

    Attributes:
      op: the convolution or dense product.
      before: the chain that computes its data.
      after: the chain applied to its result.
    """

    op: WeightedOp
    before: Chain | None = None
    after: Chain | None = None

    @property
    def shifts(self) -> bool:
        """Return whether a shift must be added to the result; before a padded product the shift is zero."""
        before = self.before is not None and self.before.shifts and not self.op.dilutes
        return before or (self.after is not None and self.after.shifts)

    @property
    def steps(self) -> tuple[ChannelStep, ...]:
        """Return the operations of its chains."""
        return tuple(step for chain in (self.before, self.after) if chain for step in chain.steps)

    @property
    def statics(self) -> list[Value]:
        """Return the weights and all static values that are folded into them."""
        return [self.op.weights, *(step.static for step in self.steps if step.static is not None)]

    @property
    def dtype(self) -> Any:
        """Return the widest dtype of the product and its chains, in which the shift is added."""
        return jnp.result_type(*(x.aval.dtype for x in (self.op.out, *(step.after for step in self.steps))))

    @property
    def shift_shape(self) -> list[int]:
        """Return the shape of the shift for broadcasting: that of the result, with 1 for all axes but the channels."""
        return [n if i in self.op.outputs else 1 for i, n in enumerate(self.op.out.aval.shape)]


class FoldPlan:
    """The chains of a program that are folded, and the program without them.

    Args:
      flat: the program; its first arguments are the parameters.
      names: the dotted paths of the parameters.
      leaves: the parameters; empty if only their shapes are known.
      recorded: in that case, the `answers` of the plan that had the values.

    Attributes:
      answers: the answers to questions about the values of the parameters, in order.
    """

    def __init__(
        self, flat: FlatProgram, names: Sequence[str], leaves: Sequence[Any], recorded: Sequence[bool] | None = None
    ) -> None:
        self._flat, self._names = flat, names
        self._known = dict(zip(flat.arguments, leaves, strict=False))
        self._recorded = None if recorded is None else iter(recorded)
        self.answers: list[bool] = []
        self._folds: dict[Node, Fold] = {}
        self._chains: list[tuple[Chain, list[WeightedOp]]] = []
        self._claimed: set[Node] = set()
        self._reasons: dict[Node, list[str]] = {}
        ops = [op for op in map(weighted_op, flat.nodes) if op is not None]
        # Chains after a product take precedence, because padding does not affect them. `_claimed` holds their steps.
        for op in ops:
            self._fold_after(op)
        for data in dict.fromkeys(op.data for op in ops):
            self._fold_before(data)
        self._leaves, self._entries = self._name()

    # ---- Which chains are folded

    def _fold_after(self, op: WeightedOp) -> None:
        """Fold the longest chain after a product whose intermediate values have no other uses."""
        chain = Chain(op.out, ())
        while True:
            value = chain.steps[-1].after if chain.steps else op.out
            if len(value.uses) != 1:
                for user in value.uses:
                    self._because(user, f"its input has several uses: {_users(value.uses)}")
                break
            step = step_of(value.uses[0], value) if value.uses[0] else None
            if step is None:
                break
            longer = Chain(op.out, (*chain.steps, step))
            # Use ones for all values: only the axes along which factor and shift vary matter here.
            found = longer.affine_at_base(sizes_only)
            if found is None or not axes_of(found) <= set(op.outputs):
                self._because(step.node, "it varies within a channel of the product before it")
                break
            chain = longer
        chain = chain.trimmed()
        if chain.learned:
            self._try(chain, [Fold(op, after=chain)])

    def _fold_before(self, data: Value) -> None:
        """Fold the chain that computes the data of products, if only such products use it."""
        users = [weighted_op(user) if user else None for user in data.uses]
        ops = [op for op in users if op is not None]
        steps: list[ChannelStep] = []
        value = data
        while value.node is not None and value.node not in self._claimed and (value is data or len(value.uses) == 1):
            step = step_of(value.node)
            if step is None:
                break
            steps.insert(0, step)
            value = step.before
        # The chain was built from its end. Drop steps from its beginning until it varies only along input channels.
        while steps:
            axes = axes_of(Chain(steps[0].before, tuple(steps)).affine(sizes_only))
            if all(axes <= set(op.inputs) for op in ops):
                break
            self._because(steps.pop(0).node, "it varies along axes over which the product after it does not sum")
        chain = Chain(steps[0].before if steps else data, tuple(steps))
        if not chain.learned:
            return
        others = [user for user, op in zip(data.uses, users, strict=True) if op is None]
        if others:
            self._because(steps[-1].node, f"its output is also used by {_users(others)}")
        # Padding is applied after the shift, so W(s·x + t) with zero padding is not of the form W'x + t' unless t = 0.
        elif any(op.dilutes for op in ops) and not self._answer(lambda: self._keeps_zero(chain)):
            self._because(steps[-1].node, "the convolution after it pads with zeros, which its shift would change")
        else:
            self._try(chain, [replace(self._folds.get(op.node, Fold(op)), before=chain) for op in ops])

    def _try(self, chain: Chain, folds: Sequence[Fold]) -> None:
        """Fold a chain into products, unless the new weights cannot be represented."""
        if self._answer(lambda: all(map(self._sound, folds))):
            self._folds |= {fold.op.node: fold for fold in folds}
            self._claimed.update(step.node for step in chain.steps)
            self._chains.append((chain, [fold.op for fold in folds]))
        else:
            dtype = folds[0].op.weights.aval.dtype
            self._because(chain.steps[-1].node, f"the folded weights would not be finite, or underflow in {dtype}")

    def _because(self, node: Node | None, reason: str) -> None:
        if node is not None:
            self._reasons.setdefault(node, []).append(reason)

    # ---- Values

    def _answer(self, question: Callable[[], bool]) -> bool:
        """Return the answer to a question about parameter values, or the recorded answer without values."""
        # A plan that asks more questions than were recorded differs, and the comparison of fingerprints detects that.
        self.answers.append(question() if self._recorded is None else next(self._recorded, False))
        return self.answers[-1]

    def _value(self, value: Value) -> Any:
        """Compute a static value."""
        nodes, _ = needed(self._flat.nodes, [value], effects=False)
        with jax.ensure_compile_time_eval():  # values, not tracers, even under a user's transform
            run(nodes, self._known)
        return read(value, self._known)

    def _read(self, value: Value) -> np.ndarray:
        # Use float64, so that a chain of steps is rounded only once, at the end.
        array = np.asarray(self._value(value), np.float64)
        return array[tuple(slice(0, size) for size in value.sizes)]

    @np.errstate(all="ignore")
    def _keeps_zero(self, chain: Chain) -> bool:
        return not np.any(chain.affine(self._read)[1])

    @np.errstate(all="ignore")
    def _weights(self, fold: Fold) -> tuple[np.ndarray, np.ndarray]:
        """Return the folded weights, and the shift with all axes of the result, in float64.

        For data s·x + t before the product and u·y + v after it: u·(W(s·x + t)) + v = (u·W·s)x + (u·(Wt) + v).
        """
        op, original = fold.op, self._value(fold.op.weights)
        weights, shift = np.asarray(original, np.float64), np.zeros(())
        if fold.before:
            s, t = fold.before.affine(self._read)
            weights = weights * op.factor_before(s)
            if fold.before.shifts and not op.dilutes:
                shift = op.of_shift(t, original)
        if fold.after and (found := fold.after.affine_at_base(self._read)):
            weights, shift = weights * op.factor_after(found[0]), shift * found[0] + found[1]
        return weights, shift

    @np.errstate(all="ignore")
    def _sound(self, fold: Fold) -> bool:
        """Return whether the folded weights are finite and do not underflow relative to the largest of a feature."""
        weights, shift = self._weights(fold)
        dtype = fold.op.weights.aval.dtype
        axes = tuple(i for i in range(weights.ndim) if i not in fold.op.outputs.values())
        lost = np.abs(weights.astype(dtype).astype(np.float64) - weights)
        most = np.abs(weights).max(axes, keepdims=True)
        # Rounding to nearest changes a normal number by at most a relative eps/2. A subnormal weight loses more, which
        # matters only relative to the largest weight of its output feature.
        fits = np.isfinite(weights) & (lost <= float(jnp.finfo(dtype).eps) * most)
        return bool(fits.all() and np.isfinite(shift.astype(fold.dtype).astype(np.float64)).all())

    # ---- The new program

    def _name(self) -> tuple[list[int], dict[Node, tuple[str, str]]]:
        """Return the parameters that are still needed, and for each fold the names of its weights and its shift.

        Weights keep the name of their parameter; a shift takes the name of the bias of the same module.
        """
        _, seen = needed(self._flat.nodes, self._flat.outputs, self._rewrites({}))
        leaves = [i for i in range(len(self._names)) if self._flat.arguments[i] in seen]
        taken = {self._names[i] for i in leaves}

        def unique(name: str) -> str:
            numbered = (name if i == 1 else f"{name}_{i}" for i in itertools.count(1))
            taken.add(found := next(x for x in numbered if x not in taken))
            return found

        entries = {}
        for node, fold in self._folds.items():
            kernel = self._only_name(fold.op.weights) or "kernel"
            owner = kernel.rpartition(".")[0]
            added = [self._only_name(x.static) for x in fold.steps if x.node.name == "add" and x.static]
            default = f"{owner}.shift" if owner else "shift"
            bias = next((name for name in added if name and name.rpartition(".")[0] == owner), default)
            entries[node] = unique(kernel), unique(bias) if fold.shifts else ""
        return leaves, entries

    def _only_name(self, value: Value) -> str:
        # Weights that are computed from several parameters, as by weight norm, have no single name.
        return self._names[min(value.leaves)] if len(value.leaves) == 1 else ""

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the new program."""
        with jax.ensure_compile_time_eval():
            found = {self._names[i]: jnp.asarray(self._known[self._flat.arguments[i]]) for i in self._leaves}
            for node, (kernel, bias) in self._entries.items():
                fold = self._folds[node]
                weights, shift = self._weights(fold)
                devices = getattr(self._value(fold.op.weights), "sharding", None)
                found[kernel] = jax.device_put(weights.astype(fold.op.weights.aval.dtype), devices)
                if bias:
                    shift = np.broadcast_to(shift, fold.shift_shape).astype(fold.dtype)
                    found[bias] = jnp.asarray(shift.reshape([shift.shape[i] for i in sorted(fold.op.outputs)]))
        return dict(sorted(found.items()))

    def __call__(self, parameters: dict[str, Any], arguments: Sequence[Any]) -> list[Any]:
        """Return the outputs of the new program."""
        known = {self._flat.arguments[i]: parameters[self._names[i]] for i in self._leaves}
        known |= zip(self._flat.arguments[len(self._names) :], arguments, strict=True)
        rewrites = self._rewrites(parameters)
        nodes, _ = needed(self._flat.nodes, self._flat.outputs, rewrites)
        run(nodes, known, rewrites)
        return [read(x, known) for x in self._flat.outputs]

    def _rewrites(self, parameters: dict[str, Any]) -> dict[Node, Rewrite]:
        """Return the replacements: products use folded weights, and the arithmetic of chains becomes the identity."""
        rewrites: dict[Node, Rewrite] = {}
        for node, fold in self._folds.items():
            skipped = [step for step in fold.steps if step.pairs is None]
            if fold.after:
                # The product returns the widest dtype, for the shift; only the end of the chain rounds to its dtype.
                skipped += [step for step in fold.after.steps if step.node.name == "convert_element_type"]
            rewrites |= {step.node: Rewrite([step.before], lambda x: [x]) for step in skipped}
            if fold.after:
                end = fold.after.steps[-1]
                dtype = end.after.aval.dtype
                rewrites[end.node] = Rewrite([end.before], lambda x, dtype=dtype: [x.astype(dtype)])
            rewrites[node] = Rewrite([fold.op.data], partial(self._product, fold, parameters))
        return rewrites

    def _product(self, fold: Fold, parameters: dict[str, Any], data: Any) -> list[Any]:
        """Return the product with its folded weights, and the shift added."""
        op = fold.op
        kernel, bias = self._entries[op.node]
        weights = parameters[kernel]
        (out,) = evaluate(op.node.eqn, *((weights, data) if op.kernel == 0 else (data, weights)))
        with at_source(op.node.eqn):
            if bias:
                out = out.astype(fold.dtype) + parameters[bias].reshape(fold.shift_shape)
            return [out if fold.after else out.astype(op.out.aval.dtype)]

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a value that is equal for plans that fold the same parameters in the same way.

        Shapes of the data are ignored: plans for different batch sizes have equal fingerprints.
        """
        statics = [x for fold in self._folds.values() for x in fold.statics]
        nodes, _ = needed(self._flat.nodes, statics, effects=False)
        prints: dict[Value, int] = {}

        def of(value: Value) -> int:
            if value.constant is not None:
                return hash((str(value.aval), np.asarray(value.constant).tobytes()))
            return prints[value] if value in prints else hash(("leaf", value.leaf))

        for node in nodes:
            # Ignore `shape`: parameters are broadcast to the shape of the data.
            params = {k: v for k, v in node.eqn.params.items() if not (callable(v) or k == "shape")}
            for i, x in enumerate(node.outputs):
                prints[x] = hash((i, node.name, str(params), *map(of, node.inputs)))
        folds = []
        for node, fold in self._folds.items():
            steps = [(step.node.name, step.operand) for step in fold.steps]
            folds.append((node.name, self._entries[node], steps, [(of(x), x.sizes) for x in fold.statics]))
        return folds, self._leaves, self.answers

    def report(self) -> FoldReport:
        """Return the candidates that were folded, and those that were not."""
        folded = [
            candidate(chain.steps, self._names, kernel=", ".join(self._entries[op.node][0] for op in ops))
            for chain, ops in self._chains
        ]
        return FoldReport(tuple(folded), tuple(kept(self._flat, self._names, self._claimed, self._reasons)))


def _users(users: Sequence[Node | None]) -> str:
    return " and ".join(sorted({"the output" if user is None else f"`{user.name}`" for user in users}))
