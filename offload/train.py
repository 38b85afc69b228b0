"""`python -m offload.train`: train a model larger than the device. Without arguments: the built-in run."""

from __future__ import annotations

import os

from offload import __version__
from offload.app.config.command_line import importing, parse_config, run_command, take_gpus
from offload.app.launch import end_with_launcher, launch

DESCRIPTION = (
    "Train a Hugging Face model whose states stream through the device. Without arguments: a small Llama on the "
    "sources of Python's standard library, about two minutes. Exit codes: 0 fine, 1 failed, 2 bad configuration or "
    "input, 3 does not fit, 130 interrupted (state saved)."
)


def main(words: list[str]) -> int:
    is_launched = end_with_launcher()
    num_ranks, words = take_gpus(words)
    config = parse_config(words, prog="python -m offload.train", description=DESCRIPTION)
    from offload.app.training.task import check_names  # late import: an interrupt now meets a working exit path

    check_names(config)
    if num_ranks > 1:
        config.check_ranks(num_ranks)
        print(f"offload {__version__}: starting {num_ranks} ranks ...")
        with importing():
            import torch.distributed.launcher.api  # noqa: F401
        return launch("offload.train", words, num_ranks, debug=config.run.debug)
    if not is_launched and os.environ.get("RANK", "0") == "0":
        print(f"offload {__version__}: loading torch and transformers ...")  # takes seconds
    with importing():  # only after the configuration is valid
        import transformers.modeling_utils  # noqa: F401 - shared by all models, half of the load time

        from offload.app.training.trainer import Trainer

    Trainer(config).run()
    return 0


if __name__ == "__main__":
    run_command(main)
