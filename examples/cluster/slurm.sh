#!/bin/bash
# One process on each node, with all GPUs of the node:  sbatch examples/cluster/slurm.sh
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# If one process fails, Slurm ends the others too.
srun --kill-on-bad-exit=1 python examples/cluster/train.py --detection slurm --out "${SCRATCH:-.}/plurax"
code=$?

# 143: SIGTERM came, 120 seconds before the end of the time, and the checkpoint is written. Queue the job again.
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
