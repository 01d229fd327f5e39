"""Compiled programs stored in files for other processes: the mechanism of `aot`.

The input is a call of the wrapped function; the output is a compiled program from memory, a file, or the compiler.

`aot.py` looks up the program by the types of the arguments, the settings and the mesh, runs it, and updates modules.
`signature.py` describes a new kind of call: `CallSignature` lowers the function and computes the identity that names
the file, from the program's bytecode if there is no key, otherwise from the key and the structure of the arguments.
`environment.py` lists the other parts of the identity: versions, flags, processor, settings of JAX.
`program.py` reads or compiles the program (`prepare`). A program found by its key alone runs unchecked the first time.
Before the second call, or when the process ends, `AotProgram.compare` checks that it still matches its function.
`program_file.py` reads and writes the file, and checks its owner, its checksum and the identity in its line of JSON.
`call_structure.py` writes the pytree structures of arguments and results as text, and reads them in another process.
"""
