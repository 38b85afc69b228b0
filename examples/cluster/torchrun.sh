#!/bin/sh
# HEAD is the first machine, by the address that the others reach; NODE counts them from 0. The rest are settings:
#   HEAD=10.0.0.1 MACHINES=2 NODE=0 examples/cluster/torchrun.sh --config examples/finetune.yaml --run.dir /shared/run
# A rank that is lost ends all; torchrun starts them again, three times at most, at the newest checkpoint of all.
NODE=${NODE:-${SLURM_NODEID:-${SKYPILOT_NODE_RANK:-0}}}
IS_HOST=$([ "$NODE" = 0 ] && echo true || echo false) # torchrun would look in vain where a name is that of the loopback
exec torchrun --nnodes "${MACHINES:-2}" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-conf "is_host=$IS_HOST" --rdzv-id "${ID:-offload}" \
  -m offload.train "$@"
