"""Models as pytrees of arrays, and back: Flax NNX modules, Equinox modules, and models of the library's own.

JAX transforms functions of arrays, but a model is an object with state. So a transform splits each model before JAX
sees it, merges it inside the traced function, and writes back afterwards what the function changed:

- `split_model.py` defines what a model is, splits it into a static structure, trainable arrays and other arrays
  (`SplitModel`), merges it, and finds the model that a function is bound to (a method's `self`, a module itself);
- `mutation.py` calls a function with merged models, finds out which arrays the function changed and which it only
  returned, raises if a change is not allowed, and otherwise writes the changes into the user's models;
- `stacking.py` stacks models of one architecture along axis 0, or raises with the first difference between them;
- `equinox.py` handles Equinox modules, pytrees with functions, numbers and text among the leaves: it selects the leaves
  to differentiate, and makes a pytree of the arrays alone;
- `hashable.py` keeps everything but the arrays of a pytree as a hashable value, for static arguments of `jax.jit`.

Flax and Equinox are never imported at module level: without their modules loaded there is no model of theirs.
"""
