"""`PrivateStep`: the clipped sum, the noise, the division by the expected batch size, and the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..._calls.explicit_sharding import along, explicit_axes, with_automatic
from ..._calls.primals import trainable_of, with_trainable
from ..._core.arguments import describe, leaf_name
from ..._models.equinox import differentiated
from ..._models.split_model import SplitModel, split
from ..._runs.optimizer import check_opt_state
from .._per_example.clip_norms import ClipNorms
from .._per_example.clipped import clipped_grad
from .._per_example.methods import Method
from .accounting import Ledger
from .adaptive import adapted
from .model_loss import of_example, with_frozen, with_random_state, without_frozen
from .noise import add_noise, add_noise_and_count, privatizer
from .sampling import Batch
from .state import DPState, check_state

# Constants to fold into the key of a run or of a member, one for each purpose.
_NOISE, _MASKS, SAMPLING = (2**32 - i for i in (1, 2, 3))


@dataclass(frozen=True, eq=False)
class PrivateStep:
    """A step of `DPSGD` as a function to compile; the attributes are arguments of `DPSGD`.

    The optimizer is in the form of `as_transform`. The last two remember what was found out about states.
    """

    loss: Callable[..., Any]
    optimizer: Any
    ledger: Ledger
    clipping: ClipNorms
    method: Method
    keep_batch_dim: bool
    microbatch_size: int | None
    memory_budget: int | str | None
    has_aux: bool
    check_loss: bool
    checked_states: set[Any] = field(default_factory=set)
    random_state: dict[Any, set[str]] = field(default_factory=dict)

    def init(self, trainable: Any, key: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array | None]:
        """Return the optimizer state, the noise state, the key of dropout masks, and the clip norms, of one model."""
        opt_state = self.optimizer.init(trainable)
        # An optimizer that needs the value of the loss, which is not private, fails here and not at the first step.
        try:
            jax.eval_shape(self.optimizer.update, trainable, opt_state, trainable)
        except (TypeError, ValueError) as error:
            needs = "the optimizer must update from gradients and parameters alone, since the loss is not private"
            raise TypeError(f"DPSGD.init: {needs}, but it raises: {error}") from error
        noise_state = privatizer(self.ledger, jax.random.fold_in(key, _NOISE)).init(trainable)
        clip_norms = None if self.ledger.adaptive is None else self.clipping.array()
        return opt_state, noise_state, jax.random.fold_in(key, _MASKS), clip_norms

    def check_state(self, api: str, state: Any) -> None:
        """Raise if a state was made with another ledger or another optimizer, or is not a `DPState`."""
        check_state(api, state, self.ledger)
        trainable = differentiated(trainable_of(state.tree), integers=True)
        init = self.optimizer.init if state.members is None else jax.vmap(self.optimizer.init)
        check_opt_state(api, state.opt_state, init, trainable, self.checked_states)

    def example_loss(self, tree: Any, key: jax.Array) -> Callable[..., Any]:
        """Return the loss as a function of the trainable parameters, an example's index, and its batch."""
        return of_example(self.loss, tree, key, self.has_aux)

    def __call__(self, state: DPState, batch: Batch) -> tuple[DPState, dict[str, jax.Array]]:
        """Return the state after a step, and the metrics."""
        _, axes = explicit_axes((batch.arguments, batch.is_padding_example))
        if not axes:
            return self._of_members(state, batch)

        # Over explicit mesh axes JAX checks the sharding of each operation. Trace the step with automatic axes
        # instead; then shard the new state like the old one, and replicate the metrics on every device.
        def place(out: Any) -> list[PartitionSpec]:
            return [along(axes, x) for x in jax.tree.leaves(state)] + [PartitionSpec()] * len(jax.tree.leaves(out[1]))

        return with_automatic("DPSGD.step", self._of_members, (state, batch), axes, place)

    def changing(self, state: DPState, frozen: Any, batch: Batch) -> tuple[DPState, dict[str, jax.Array]]:
        """Return the state after a step without the frozen arrays of its models, and the metrics.

        Args:
          state: a state whose tree is the first result of `without_frozen`. Its memory may be reused.
          frozen: the second result.
          batch: the batch of the step.
        """
        after, metrics = self(replace(state, tree=with_frozen(state.tree, frozen)), batch)
        return replace(after, tree=without_frozen(after.tree, self.random_state)[0]), metrics

    def _of_members(self, state: DPState, batch: Batch) -> tuple[DPState, dict[str, jax.Array]]:
        """Take a step of a model or of all members of an ensemble; return the new state and the metrics."""
        arrays = (state.tree, state.opt_state, state.noise_state, state.clip_norms, state.mask_key)
        if state.members is None:
            after, metrics = self.of_one(arrays, state.step, batch)
        else:

            def of_member(parts: SplitModel, *arrays: Any) -> Any:
                # Under `vmap` the arrays of the ensemble have no member axis: they are the arrays of one model.
                member = split(parts.merge().__plurax_member__())
                (tree, *rest), metrics = self.of_one((member, *arrays), state.step, batch)
                return (tree.trainable, tree.rest, *rest), metrics

            (trainable, rest, *others), metrics = jax.vmap(of_member)(*arrays)
            after = (SplitModel(state.tree.structure, trainable, rest), *others)
        tree, opt_state, noise_state, clip_norms = after
        changed = {"tree": tree, "opt_state": opt_state, "noise_state": noise_state, "clip_norms": clip_norms}
        return replace(state, **changed, step=state.step + 1), metrics

    def of_one(
        self, arrays: tuple[Any, ...], step: jax.Array, batch: Batch
    ) -> tuple[tuple[Any, ...], dict[str, jax.Array]]:
        """Return the arrays of one model after a step, and its metrics."""
        import optax

        tree, opt_state, noise_state, clip_norms, mask_key = arrays
        clipping = self.clipping if clip_norms is None else self.clipping.replaced(clip_norms)
        trainable = differentiated(trainable_of(tree), integers=True)
        gradient = clipped_grad(
            self.example_loss(tree, jax.random.fold_in(mask_key, step)),
            has_aux=self.has_aux,
            batch_argnums=tuple(range(1, 2 + len(batch.arguments))),
            return_values=True,
            return_grad_norms=True,
            # With half-precision parameters, gradients are summed and noise is added in float32.
            dtype=jnp.result_type(jnp.float32, *jax.tree.leaves(trainable)),
            l2_clip_norm=clipping.given(),
            automatic=clipping.automatic,
            method=self.method,
            keep_batch_dim=self.keep_batch_dim,
            microbatch_size=self.microbatch_size,
            memory_budget=self.memory_budget,
        )
        # The indices of the examples in the batch, from which each example's dropout masks are drawn.
        numbers = jnp.arange(len(batch.is_padding_example), dtype=jnp.uint32)
        sums, each = gradient(trainable, numbers, *batch.arguments, is_padding_example=batch.is_padding_example)
        real = ~jnp.asarray(batch.is_padding_example)
        within, used = clipping.within(each.grad_norms), {}
        if clip_norms is None:
            noisy, noise_state = add_noise(self.ledger, sums, noise_state)
        else:
            assert self.ledger.adaptive is not None
            centered = jnp.where(real[:, None], within - jnp.float32(0.5), 0)
            counts = centered.sum(0).reshape(clip_norms.shape)
            noisy, counts, noise_state = add_noise_and_count(self.ledger, sums, counts, clip_norms, noise_state)
            used = {"l2_clip_norm": clip_norms}
            size, first = self.ledger.expected_batch_size, self.clipping.norms
            clip_norms = adapted(self.ledger.adaptive, clip_norms, counts, size, first)
        # Divide by the expected size, which is public. The sampled size is not, and would need separate noise.
        noisy = jax.tree.map(lambda x, p: (x / self.ledger.expected_batch_size).astype(p.dtype), noisy, trainable)
        updates, opt_state = self.optimizer.update(noisy, opt_state, trainable)
        trained = optax.apply_updates(trainable, updates)
        # Count the uses of random keys on an example of zeros, so that the counts cannot depend on the data.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x[:1] if self.keep_batch_dim else x[0]), batch.arguments)
        tree = with_random_state(self.loss, with_trainable(tree, trained), zeros, self.has_aux)

        def mean(x: jax.Array) -> jax.Array:
            return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, 0).sum(0) / real.sum()

        metrics = {"loss": mean(each.values), "clipped": mean(~within.all(axis=-1)), **used}
        metrics |= jax.tree.map(mean, _metrics_of(each.aux, metrics))
        return (tree, opt_state, noise_state, clip_norms), metrics


def _metrics_of(aux: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the auxiliary output of a loss as metrics: the entries of a dict, or anything else as "aux".

    Args:
      aux: the auxiliary output.
      own: the metrics of `DPSGD`, whose names it must not have.
    """
    metrics = dict(aux) if isinstance(aux, Mapping) else {} if aux is None else {"aux": aux}
    if taken := own.keys() & metrics.keys():
        raise ValueError(f"DPSGD: the auxiliary output of the loss has `{min(taken)}`, which DPSGD uses; rename it.")
    for path, leaf in jax.tree.leaves_with_path(aux):
        if not isinstance(leaf, jax.Array) or not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            where = leaf_name("aux", path)
            raise TypeError(f"DPSGD: aux must hold numeric arrays, but `{where}` is {describe(leaf)}; leave it out.")
    return metrics
