"""Functional transforms on JAX: functions in, functions out."""

from ._batch_jacobian import batch_jacobian
from ._dual import Dual, dual
from ._grad import grad, value_and_grad
from ._hessian import hessian
from ._jacobian import jacfwd, jacobian, jacrev
from ._laplacian import laplacian
from ._linear import jvp, linearize, vjp
from ._products import gnvp, hvp, value_grad_and_hvp, vhp
from ._taylor import derivative
from ._trace import hessian_diagonal, hessian_trace, hutchinson_trace
from ._vmap import vmap
from .privacy import clipped_grad, per_sample_grad, per_sample_norm

__all__ = [
    "Dual",
    "batch_jacobian",
    "clipped_grad",
    "derivative",
    "dual",
    "gnvp",
    "grad",
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
    "per_sample_grad",
    "per_sample_norm",
    "value_and_grad",
    "value_grad_and_hvp",
    "vhp",
    "vjp",
    "vmap",
]
