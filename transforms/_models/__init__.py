"""Convert models to pytrees of arrays and back: Flax NNX modules, Equinox modules, and this library's own models.

JAX transforms functions of arrays, but a model is an object with state. So a transform splits each model before it
calls JAX, merges it inside the traced function, and afterwards writes the changed state back:

- `split_model.py` defines what counts as a model, splits it into a static structure, trainable arrays and other arrays
  (`SplitModel`), merges it, and finds the model that a function is bound to (a method's `self`, a module itself);
- `mutation.py` calls a function with merged models, determines which arrays the function changed and which it only
  passed through, raises if a change is not allowed, and otherwise writes the changes into the user's models;
- `streams.py` splits the random streams of a module, one for each slice of a map;
- `stacking.py` stacks models of one architecture along axis 0, or raises with the first difference between them;
- `equinox.py` handles Equinox modules, which are pytrees with functions, numbers and strings among the leaves: it
  selects the leaves to differentiate, and makes a pytree of the arrays alone;
- `evaluation.py` returns modules in evaluation mode;
- `hashable.py` stores everything but the arrays of a pytree as a hashable value, for static arguments of `jax.jit`.

Flax and Equinox are never imported at module level: if they are not loaded, no argument can be one of their models.
"""
