"""`StrategyChoice`: decides how a step is executed: as the trainer asks, as an earlier step was, or as is quickest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from ...transforms._convolutions.as_products import has_convolution
from ...transforms._core.compat import Tracer
from ...transforms._core.memory import largest_chunk
from .._members.sharding import Layout
from .._members.strategy import Execution, in_turn
from .autotune import Tuning, fingerprint, recall, remember, tune
from .executor import Executor, StepInputs

# A loop over at most so many members is written out, with a copy of the step for each; one over more is compiled as a
# loop.
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
    _fitting: dict[Any, bool] = field(default_factory=dict, init=False)

    @property
    def asked(self) -> Execution:
        """Return the execution that the trainer was asked for."""
        return Execution(self.strategy, self.chunk_size)

    def choose(
        self, inputs: StepInputs, earlier: Execution | None, donate: bool, tell: Callable[[str], None]
    ) -> Execution:
        """Return how a step is executed: as the trainer asks, else as an earlier one was, else the quickest way."""
        if self.strategy == "vmap" and self.budget is None:
            # The usual case of a training loop: nothing to look up, so the arrays of the state are not visited.
            chunk_size = self.chunk_size
            if chunk_size is None and earlier and earlier.strategy == "vmap":
                chunk_size = earlier.chunk_size
            return Execution("vmap", chunk_size)
        traced = inputs.is_traced
        if self.chunk_size is not None:
            chosen = Execution("vmap", self.chunk_size)
        elif self.strategy not in ("auto", "vmap"):
            chosen = Execution(self.strategy)
        elif earlier and self.strategy in ("auto", earlier.strategy) and self._fits(inputs, earlier):
            # A resumed run goes on as it began: another execution rounds otherwise.
            chosen = earlier
        elif self.strategy == "auto":
            chosen = self._quickest(inputs, donate, traced, tell)
        else:
            chosen = self._largest_chunk(inputs)
        # That may not be possible here: a traced step is part of one program on one device, and a mesh has one program.
        found = chosen
        if traced:
            chosen = chosen._replace(products=False, devices=1)
        if chosen.strategy == "loop" and (traced or self.executor.layout is not None):
            many = self.strategy == "auto" and self._members_per_device(inputs) > _MOST_COPIES
            chosen = chosen._replace(strategy="map" if many else "unroll")
        if chosen.devices > len(jax.local_devices()):  # of a checkpoint that another machine has written
            chosen = chosen._replace(devices=1)
        if chosen != found and not self._fits(inputs, chosen):
            return self._largest_chunk(inputs)
        return chosen

    def _quickest(self, inputs: StepInputs, donate: bool, traced: bool, tell: Callable[[str], None]) -> Execution:
        """Return the execution that "auto" chooses, found once for each kind of model and batch."""
        kind = donate, inputs.kind
        if kind in self._chosen:
            return self._chosen[kind]
        jaxpr = self.executor.member_program(inputs)
        # In a trace there is no time. Processes would each measure other times, and choose differently. Side effects
        # would happen; naming an axis of the mesh is one to JAX, but does nothing.
        traced = traced or isinstance(jnp.zeros(()), Tracer)
        alone = self.executor.layout is None or self.executor.layout.in_one_process
        effects = [effect for effect in jaxpr.effects if type(effect).__name__ != "NamedAxisEffect"]
        tuning = None
        if not traced and alone and self.seconds and not effects:
            tuning = self._tuned(jaxpr, inputs, donate, tell)
        if tuning is None:
            chosen = self._by_rule(jaxpr, traced, inputs)
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
        # Members that an earlier step has left on other devices would have to be moved, which takes time too.
        spread = Layout.around(inputs.state)
        where = on_mesh, None if spread is None else spread.devices
        key = fingerprint(jaxpr, size, inputs.axes, self.budget, where, devices, donate)
        tuning = recall(key, self.cache)
        if tuning is not None and not tuning.is_cut_short_of(self.seconds):
            return tuning
        tuning = tune(
            partial(self.executor.trial, inputs, donate),
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

    def _by_rule(self, jaxpr: Jaxpr, traced: bool, inputs: StepInputs) -> Execution:
        """Return a strategy without measuring, within the budget."""
        strategy = "vmap"
        if in_turn(jaxpr, jax.default_backend()):
            strategy = "loop"
            if traced or self.executor.layout is not None:
                strategy = "unroll" if self._members_per_device(inputs) <= _MOST_COPIES else "map"
        chosen = Execution(strategy)
        return chosen if self._fits(inputs, chosen) else self._largest_chunk(inputs)

    def _fits(self, inputs: StepInputs, execution: Execution) -> bool:
        """Return whether a step that is executed so stays within the budget; compiles it to find out."""
        if self.budget is None:
            return True
        kind = execution, inputs.kind
        if kind not in self._fitting:
            self._fitting[kind] = self._temporaries(inputs, execution) <= self.budget
        return self._fitting[kind]

    def _temporaries(self, inputs: StepInputs, execution: Execution) -> int:
        """Return the bytes of a step's temporaries; one that keeps its state, as `Trainer.step` takes them."""
        return self.executor.trial(inputs, False, execution).compile()

    def _members_per_device(self, inputs: StepInputs) -> int:
        layout, size = self.executor.layout, inputs.size
        return size if layout is None else layout.padded(size) // layout.devices

    def _largest_chunk(self, inputs: StepInputs) -> Execution:
        """Return the largest chunk for "vmap" whose temporaries fit into the budget."""
        kind = "chunk", inputs.kind
        if kind not in self._chosen:
            members = self._members_per_device(inputs)

            def of_chunk(chunk: int) -> Execution:
                return Execution("vmap", None if chunk == members else chunk)

            assert self.budget is not None  # else everything fits
            chunk = largest_chunk("Trainer", lambda n: self._temporaries(inputs, of_chunk(n)), members, self.budget)
            self._chosen[kind] = of_chunk(chunk)
        return self._chosen[kind]
