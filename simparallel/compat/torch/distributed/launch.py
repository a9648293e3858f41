"""`python -m torch.distributed.launch`, which gives the script `--local_rank=N` as its first argument."""

import sys

from simparallel.compat.torch.distributed.run import main

if __name__ == "__main__":
    sys.exit(main("--no-use-env"))
