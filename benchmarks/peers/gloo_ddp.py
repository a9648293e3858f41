"""torch's DistributedDataParallel over gloo: `python gloo_ddp.py RANKS DIRECTORY`, like `gloo.py`.

driver -> all      {"model": "mlp", "batch_size": 32, "shape": [784], "lr": 0.0001, "count": 100}
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch_models  # type: ignore[import-not-found]
from exchange import images, timed  # type: ignore[import-not-found]
from gloo import GlooPeer, main  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel


class DdpPeer(GlooPeer):
    def turn(self, command: dict[str, Any]) -> tuple[float, bool]:
        """Train a new model: (seconds, whether every rank ended with the same finite parameters)."""
        net = DistributedDataParallel(getattr(torch_models, command["model"])())
        optimizer = torch.optim.SGD(net.parameters(), lr=command["lr"])
        pixels, classes = images(command["batch_size"], *command["shape"], seed=self.rank)
        inputs, labels = torch.from_numpy(pixels), torch.from_numpy(classes)

        def step() -> None:
            loss = torch.nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        seconds = timed(step, self.barrier, command["count"])
        ours = sum(float(parameter.double().sum()) for parameter in net.parameters())
        # One number stands for all parameters: the ranks must agree in it.
        sums = self.gather(ours)
        return seconds, sums is None or (math.isfinite(ours) and len(set(sums)) == 1)


if __name__ == "__main__":
    main(DdpPeer, int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
