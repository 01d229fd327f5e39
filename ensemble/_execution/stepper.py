"""`Stepper`: take the training steps of all members, and choose the execution of each."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import jax

from ...transforms._convolutions.as_products import has_convolution
from ...transforms._core.axes import Axes, axes_per_argument, mapped_size
from ...transforms._core.compat import Jaxpr
from ...transforms._core.memory import largest_chunk
from ...transforms._core.target import device, platform
from ...transforms._runs.manifest import TrainerSettings
from ...transforms._runs.source import Stacked, copied, first_of
from .._members.sharding import Layout
from .._members.strategy import Execution, by_rule
from .._step.member_step import MemberStep
from .._step.shared_step import SharedStep
from .._step.state import TrainState
from .autotune import Tuning, fingerprint, recall, remember
from .data_parallel import check_split
from .executor import Executor, StepInputs
from .forms import State, Unstacked, arrays_of, stacked, unstacked
from .last_step import LastStep
from .search import Search, chunk_of

# Where "loop" is not possible, "auto" replaces it with "unroll" for at most this many members, and with "map" for more.
_MOST_COPIES = 16


class Stepper:
    """Take training steps of all members with the execution that is requested, used earlier, or fastest.

    Args:
      step: the step of one member.
      shared_step: the step of the parameters that all members share.
      layout: the layout of the members on a mesh; None without a mesh.
      in_axes: the axes of a batch, as for `Trainer`.
      asked: the strategy and the chunk size that were passed to the trainer.
      budget: the maximum bytes of the temporaries of a step, or None.
      seconds: how long the steps of the trials of "auto" may take beyond those of its best execution.
      cache: the directory in which "auto" stores its results, or None.

    Attributes:
      executor: runs the steps.
      search: the latest search of "auto" for an execution; None if there is none.
      last: the last step, if it left its state usable and can be repeated without choosing again.
      digests: the digests of the programs that checkpoints have stored, by the kind of their inputs.
    """

    def __init__(
        self,
        step: MemberStep,
        shared_step: SharedStep,
        layout: Layout | None,
        in_axes: Axes,
        asked: Execution,
        budget: int | None,
        seconds: float,
        cache: Path | None,
    ) -> None:
        self._step, self._in_axes, self._asked = step, in_axes, asked
        self._budget, self._seconds, self._cache = budget, seconds, cache
        self.executor = Executor(step, shared_step, layout)
        self.search: Search | None = None
        self.last: LastStep | None = None
        self.digests: dict[Any, str] = {}
        # The axes of the arguments, by the number of members, structure and shapes, for which they were checked.
        self._axes: dict[Any, tuple[Axes, ...]] = {}
        self._checked_splits: set[Any] = set()
        self._searches: dict[Any, Search | Execution] = {}
        self._chunks: dict[Any, Execution] = {}
        self._temporaries: dict[Any, int] = {}

    @property
    def freezes(self) -> bool:
        """Return whether a member stops when its loss or gradients are not finite."""
        return self._step.freeze

    @property
    def columns(self) -> list[str]:
        """Return the names of the hyperparameters with a number for each member, the columns of the history."""
        return [name for name, values in self._numbers.items() if isinstance(values, list)]

    @property
    def _numbers(self) -> dict[str, Any]:
        return {**self._step.optimizer.numbers, **self._step.loss.numbers}

    def settings(self, execution: Execution | None = None) -> TrainerSettings:
        """Return the settings that a checkpoint stores, with an execution of the steps; None for the requested one."""
        execution = execution or self._asked
        return TrainerSettings(self._step.optimizer.name, self._numbers, **execution._asdict())

    def arguments(self, batch: Any, size: int) -> tuple[tuple[Any, ...], tuple[Axes, ...]]:
        """Return the arguments of the loss after the model, and the axes of each; check them for `size` members.

        Several batches that are `Stacked` have the axes of one of them.

        Raises:
          ValueError: the batch does not match `in_axes`.
        """
        several = isinstance(batch, Stacked)
        batch = batch.arrays if several else batch
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        leaves, treedef = jax.tree.flatten(arguments)
        kind = size, treedef, tuple([getattr(x, "shape", ()) for x in leaves]), several
        axes = self._axes.get(kind)
        if axes is None:
            one = jax.eval_shape(first_of, arguments) if several else arguments
            axes = axes_per_argument("Trainer.step", self._in_axes, one)
            # With None for the model, so that errors use the argument names of the loss.
            what = "the number of members"
            mapped_size("Trainer.step", self._step.loss.fun, (None, *one), {}, (None, *axes), None, size, what)
            self._axes[kind] = axes
        return arguments, axes

    def advance(
        self,
        state: State,
        batch: Any,
        execution: Execution | None = None,
        *,
        donate: bool = False,
        search: Search | Tuning | None = None,
        left: int | None = None,
    ) -> tuple[State, dict[str, jax.Array], Execution]:
        """Take a step, or one for each of several batches; return the new state, the metrics, and the execution.

        Args:
          state: the state before the step.
          batch: as for `Trainer.step`, or several that are `Stacked`.
          execution: the execution of a step of an earlier run, used again if the settings of the trainer allow it.
          donate: whether the step reuses the memory of `state`.
          search: the search that the run follows, or the results of that of an earlier run, from which a new one goes
            on; None for the search of the kind of these inputs.
          left: the number of steps of the run from here on, if known.
        """
        several = isinstance(batch, Stacked)
        inputs = StepInputs(state, *self.arguments(batch, state._size), batch.steps if several else None)
        layout = self.executor.layout
        if layout is not None and layout.shards > 1:
            # Checked once for each kind of inputs, but again after a traced step, which has no values to compare.
            kind = inputs.kind
            if kind not in self._checked_splits and check_split(self._step, layout, inputs.first):
                self._checked_splits.add(kind)
        if donate and not several:
            inputs = inputs._replace(arguments=copied(inputs.arguments))
        asked, fixed = self._asked, None
        if asked.strategy != "auto" or asked.chunk_size is not None:
            fixed = asked._replace(strategy="vmap") if asked.strategy == "auto" else asked
            if asked == Execution("vmap") and execution is not None and execution.strategy == "vmap":
                fixed = execution  # a resumed run keeps its chunks
        elif execution is not None and self._fits(inputs, donate, execution):
            fixed = execution  # a resumed run repeats its execution, since another one rounds differently
        if fixed is None:
            found = search if isinstance(search, Search) else self._search_for(inputs, donate, search)
            if isinstance(found, Search):
                return self._follow(found, inputs, donate, left)
            fixed = found
        fixed = self._fitting(inputs, donate, fixed)
        after, metrics = self.executor.execute(fixed, inputs, donate)
        self._remember(inputs, fixed, after, donate)
        return after, metrics, fixed

    def _remember(self, inputs: StepInputs, execution: Execution, after: State, donate: bool) -> None:
        """Remember a step that can be repeated without choosing its execution again."""
        alone = execution.devices == 1 and execution.strategy != "loop" and self.executor.layout is None
        if (
            not alone
            or donate
            or self.executor.takes_turns(inputs)
            or not isinstance(before := inputs.state, TrainState)
        ):
            return
        assert isinstance(after, TrainState)
        if (held := after._held) is not None:  # not made at once
            program = self.executor.program(execution, inputs, donate, held.packing)
            self.last = LastStep(program, before, after, inputs.arguments)

    def _follow(
        self, search: Search, inputs: StepInputs, donate: bool, left: int | None
    ) -> tuple[State, dict[str, jax.Array], Execution]:
        """Take a step with the execution that a search wants next, and report it."""
        self.search, steps = search, inputs.steps or 1
        if search.is_new:
            return self._first(search, inputs, donate)
        if search.size != inputs.size:
            search.stop("members left the run")
        execution = search.next(steps, left, partial(self.executor.lower, inputs, donate))
        if search.block is None:
            execution = self._fitting(inputs, donate, execution)
            after, metrics = self.executor.execute(execution, inputs, donate)
        else:
            if search.starts_block():
                # Before the clock starts, the state gets the form that this execution needs, which may compile too.
                loops = execution.strategy == "loop" and donate
                inputs = inputs._replace(state=unstacked(inputs.state) if loops else _not_unstacked(inputs.state))
                jax.block_until_ready((arrays_of(inputs.state), inputs.arguments))
                search.begin()
            try:
                after, metrics = self.executor.execute(execution, inputs, donate)
                if search.ends_block(steps):
                    jax.block_until_ready((arrays_of(after), metrics))
            except Exception as error:  # such as too little memory for a candidate
                if execution == search.best or _is_deleted(inputs.state):
                    raise
                search.failed(error)
                return self._follow(search, inputs, donate, left)
        search.took(steps)
        if not search.is_open and execution == search.best:  # not the candidate whose trial ended the search
            self._remember(inputs, execution, after, donate)
        return after, metrics, execution

    def _first(self, search: Search, inputs: StepInputs, donate: bool) -> tuple[State, dict[str, jax.Array], Execution]:
        """Take the first step with the execution of the rule, or with another one if that fails."""
        start, first, others = time.perf_counter(), None, search.others()
        while True:
            try:
                execution = self._fitting(inputs, donate, search.best)
                after, metrics = self.executor.execute(execution, inputs, donate)
                jax.block_until_ready((arrays_of(after), metrics))
            except Exception as error:  # such as an operation that cannot be batched
                first = first or error
                if _is_deleted(inputs.state) or (instead := next(others, None)) is None:
                    raise first from None
                search.instead(instead, error)
            else:
                search.first(execution, time.perf_counter() - start)
                return after, metrics, execution

    def _fitting(self, inputs: StepInputs, donate: bool, execution: Execution) -> Execution:
        """Return an execution, or its replacement where it is not possible or does not fit into the budget."""
        possible = self._possible(inputs, execution)
        return possible if self._fits(inputs, donate, possible) else self._largest_chunk(inputs, donate)

    def _possible(self, inputs: StepInputs, chosen: Execution) -> Execution:
        """Return an execution, or its replacement in a trace, on a mesh, or on a machine with fewer devices."""
        if chosen == Execution("vmap", chosen.chunk_size):
            return chosen  # the common case, handled early because `is_traced` visits all arrays of the state
        on_mesh = self.executor.layout is not None
        if traced := inputs.is_traced:  # part of one program on one device, which may be differentiated
            # XLA is slow at convolutions that are batched or in a loop, so without products the members take turns.
            chosen = Execution("loop") if chosen.products else chosen._replace(devices=1)
        if chosen.strategy == "loop" and (traced or on_mesh or inputs.trains_shared):
            # Unrolled, with a copy of the step for each member; "auto" uses a compiled loop for many members.
            many = self._asked.strategy == "auto" and self._members_per_device(inputs) > _MOST_COPIES
            chosen = chosen._replace(strategy="map" if many else "unroll")
        if chosen.devices > len(jax.local_devices()):  # from a checkpoint that was written on another machine
            chosen = chosen._replace(devices=1)
        return chosen

    def _search_for(self, inputs: StepInputs, donate: bool, earlier: Tuning | None = None) -> Search | Execution:
        """Return the search for a kind of model and batch; an execution where nothing can be tried."""
        kind, traced = (donate, inputs.kind), inputs.is_traced
        if kind in self._searches and earlier is None:
            found = self._searches[kind]
            return found.best if traced and isinstance(found, Search) else found
        layout, jaxpr = self.executor.layout, self.executor.member_program(inputs)
        rule = by_rule(jaxpr, platform())
        # Nothing can be timed inside a trace. Several processes would measure different times and choose differently.
        if traced or not self._seconds or not (layout is None or layout.in_one_process):
            rule = rule if earlier is None else earlier.chosen
            if not traced:  # not stored for a traced step, so that a later untraced step begins a search
                self._searches[kind] = rule
            return rule
        key = self._fingerprint(jaxpr, inputs, donate)
        where = f"{inputs.size} × {inputs.state._structure!r} on {jax.devices()[0].device_kind}"
        known = earlier or recall(key, self._cache) or Tuning(rule, (), where, 0.0)
        sizes = inputs.size, self._members_per_device(inputs)
        search = self._searches[kind] = Search(
            known,
            self._candidates(
                rule, has_convolution(jaxpr), sizes[1], one_program=layout is not None or inputs.trains_shared
            ),
            sizes,
            self._seconds,
            self._budget,
            partial(remember, key, directory=self._cache),
        )
        return search

    def _fingerprint(self, jaxpr: Jaxpr, inputs: StepInputs, donate: bool) -> str:
        layout = self.executor.layout
        on_mesh = None if layout is None else tuple(layout.mesh.shape.items())
        steps = inputs.steps or 1
        return fingerprint(
            jaxpr, inputs.size, inputs.axes, self._budget, on_mesh, len(jax.local_devices()), donate, steps
        )

    def _candidates(self, rule: Execution, convolutions: bool, members: int, *, one_program: bool) -> list[Execution]:
        """Return the executions that may be faster than that of the rule, the most promising first."""
        on_mesh, spread = self.executor.layout is not None, 1
        if not on_mesh and platform() == "cpu":
            spread = min(len(jax.local_devices()), members)
        # By what was fastest for networks of several kinds; unrolled programs take the longest to compile.
        ways = ("map", "vmap") if one_program else ("loop", "map", "vmap")
        found = [rule._replace(strategy=x, devices=spread) for x in ("vmap", "map", "unroll") if spread > 1]
        found += [rule._replace(strategy=x) for x in ways]
        if (chunk := chunk_of(members, members // 4, rule)) is not None:
            found.insert(-1, chunk)
        found.append(rule._replace(strategy="unroll"))
        if convolutions:
            slow = "map" if platform() == "cpu" else None  # XLA is slow at convolutions in a loop there
            found += [Execution(x, products=not rule.products) for x in ways if x != slow]
        return [one for one in dict.fromkeys(found) if one != rule]

    def _members_per_device(self, inputs: StepInputs) -> int:
        layout, size = self.executor.layout, inputs.size
        return size if layout is None else layout.padded(size) // layout.devices

    def _fits(self, inputs: StepInputs, donate: bool, execution: Execution) -> bool:
        """Return whether a step with this execution fits into the budget; compiles it to find out."""
        return self._budget is None or self._need(inputs, donate, execution) <= self._budget

    def _need(self, inputs: StepInputs, donate: bool, execution: Execution) -> int:
        """Return the bytes of a step's temporaries, determined once for each kind of model and batch, and device."""
        kind = execution, donate, inputs.kind, device()
        if kind not in self._temporaries:
            self._temporaries[kind] = self.executor.temporaries(inputs, donate, execution)
        return self._temporaries[kind]

    def _largest_chunk(self, inputs: StepInputs, donate: bool) -> Execution:
        """Return the largest chunk for "vmap" whose temporaries fit into the budget."""
        kind, members = (donate, inputs.kind, device()), self._members_per_device(inputs)
        if kind not in self._chunks:
            assert self._budget is not None  # otherwise everything fits

            def of_chunk(chunk: int) -> Execution:
                return Execution("vmap", None if chunk == members else chunk)

            found = largest_chunk("Trainer", lambda n: self._need(inputs, donate, of_chunk(n)), members, self._budget)
            self._chunks[kind] = of_chunk(found)
        return self._chunks[kind]


def _not_unstacked(state: State) -> State:
    return stacked(state) if isinstance(state, Unstacked) else state


def _is_deleted(state: State) -> bool:
    """Return whether a failed step has used up the memory of its state."""
    return any(x.is_deleted() for x in arrays_of(state) if isinstance(x, jax.Array))
