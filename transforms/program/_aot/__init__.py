"""Compiled programs kept in files for other processes: the mechanism of `aot`.

A call of the wrapped function goes in; a compiled program comes out, from memory, from a file, or from the compiler.

`aot.py` finds the program by the kinds of the arguments, settings and mesh, runs it, and updates modules.
For a new kind of call, `signature.py` describes it: `CallSignature` lowers the function and computes the identity that
names the file, from the program's text without a key, from the key and the arguments' structure with one.
`environment.py` lists what else is a part of the identity: versions, flags, processor, settings of JAX.
`program.py` reads or compiles (`prepare`). A program found by its key alone runs unchecked the first time. Before the
second call, or when the process ends, `AotProgram.compare` checks that it still matches its function.
`program_file.py` reads and writes the file: ownership, checksum, then a line of JSON with the identity.
`call_structure.py` writes the pytree structures of arguments and results as text, and reads them in another process.
"""
