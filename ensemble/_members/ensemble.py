"""`Ensemble`: many models of one architecture, stored as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, SupportsIndex, TypeVar, get_args, overload

import jax
import numpy as np
from jax.tree_util import GetAttrKey, register_pytree_with_keys
from jax.typing import ArrayLike

from ...transforms._core.arguments import check_callable, check_choice, describe
from ...transforms._core.axes import Axes
from ...transforms._core.compat import Tracer
from ...transforms._core.prediction import Kind, Prediction
from ...transforms._models.evaluation import evaluating
from ...transforms._models.split_model import M, Structure, is_model, is_module, split
from .call import call_members
from .create import create_members, stack_members
from .functional_model import FunctionalModel, Rule
from .modes import viewed
from .ndims import Ndims
from .prediction import check_temperature, classify, kind_for, regress
from .rows import member_index, select_rows
from .sharding import Layout, one_copy, within
from .shared import SharedArrays, separate, with_shared
from .stacked_structure import StackedStructure
from .told import Told, untold

if TYPE_CHECKING:
    from flax import nnx

P = ParamSpec("P")
R = TypeVar("R")
Model = TypeVar("Model")


@dataclass(frozen=True, eq=False, repr=False)
class Ensemble(Generic[M]):
    """Several models of one architecture, with their arrays stacked along axis 0.

    Create one with `Ensemble.stack`, `Ensemble.create` or `Ensemble.from_apply`. An ensemble is immutable: every method
    returns a new object. It is a pytree of its stacked arrays, so it works with `jax.jit` and `jax.tree.map`.
    `plurax.transforms.vmap` accepts an ensemble as the function or as an argument, and maps over its members.

    Attributes:
      structure: the static part that all members share.
      trainable: the trainable arrays, stacked: for NNX modules the `nnx.Param`s, as nested dicts. Gradients and
        optimizer states have the same structure.
      rest: all other arrays, stacked, such as BatchNorm statistics and dropout keys.
      shared: the arrays that all members share, stored once; None if they share nothing.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from plurax.ensemble import Ensemble
      >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 5, seed=0)
      >>> ens(jnp.ones((2, 4))).shape
      (5, 2, 3)
      >>> ens[1](jnp.ones((2, 4))).shape
      (2, 3)
    """

    structure: Structure[M]
    trainable: Any
    rest: Any
    shared: SharedArrays | None = None
    # Static, so that it survives flattening: if the arrays later differ in their number of axes, they were sliced.
    _ndims: Ndims = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ndims", self._current_ndims())

    @classmethod
    def stack(cls, members: Sequence[Model], *, shared: Any = None) -> Ensemble[Model]:
        """Stack models of one architecture, as MindSpore's `CellList`.

        Args:
          members: a list or another sequence of NNX modules, or of members of an ensemble (`ens[i]`). They are copied.
          shared: a filter, as for `plurax.transforms.modules.freeze`, of variables that all members share, such as
            `"trunk"`: equal copies, or the same variables, stored once. Random streams are never shared.

        Returns:
          An ensemble of `len(members)` models.

        Raises:
          TypeError: `members` is not a sequence or contains an element that is not a model; the members have different
            classes; a variable is not an array.
          ValueError: `members` is empty; the models have no arrays, share a variable (for example because all of them
            keep one `nnx.Rngs`), or differ in their configuration, in the path, shape or dtype of an array, or in the
            value of a shared one; `shared` selects no variable, or all of them. The message names the first difference
            and the index of the member.

        Cost:
          One copy of every array.

        Examples:
          >>> from flax import nnx
          >>> from plurax.ensemble import Ensemble
          >>> ens = Ensemble.stack([nnx.Linear(4, 3, rngs=nnx.Rngs(i)) for i in range(3)])
          >>> len(ens)
          3
        """
        if not isinstance(members, Sequence) or isinstance(members, (str, bytes)):
            raise TypeError(f"Ensemble.stack: members must be a list of models, but got {describe(members)}.")
        if not members:
            raise ValueError("Ensemble.stack: the list of members is empty; an ensemble has at least one.")
        for i, member in enumerate(members):
            if not is_model(member) or isinstance(member, Ensemble):
                found = f"member {i} is {type(member).__name__}, not an NNX module"
                remedy = "for others use Ensemble.from_apply(apply, variables)"
                if isinstance(member, Ensemble):
                    remedy = "pass the members of an ensemble, as [*ensemble]"
                raise TypeError(f"Ensemble.stack: {found}; {remedy}.")
        return Ensemble(*stack_members("Ensemble.stack", members, shared))

    @classmethod
    def create(
        cls, make: Callable[[nnx.Rngs], Model], size: int, *, seed: Any, mesh: Any = None, shared: Any = None
    ) -> Ensemble[Model]:
        """Create members with different random initializations, in one compiled program.

        Args:
          make: a function from `nnx.Rngs` to a model. It is traced once, for all members.
          size: the number of members, at least 1.
          seed: an int or a key. Member i is `make(nnx.Rngs(jax.random.fold_in(jax.random.key(seed), i)))`, to an ulp.
            Alternatively one seed per member, as a list of ints or keys or as an array of keys (size,): member i is
            `make(nnx.Rngs(seed[i]))`, to an ulp, so equal seeds give equal members.
          mesh: a `jax.sharding.Mesh` with an axis "ensemble". Each device along that axis creates and holds only its
            own members; devices along an axis "data" hold copies, and along an axis "model" parts of each kernel. A
            mesh may span several processes.
          shared: as for `stack`; the variables of member 0 are taken.

        Returns:
          An ensemble of `size` models.

        Raises:
          TypeError: `make` is not callable or does not return a model; `size` is not an int; `seed` is neither an int,
            a key, nor a list or array of these; its keys are of different kinds; `mesh` is not a mesh.
          ValueError: `size` is below 1 or not divisible by the number of devices along "ensemble"; `seed` has another
            number of entries than `size`; the axes of the mesh have other names; the call is traced and there is a
            mesh, or this is an `AbstractMesh`; the models have no arrays; `shared` selects no variable, or all of them.

        Cost:
          One compilation. The members are created one after another, so peak memory is that of the result.

        Examples:
          >>> from flax import nnx
          >>> from plurax.ensemble import Ensemble
          >>> Ensemble.create(lambda rngs: nnx.Linear(4, 3, rngs=rngs), 2, seed=0)
          Ensemble of 2 × Linear, 15 parameters each
        """
        return Ensemble(*create_members(make, size, seed, mesh, shared))

    @classmethod
    def from_apply(
        cls, apply: Callable[Concatenate[Any, P], R], variables: Sequence[Any], *, trainable: Rule | None = None
    ) -> Ensemble[FunctionalModel[P, R]]:
        """Make an ensemble from an apply function and one pytree per member: Linen, Equinox, plain functions.

        Args:
          apply: a pure function `apply(variables, *args, **kwargs)`, such as the `apply` of a Linen module.
          variables: a list or tuple of pytrees, one for each member. Arrays are stacked. Leaves that are not arrays
            (functions, Python numbers) are configuration and must be equal in all members.
          trainable: selects the arrays to train: a function of a dotted path, such as `"params.dense.kernel"`, and the
            array. None trains the floating-point arrays: those of the collection "params" for Linen variables (a
            mapping with that key), otherwise all.

        Returns:
          An ensemble. Its members, and the models that a loss receives, are callables with an attribute `variables`.
          In a loss `model.call_and_update(x)` keeps new `batch_stats` and counts keys, for Linen variables; a loss
          updates other state by assigning to `model.variables`.

        Raises:
          TypeError: `apply` is not callable, or `variables` is not a list or tuple.
          ValueError: the list is empty; the pytrees hold no arrays; a member differs from the first in structure,
            shape, dtype or configuration.

        Examples:
          >>> import jax.numpy as jnp
          >>> from plurax.ensemble import Ensemble
          >>> ens = Ensemble.from_apply(lambda v, x: v["w"] * x, [{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}])
          >>> ens(jnp.arange(3.0))
          Array([[0., 1., 2.],
                 [0., 0., 0.]], dtype=float32)
        """
        check_callable("Ensemble.from_apply", apply, "apply")
        if not isinstance(variables, (list, tuple)):
            got = type(variables).__name__
            raise TypeError(f"Ensemble.from_apply: variables must be a list, one pytree per member, but got a {got}.")
        if not variables:
            raise ValueError("Ensemble.from_apply: the list of variables is empty; pass at least one pytree.")
        members = [FunctionalModel(apply, value, trainable) for value in variables]
        return Ensemble(*stack_members("Ensemble.from_apply", members))

    def __call__(self: Ensemble[Callable[..., R]], *args: Any, in_axes: Axes = None, **kwargs: Any) -> R:
        """Evaluate every member, in one compiled program.

        Args:
          *args: the positional arguments of one member: arrays, or other values, which are passed unchanged.
          in_axes: None gives every member the same arguments; 0 gives member i slice i of each positional argument; a
            tuple has one entry for each positional argument.
          **kwargs: keyword arguments of one member. With `in_axes=None` all members share them; otherwise arrays are
            mapped over axis 0, as in `jax.vmap`, and other values are shared.

        Returns:
          The outputs of the members, stacked along a new axis 0 of length `len(self)`.

        Raises:
          TypeError: `in_axes` is not an int, None, a tuple or a list.
          ValueError: `in_axes` does not match the arguments; a mapped axis does not have length `len(self)`; a member
            would change its own state (BatchNorm in training mode, dropout): see `view`.
        """
        return call_members(self, self._programs, args, kwargs, in_axes)

    def predict(
        self,
        x: Any,
        *,
        kind: Kind | None = None,
        in_axes: Axes = None,
        temperature: ArrayLike | None = None,
        **kwargs: Any,
    ) -> Prediction:
        """Predict with all members in evaluation mode; return the mean and measures of uncertainty.

        Evaluation mode sets `deterministic=True` and `use_running_average=True` in every NNX module that has such an
        attribute.

        Args:
          x: inputs, shape (batch, ...).
          kind: the meaning of the members' outputs. `"classification"`: logits (batch, ..., classes), such as one
            class per pixel; `"binary"`: logits of any shape (batch, ...), each of a yes-or-no label of its own, whose
            probability is the sigmoid; `"regression"`: values (batch, ...), or a pair of means and variances. None is
            what `with_kind` told the ensemble; without that, `"classification"`, with one warning for each ensemble.
          in_axes: as in a call: None gives every member the same `x`; 0 gives member i slice i of it.
          temperature: divides the logits: a positive number for all members, or one for each, (size,), as
            `plurax.ensemble.calibration.fit_temperature` returns them.
          **kwargs: keyword arguments of the members, such as `train=False` for Linen.

        Returns:
          A `Prediction`; in float32 for half-precision outputs.

        Raises:
          TypeError: as in a call; the logits are not floating point; `temperature` is not a real number.
          ValueError: as in a call; `kind` is unknown; the outputs do not have the shape that `kind` requires; the
            logits have fewer than 2 classes; a variance is negative; `temperature` has another shape, is not positive
            and finite, or is given with `"regression"`.

        Source:
          Lakshminarayanan et al. 2017, "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles".
        """
        kind = kind_for("Ensemble.predict", self, kind)
        check_temperature(temperature, kind, len(self))
        outputs = self._evaluating()(x, in_axes=in_axes, **kwargs)
        return regress(outputs) if kind == "regression" else classify(outputs, kind, temperature)

    def with_kind(self, kind: Kind) -> Ensemble[M]:
        """Return the ensemble, told once what the outputs of its members mean; training and selections keep it.

        Args:
          kind: as for `predict`, whose default it becomes, and that of `export` and of distillation.

        Returns:
          An ensemble with the same arrays. As a pytree it has another structure than one that was told nothing.

        Raises:
          ValueError: `kind` is unknown.

        Examples:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from plurax.ensemble import Ensemble
          >>> ens = Ensemble.create(lambda rngs: nnx.Linear(4, 2, rngs=rngs), 5, seed=0).with_kind("regression")
          >>> ens.predict(jnp.ones((3, 4))).mean.shape
          (3, 2)
        """
        check_choice("Ensemble.with_kind", "kind", kind, get_args(Kind))
        static = Told(untold(self.structure), kind), self._ndims
        return _unflatten(static, (self.trainable, self.rest, self.shared))

    @property
    def kind(self) -> Kind | None:
        """What the outputs of the members mean, as `with_kind` was told; None if nothing was."""
        return self.structure.kind if isinstance(self.structure, Told) else None

    def view(self, **attributes: Any) -> Ensemble[M]:
        """Return an ensemble with other values of static attributes of the members, as `nnx.view`.

        Args:
          **attributes: new values by name, such as `deterministic=True` (dropout) or `use_running_average=True`
            (BatchNorm).

        Returns:
          An ensemble with the same arrays.

        Raises:
          TypeError: the members are not NNX modules.
          ValueError: no module has an attribute of that name.

        Examples:
          >>> from flax import nnx
          >>> from plurax.ensemble import Ensemble
          >>> ens = Ensemble.create(lambda rngs: nnx.Dropout(0.5, rngs=rngs), 2, seed=0)
          >>> ens.view(deterministic=True)(1.0)
          Array([1., 1.], dtype=float32, weak_type=True)
        """
        return self.__plurax_stack__(viewed(self.__plurax_member__(), attributes))

    def unstack(self) -> list[M]:
        """Return all members as standalone models."""
        return list(self)

    def __len__(self) -> int:
        self._check_intact()
        return jax.tree.leaves((self.trainable, self.rest))[0].shape[0]

    def __iter__(self) -> Iterator[M]:
        return (self[i] for i in range(len(self)))

    # The type of an array does not tell whether it holds one index or several, so its overload comes first.
    @overload
    def __getitem__(self, index: jax.Array | np.ndarray) -> Any: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> M: ...
    @overload
    def __getitem__(self, index: slice | list[int] | list[bool]) -> Ensemble[M]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return member `index` as a standalone model, or an ensemble of some of the members.

        A slice, a list or array of ints, or a mask gives an ensemble; lists, arrays and masks as in
        `plurax.ensemble.select`.
        """
        size = len(self)
        if isinstance(index, list) or (isinstance(index, (np.ndarray, jax.Array)) and index.ndim):
            return self._of_rows(*select_rows("Ensemble", (self.trainable, self.rest), index, size))
        if isinstance(index, slice) and not range(size)[index]:
            raise IndexError(f"Ensemble: {index} selects none of the {size} members; select at least one.")
        chosen: Any = index if isinstance(index, slice) else member_index("Ensemble", index, size)
        with within(Layout.home(self)):
            trainable, rest = jax.tree.map(lambda x: x[chosen], (self.trainable, self.rest))
        if isinstance(index, slice):
            return self._of_rows(trainable, rest)
        # A member on a mesh would refuse inputs on other devices. So it leaves the mesh, and JAX may move it.
        return one_copy(self._with(trainable, rest, self.shared)).__plurax_member__()

    def __repr__(self) -> str:
        # In a sliced ensemble or a prefix, no axis 0 has the number of members as its length.
        if not self._is_intact() or min(self._ndims.of, default=0) < 1:
            return f"Ensemble({self.trainable!r}, {self.rest!r})"
        count = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(self.trainable))
        text = f"Ensemble of {len(self)} × {self.structure!r}, {count:,} parameter{'s' * (count != 1)} each"
        return text if self.shared is None else f"{text}, {sum(x.size for x in jax.tree.leaves(self.shared)):,} shared"

    @cached_property
    def _programs(self) -> dict[Any, Callable[..., Any]]:
        return {}  # of earlier calls, by the kind of their arguments; see `call_members`

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_programs"}  # programs cannot be copied

    def _with(self, trainable: Any, rest: Any, shared: Any) -> Ensemble[M]:
        """Return the ensemble with other arrays of the same structure and shapes."""
        return _unflatten((self.structure, self._ndims), (trainable, rest, shared))

    def _of_rows(self, trainable: Any, rest: Any) -> Ensemble[M]:
        """Return an ensemble of some of the members, which share the same arrays."""
        return Ensemble(self.structure, trainable, rest, self.shared)

    def _current_ndims(self) -> Ndims:
        return Ndims(tuple(getattr(x, "ndim", -1) for x in jax.tree.leaves((self.trainable, self.rest))))

    def _is_intact(self) -> bool:
        # Plain tuples are compared, because the `Ndims` of a prefix is equal to any other.
        return self._current_ndims().of == self._ndims.of

    def _check_intact(self) -> None:
        """Raise if axis 0 of the arrays no longer indexes the members."""
        if self._is_intact():
            return
        found = "its arrays were sliced or stacked, as by jax.vmap or lax.scan: their axis 0 is not the members"
        remedy = "use plurax.transforms.vmap, or pass all of it, with in_axes=None"
        if self._current_ndims().of > self._ndims.of:
            remedy = "map over their first axis with jax.vmap"
        elif not any(isinstance(x, Tracer) for x in jax.tree.leaves(self)):
            remedy = "take members by their index, as ensemble[0]"
        raise ValueError(f"Ensemble: {found}; {remedy}.")

    def _evaluating(self) -> Ensemble[Any]:
        """Return the ensemble in evaluation mode; members of `from_apply` stay unchanged."""
        model = self.__plurax_member__()
        if not is_module(model):
            return self
        return self.__plurax_stack__(evaluating(model))

    # The hooks by which plurax.transforms recognizes an ensemble (`transforms._models.split_model`): the last when it
    # differentiates, the others when it maps over members.

    def __plurax_member__(self) -> M:
        """Return a model with the current arrays: one member where axis 0 is mapped, else all members, stacked."""
        return self.structure.merge(*with_shared(self.trainable, self.rest, self.shared))

    def __plurax_stack__(self, model: Any) -> Ensemble[M]:
        """Return `model` as an ensemble, inside a vmap as well as outside."""
        parts = split(model)
        structure = parts.structure if self.kind is None else Told(parts.structure, self.kind)
        stacked: Ensemble[M] = Ensemble(structure, parts.trainable, parts.rest)
        if self.shared is not None and self._is_intact():  # inside a vmap, each member may return another value
            own, shared = separate(parts, self.shared.paths)
            return Ensemble(structure, *own, shared)
        # Inside a vmap the arrays of `self` and of `model` lack axis 0, so both have one axis fewer than the result
        # has outside. The difference is the same for all arrays.
        mapped = self._ndims.of[0] - self._current_ndims().of[0]
        object.__setattr__(stacked, "_ndims", Ndims(tuple(ndim + mapped for ndim in stacked._ndims.of)))
        return stacked

    def __plurax_own__(self) -> Ensemble[M]:
        return self._with(self.trainable, self.rest, None)

    def __plurax_split__(self) -> tuple[Structure, Any, Any]:
        self._check_intact()
        return StackedStructure.split(self)


def _flatten_with_keys(ens: Ensemble) -> tuple[Any, Any]:
    children = [(GetAttrKey(name), getattr(ens, name)) for name in ("trainable", "rest", "shared")]
    return children, (ens.structure, ens._ndims)


def _unflatten(static: tuple[Structure, Ndims], arrays: Iterable[Any]) -> Ensemble:
    # The constructor would take the number of axes from the arrays, which may be sliced, or not be arrays at all.
    ens = object.__new__(Ensemble)
    trainable, rest, shared = arrays
    vars(ens).update(structure=static[0], trainable=trainable, rest=rest, shared=shared, _ndims=static[1])
    return ens


register_pytree_with_keys(Ensemble, _flatten_with_keys, _unflatten)
