"""Runs the command `data` for `python -m offload.data`.

The code is in `offload.look`, because the package has the name.
"""

from offload.config.command_line import run_command
from offload.look import main

if __name__ == "__main__":
    run_command(main)
