"""Functional transforms on JAX: functions in, functions out, for plain functions, pytrees and Flax modules.

- Map a function: `vmap`, in chunks (`chunk_size=` or `memory_budget=`) where the whole batch does not fit into memory.
- Differentiate it: `grad`, `value_and_grad`, `jvp`, `vjp`, `linearize`, `derivative` (higher orders), `dual`.
- Jacobians: `jacobian` (picks the cheaper mode; `sparsity=` for sparse Jacobians), `jacfwd`, `jacrev`,
  `batch_jacobian`.
- Hessians: `hessian`; products `hvp`, `vhp`, `gnvp`; `hessian_diagonal`, `hessian_trace`, `laplacian`.
- One gradient per sample: `per_sample_grad`, `per_sample_norm`, `clipped_grad`.

Three submodules have to be imported by name: `plurax.transforms.privacy` (`DPSGD`), `plurax.transforms.program`
(profiles, compile caches, scanned layers) and `plurax.transforms.modules` (freeze, cast, save and load parameters).
Ensembles are in `plurax.ensemble`. Every docstring lists arguments, errors, cost and an example: try `help(vmap)`.

Examples:
  >>> import jax.numpy as jnp
  >>> from plurax.transforms import grad, jacobian, vmap
  >>> vmap(grad(lambda x: x**3))(jnp.arange(3.0))
  Array([ 0.,  3., 12.], dtype=float32)
  >>> jacobian(lambda x: x[:2] * x[2])(jnp.array([1.0, 2.0, 3.0]))
  Array([[3., 0., 1.],
         [0., 3., 2.]], dtype=float32)

Source layout, lowest layer first; the docstring of each folder describes its files:

- `_core`: arguments, axes, memory budgets, jaxprs, keys, versions of JAX; `_models`: split models into arrays and
  merge them; `_calls`: a user's call as a function of arrays, and evaluation in chunks;
- `_vmap`, `_grad`, `_dual`, `_taylor`, `_linear`: the transforms that fit into one file, with their checks: `vmap`;
  `grad`, `value_and_grad`; `dual`; `derivative`; `jvp`, `vjp`, `linearize`;
- `_jacobian`: Jacobians and Hessians, dense and sparse; `_curvature`: products with second derivatives, traces,
  Laplacians;
- `_convolutions`: convolutions as matrix products, for CPUs; `_runs`: the loop, history, checkpoints and files of
  long runs;
- `privacy`: per-sample and clipped gradients, DP-SGD; `program`: profiling and rewriting of programs; `modules`:
  parameters of Flax modules. These three are public;
- `_statistics`: inner products, moments, kernels and projections of per-sample gradients;
- `curvature`: Gauss-Newton matrices. It is public.
"""

from ._core.version import __version__ as __version__
from ._curvature.hessian_trace import hessian_diagonal, hessian_trace, hutchinson_trace
from ._curvature.laplacian import laplacian
from ._curvature.products import gnvp, hvp, value_grad_and_hvp, vhp
from ._dual import Dual, dual
from ._grad import grad, value_and_grad
from ._jacobian.batch import batch_jacobian
from ._jacobian.hessian import hessian
from ._jacobian.jacobian import jacfwd, jacobian, jacrev
from ._linear import jvp, linearize, vjp
from ._statistics.gram import per_sample_gram
from ._statistics.moments import per_sample_moments
from ._statistics.noise_scale import gradient_noise_scale
from ._statistics.ntk import empirical_ntk, ntk_vp
from ._statistics.projection import per_sample_jvp, per_sample_projection
from ._taylor import derivative
from ._vmap import vmap
from .privacy import check_loss, clipped_grad, per_sample_grad, per_sample_norm

__all__ = [
    "Dual",
    "batch_jacobian",
    "check_loss",
    "clipped_grad",
    "derivative",
    "dual",
    "empirical_ntk",
    "gnvp",
    "grad",
    "gradient_noise_scale",
    "hessian",
    "hessian_diagonal",
    "hessian_trace",
    "hutchinson_trace",
    "hvp",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "laplacian",
    "linearize",
    "ntk_vp",
    "per_sample_grad",
    "per_sample_gram",
    "per_sample_jvp",
    "per_sample_moments",
    "per_sample_norm",
    "per_sample_projection",
    "value_and_grad",
    "value_grad_and_hvp",
    "vhp",
    "vjp",
    "vmap",
]
