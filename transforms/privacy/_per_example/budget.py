"""Choose the quickest method whose compiled temporaries fit into a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from ..._core.memory import in_words, temporaries, warn_if_repeated
from ..._core.target import platform
from ._estimates.cpu_cost import costs
from .in_backward import in_backward
from .loss import ExampleProgram
from .methods import MethodChoice

# How many programs are compiled at most to find the uses whose norms are computed inside the backward pass.
_PROBES = 4


class _Needs:
    """The temporary bytes of each choice, which are compiled once; infinite if JAX cannot trace or compile it."""

    def __init__(self, api: str, compute: Callable[[MethodChoice], Any], budget: int) -> None:
        self._api, self._compute, self.budget = api, compute, budget
        self.found: dict[MethodChoice, tuple[float, bool]] = {}

    def of(self, choice: MethodChoice) -> float:
        """Return the bytes of a choice."""
        if choice not in self.found:
            try:
                self.found[choice] = temporaries(partial(self._compute, choice))
            except Exception as error:  # missing rules raise errors of any type, and so does a device without memory
                if str(error).startswith(f"{self._api}: "):
                    raise
                self.found[choice] = math.inf, False
        return self.found[choice][0]

    def may_fit(self, choice: MethodChoice) -> bool:
        """Return whether a choice is worth compiling: its share of a larger group is not far above the budget."""
        known = [
            (other.examples, need)
            for other, (need, _) in self.found.items()
            if (other.method, other.products) == (choice.method, choice.products) and other.examples > choice.examples
        ]
        return choice.examples == 1 or all(
            need == math.inf or need * choice.examples / n <= 2 * self.budget for n, need in known
        )


def within_budget(
    api: str,
    program: ExampleProgram,
    methods: Sequence[str],
    size: int,
    spmd_axis_name: str | None,
    compute: Callable[[MethodChoice], Any],
    budget: int,
) -> MethodChoice:
    """Return the quickest choice that fits.

    Args:
      api: the caller's name in errors.
      program: the loss.
      methods: the methods to choose from: one, or all three.
      size: the number of examples.
      spmd_axis_name: as for `jax.vmap`.
      compute: a function that computes a choice.
      budget: bytes.

    Raises:
      ValueError: no choice fits.

    Warns:
      UserWarning: as `warn_if_repeated`.
    """
    needs = _Needs(api, compute, budget)
    allowed = {*methods, "mixed"} if {"ghost", "book_keeping"} <= {*methods} else {*methods}
    alone = platform() == "cpu" and jax.device_count() == 1 and spmd_axis_name is None
    choices = _on_cpu(program, size) if alone else _on_accelerator(program, size, spmd_axis_name, needs, allowed)
    for choice in choices:
        if choice.method in allowed and needs.may_fit(choice) and needs.of(choice) <= budget:
            needed, repeated = needs.found[choice]
            words = f'method="{choice.method}", {choice.examples} of {size} examples at a time'
            warn_if_repeated(api, budget, int(needed), words, repeated)
            return choice._replace(why=f"{in_words(int(needed))} of temporaries fit into {in_words(budget)}")
    found = {choice: needed for choice, (needed, _) in needs.found.items() if math.isfinite(needed)}
    if not found:  # JAX can trace none of them: one example at a time, as without a budget
        return MethodChoice("vmap", 1, "one example at a time")
    least = min(found, key=found.__getitem__)
    smallest = f"{in_words(math.ceil(found[least]), up=True)}, for {least.examples} of {size} examples at a time"
    raise ValueError(
        f"{api}: no method fits into memory_budget={in_words(budget)}: the smallest found is {smallest}; "
        "raise the budget."
    )


def _on_cpu(program: ExampleProgram, size: int) -> Iterator[MethodChoice]:
    """Yield the choices for one CPU device, the quickest first by the cost model."""
    for cost in sorted(costs(program, size, size)):
        yield MethodChoice(cost.method, cost.examples, "", products=cost.products)


def _on_accelerator(
    program: ExampleProgram, size: int, spmd_axis_name: str | None, needs: _Needs, allowed: set[str]
) -> Iterator[MethodChoice]:
    """Yield the choices for an accelerator or several devices, the quickest first: large groups before small ones."""
    for n in (n for n in range(size, 0, -1) if size % n == 0):
        yield MethodChoice("book_keeping", n, "")
        ghost = MethodChoice("ghost", n, "")
        if n == size and "mixed" in allowed and not program.refusal and needs.of(ghost) <= needs.budget:
            yield from _mixed(sorted(in_backward(program.plan, spmd_axis_name).uses), size, needs)
        yield ghost
        yield MethodChoice("vmap", n, "")


def _mixed(uses: list[int], size: int, needs: _Needs) -> Iterator[MethodChoice]:
    """Yield the choice with the fewest uses inside the backward pass that fits, by bisection.

    The second pass goes back to the first of these uses only. So the later it is, the less is computed twice.
    """
    fewest, most = 0, len(uses)  # with `most` of the last uses it fits
    found = None
    for _ in range(_PROBES):
        if most - fewest <= 1:
            break
        middle = (fewest + most) // 2
        choice = MethodChoice("mixed", size, "", uses[-middle])
        if needs.of(choice) <= needs.budget:
            most, found = middle, choice
        else:
            fewest = middle
    if found is not None:
        yield found
