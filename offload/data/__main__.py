"""`python -m offload.data`: the command `data`, which is in `offload.look`, as its own name is the package's."""

from offload.config.command_line import run_command
from offload.look import main

if __name__ == "__main__":
    run_command(main)
