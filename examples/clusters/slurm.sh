#!/bin/bash
# Four ranks on each of two nodes: sbatch slurm.sh. Options of sbatch's command line replace those below.
#SBATCH --job-name=simparallel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log
set -euo pipefail

# An environment with simparallel, and for more than one node with an mpi4py built for the cluster's MPI library.
if [ -n "${VENV:-}" ]; then
    # shellcheck source=/dev/null
    source "$VENV/bin/activate"
fi
# srun gives each task cores of its own, so that they are not to be shared with the other ranks.
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Without srun, the script would run once and alone. If one task fails, Slurm ends the others.
srun --mpi=pmix --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 python train.py "$@"
