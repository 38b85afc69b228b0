#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --requeue
# sbatch examples/cluster/slurm.sh --config examples/finetune.yaml --run.dir /shared/run
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD MACHINES=$SLURM_NNODES ID=$SLURM_JOB_ID
srun examples/cluster/torchrun.sh "$@"
