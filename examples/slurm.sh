#!/bin/bash
# Train on four machines of eight GPUs under Slurm:  sbatch examples/slurm.sh corpus/ /shared/run
# Two minutes before the time limit the job receives SIGTERM and saves; Slurm then queues it again, and it resumes.
#SBATCH --job-name=sedd
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32
#SBATCH --time=24:00:00 --signal=TERM@120 --requeue --open-mode=append
set -euo pipefail
data=$1 out=$2  # both on storage that all machines share
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
resume=$([ -f "$out/config.json" ] && echo --resume || true)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else restarted processes may wait for each other for ever (torch 2.13)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
  -m sedd train "$data" --out "$out" --recipe small $resume || code=$?
# stopped by the time limit or by a lost machine
if [ "${code:-0}" -ne 0 ] && [ -f "$out/config.json" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
