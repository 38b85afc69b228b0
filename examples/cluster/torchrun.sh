#!/bin/sh
# HEAD is the first machine's address, reachable from the others; NODE counts from 0. The other arguments are settings:
#   HEAD=10.0.0.1 MACHINES=2 NODE=0 examples/cluster/torchrun.sh --config examples/finetune.yaml --run.dir /shared/run
# A lost rank ends all ranks. torchrun restarts them at most three times, from the newest common checkpoint.
NODE=${NODE:-${SLURM_NODEID:-${SKYPILOT_NODE_RANK:-0}}}
IS_HOST=$([ "$NODE" = 0 ] && echo true || echo false) # torchrun fails where the host name resolves to the loopback
exec torchrun --nnodes "${MACHINES:-2}" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-conf "is_host=$IS_HOST" --rdzv-id "${ID:-offload}" \
  -m offload.train "$@"
