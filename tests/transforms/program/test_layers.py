"""Stacked and scanned layers, against a loop over the layers."""

import dataclasses
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import clipped_grad, grad, hvp, jacobian, jvp, per_sample_grad, value_and_grad, vmap
from plurax.transforms.program import profile, scan_layers, stack_layers


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class Block(nnx.Module):
    """A residual block; optionally with statistics and dropout."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, noisy: bool = False, act: Any = nnx.tanh) -> None:
        self.norm = nnx.BatchNorm(width, rngs=rngs) if noisy else nnx.LayerNorm(width, rngs=rngs)
        self.dense = nnx.Linear(width, width, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs) if noisy else None
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.act(self.dense(self.norm(x)))
        return x + (self.drop(y) if self.drop else y)


class Net(nnx.Module):
    """A network with its blocks in a loop or in a scan."""

    def __init__(self, rngs: nnx.Rngs, *, scanned: bool, depth: int = 5, **options: Any) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        blocks = [Block(4, rngs) for _ in range(depth)]
        self.scanned, self.options = scanned, tuple(options.items())
        self.blocks = stack_layers(blocks) if scanned else nnx.List(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        if self.scanned:
            return scan_layers(self.blocks, x, **dict(self.options))[0]
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(x) - y) ** 2).mean()


def both(**options: Any) -> tuple[Net, Net]:
    return Net(nnx.Rngs(7), scanned=True, **options), Net(nnx.Rngs(7), scanned=False)


BATCH = normal(6, 3), normal(6, 4, seed=1)


def as_looped(tree: Any) -> dict[str, np.ndarray]:
    """Return arrays by path, with those of a stack split into its layers."""
    found: dict[str, np.ndarray] = {}
    for path, value in nnx.to_flat_state(tree):
        name = ".".join(map(str, path))
        if name.startswith("blocks.layer."):
            found |= {name.replace("layer", str(i)): np.asarray(x) for i, x in enumerate(value[...])}
        else:
            found[name] = np.asarray(value[...])
    return found


def assert_close(ours: Any, theirs: Any, atol: float = 2e-6) -> None:
    ours, theirs = as_looped(ours), as_looped(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=atol, rtol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def of_the_loop() -> Any:
    """Return the value and gradient of the looped network."""
    return jax.jit(value_and_grad(loss))(both()[1], *BATCH)


@pytest.mark.parametrize(
    "options",
    [{}, {"remat": True}, {"remat": jax.checkpoint_policies.dots_saveable}, {"unroll": 2}, {"unroll": 9}],
    ids=["plain", "remat", "policy", "unroll", "unroll-all"],
)
def test_values_and_gradients_are_those_of_the_loop(options: dict[str, Any], of_the_loop: Any) -> None:
    scanned, _ = both(**options)
    of_both = nnx.jit(lambda model: (value_and_grad(loss)(model, *BATCH), nnx.grad(loss)(model, *BATCH)))
    (value, gradient), of_nnx = of_both(scanned)
    expected, expected_gradient = of_the_loop
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(gradient, expected_gradient)
    assert_close(of_nnx, expected_gradient)
    if not options:
        assert_close(grad(loss)(scanned, *BATCH), expected_gradient)  # outside of jit


def test_one_block_is_in_the_program_whatever_their_number() -> None:
    def lines(depth: int, scanned: bool) -> int:
        graph, state = nnx.split(Net(nnx.Rngs(0), scanned=scanned, depth=depth))
        step = jax.jit(jax.grad(lambda state: loss(nnx.merge(graph, state), *BATCH)))
        return len(step.lower(state).compile().as_text().splitlines())

    of_one = lines(24, True)
    assert of_one <= 1.02 * lines(3, True)
    assert 4 * of_one <= lines(24, False)


def test_each_layer_is_traced_once() -> None:
    calls = []

    class Counted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w = nnx.Param(rngs.normal((3,)))

        def __call__(self, x: jax.Array) -> jax.Array:
            calls.append(1)
            return x * self.w

    scan_layers(stack_layers([Counted(nnx.Rngs(i)) for i in range(7)]), jnp.ones(3))
    assert len(calls) == 1


def test_statistics_and_dropout_keys_are_separate_for_each_layer() -> None:
    layers = [Block(4, nnx.Rngs(i), noisy=True) for i in range(3)]
    stack, x = stack_layers(layers), normal(6, 4)
    for _ in range(2):
        y, ys = scan_layers(stack, x)
        expected = x
        for layer in layers:
            expected = layer(expected)
        np.testing.assert_allclose(y, expected, atol=2e-6)
        assert ys is None
    for ours, theirs in zip(stack.unstack(), layers, strict=True):
        for (path, value), (other, expected) in zip(
            nnx.to_flat_state(nnx.state(ours)), nnx.to_flat_state(nnx.state(theirs)), strict=True
        ):
            assert path == other
            if path[-1] == "key":
                assert (jax.random.key_data(value[...]) == jax.random.key_data(expected[...])).all()
            else:
                np.testing.assert_allclose(value[...], expected[...], atol=2e-6)
    assert np.asarray(stack.layer.drop.rngs.count[...]).tolist() == [2, 2, 2]


def test_statistics_are_updated_under_grad_and_fixed_in_evaluation() -> None:
    stack, x = stack_layers([Block(4, nnx.Rngs(i), noisy=True) for i in range(3)]), normal(6, 4)
    before = np.asarray(stack.layer.norm.mean[...])
    value_and_grad(lambda stack: scan_layers(stack, x)[0].sum())(stack)
    after = np.asarray(stack.layer.norm.mean[...])
    assert (np.abs(after - before).max(1) > 1e-4).all()
    view = nnx.view(stack, deterministic=True, use_running_average=True)
    first, second = (scan_layers(view, x)[0] for _ in range(2))
    assert (first == second).all()
    assert (view.layer.norm.mean[...] == after).all()


def test_a_mask_is_shared_and_a_cache_is_scanned() -> None:
    class Attend(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.key, self.query = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array, cache: Any) -> Any:
            key = cache["key"] + self.key(x)
            weights = jax.nn.softmax(jnp.where(mask, self.query(x) @ key.T, -1e9))
            return weights @ x, {"key": key, "used": cache["used"] + 1}

    layers = [Attend(nnx.Rngs(i)) for i in range(3)]
    x, mask = normal(5, 4), jnp.tril(jnp.ones((5, 5), bool))
    caches = {"key": normal(3, 5, 4, seed=2), "used": jnp.array([4, 5, 6])}
    y, ys = jax.jit(lambda x, mask, caches: scan_layers(stack_layers(layers), x, mask, xs=caches))(x, mask, caches)
    for i, layer in enumerate(layers):
        x, cache = layer(x, mask, jax.tree.map(lambda leaf: leaf[i], caches))  # noqa: B023 (used at once)
        np.testing.assert_allclose(ys["key"][i], cache["key"], atol=1e-5)
    np.testing.assert_allclose(y, x, atol=1e-5)
    assert ys["used"].tolist() == [5, 6, 7]


def test_a_pair_may_be_a_carry() -> None:
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.array(2.0))

        def __call__(self, pair: Any) -> Any:
            a, b = pair
            return b * self.w, a

    (a, b), ys = scan_layers(stack_layers([Both() for _ in range(3)]), (jnp.ones(2), jnp.zeros(2)))
    assert (a.tolist(), b.tolist(), ys) == ([0.0, 0.0], [2.0, 2.0], None)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_are_kept(dtype: Any) -> None:
    layers = [nnx.Linear(4, 4, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(i)) for i in range(3)]
    expected = x = normal(2, 4).astype(dtype)
    for layer in layers:
        expected = layer(expected)
    y, _ = scan_layers(stack_layers(layers), x)
    assert y.dtype == dtype
    eps = float(jnp.finfo(dtype).eps)  # of numbers up to 1, some of which are small differences
    np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), rtol=4 * eps, atol=eps)


def test_unstacked_layers_equal_the_originals_and_are_copies() -> None:
    layers = [Block(4, nnx.Rngs(i)) for i in range(3)]
    stack = stack_layers(layers)
    again = stack.unstack()
    assert len(stack) == len(again) == 3
    x = normal(2, 4)
    for ours, theirs in zip(again, layers, strict=True):
        assert (ours(x) == theirs(x)).all()
        assert type(ours) is Block
    again[0].dense.kernel[...] = jnp.zeros((4, 4))
    layers[1].dense.kernel[...] = jnp.zeros((4, 4))
    assert (np.abs(stack.layer.dense.kernel[...]).max((1, 2)) > 0).all()


def test_single_layers_stacks_of_one_and_layers_without_arrays() -> None:
    one = Block(4, nnx.Rngs(0))
    x = normal(2, 4)
    np.testing.assert_allclose(scan_layers(stack_layers([one]), x)[0], one(x), rtol=1e-6)

    class Double(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

    assert scan_layers(stack_layers([Double(), Double(), Double()]), jnp.ones(2))[0].tolist() == [8.0, 8.0]


def test_stacks_of_stacks_and_rematerialized_blocks() -> None:
    class Group(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.blocks = stack_layers([Block(4, nnx.Rngs(seed + i), noisy=True) for i in range(2)])

        @nnx.remat
        def __call__(self, x: jax.Array) -> jax.Array:
            return scan_layers(self.blocks, x)[0]

    groups = [Group(10 * i) for i in range(3)]
    stack, x = stack_layers(groups), normal(6, 4)
    assert stack.layer.blocks.layer.dense.kernel.shape == (3, 2, 4, 4)
    (value, gradient), expected = value_and_grad(lambda stack: scan_layers(stack, x)[0].sum())(stack), x
    for group in groups:
        expected = group(expected)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
    assert gradient["layer"]["blocks"]["layer"]["dense"]["kernel"].shape == (3, 2, 4, 4)
    for ours, theirs in zip(stack.unstack(), groups, strict=True):
        np.testing.assert_allclose(ours.blocks.layer.norm.mean[...], theirs.blocks.layer.norm.mean[...], atol=2e-6)
        assert len(ours.blocks) == 2


def test_a_frozen_kernel_needs_no_gradient_work() -> None:
    def flops(of: Any) -> float:
        apart: Any = nnx.split(Net(nnx.Rngs(0), scanned=True, depth=2, unroll=2), of, ...)
        graph, chosen, rest = apart
        step = jax.jit(jax.grad(lambda chosen: loss(nnx.merge(graph, chosen, rest), *BATCH)))
        analysis: Any = step.lower(chosen).compile().cost_analysis()
        return analysis["flops"]

    saved = flops(nnx.Param) - flops(nnx.All(nnx.Param, nnx.Not(nnx.PathContains("kernel"))))
    assert saved >= 2 * 6 * 3 * 4 + 2 * (2 * 6 * 4 * 4)  # the products for the kernels' gradients


# Transforms of a scan.


@pytest.mark.slow
def test_forward_mode_second_order_and_rows() -> None:
    scanned, looped = both()
    x, y = BATCH
    slope = lambda model: jvp(lambda x: loss(model, x, y), (x,), (jnp.ones_like(x),))[1]
    every = jax.jit(
        lambda model: {
            "jvp": slope(model),
            "hvp": hvp(lambda x: loss(model, x, y), (x,), (jnp.cos(x),)),
            "jacobian": jacobian(model)(x[:2]),
            "vmap": vmap(model, chunk_size=4)(x),
        }
    )
    ours, theirs = every(scanned), every(looped)
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(slope(scanned), theirs["jvp"], atol=2e-5)  # outside of jit


CLIPPED: Any = {"l2_clip_norm": 0.3, "batch_argnums": (1, 2)}


@pytest.fixture(scope="module")
def clipped_of_the_loop() -> Any:
    return jax.jit(clipped_grad(loss, **CLIPPED, method="vmap"))(both()[1], *BATCH)


@pytest.mark.parametrize("method", ["vmap", "ghost", "book_keeping"])
def test_clipped_gradients_are_those_of_the_loop(method: str, clipped_of_the_loop: Any) -> None:
    ours = jax.jit(clipped_grad(loss, **CLIPPED, method=method))(both()[0], *BATCH)
    assert_close(ours, clipped_of_the_loop)


def test_per_sample_gradients_are_those_of_the_loop() -> None:
    scanned, looped = both()
    each = jax.jit(per_sample_grad(loss, batch_argnums=(1, 2)))
    ours, theirs = (each(model, *BATCH) for model in (scanned, looped))
    np.testing.assert_allclose(
        ours["blocks"]["layer"]["dense"]["kernel"][...][:, 3], theirs["blocks"][3]["dense"]["kernel"][...], atol=2e-6
    )


def trained_ensemble(strategy: str, scanned: bool) -> tuple[np.ndarray, Any]:
    """Return the losses of the last of three steps, and a member."""
    trainer = Trainer(loss, optax.sgd(0.1), strategy=strategy)
    state = trainer.init(Ensemble.create(lambda rngs: Net(rngs, scanned=scanned), 3, seed=0))
    for _ in range(3):
        state, metrics = trainer.step(state, BATCH)
    return np.asarray(metrics["loss"]), state.ensemble[2]


@pytest.fixture(scope="module")
def ensemble_of_the_loop() -> Any:
    return trained_ensemble("vmap", scanned=False)


@pytest.mark.parametrize("strategy", ["vmap", "map", "unroll", "loop"])
def test_an_ensemble_trains_as_with_the_loop(strategy: str, ensemble_of_the_loop: Any) -> None:
    (ours, member), (theirs, expected) = trained_ensemble(strategy, scanned=True), ensemble_of_the_loop
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert_close(nnx.state(member), nnx.state(expected))


def test_an_optimizer_trains_a_stack() -> None:
    scanned, looped = both()
    gradient = jax.jit(grad(loss))
    for model in (scanned, looped):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        for _ in range(3):
            optimizer.update(model, gradient(model, *BATCH))
    assert_close(nnx.state(scanned, nnx.Param), nnx.state(looped, nnx.Param))


@pytest.mark.slow
def test_a_profile_names_the_parts_of_a_layer() -> None:
    (scanned, _), x = both(), normal(64, 3)
    options: Any = {"mode": "eager", "repeats": 1}
    for taken in (profile(scanned, x, **options), profile(lambda m, x: m(x), scanned, x, **options)):
        assert "blocks/layer/dense" in taken.table(by="scope")
    # The scan makes a new object for each layer, and closures are not searched: the path starts at the layer.
    assert "dense" in profile(lambda x: scanned(x), x, **options).table(by="scope")


# Convolutions, whose gradients XLA computes slowly in a loop on a CPU.


class Convolve(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 3, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.conv(x))


def test_no_convolution_is_in_the_gradient_of_a_scan_on_a_cpu() -> None:
    layers = [Convolve(nnx.Rngs(i)) for i in range(3)]
    stack, x = stack_layers(layers), normal(2, 7, 5, 3)

    def scanned(stack: Any, x: jax.Array) -> jax.Array:
        return (scan_layers(stack, x)[0] ** 2).sum()

    def looped(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = layer(x)
        return (x**2).sum()

    ours = grad(scanned, argnums=(0, 1))(stack, x)
    theirs = jax.jit(grad(looped, argnums=(0, 1)))(nnx.List(layers), x)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    for i in range(3):
        kernel = theirs[0][i]["conv"]["kernel"][...]
        np.testing.assert_allclose(ours[0]["layer"]["conv"]["kernel"][...][i], kernel, rtol=1e-4, atol=1e-4)
    if jax.default_backend() == "cpu":
        graph, state = nnx.split(stack)
        text = str(jax.make_jaxpr(jax.grad(lambda state: scanned(nnx.merge(graph, state), x)))(state))
        assert text.count("conv_general_dilated") == 1


# Refusals.


@dataclasses.dataclass
class NoLayer:
    size: int = 3


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (3, TypeError, "layers must be a list of NNX modules, but got 3 of type int"),
        ("ab", TypeError, "layers must be a list of NNX modules, but got 'ab' of type str"),
        ([], ValueError, "the list of layers is empty; pass at least one layer"),
        ([NoLayer()], TypeError, "layer 0 is .*NoLayer.*, not an NNX module; stack the arrays"),
    ],
)
def test_invalid_lists_of_layers_are_refused(layers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^stack_layers: {message}"):
        stack_layers(layers)


def test_layers_that_differ_are_named() -> None:
    blocks = [Block(4, nnx.Rngs(i)) for i in range(4)]
    with pytest.raises(TypeError, match="layer 4 is a Convolve, but layer 0 is a Block; stack models of one class"):
        stack_layers([*blocks, Convolve(nnx.Rngs(0))])
    with pytest.raises(ValueError, match=r"layer 4 differs from layer 0 at `dense.bias`: it has shape \(5,\)"):
        stack_layers([*blocks, Block(5, nnx.Rngs(0))])
    with pytest.raises(ValueError, match="layer 4 differs from layer 0 in its configuration: act of the model is "):
        stack_layers([*blocks, Block(4, nnx.Rngs(0), act=nnx.relu)])
    with pytest.raises(ValueError, match="a different object in each; define it once, at module level"):
        stack_layers([Block(4, nnx.Rngs(i), act=lambda x: x) for i in range(2)])


def test_a_layer_that_was_changed_after_it_was_made_is_named() -> None:
    blocks = [Block(4, nnx.Rngs(i)) for i in range(4)]
    blocks[2].norm.epsilon = 1e-3
    with pytest.raises(
        ValueError, match="layer 2 differs .* epsilon of norm is 0.001, but there 1e-06; build all layers"
    ):
        stack_layers(blocks)
    blocks[2].norm.epsilon = 1e-6
    blocks[3].dense.kernel = nnx.Param(jnp.ones((4, 4), jnp.bfloat16))
    with pytest.raises(
        ValueError, match="layer 3 differs from layer 0 at `dense.kernel`: .* bfloat16, but layer 0 has"
    ):
        stack_layers(blocks)
    del blocks[3].dense.kernel
    with pytest.raises(ValueError, match="layer 3 differs from layer 0 at `dense.kernel`: it has no array there"):
        stack_layers(blocks)


def test_a_modified_stack_is_named() -> None:
    stack = stack_layers([Block(4, nnx.Rngs(i)) for i in range(3)])
    stack.layer.dense.kernel = nnx.Param(jnp.ones((4, 4)))
    message = r"^Stack: `layer.dense.kernel` has shape \(4, 4\), but axis 0 must be its 3 layers; stack the layers"
    with pytest.raises(ValueError, match=message):
        scan_layers(stack, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=message):
        stack.unstack()


def test_layers_that_share_variables_are_refused() -> None:
    shared = nnx.Param(jnp.ones(3))

    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.w = shared

    with pytest.raises(ValueError, match="layers 0 and 1 share a variable, `w` of the first and `w` of the second"):
        stack_layers([Tied(), Tied()])

    class KeepsStreams(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.rngs = rngs

    streams = nnx.Rngs(0)
    with pytest.raises(ValueError, match="build each with a separate nnx.Rngs"):
        stack_layers([KeepsStreams(streams), KeepsStreams(streams)])


class Any_(nnx.Module):
    """A module whose call returns the result of a given function."""

    def __init__(self, fun: Any) -> None:
        self.fun = fun
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self, x: Any, *args: Any) -> Any:
        return self.fun(self, x, *args)


def remember(module: Any, x: Any) -> Any:
    module.seen = nnx.Intermediate(x)
    return x


@pytest.mark.parametrize(
    ("fun", "error", "message"),
    [
        (
            lambda m, x: (x, x, x),
            TypeError,
            "Any_ must return a carry of structure PyTreeDef.* it returned",
        ),
        (lambda m, x: None, TypeError, "Any_ must return a carry of structure"),
        (lambda m, x: x[:2], ValueError, r"Any_ takes `carry`, .* \(3,\) and dtype float32, but returns .* \(2,\)"),
        (lambda m, x: x.astype(jnp.bfloat16), ValueError, "returns .* bfloat16; return a carry of the same"),
        (remember, ValueError, r"fun changes the structure of Any_ \(`seen"),
    ],
)
def test_unsupported_layers_are_refused(fun: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^scan_layers: .*{message}"):
        scan_layers(stack_layers([Any_(fun), Any_(fun)]), jnp.ones(3))


def test_streams_cannot_be_shared_but_keys_can_be_passed() -> None:
    class Noisy(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            return x + jax.random.normal(key, (3,)) * self.w

    stack, keys = stack_layers([Noisy() for _ in range(4)]), jax.random.split(jax.random.key(0), 4)
    expected = sum(jax.random.normal(key, (3,)) for key in keys)
    np.testing.assert_allclose(scan_layers(stack, jnp.zeros(3), xs=keys)[0], expected, atol=1e-6)
    draws = lambda _, x, rngs: x + jax.random.normal(rngs(), (3,))
    drawing = stack_layers([Any_(draws), Any_(draws)])
    for options in ({}, {"unroll": 4}, {"remat": True}):
        with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate RngCount"):
            scan_layers(drawing, jnp.zeros(3), nnx.Rngs(0), **options)


def test_models_are_neither_carried_nor_sliced() -> None:
    stack, x = stack_layers([nnx.LayerNorm(3, rngs=nnx.Rngs(0)) for _ in range(2)]), jnp.ones(3)
    with pytest.raises(TypeError, match=r"^scan_layers: `carry\[1\]` is a Rngs, but .* pass models as shared"):
        scan_layers(stack, (x, nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"^scan_layers: `xs\['a'\]` is a Linear, but xs holds arrays; make models"):
        scan_layers(stack, x, xs={"a": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})


def test_a_named_tuple_is_not_a_pair() -> None:
    class Both(NamedTuple):
        x: Any
        y: Any

    with pytest.raises(TypeError, match="Any_ must return a carry of structure"):
        scan_layers(stack_layers([Any_(lambda m, x: Both(x, x))]), jnp.ones(3))


def test_wrong_arguments_are_refused() -> None:
    stack = stack_layers([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)])
    x = jnp.ones((5, 3))
    with pytest.raises(TypeError, match="^scan_layers: stack must be the result of stack_layers, but got"):
        scan_layers([stack], x)
    with pytest.raises(ValueError, match=r"`xs\['a'\]` is .* \(3,\) .*, but axis 0 must be the 2 layers; pass"):
        scan_layers(stack, x, xs={"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="`xs` is 1.0 .*, but axis 0 must be the 2 layers"):
        scan_layers(stack, x, xs=1.0)
    with pytest.raises(TypeError, match="remat must be a bool or a checkpoint policy, but got 3"):
        scan_layers(stack, x, remat=3)
    with pytest.raises(ValueError, match="unroll must be at least 1, but got 0"):
        scan_layers(stack, x, unroll=0)
