"""Entry point of `python -m offload.data`.

The command `data` lives in `offload.look`, because this package already has the name.
"""

from offload.config.command_line import run_command
from offload.look import main

if __name__ == "__main__":
    run_command(main)
