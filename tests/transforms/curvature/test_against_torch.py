"""Factors, diagonals, evidence and variances, against curvlinops, BackPACK and laplace-torch (extra `bench`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms.curvature import ekfac, ggn_diagonal, kfac, laplace

from .test_diagonal import cross_entropy, labels, normal

# Those of the other libraries.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Full backward hook:UserWarning")
N, PRIOR = 12, 0.7
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-6}
SIZES = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (3, 6), "2.bias": (3,)}


def model(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]


def twins() -> tuple[Any, Any, Any, Any]:
    """Return parameters, inputs, labels, and the same network in PyTorch."""
    torch = pytest.importorskip("torch", reason="the extra `bench` is not installed")
    p = {name: jnp.float32(normal(*shape)) for name, shape in SIZES.items()}
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    net.load_state_dict({name: torch.tensor(np.asarray(x)) for name, x in p.items()})
    return p, jnp.float32(normal(N, 4)), labels(3, N), net


def tensors(*given: Any) -> list[Any]:
    torch = pytest.importorskip("torch")
    return [torch.tensor(np.asarray(x, np.int64 if x.dtype == jnp.int32 else None)) for x in given]


def block(factors: Any, p: Any, name: str) -> np.ndarray:
    return np.asarray(factors.blocks[sorted(p).index(name)].dense())


@pytest.mark.parametrize("name", ["KFACLinearOperator", "EKFACLinearOperator"])
def test_factors_are_those_of_curvlinops(name: str) -> None:
    curvlinops = pytest.importorskip("curvlinops", reason="the extra `bench` is not installed")
    p, x, y, net = twins()
    torch = pytest.importorskip("torch")
    operator = getattr(curvlinops, name)(
        net, torch.nn.CrossEntropyLoss(), [*net.parameters()], [tuple(tensors(x, y))], fisher_type="type-2"
    )
    theirs = (operator @ torch.eye(operator.shape[1])).numpy()
    ours = (kfac if name.startswith("K") else ekfac)(model, cross_entropy, fisher="exact")(p, x, y)
    offset = 0
    for leaf, shape in SIZES.items():
        size = int(np.prod(shape))
        np.testing.assert_allclose(
            block(ours, p, leaf), theirs[offset : offset + size, offset : offset + size], **TOLERANCE
        )
        offset += size


def test_diagonals_are_those_of_backpack() -> None:
    backpack = pytest.importorskip("backpack", reason="the extra `bench` is not installed")
    from backpack.extensions import DiagGGNExact

    p, x, y, net = twins()
    torch = pytest.importorskip("torch")
    inputs, targets = tensors(x, y)
    loss = backpack.extend(torch.nn.CrossEntropyLoss())(backpack.extend(net)(inputs), targets)
    with backpack.backpack(DiagGGNExact()):
        loss.backward()
    ours = ggn_diagonal(model, cross_entropy)(p, x, y)
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.diag_ggn_exact.numpy(), **TOLERANCE)


@pytest.mark.parametrize(("structure", "theirs"), [("kfac", "kron"), ("diagonal", "diag"), ("full", "full")])
def test_evidence_and_variances_are_those_of_laplace_torch(structure: Any, theirs: str) -> None:
    library = pytest.importorskip("laplace", reason="the extra `bench` is not installed")
    p, x, y, net = twins()
    torch = pytest.importorskip("torch")
    inputs, targets = tensors(x, y)
    data = torch.utils.data.TensorDataset(inputs, targets)
    options = {"subset_of_weights": "all", "hessian_structure": theirs, "prior_precision": PRIOR}
    other = library.Laplace(net, "classification", **options)
    other.fit(torch.utils.data.DataLoader(data, batch_size=N))
    ours = laplace(model, cross_entropy, p, (x, y), structure=structure, prior_precision=PRIOR)
    np.testing.assert_allclose(ours.log_marginal_likelihood(), other.log_marginal_likelihood().item(), rtol=1e-4)
    mean, covariance = other._glm_predictive_distribution(inputs)
    found = ours.predict(x, kind="regression")
    np.testing.assert_allclose(found.mean, mean.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        found.variance, torch.diagonal(covariance, dim1=1, dim2=2).detach().numpy(), rtol=1e-4, atol=1e-6
    )
    assert isinstance(jax.tree.leaves(ours)[0], jax.Array)
