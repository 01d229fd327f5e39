"""`StrategyChoice`: decides how a step is executed: as the trainer asks, as an earlier step was, or as is quickest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Jaxpr

from ...transforms._convolutions.as_products import has_convolution
from ...transforms._core.memory import largest_chunk
from .._members.strategy import Execution, in_turn
from .autotune import Tuning, fingerprint, recall, remember, tune
from .executor import Executor, StepInputs

# A loop over at most so many members is written out where it is no Python loop; one over more is compiled as a loop.
_MOST_COPIES = 16


@dataclass(eq=False)
class StrategyChoice:
    """Decides how the steps of a trainer are executed.

    Args:
      executor: executes and measures them.
      strategy: the strategy that the trainer was given.
      chunk_size: likewise.
      budget: the most bytes that the temporaries of a step may take, or None.
      seconds: how long "auto" may measure.
      cache: the directory in which it keeps what it has found, or None.

    Attributes:
      tuning: what was measured last; None where nothing was.
    """

    executor: Executor
    strategy: str
    chunk_size: int | None
    budget: int | None
    seconds: float
    cache: Path | None
    tuning: Tuning | None = field(default=None, init=False)
    _chosen: dict[Any, Execution] = field(default_factory=dict, init=False)
    _temporaries: dict[Any, int] = field(default_factory=dict, init=False)

    @property
    def asked(self) -> Execution:
        """Return the execution that the trainer was asked for."""
        return Execution(self.strategy, self.chunk_size)

    def choose(
        self, inputs: StepInputs, earlier: Execution | None, donate: bool, tell: Callable[[str], None]
    ) -> Execution:
        """Return how a step is executed: as the trainer asks, else as an earlier one was, else the quickest way."""
        if self.chunk_size is not None:
            chosen = Execution("vmap", self.chunk_size)
        elif self.strategy not in ("auto", "vmap"):
            chosen = Execution(self.strategy)
        elif earlier and self.strategy in ("auto", earlier.strategy) and self._fits(inputs, donate, earlier):
            # A resumed run goes on as it began: another execution rounds otherwise.
            chosen = earlier
        elif self.strategy == "auto":
            chosen = self._quickest(inputs, donate, tell)
        else:
            chosen = Execution("vmap") if self.budget is None else self._largest_chunk(inputs, donate)
        chosen = self._possible(inputs, chosen)
        return chosen if self._fits(inputs, donate, chosen) else self._largest_chunk(inputs, donate)

    def _possible(self, inputs: StepInputs, chosen: Execution) -> Execution:
        """Return an execution, or what replaces it in a trace, on a mesh, or on a machine with fewer devices."""
        if chosen == Execution("vmap", chosen.chunk_size):
            return chosen  # the usual case of a training loop, in which the arrays of the state are not visited
        on_mesh = self.executor.layout is not None
        if traced := inputs.is_traced:  # part of one program on one device
            chosen = chosen._replace(products=False, devices=1)
        if chosen.strategy == "loop" and (traced or on_mesh):
            # Written out, with a copy of the step for each member; "auto" has a compiled loop for many.
            many = self.strategy == "auto" and self._members_per_device(inputs) > _MOST_COPIES
            chosen = chosen._replace(strategy="map" if many else "unroll")
        if chosen.devices > len(jax.local_devices()):  # of a checkpoint that another machine has written
            chosen = chosen._replace(devices=1)
        return chosen

    def _quickest(self, inputs: StepInputs, donate: bool, tell: Callable[[str], None]) -> Execution:
        """Return the execution that "auto" chooses, found once for each kind of model and batch."""
        kind = donate, inputs.kind
        if kind in self._chosen:
            return self._chosen[kind]
        layout, jaxpr, traced = self.executor.layout, self.executor.member_program(inputs), inputs.is_traced
        # In a trace there is no time. Processes would each measure other times, and choose differently. Side effects
        # would happen; naming an axis of the mesh is one to JAX, but does nothing.
        alone = layout is None or layout.in_one_process
        effects = [effect for effect in jaxpr.effects if type(effect).__name__ != "NamedAxisEffect"]
        tuning = None
        if not traced and alone and self.seconds and not effects:
            tuning = self._tuned(jaxpr, inputs, donate, tell)
        if tuning is None:
            chosen = Execution("loop" if in_turn(jaxpr, jax.default_backend()) else "vmap")
        else:
            self.tuning, chosen = tuning, tuning.chosen
        if not traced:  # so that a later step that is not traced measures
            self._chosen[kind] = chosen
        return chosen

    def _tuned(self, jaxpr: Jaxpr, inputs: StepInputs, donate: bool, tell: Callable[[str], None]) -> Tuning | None:
        """Return what was measured for a program, now or before; None where there is no memory to measure."""
        layout, size = self.executor.layout, inputs.size
        on_mesh = None if layout is None else tuple(layout.mesh.shape.items())
        devices = len(jax.local_devices()) if on_mesh is None and jax.default_backend() == "cpu" else 1
        # With the seconds: a search that was short of time is not the answer for one that has more.
        key = fingerprint(jaxpr, size, inputs.axes, self.budget, self.seconds, on_mesh, devices, donate)
        tuning = recall(key, self.cache)
        if tuning is None:
            tuning = tune(
                partial(self.executor.temporaries, inputs, donate),
                partial(self.executor.seconds, inputs, donate),
                size=self._members_per_device(inputs),
                looped=layout is None,
                devices=min(devices, size),
                convolutions=has_convolution(jaxpr),
                seconds=self.seconds,
                budget=self.budget,
                where=f"{size} × {inputs.state._structure!r} on {jax.devices()[0].device_kind}",
                tell=tell,
            )
            if tuning is not None:
                remember(key, tuning, self.cache)
        return tuning

    def _members_per_device(self, inputs: StepInputs) -> int:
        layout, size = self.executor.layout, inputs.size
        return size if layout is None else layout.padded(size) // layout.devices

    def _fits(self, inputs: StepInputs, donate: bool, execution: Execution) -> bool:
        """Return whether a step that is executed so stays within the budget; compiles it to find out."""
        return self.budget is None or self._need(inputs, donate, execution) <= self.budget

    def _need(self, inputs: StepInputs, donate: bool, execution: Execution) -> int:
        """Return the bytes of a step's temporaries, found once for each kind of model and batch."""
        kind = execution, donate, inputs.kind
        if kind not in self._temporaries:
            self._temporaries[kind] = self.executor.temporaries(inputs, donate, execution)
        return self._temporaries[kind]

    def _largest_chunk(self, inputs: StepInputs, donate: bool) -> Execution:
        """Return the largest chunk for "vmap" whose temporaries fit into the budget."""
        kind, members = ("chunk", donate, inputs.kind), self._members_per_device(inputs)
        if kind not in self._chosen:
            assert self.budget is not None  # else everything fits

            def of_chunk(chunk: int) -> Execution:
                return Execution("vmap", None if chunk == members else chunk)

            found = largest_chunk("Trainer", lambda n: self._need(inputs, donate, of_chunk(n)), members, self.budget)
            self._chosen[kind] = of_chunk(found)
        return self._chosen[kind]
