"""The report of `fold_bn`: the batch norms in a program, folded or kept, with their lines in the user's code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from ..._core.source_lines import where
from .._ir.flat_program import FlatProgram, Node, insides
from .affine_chains import ChannelStep, step_of
from .weighted_ops import PRODUCTS


@dataclass(frozen=True)
class Candidate:
    """A batch norm, or another per-channel scale.

    Attributes:
      what: "batch norm" (it divides by a root) or "per-channel scale".
      parameters: the path of its parameters, such as "layers.0.bn"; empty if they are constants of the program.
      where: its named scopes and its source line.
      kernel: the names of the new parameters that it was folded into; empty if it was kept.
      reason: the reason why it was kept; empty if it was folded.

    Examples:
      >>> from plurax.transforms.program import Candidate
      >>> print(Candidate("batch norm", "bn", "block (net.py:12)", "conv.kernel", ""))
      batch norm bn at block (net.py:12): into conv.kernel
    """

    what: str
    parameters: str
    where: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        name = " ".join(filter(None, [self.what, self.parameters]))
        return f"{name} at {self.where}: " + (f"into {self.kernel}" if self.kernel else self.reason)


@dataclass(frozen=True)
class FoldReport:
    """The batch norms that were folded, and those that were kept and why; `print` shows one per line.

    Attributes:
      folded: the candidates that were folded into weights.
      kept: the candidates that are computed as before.

    Examples:
      >>> from plurax.transforms.program import Candidate, FoldReport
      >>> norm = Candidate("batch norm", "bn", "block (net.py:12)", "conv.kernel", "")
      >>> print(FoldReport((norm,), ()))
      folded 1, kept 0
      + batch norm bn at block (net.py:12): into conv.kernel
    """

    folded: tuple[Candidate, ...]
    kept: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [*(f"+ {x}" for x in self.folded), *(f"- {x}" for x in self.kept)]
        return "\n".join([f"folded {len(self.folded)}, kept {len(self.kept)}", *lines])


def candidate(steps: Sequence[ChannelStep], names: Sequence[str], *, kernel: str = "", reason: str = "") -> Candidate:
    """Describe a chain by the names of the parameters that it multiplies by."""
    scales = {step.scale: step.node for step in steps if step.scale}
    what = "batch norm" if any(x.rooted for x in scales) else "per-channel scale"
    paths = [names[leaf] for x in scales for leaf in sorted(x.leaves)]
    # "bn.scale" and "bn.var" both belong to "bn".
    owners = dict.fromkeys(path.rpartition(".")[0] or path for path in paths)
    return Candidate(what, ", ".join(owners), where(next(iter(scales.values())).eqn), kernel, reason)


def kept(
    flat: FlatProgram,
    names: Sequence[str],
    claimed: Collection[Node],
    reasons: Mapping[Node, Sequence[str]],
    inside: str = "",
) -> Iterator[Candidate]:
    """Yield the candidates of a program and its inner programs that are not folded.

    Args:
      flat: the program.
      names: the names of the parameters.
      claimed: the operations that are folded.
      reasons: the known reasons why operations are not folded.
      inside: the reason why no operation of an inner program is folded; empty for the outermost program.
    """
    chains: dict[Node, list[ChannelStep]] = {}
    for node in flat.nodes:
        for inner in insides(node):
            yield from kept(inner, names, (), {}, inside or f"it is inside a `{node.name}`")
        step = None if node in claimed else step_of(node)
        if step is not None:
            # A step continues the chain that ends at its input, if nothing else uses that value.
            before = step.before.node if len(step.before.uses) == 1 else None
            chains[node] = [*(chains.pop(before, []) if before else []), step]
    for steps in chains.values():
        known = list(dict.fromkeys(reason for step in steps for reason in reasons.get(step.node, ())))
        if any(_scales(step, bool(known)) for step in steps):
            yield candidate(steps, names, reason=inside or "; ".join(known) or _why_alone(steps[0]))


def _scales(step: ChannelStep, at_product: bool) -> bool:
    """Return whether a step scales channels; a table of constants, such as rotary positions, does not count."""
    scale = step.scale
    return scale is not None and (sum(n > 1 for n in scale.sizes) < 2 or (at_product and bool(scale.leaves)))


def _why_alone(step: ChannelStep) -> str:
    """Return the reason why a chain, whose first step is `step`, is not next to a product."""
    before = step.before.node
    if jnp.issubdtype(step.before.aval.dtype, jnp.complexfloating):
        return "complex numbers are not folded"
    if before is not None and before.name in PRODUCTS:
        return f"the weights of the `{before.name}` before it depend on data, or differ between parts of the batch"
    if before is not None and _has_product(before):
        return f"the product before it is inside a `{before.name}`"
    # A product of data and data, or a root of data, is the end of a gate or a norm: x · sigmoid(y), x · rsqrt(var(x)).
    if before is not None and before.name in ("mul", "div", "rsqrt") and not any(x.static for x in before.inputs):
        return (
            "it scales a gate, or a norm that uses statistics of the data; for batch norm in training mode, use "
            "model.eval() in Flax NNX, use_running_average=True in Linen, inference_mode(model) in Equinox"
        )
    return "no convolution or dense product is next to it"


def _has_product(node: Node) -> bool:
    return any(x.name in PRODUCTS or _has_product(x) for inner in insides(node) for x in inner.nodes)
