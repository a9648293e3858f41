"""`python -m torch.distributed.run`, also called torchrun."""

import sys


def main(*settings: str) -> int:
    """Start the script of the command line on the devices that it asks for; return the exit code."""
    from simparallel.cli.main import main as command

    return command(["torchrun", *settings, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
