#!/bin/bash
# Four processes on the hosts that Open MPI knows:  bash examples/cluster/mpi.sh
# Detection by mpi4py works with every version (pip install mpi4py). "ompi" needs Open MPI 4: version 5 no longer sets
# the variable that JAX looks for.
set -euo pipefail
processes="${1:-4}"
out="${2:-demo/cluster}"
exec mpirun -n "$processes" python examples/cluster/train.py --detection mpi4py --out "$out"
