"""Sequential micro-batches, against the whole batch."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.transforms import clipped_grad, grad, hvp, value_and_grad, vmap
from plurax.transforms.program import accumulate


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    return ((hidden - batch["y"]) ** 2).mean()


PARAMS = {"w": normal(3, 5), "v": normal(5, 2, seed=1)}
BATCH = {"x": normal(12, 3, seed=2), "y": normal(12, 2, seed=3)}


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 12])
def test_gradients_are_those_of_the_whole_batch(micro_batches: int) -> None:
    inside = accumulate(jax.value_and_grad(loss), micro_batches)
    outside = jax.value_and_grad(accumulate(loss, micro_batches))
    every = jax.jit(lambda *args: (jax.value_and_grad(loss)(*args), inside(*args), outside(*args)))
    expected, *found = every(PARAMS, BATCH)
    for ours in found:
        assert_close(ours, expected)
    if micro_batches == 3:
        assert_close(outside(PARAMS, BATCH), expected)  # outside of jit


def test_several_batches_negative_positions_and_keywords() -> None:
    def fun(scale: jax.Array, x: jax.Array, params: jax.Array, y: jax.Array, *, power: int) -> jax.Array:
        return (scale * (x @ params - y) ** power).mean()

    arguments = jnp.array(0.5), normal(6, 3), normal(3), normal(6, seed=4)
    ours = accumulate(fun, 3, batch_argnums=(1, -1))(*arguments, power=2)
    np.testing.assert_allclose(ours, fun(*arguments, power=2), rtol=1e-6)


def test_a_sum_adds_counts_and_keeps_their_dtype() -> None:
    def count(params: Any, x: jax.Array) -> Any:
        return {"hits": (x > 0).sum(), "all": x.shape[0], "total": x.sum()}

    x = normal(8, 3)
    ours = accumulate(count, 4, reduction="sum")(None, x)
    assert (int(ours["hits"]), int(ours["all"])) == (int((x > 0).sum()), 8)
    assert ours["hits"].dtype == jnp.int32
    np.testing.assert_allclose(ours["total"], x.sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_summed_in_higher_precision(dtype: Any) -> None:
    ours = accumulate(lambda _, x: x.sum(), 1024, reduction="sum")(None, jnp.ones(1024, dtype))
    assert (ours.dtype, float(ours)) == (dtype, 1024.0)  # a bfloat16 sum would stop at 256


def test_one_part_is_compiled_and_in_memory() -> None:
    def compiled(micro_batches: int) -> Any:
        batch = {"x": jnp.zeros((960, 64)), "y": jnp.zeros((960, 2))}
        params = {"w": jnp.zeros((64, 128)), "v": jnp.zeros((128, 2))}
        step = jax.jit(accumulate(jax.value_and_grad(loss), micro_batches))
        return step.lower(params, batch).compile()

    few, many = compiled(4), compiled(48)
    assert len(many.as_text().splitlines()) <= 1.1 * len(few.as_text().splitlines())
    whole, four = (compiled(k).memory_analysis().temp_size_in_bytes for k in (1, 4))
    assert four < 0.5 * whole
    assert many.memory_analysis().temp_size_in_bytes < four


def test_the_gradient_of_an_accumulation_stores_one_part() -> None:
    batch = {"x": jnp.zeros((960, 64)), "y": jnp.zeros((960, 2))}
    params = {"w": jnp.zeros((64, 128)), "v": jnp.zeros((128, 2))}
    whole, parts = (
        jax.jit(jax.grad(f)).lower(params, batch).compile().memory_analysis().temp_size_in_bytes
        for f in (loss, accumulate(loss, 12))
    )
    assert parts < 0.4 * whole


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        # No bias before a batch norm: its gradient would be rounding noise.
        self.dense, self.out = nnx.Linear(3, 4, use_bias=False, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(nnx.tanh(self.norm(self.dense(x)))))


def net_loss(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(x) - y) ** 2).mean()


def test_a_module_in_evaluation_has_the_gradients_of_the_whole_batch() -> None:
    model = nnx.view(Net(nnx.Rngs(0)), deterministic=True, use_running_average=True)
    x, y = normal(6, 3), normal(6, 2, seed=1)
    ours = accumulate(value_and_grad(net_loss), 3, batch_argnums=(1, 2))(model, x, y)
    assert_close(ours, jax.jit(value_and_grad(net_loss))(model, x, y))
    assert_close(jax.jit(value_and_grad(accumulate(net_loss, 3, batch_argnums=(1, 2))))(model, x, y), ours)


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_the_state_of_a_module_is_passed_between_parts(outside: bool) -> None:
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    x, y = normal(12, 3), normal(12, 2, seed=1)
    of_part = nnx.jit(value_and_grad(net_loss))
    parts = [of_part(theirs, np.asarray(x)[i : i + 4], np.asarray(y)[i : i + 4]) for i in (0, 4, 8)]
    expected = jax.tree.map(lambda *each: np.mean(each, 0), *parts)
    if outside:
        found = value_and_grad(accumulate(net_loss, 3, batch_argnums=(1, 2)))(ours, x, y)
    else:
        found = accumulate(value_and_grad(net_loss), 3, batch_argnums=(1, 2))(ours, x, y)
    assert_close(found, expected)
    assert int(ours.drop.rngs.count[...]) == 3
    assert_close(nnx.to_pure_dict(nnx.state(ours, nnx.BatchStat)), nnx.to_pure_dict(nnx.state(theirs, nnx.BatchStat)))


def test_a_module_may_be_the_function() -> None:
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(4, 3)
    np.testing.assert_allclose(accumulate(model, 2, batch_argnums=0)(x), (model(x[:2]) + model(x[2:])) / 2, rtol=1e-6)


@pytest.mark.slow
def test_under_vmap_jit_and_second_derivatives() -> None:
    ours = accumulate(loss, 3)
    many = jax.tree.map(lambda p: np.stack([p, 2 * p]), PARAMS)
    direction = jax.tree.map(np.cos, PARAMS)

    @jax.jit
    def of_both(many: Any, direction: Any) -> Any:
        gradients = [vmap(grad(f), (0, None))(many, BATCH) for f in (ours, loss)]
        return gradients, [hvp(lambda p, f=f: f(p, BATCH), (PARAMS,), (direction,)) for f in (ours, loss)]

    for found, expected in of_both(many, direction):
        assert_close(found, expected, atol=1e-5)


@pytest.mark.slow
def test_clipped_gradients_add_up() -> None:
    clipped = clipped_grad(loss, l2_clip_norm=0.1)
    both = jax.jit(lambda *args: (accumulate(clipped, 4, reduction="sum")(*args), clipped(*args)))
    assert_close(*both(PARAMS, BATCH))


def test_a_training_step_is_that_of_the_whole_batch() -> None:
    optimizer = optax.adam(1e-2)

    def train(gradient: Any) -> Any:
        params, state = PARAMS, optimizer.init(PARAMS)
        for _ in range(3):
            updates, state = optimizer.update(gradient(params, BATCH), state)
            params = optax.apply_updates(params, updates)
        return params

    assert_close(train(jax.jit(accumulate(jax.grad(loss), 4))), train(jax.jit(jax.grad(loss))), atol=1e-5)


def test_convolutions_keep_their_gradients() -> None:
    model = nnx.Conv(2, 3, (3, 3), rngs=nnx.Rngs(0))
    x = normal(4, 6, 5, 2)

    def of(model: Any, x: jax.Array) -> jax.Array:
        return (nnx.relu(model(x)) ** 2).mean()

    assert_close(*jax.jit(lambda *args: (accumulate(grad(of), 2)(*args), grad(of)(*args)))(model, x))


def test_per_example_keys_are_split_with_the_batch() -> None:
    keys = jax.random.split(jax.random.key(0), 4)

    def noise(_: Any, keys: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.normal)(keys).mean()

    np.testing.assert_allclose(accumulate(noise, 2)(None, keys), noise(None, keys), rtol=1e-6)


# Weights.

KEPT = jnp.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])  # 6 sequences of 3 tokens
SEQUENCES = normal(6, 3, 2, seed=5)


def masked_loss(params: Any, x: jax.Array, mask: jax.Array) -> Any:
    """Return a mean over tokens, and a mean of other numbers."""
    each = jnp.tanh(x @ params["w"]).sum(-1) * mask
    return each.sum() / mask.sum(), {"size": (jnp.abs(x).sum(-1) * mask).sum(keepdims=True) / mask.sum()}


def kept(x: jax.Array, mask: jax.Array) -> jax.Array:
    return mask.sum()


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("by_function", [True, False])
def test_a_weighted_mean_is_that_of_the_whole_batch(micro_batches: int, by_function: bool) -> None:
    """The last of three micro-batches keeps no token, so its mean is 0 / 0."""
    weights = kept if by_function else [int(part.sum()) for part in jnp.split(KEPT, micro_batches)]
    params = {"w": normal(2, 4)}
    options: Any = {"batch_argnums": (1, 2), "weights": weights}
    whole = jax.value_and_grad(masked_loss, has_aux=True)
    ours = accumulate(whole, micro_batches, **options)
    for transform in (lambda fun: fun, jax.jit):
        assert_close(transform(ours)(params, SEQUENCES, KEPT), transform(whole)(params, SEQUENCES, KEPT))
    plain = accumulate(whole, micro_batches, batch_argnums=(1, 2))(params, SEQUENCES, KEPT)
    assert micro_batches == 1 or not np.allclose(plain[0][0], whole(params, SEQUENCES, KEPT)[0][0], rtol=1e-2)


def test_weights_take_the_arguments_of_the_batch_in_their_order() -> None:
    fun = lambda x, scale, mask: (scale * x * mask).sum() / mask.sum()
    x, mask = normal(6), jnp.array([1, 0, 1, 1, 0, 1])
    found = accumulate(fun, 3, batch_argnums=(2, 0), weights=lambda x, mask: mask.sum())(x, 2.0, mask)
    np.testing.assert_allclose(found, fun(x, 2.0, mask), rtol=1e-6)


def test_weights_under_vmap_and_differentiated_from_outside() -> None:
    def mean(scale: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        return (jnp.sin(scale * x) * weight).sum() / weight.sum()

    ours = accumulate(mean, 4, batch_argnums=(1, 2), weights=lambda x, weight: weight.sum())
    scale, x, weight = jnp.array([0.5, 2.0, 3.0]), normal(8), jnp.abs(normal(8, seed=1))
    every = jax.vmap(jax.grad(ours, argnums=(0, 1, 2)), (0, None, None))(scale, x, weight)
    assert_close(every, jax.vmap(jax.grad(mean, argnums=(0, 1, 2)), (0, None, None))(scale, x, weight))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("of_weights", [np.int64, np.float64, np.uint8, jnp.bfloat16])
def test_weighted_results_keep_their_dtype(dtype: Any, of_weights: Any) -> None:
    x = jnp.arange(8).astype(dtype)
    found = accumulate(lambda _, x: x.mean(), 4, weights=np.array([3, 0, 1, 4]).astype(of_weights))(None, x)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, complex), (3 * 0.5 + 4.5 + 4 * 6.5) / 8, rtol=1e-2)


def test_the_state_of_a_module_passes_through_weighted_parts() -> None:
    model = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
    twin = nnx.clone(model)
    x = normal(8, 3)
    nnx.jit(accumulate(lambda model, x: model(x).mean(), 4, weights=[1.0, 2.0, 0.0, 1.0]))(model, x)
    for part in jnp.split(x, 4):
        twin(part)
    np.testing.assert_allclose(model.mean[...], twin.mean[...], rtol=1e-5)


# Refusals.


def adds_a_variable(model: Any, x: jax.Array) -> jax.Array:
    model.seen = nnx.Intermediate(x.sum())
    return x.sum()


def assigns(model: Any, x: jax.Array) -> jax.Array:
    model.bias[...] = model.bias[...] + x.sum()
    return x.sum()


@pytest.mark.parametrize(
    ("fun", "options", "x", "error", "message"),
    [
        (3, {}, jnp.ones(4), TypeError, "fun must be a function, a bound method or a module, but got 3"),
        (loss, {"micro_batches": 2.0}, jnp.ones(4), TypeError, "micro_batches must be an int, but got 2.0"),
        (loss, {"micro_batches": 0}, jnp.ones(4), ValueError, "micro_batches must be at least 1, but got 0"),
        (loss, {"reduction": "max"}, jnp.ones(4), ValueError, "reduction must be one of 'mean', 'sum', but got 'max'"),
        (loss, {"batch_argnums": ()}, jnp.ones(4), ValueError, "batch_argnums is empty"),
        (loss, {"batch_argnums": 2}, jnp.ones(4), ValueError, "batch_argnums selects argument 2, but the call has 2"),
        (
            loss,
            {"batch_argnums": 0},
            jnp.ones(4),
            TypeError,
            "`params` is a model; name only arguments with examples",
        ),
        (loss, {}, {"x": 1.0}, ValueError, r"`batch\['x'\]` is 1.0 .*; pass it in another argument"),
        (
            loss,
            {},
            {"x": jnp.ones(4), "y": jnp.ones(6)},
            ValueError,
            r"`batch\['x'\]` has 4 examples, but `batch\['y'\]` has 6",
        ),
        (
            loss,
            {},
            {},
            ValueError,
            "the arguments of batch_argnums hold no array, so there are no examples; pass some",
        ),
        (loss, {}, jnp.ones(5), ValueError, "micro_batches=2 does not divide the 5 examples; drop some"),
        (
            loss,
            {"batch_argnums": (1, -1)},
            jnp.ones(4),
            ValueError,
            r"batch_argnums=\(1, -1\) names argument `batch` twice",
        ),
        (
            lambda m, x: {"n": x.astype(int)},
            {},
            jnp.ones(4),
            TypeError,
            r"`output\['n'\]` is .* dtype int32, which has no mean over micro-batches; return floats",
        ),
        (
            lambda m, x: x > 0,
            {"reduction": "sum"},
            jnp.ones(4),
            TypeError,
            "`output` is .* dtype bool, which has no sum",
        ),
        (lambda m, x: m, {}, jnp.ones(4), TypeError, "`output` is Linear.*, which has no mean over micro-batches"),
        (lambda m, x: "loss", {}, jnp.ones(4), TypeError, "`output` is 'loss' of type str, which has no mean"),
        (
            loss,
            {"reduction": "sum", "weights": [1, 2]},
            jnp.ones(4),
            ValueError,
            "weights are for a mean, but got reduction='sum'; sums add up without weights",
        ),
        (loss, {"weights": 2.0}, jnp.ones(4), TypeError, "weights must be an array or a function, but got 2.0"),
        (
            loss,
            {"weights": [1.0, 2.0, 3.0]},
            jnp.ones(4),
            ValueError,
            r"weights must be a number for each of 2 micro-batches, but got an array of shape \(3,\)",
        ),
        (
            loss,
            {"weights": lambda batch: batch},
            jnp.ones(4),
            ValueError,
            r"weights must be a number for each of 2 micro-batches, but got results of shape \(2,\)",
        ),
        (loss, {"weights": [1j, 1]}, jnp.ones(4), TypeError, "weights must be real numbers, but got complex64"),
        (
            loss,
            {"weights": lambda batch: batch[0] > 0},
            jnp.ones(4),
            TypeError,
            "weights must be real numbers, but got bool; count a mask by its sum",
        ),
        *(
            (loss, {"weights": wrong}, jnp.ones(4), ValueError, "weights must be finite, not negative and not all zero")
            for wrong in ([1.0, -1.0], [1.0, np.nan], np.array([np.inf, 1]), [0, 0], lambda batch: -batch.sum())
        ),
        (adds_a_variable, {}, jnp.ones(4), ValueError, r"fun changes the structure of Linear \(`seen"),
        (assigns, {}, jnp.ones(4), ValueError, "fun assigns the parameter `bias`, but all calls share it"),
    ],
)
def test_results_that_cannot_be_accumulated_are_refused(
    fun: Any, options: Any, x: Any, error: Any, message: str
) -> None:
    options = {"micro_batches": 2, **options}
    with pytest.raises(error, match=f"^accumulate: .*{message}"):
        accumulate(fun, options.pop("micro_batches"), **options)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), x)


# Regressions.


def test_weak_types_of_a_batch_stay_weak() -> None:
    weak = jnp.full((4, 3), 1.0)
    assert accumulate(lambda w, x: (w * x).mean(), 2)(jnp.ones(3, jnp.bfloat16), weak).dtype == jnp.bfloat16


ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from plurax.transforms.program import accumulate

def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()

assert jax.device_count() == 4
w, x = jnp.sin(jnp.arange(6.0)).reshape(3, 2), jnp.cos(jnp.arange(72.0)).reshape(24, 3)
mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,))
value, gradient = jax.value_and_grad(loss)(w, x)
for check_vma, inside in ((True, True), (True, False), (False, True)):
    of = accumulate(jax.value_and_grad(loss), 3) if inside else jax.value_and_grad(accumulate(loss, 3))

    def of_part(w, x):
        mine = jax.lax.pcast(w, "i", to="varying") if check_vma else w  # else gradients are summed over devices
        return jax.lax.pmean(of(mine, x), "i")

    mapped = jax.shard_map(of_part, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=check_vma)
    found = jax.jit(mapped)(w, x)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-5, atol=1e-6)
    each = jax.jit(jax.shard_map(lambda w, x: of(w, x)[0][None], mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i")))
    expected = [loss(w, part) for part in jnp.split(x, 4)]
    np.testing.assert_allclose(each(w, x), expected, rtol=1e-5)
    assert len({float(x) for x in expected}) == 4

    def added(w, x):
        return of(w, x)[1]

    weighted = accumulate(loss, 3, weights=lambda x: x[0, 0] ** 2)  # weights differ between devices, as the data do
    alone = jax.shard_map(lambda w, x: weighted(w, x)[None], mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    np.testing.assert_allclose(jax.jit(alone)(w, x), [weighted(w, part) for part in jnp.split(x, 4)], rtol=1e-5)

    if check_vma:
        found = jax.jit(jax.shard_map(added, mesh=mesh, in_specs=(P(), P("i")), out_specs=P()))(w, x)
        np.testing.assert_allclose(found, 4 * gradient, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow
def test_inside_of_a_shard_map_on_four_devices() -> None:
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", ON_FOUR_DEVICES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


def test_a_custom_rule_in_a_module_assigns_nothing() -> None:
    @nnx.custom_vjp
    def apply(model: Any, x: jax.Array) -> jax.Array:
        return model(x)

    def forward(model: Any, x: jax.Array) -> Any:
        return apply(model, x), (model, x)

    def backward(saved: Any, cotangent: Any) -> Any:
        (updates, out), (model, _) = cotangent, saved
        return jax.tree.map(jnp.zeros_like, updates[0]), out @ model.kernel.T

    apply.defvjp(forward, backward)
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(4, 3)
    total = accumulate(lambda m, x: apply(m, x).sum(), 2, reduction="sum")(model, x)
    np.testing.assert_allclose(total, model(x).sum(), rtol=1e-5)


def test_colliding_names_with_dots_are_distinguished() -> None:
    outer, inner = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.ones(()))
    model = nnx.Dict({"a.b": outer, "a": nnx.Dict({"b": inner})})

    def count(model: Any, x: jax.Array) -> jax.Array:
        model["a.b"][...] += 1
        return x.sum()

    accumulate(count, 2)(model, jnp.ones(4))
    assert (float(outer[...]), float(inner[...])) == (2.0, 1.0)
