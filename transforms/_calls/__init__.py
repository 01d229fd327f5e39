"""A user's call as a pure function of arrays, to differentiate, map in chunks, or shard over a mesh.

A transform receives `fun`, `argnums` and arguments that may contain models; JAX needs a pure function of arrays:

- `call.py` makes the pure function: `Call` selects the arguments to differentiate, checks their dtypes, splits models,
  separates the auxiliary output, and writes changed state back into the models after JAX has finished;
- `primals.py` stores the names, structures and shapes of the selected arguments, so that gradients are returned in
  the user's form (an `nnx.State` for a module) and errors about tangents name the argument.

For mapped calls:

- `chunk.py` runs a `lax.scan` over chunks of the mapped axis and writes the results in place;
- `explicit_sharding.py` handles arrays sharded over explicit axes of a mesh: it reads their shardings, shards other
  arrays alike, and makes the axes automatic inside a function.

`decisions.py` caches decisions for a function and a kind of arguments (such as forward or reverse mode) for as long as
the function is alive.

The result is the user's output, and gradients, tangents or mapped results in the structure of the arguments.
"""
