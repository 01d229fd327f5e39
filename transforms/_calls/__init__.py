"""A user's call as a function of arrays, ready to be differentiated, mapped in chunks, or divided over a mesh.

A transform receives `fun`, `argnums` and arguments with models among them; JAX needs a pure function of arrays. In
between:

- `call.py` makes the pure function: `Call` selects the arguments to differentiate, checks their dtypes, splits models,
  separates the auxiliary output, and writes changed state back into the models once JAX is done;
- `primals.py` keeps what the selected arguments look like to the user, so that gradients have their form (an
  `nnx.State` for a module) and tangents are checked by name.

Calls that are mapped pass through:

- `chunk.py`, a `lax.scan` over chunks of the mapped axis, whose results are written in place;
- `explicit_sharding.py`, for arrays divided over explicit axes of a mesh: it reads how they are divided, divides others
  alike, and makes the axes automatic inside of a function.

`decisions.py` remembers what was decided for a function and a kind of arguments (such as forward or reverse mode), as
long as the function lives.

What comes out is the user's output, with gradients, tangents or mapped results in the structure of the arguments.
"""
