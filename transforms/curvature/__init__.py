"""Curvature of the loss of a model: Gauss-Newton matrices, for any JAX function.

`_output_hessian` finds the form of the Hessian of a loss by the outputs of an example, and a square root of it.
`_outputs` computes the gradients of its columns, or of samples, at the parameter uses of a model, which
`privacy/_per_example` finds.
`_diagonal` sums their squares. `_kfac` multiplies activations with themselves, and gradients with themselves, to the
blocks of `_kronecker`, and `_ekfac` corrects their eigenvalues. `_sides` finds the axes of each parameter for which
there is such a product, `_squares` has the sums of squares, and `_blocks` the block of one parameter.
`_reduction` compares the loss of a batch with those of its examples.
`_data` averages the factors of the batches of a dataset, and `_influence` multiplies gradients with their inverse.
`_laplace/` has a normal distribution with such a precision.
"""

from ._diagonal import ggn_diagonal
from ._ekfac import ekfac
from ._influence import influence, self_influence
from ._kfac import kfac
from ._kronecker import KroneckerFactors
from ._laplace.laplace import Laplace, laplace

__all__ = [
    "KroneckerFactors",
    "Laplace",
    "ekfac",
    "ggn_diagonal",
    "influence",
    "kfac",
    "laplace",
    "self_influence",
]
