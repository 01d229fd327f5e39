"""Distillation: one small model with the mean prediction of an ensemble or a committee, and with its uncertainty.

`targets` evaluates the teacher once, `loss` compares a student with these targets, and `distill` does both and trains.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import digamma, entr, gammaln

from ..transforms._core.arguments import check_choice, check_count, check_number, describe
from ..transforms._core.prediction import Kind, Prediction, assumed_kind, at_least_float32, entropy_of, mean_of
from ..transforms._models.split_model import is_model
from ..transforms._runs.data import examples
from ._members.ensemble import Ensemble
from ._members.prediction import kind_for
from ._sharing.committee import Committee
from ._training._data.batches import Batches
from ._training.trainer import Trainer

__all__ = ["Targets", "dirichlet", "distill", "loss", "targets"]

Head = Literal["mean", "dirichlet"]

# Probabilities of members are mixed with so much of the uniform distribution before their logarithm, as by Malinin et
# al.: a single member that is certain would otherwise dominate the mean of the logarithms.
_SMOOTHING = 1e-4


class Targets(NamedTuple):
    """What a student learns from: statistics of the members' predictions, one row for each example.

    Attributes:
      mean: the mean probability of each class, or the mean value.
      spread: for a Dirichlet head, the mean logarithm of each class's probability; for regression, the variance of the
        value, which is that of the means plus the mean of the variances.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import Ensemble, distillation
      >>> teacher = Ensemble.from_apply(lambda w, x: w * x, [jnp.array(1.0), jnp.array(3.0)])
      >>> distillation.targets(teacher, jnp.array([1.0, 2.0]), kind="regression").spread
      Array([1., 4.], dtype=float32)
    """

    mean: jax.Array
    spread: jax.Array


def targets(
    teacher: Ensemble[Any] | Committee,
    x: Any,
    *,
    kind: Kind | None = None,
    temperature: float = 1.0,
    batch_size: int = 1024,
) -> Targets:
    """Evaluate a teacher in evaluation mode, and return what a student learns from.

    Args:
      teacher: an `Ensemble` or a `Committee`, whose weights are used.
      x: the inputs, a pytree of arrays with the examples along axis 0.
      kind: as for `Ensemble.predict`.
      temperature: divides the logits of the members.
      batch_size: the number of examples that are evaluated together.

    Returns:
      `Targets`, with the examples along axis 0.

    Raises:
      TypeError: the teacher is neither an `Ensemble` nor a `Committee`; `temperature` is not a number; `x` holds
        something other than arrays.
      ValueError: as for `predict`; `temperature` is not positive; there are no examples, or arrays differ in length.

    Cost:
      One prediction of all members for each example.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, distillation
      >>> teacher = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0)
      >>> distillation.targets(teacher, jnp.ones((2, 4)), kind="classification").mean.shape
      (2, 3)
    """
    if not isinstance(teacher, (Ensemble, Committee)):
        raise TypeError(f"targets: teacher must be an Ensemble or a Committee, but got {describe(teacher)}.")
    kind = kind_for("targets", teacher, kind)
    check_count("targets", "batch_size", batch_size)
    heat = check_number("targets", "temperature", temperature, lambda t: 0 < t < float("inf"), "positive and finite")
    options: dict[str, Any] = {} if kind == "regression" else {"temperature": heat}
    weights = teacher.weights if isinstance(teacher, Committee) else None

    def of(x: Any) -> Targets:
        found = teacher.predict(x, kind=kind, **options)
        if kind == "regression":
            return Targets(found.mean, found.variance)
        smooth = (1 - _SMOOTHING) * found.members + _SMOOTHING / found.members.shape[-1]
        return Targets(found.mean, mean_of(jnp.log(smooth), weights))

    x, count = examples("targets", x, "x")
    if not count:
        raise ValueError("targets: x has no examples; pass at least one.")
    parts = [of(jax.tree.map(lambda x, i=i: x[i : i + batch_size], x)) for i in range(0, count, batch_size)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)


def loss(kind: Kind | None = None, *, head: Head = "mean", temperature: float = 1.0) -> Any:
    """Return a loss for `Trainer` that compares a student with the targets of a teacher.

    Args:
      kind: as for `Ensemble.predict`, but a loss can be told nothing else, so that None is "classification", with a
        warning unless the head says so. For "regression" the student returns values, which are compared by the squared
        error, or a pair of means and variances, whose Gaussian likelihood of the teacher's members is maximized.
      head: for classification, "mean": the student's softmax is compared with the mean probabilities; "dirichlet": its
        logits are the logarithms of a Dirichlet distribution's parameters, whose likelihood of the members'
        probabilities is maximized, so that it learns their disagreement too; read it with `dirichlet`.
      temperature: that of `targets`; divides the student's logits too. The loss is multiplied by its square, which
        keeps the size of the gradients.

    Returns:
      A function of a student, a batch of inputs, and the `Targets` of the batch, which returns a scalar.

    Raises:
      TypeError: `temperature` is not a number; when called, the student returns something else.
      ValueError: `kind` or `head` is unknown, or a Dirichlet head is for another kind than "classification";
        `temperature` is not positive, or given for regression; when called, the student's outputs have another shape
        than the teacher's.

    Source:
      Hinton et al. 2015, "Distilling the Knowledge in a Neural Network"; Malinin et al. 2020, "Ensemble Distribution
      Distillation".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import distillation
      >>> certain = distillation.Targets(jnp.array([[0.0, 1.0]]), jnp.array([[-9.0, 0.0]]))
      >>> distillation.loss("classification")(lambda x: x, jnp.array([[3.0, 3.0]]), certain).round(3)  # log 2
      Array(0.693, dtype=float32)
    """
    check_choice("loss", "head", head, get_args(Head))
    if kind is None:
        kind = "classification" if head == "dirichlet" else assumed_kind("loss")
    check_choice("loss", "kind", kind, get_args(Kind))
    heat = check_number("loss", "temperature", temperature, lambda t: 0 < t < float("inf"), "positive and finite")
    if head == "dirichlet" and kind != "classification":
        raise ValueError(f"loss: head='dirichlet' is for kind='classification', but kind is {kind!r}.")
    if heat != 1 and kind == "regression":
        raise ValueError("loss: temperature divides logits, but kind='regression' has none; leave it out.")

    def of_student(model: Any, x: Any, given: Targets) -> jax.Array:
        outputs = model(x)
        if kind == "regression":
            return _gaussian(outputs, given)
        logits = at_least_float32(outputs) / heat
        if kind == "binary":
            logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)
        _check_shape(logits, given.mean)
        of_each = _dirichlet(logits, given.spread) if head == "dirichlet" else _cross_entropy(logits, given.mean)
        return heat**2 * of_each.mean()

    return of_student


def distill(
    teacher: Ensemble[Any] | Committee,
    student: Any,
    x: Any,
    *,
    steps: int,
    key: jax.Array,
    kind: Kind | None = None,
    head: Head = "mean",
    temperature: float = 1.0,
    optimizer: Any = None,
    batch_size: int = 128,
    progress: bool = True,
) -> Any:
    """Train a student to predict as an ensemble or a committee does, and return it.

    Args:
      teacher: an `Ensemble` or a `Committee`.
      student: a model, or an `Ensemble` of students. It is not changed.
      x: the inputs on which they are compared, a pytree of arrays with the examples along axis 0; labels are not
        needed, so these may be more than the teacher was trained on.
      steps: the number of training steps.
      key: a random key for the order of the examples.
      kind: as for `Ensemble.predict`; None takes what the teacher was told. A Dirichlet head says "classification".
      head: as for `loss`.
      temperature: as for `targets` and `loss`.
      optimizer: an optax transformation; None for `optax.adam(1e-3)`.
      batch_size: the number of examples in a batch; at most all of them.
      progress: whether to show a bar.

    Returns:
      The trained student, of the type of `student`; an ensemble is told the kind. A model with a Dirichlet head is read
      with `dirichlet`; one that returns means and variances, or logits, with `Ensemble.stack([student]).predict`.

    Raises:
      TypeError, ValueError: as for `targets`, `loss`, `Batches` and `Trainer`; the student is not a model.

    Cost:
      One prediction of all members for each example, then ordinary training. To train with checkpoints, validation or
      augmented inputs, call `Trainer` with `loss` and `targets` instead.

    Source:
      As for `loss`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble, distill
      >>> teacher = Ensemble.create(lambda rngs: nnx.Linear(1, 2, rngs=rngs), 5, seed=0).with_kind("classification")
      >>> x = jnp.linspace(-1, 1, 20)[:, None]
      >>> options = {"steps": 200, "key": jax.random.key(0), "optimizer": optax.adam(0.05), "progress": False}
      >>> student = distill(teacher, nnx.Linear(1, 2, rngs=nnx.Rngs(9)), x, batch_size=20, **options)
      >>> bool(jnp.abs(jax.nn.softmax(student(x)) - teacher.predict(x).mean).max() < 0.05)
      True
    """
    if not isinstance(student, Ensemble) and not is_model(student):
        raise TypeError(f"distill: student must be a model or an Ensemble, but got {describe(student)}.")
    if not isinstance(teacher, (Ensemble, Committee)):
        raise TypeError(f"distill: teacher must be an Ensemble or a Committee, but got {describe(teacher)}.")
    if kind is None and teacher.kind is None and head == "dirichlet":
        kind = "classification"
    kind = kind_for("distill", teacher, kind)
    compare = loss(kind, head=head, temperature=temperature)
    given = targets(teacher, x, kind=kind, temperature=temperature)
    students = (student if isinstance(student, Ensemble) else Ensemble.stack([student])).with_kind(kind)
    batches = Batches((x, given), min(batch_size, len(given.mean)), key=key)
    trainer = Trainer(compare, optax.adam(1e-3) if optimizer is None else optimizer)
    trained = trainer.fit(trainer.init(students), batches, steps=steps, progress=progress)[0].ensemble
    return trained if isinstance(student, Ensemble) else trained[0]


def dirichlet(logits: jax.Array) -> Prediction:
    """Return the prediction of a student with a Dirichlet head, from its outputs.

    Args:
      logits: the logarithms of the distribution's parameters, floating-point, (batch, ..., classes).

    Returns:
      A `Prediction` under the Dirichlet distribution: mean and variance of each probability, entropy of the mean, and
      mutual information. `members` has the mean only, with a first axis of length 1.

    Raises:
      TypeError: the outputs are not floating-point.
      ValueError: they have no axis of at least two classes.

    Source:
      Malinin and Gales 2018, "Predictive Uncertainty Estimation via Prior Networks".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import distillation
      >>> unsure, disagreeing = jnp.log(jnp.array([[50.0, 50.0], [0.5, 0.5]]))
      >>> found = distillation.dirichlet(jnp.stack([unsure, disagreeing]))
      >>> found.mean, found.mutual_information.round(2)
      (Array([[0.5, 0.5],
             [0.5, 0.5]], dtype=float32), Array([0.  , 0.31], dtype=float32))
    """
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"dirichlet: the outputs must be floating-point, but got {describe(logits)}.")
    if logits.ndim < 1 or logits.shape[-1] < 2:
        raise ValueError(f"dirichlet: the outputs must have a last axis of classes, but got {describe(logits)}.")
    logits = at_least_float32(logits)
    mean, alpha = jax.nn.softmax(logits), jnp.exp(logits)
    total = alpha.sum(-1, keepdims=True)
    variance = mean * (1 - mean) / (total + 1)
    expected = (mean * (digamma(total + 1) - digamma(alpha + 1))).sum(-1)
    entropy = entropy_of(mean)
    return Prediction(mean, variance, entropy, jnp.maximum(entropy - expected, 0), mean[None])


def _cross_entropy(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Return the Kullback-Leibler divergence from the target to the student, whose least value is 0."""
    return -(p * jax.nn.log_softmax(logits)).sum(-1) - entr(p).sum(-1)


def _dirichlet(logits: jax.Array, mean_log: jax.Array) -> jax.Array:
    """Return the mean negative log-likelihood of the members' probabilities."""
    alpha = jnp.exp(logits)
    return gammaln(alpha).sum(-1) - gammaln(alpha.sum(-1)) - ((alpha - 1) * mean_log).sum(-1)


def _gaussian(outputs: Any, given: Targets) -> jax.Array:
    """Return the squared error, or for means and variances the mean negative log-likelihood of the members' values."""
    is_pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
    for x in outputs if is_pair else [outputs]:
        _check_shape(x, given.mean)
    if not is_pair:
        return jnp.square(outputs - given.mean).mean()
    mean, variance = outputs
    return (jnp.log(variance) + (given.spread + jnp.square(mean - given.mean)) / variance).mean() / 2


def _check_shape(x: Any, like: jax.Array) -> None:
    if jnp.shape(x) != like.shape:
        found = f"the student returns {describe(x)}, but the teacher predicts {describe(like)}"
        raise ValueError(f"loss: {found}; let both have one shape.")
