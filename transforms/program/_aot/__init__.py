"""Compiled programs kept in files for other processes: the mechanism of `aot`.

A call of the wrapped function goes in; a compiled program comes out, from memory, from a file, or from the compiler.

`aot.py` finds the program by the kinds of the arguments, settings and mesh, runs it, and updates modules.
For a new kind of call, `signature.py` describes it: `CallSignature` lowers the function and computes the identity that
names the file, from the program's text without a key, from the key and the arguments' structure with one.
`program.py` reads or compiles: it decides whether a file is used, written, or found stale (`AotProgram.compare`).
`program_file.py` reads and writes the file: checksum, ownership, then a line of JSON against what is expected here.
`environment.py` lists what has to be equal before a program is trusted: versions, flags, processor, settings of JAX.
`call_structure.py` writes the pytree structures of arguments and results as text, and reads them in another process.
`unverified.py` keeps the programs that ran because of their key alone, and compares each with its function before the
second call, or at the end of the process.

What is compared before a program from a file is trusted is `expected`, built in `program.prepare` from the signature
and `environment.py`. A program that was found by its key runs first, and is compared with its function later, by
`Lowered.is_of` in `signature.py`.
"""
