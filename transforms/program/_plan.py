"""Which chains go into which weights, and what becomes of the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxpr import at_source, evaluate
from ._affine import PRODUCTS, Chain, Site, Step, axes_of, names_of, site_of, sizes_only, step_of
from ._flat import Flat, Node, Rewrite, Value, insides, needed, read, run
from ._report import Candidate, FoldReport, where


class Changed(Exception):
    """The answers to another plan's questions do not fit this one."""


class Answers:
    """Answers to what a plan asks of the values of parameters, which are at hand only the first time.

    Args:
      recorded: the answers of the first time; None then.
    """

    def __init__(self, recorded: Sequence[bool] | None = None) -> None:
        self.given: list[bool] = []
        self._recorded: Iterator[bool] | None = None if recorded is None else iter(recorded)

    def __call__(self, question: Callable[[], Any]) -> bool:
        answer = bool(question()) if self._recorded is None else next(self._recorded, None)
        if answer is None:
            raise Changed
        self.given.append(answer)
        return answer


@dataclass(frozen=True, eq=False)
class Fold:
    """A product and the chains that become part of its weights.

    Attributes:
      site: the product.
      before: the chain that leads to its data.
      after: the chain that follows it.
    """

    site: Site
    before: Chain | None = None
    after: Chain | None = None

    @property
    def shifts(self) -> bool:
        """Whether a shift is left to add to the result; one that goes into a padded product is zero."""
        before = self.before is not None and self.before.shifts and not self.site.dilutes
        return before or (self.after is not None and self.after.shifts)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The operations of its chains."""
        return tuple(step for chain in (self.before, self.after) if chain for step in chain.steps)

    @property
    def statics(self) -> list[Value]:
        """The weights and all that they are combined with."""
        return [self.site.weights, *(step.static for step in self.steps if step.static is not None)]

    @property
    def dtype(self) -> Any:
        """The widest dtype on the way, in which the shift is added."""
        return jnp.result_type(*(x.aval.dtype for x in (self.site.out, *(step.after for step in self.steps))))


class Plan:
    """What of a program is folded.

    Args:
      flat: the program, of which the first arguments are the parameters.
      names: the dotted paths of the parameters.
      leaves: the parameters; nothing if only their shapes are known.
      answer: the answer to a question about their values.
    """

    def __init__(self, flat: Flat, names: Sequence[str], leaves: Sequence[Any], answer: Answers) -> None:
        self._flat, self._names, self._answer = flat, names, answer
        self._known = dict(zip(flat.arguments, leaves, strict=False))
        self._folds: dict[Node, Fold] = {}
        self._chains: list[tuple[Chain, list[Site]]] = []
        self._claimed: set[Node] = set()
        self._reasons: dict[Node, list[str]] = {}
        sites = [site for site in map(site_of, flat.nodes) if site is not None]
        for site in sites:
            self._fold_after(site)
        for data in dict.fromkeys(site.data for site in sites):
            self._fold_before(data)
        self._leaves, self._entries = self._name()

    # ---- Which chains are folded

    def _fold_after(self, site: Site) -> None:
        """Fold the longest chain that follows a product and of which nothing else is used."""
        chain = Chain(site.out, ())
        while True:
            value = chain.steps[-1].after if chain.steps else site.out
            if len(value.uses) != 1:
                for i, user in enumerate(value.uses):
                    others = [*value.uses[:i], *value.uses[i + 1 :]]
                    self._because(user, f"what goes into it is also used by {names_of(others)}")
                break
            step = step_of(value.uses[0], value) if value.uses[0] else None
            if step is None:
                break
            longer = Chain(site.out, (*chain.steps, step))
            found = longer.affine(sizes_only)
            if found is None or not axes_of(found) <= set(site.outputs):
                self._because(step.node, "it differs between places of one channel of the product before it")
                break
            chain = longer
        chain = chain.trimmed()
        if chain.learned:
            self._try(chain, [Fold(site, after=chain)])

    def _fold_before(self, data: Value) -> None:
        """Fold the chain that leads to the data of products, if such products are all that uses it."""
        users = [site_of(user) if user else None for user in data.uses]
        sites = [site for site in users if site is not None]
        steps: list[Step] = []
        value = data
        while value.node is not None and value.node not in self._claimed and (value is data or len(value.uses) == 1):
            step = step_of(value.node)
            if step is None:
                break
            steps.insert(0, step)
            value = step.before
        while steps:
            found = Chain(steps[0].before, tuple(steps)).affine_at_end(sizes_only)
            if found is not None and all(axes_of(found) <= set(site.inputs) for site in sites):
                break
            self._because(steps.pop(0).node, "it differs along axes over which the product after it does not sum")
        chain = Chain(data, tuple(steps))
        if not chain.learned:
            return
        others = [user for user, site in zip(data.uses, users, strict=True) if site is None]
        if others:
            self._because(steps[-1].node, f"what comes out of it is also used by {names_of(others)}")
        elif any(site.mixes_batch for site in sites):
            self._because(steps[-1].node, "the convolution after it has a batch_group_count")
        elif any(site.dilutes for site in sites) and not self._answer(lambda: self._keeps_zero(chain)):
            self._because(steps[-1].node, "the convolution after it pads with zeros, which its shift would change")
        else:
            self._try(chain, [replace(self._folds.get(site.node, Fold(site)), before=chain) for site in sites])

    def _try(self, chain: Chain, folds: Sequence[Fold]) -> None:
        """Fold, if what comes out can be represented."""
        if self._answer(lambda: all(map(self._sound, folds))):
            self._folds |= {fold.site.node: fold for fold in folds}
            self._claimed.update(step.node for step in chain.steps)
            self._chains.append((chain, [fold.site for fold in folds]))
        else:
            dtype = folds[0].site.weights.aval.dtype
            self._because(chain.steps[-1].node, f"the folded weights would not be finite, or lost in {dtype}")

    def _because(self, node: Node | None, reason: str) -> None:
        if node is not None:
            self._reasons.setdefault(node, []).append(reason)

    # ---- Values

    def _value(self, value: Value) -> Any:
        """The array that a static value is."""
        nodes, _ = needed(self._flat.nodes, [value], effects=False)
        with jax.ensure_compile_time_eval():
            run(nodes, self._known)
        return read(value, self._known)

    def _read(self, value: Value) -> np.ndarray:
        array = np.asarray(self._value(value), np.float64)
        return array[tuple(slice(0, size) for size in value.sizes)]

    def _keeps_zero(self, chain: Chain) -> bool:
        found = chain.affine(self._read)
        return found is not None and not np.any(found[1])

    def _weights(self, fold: Fold) -> tuple[Any, np.ndarray]:
        """The folded weights, not yet rounded to their dtype, and the shift of the result, in all its axes.

        With data s·x + t and a result that becomes u·y + v: u·(W(s·x + t)) + v = (u·W·s)x + (u·(Wt) + v).
        """
        site = fold.site
        weights = self._value(site.weights)
        with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
            weights = jnp.asarray(weights, jnp.result_type(weights, jnp.float32, fold.dtype))
            factor, shift = np.ones(()), np.zeros(())
            if fold.before and (found := fold.before.affine_at_end(self._read)):
                factor = site.factor_before(found[0])
                if fold.before.shifts and not site.dilutes:
                    shift = site.of_shift(found[1], weights)
            if fold.after and (found := fold.after.affine(self._read)):
                factor, shift = factor * site.factor_after(found[0]), shift * found[0] + found[1]
            return weights * jnp.asarray(factor, weights.dtype), shift

    def _sound(self, fold: Fold) -> bool:
        """Whether the folded weights are finite, and small ones are not lost among those of their feature."""
        exact, shift = self._weights(fold)
        dtype = fold.site.weights.aval.dtype
        with jax.ensure_compile_time_eval():
            axes = tuple(i for i in range(exact.ndim) if i not in fold.site.outputs.values())
            lost = jnp.abs(exact.astype(dtype).astype(exact.dtype) - exact)
            most = jnp.max(jnp.abs(exact), axis=axes, keepdims=True)
            fits = jnp.isfinite(exact) & (lost <= jnp.finfo(dtype).eps * most)
            return bool(jnp.all(fits)) and bool(np.all(np.isfinite(shift.astype(fold.dtype))))

    # ---- The new program

    def _name(self) -> tuple[list[int], dict[Node, tuple[str, str]]]:
        """The parameters that are still needed, and for each fold the names of its weights and its shift.

        Weights keep the name of the parameter they come from, and the shift that of the bias beside it.
        """
        _, seen = needed(self._flat.nodes, self._flat.outputs, self._rewrites({}))
        leaves = [i for i in range(len(self._names)) if self._flat.arguments[i] in seen]
        taken = {self._names[i] for i in leaves}

        def unique(name: str) -> str:
            number = 1
            while (numbered := name if number == 1 else f"{name}_{number}") in taken:
                number += 1
            taken.add(numbered)
            return numbered

        entries = {}
        for node, fold in self._folds.items():
            kernel = self._only_name(fold.site.weights) or "kernel"
            owner = kernel.rpartition(".")[0]
            added = [self._only_name(x.static) for x in fold.steps if x.node.name == "add" and x.static is not None]
            bias = next((name for name in added if name and name.rpartition(".")[0] == owner), "")
            bias = bias or (f"{owner}.shift" if owner else "shift")
            entries[node] = unique(kernel), unique(bias) if fold.shifts else ""
        return leaves, entries

    def _only_name(self, value: Value) -> str:
        return self._names[min(value.leaves)] if len(value.leaves) == 1 else ""

    def parameters(self) -> dict[str, Any]:
        """The parameters of the new program."""
        found = {self._names[i]: jnp.asarray(self._known[self._flat.arguments[i]]) for i in self._leaves}
        for node, (kernel, bias) in self._entries.items():
            fold = self._folds[node]
            exact, shift = self._weights(fold)
            found[kernel] = exact.astype(fold.site.weights.aval.dtype)
            if bias:
                sizes = [fold.site.out.aval.shape[i] if i in fold.site.outputs else 1 for i in range(shift.ndim)]
                kept = [size for i, size in enumerate(sizes) if i in fold.site.outputs]
                found[bias] = jnp.asarray(np.broadcast_to(shift, sizes).reshape(kept), fold.dtype)
        return dict(sorted(found.items()))

    def __call__(self, parameters: dict[str, Any], arguments: Sequence[Any]) -> list[Any]:
        """The outputs of the new program."""
        known = {self._flat.arguments[i]: parameters[self._names[i]] for i in self._leaves}
        known |= zip(self._flat.arguments[len(self._names) :], arguments, strict=True)
        rewrites = self._rewrites(parameters)
        nodes, _ = needed(self._flat.nodes, self._flat.outputs, rewrites)
        run(nodes, known, rewrites)
        return [read(x, known) for x in self._flat.outputs]

    def _rewrites(self, parameters: dict[str, Any]) -> dict[Node, Rewrite]:
        """The products with their folded weights; the arithmetic of their chains passes on what goes in."""
        rewrites = {}
        for node, fold in self._folds.items():
            for step in fold.steps:
                if step.pairs is None:
                    rewrites[step.node] = Rewrite([step.before], lambda x: [x])
            if fold.after:
                for step in fold.after.steps:
                    if step.node.name == "convert_element_type":
                        rewrites[step.node] = Rewrite([step.before], lambda x: [x])
                end = fold.after.steps[-1]
                dtype = end.after.aval.dtype
                rewrites[end.node] = Rewrite([end.before], lambda x, dtype=dtype: [x.astype(dtype)])
            rewrites[node] = Rewrite([fold.site.data], partial(self._product, fold, parameters))
        return rewrites

    def _product(self, fold: Fold, parameters: dict[str, Any], data: Any) -> list[Any]:
        site = fold.site
        kernel, bias = self._entries[site.node]
        weights = parameters[kernel]
        (out,) = evaluate(site.node.eqn, *((weights, data) if site.kernel == 0 else (data, weights)))
        with at_source(site.node.eqn):
            if bias:
                sizes = [size if i in site.outputs else 1 for i, size in enumerate(out.shape)]
                out = out.astype(fold.dtype) + parameters[bias].reshape(sizes)
            return [out if fold.after else out.astype(site.out.aval.dtype)]

    def fingerprint(self) -> tuple[Any, ...]:
        """What two plans share that fold the same parameters in the same way, whatever the shapes of the data."""
        statics = [x for fold in self._folds.values() for x in fold.statics]
        nodes, _ = needed(self._flat.nodes, statics, effects=False)
        prints: dict[Value, int] = {}

        def of(value: Value) -> int:
            if value.constant is not None:
                return hash((str(value.aval), np.asarray(value.constant).tobytes()))
            return prints[value] if value in prints else hash(("leaf", value.leaf))

        for node in nodes:
            # The shape that parameters are spread to is that of the data.
            params = {k: v for k, v in node.eqn.params.items() if not (callable(v) or k == "shape")}
            for i, x in enumerate(node.outputs):
                prints[x] = hash((i, node.name, str(params), *map(of, node.inputs)))
        folds = [
            (
                *(node.name, self._entries[node], [(step.node.name, step.operand) for step in fold.steps]),
                *((of(x), x.sizes) for x in fold.statics),
            )
            for node, fold in self._folds.items()
        ]
        return folds, self._leaves, self._answer.given

    # ---- The report

    def report(self) -> FoldReport:
        """What was folded, and what was not."""
        folded = []
        for chain, sites in self._chains:
            kernels = ", ".join(self._entries[site.node][0] for site in sites)
            folded.append(self._candidate(chain.steps, kernels, ""))
        return FoldReport(tuple(folded), tuple(self._kept(self._flat, "")))

    def _kept(self, flat: Flat, inside: str) -> Iterator[Candidate]:
        chains: dict[Node, list[Step]] = {}
        for node in flat.nodes:
            within = inside or f"it is inside a `{node.name}`"
            for inner in insides(node):
                yield from self._kept(inner, within)
            step = None if node in self._claimed else step_of(node)
            if step is not None:
                before = step.before.node if len(step.before.uses) == 1 else None
                chains[node] = [*(chains.pop(before, []) if before else []), step]
        for steps in chains.values():
            known = [reason for step in steps for reason in self._reasons.get(step.node, ())]
            reason = inside or "; ".join(dict.fromkeys(known)) or _why_alone(steps[0])
            # A table, such as that of rotary positions, is no scale of channels.
            if reason and any(step.learned and (step.differs < 2 or (known and step.static.leaves)) for step in steps):
                yield self._candidate(steps, "", reason)

    def _candidate(self, steps: Sequence[Step], kernel: str, reason: str) -> Candidate:
        factors = [step for step in steps if step.learned]
        statics = [step.static for step in factors if step.static is not None]
        what = "batch norm" if any(x.rooted for x in statics) else "per-channel scale"
        names = [self._names[leaf] for x in statics for leaf in sorted(x.leaves)]
        owners = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
        return Candidate(what, ", ".join(owners), where(factors[0].node.eqn), kernel, reason)


def _why_alone(step: Step) -> str:
    """Why a chain, of which `step` is the first, is at no product; nothing if it only completes a norm of examples."""
    before = step.before.node
    if jnp.issubdtype(step.before.aval.dtype, jnp.complexfloating):
        return "complex numbers are not folded"
    if before is not None and before.name in PRODUCTS:
        return f"the weights of the `{before.name}` before it depend on data"
    if before is not None and _has_product(before):
        return f"the product before it is inside a `{before.name}`"
    if before is not None and before.name in ("mul", "div", "rsqrt"):
        return ""
    return "no convolution or dense product is next to it"


def _has_product(node: Node) -> bool:
    return any(x.name in PRODUCTS or _has_product(x) for inner in insides(node) for x in inner.nodes)
