"""Run offload.train on a Ray cluster: python examples/cluster/ray_train.py --workers 2 [--gpu] --run.dir /shared/run
...

The other arguments are settings of offload.train. A run restarted by Ray resumes from the newest checkpoint.
"""

import argparse

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from offload.train import main


def train(config: dict[str, list[str]]) -> None:
    main(config["words"])  # with Ray's process group and device


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workers", type=int, default=2, help="ranks, on however many machines")
parser.add_argument("--gpu", action="store_true", help="one GPU for each")
flags, words = parser.parse_known_args()
TorchTrainer(
    train,
    train_loop_config={"words": words},
    scaling_config=ScalingConfig(num_workers=flags.workers, use_gpu=flags.gpu),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
).fit()
