"""torch's FSDP2 and ZeroRedundancyOptimizer over gloo: `python gloo_zero.py RANKS DIRECTORY`, like `gloo.py`.

driver -> all      {"what": "ZeRO-3", "model": "mlp", "batch_size": 32, "shape": [784], "lr": 0.0001, "count": 100}
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch_models  # type: ignore[import-not-found]
from exchange import images, timed  # type: ignore[import-not-found]
from gloo import GlooPeer, main  # type: ignore[import-not-found]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class ZeroPeer(GlooPeer):
    def turn(self, command: dict[str, Any]) -> tuple[float, bool]:
        """Train a new model: (seconds, whether all losses are finite)."""
        net = getattr(torch_models, command["model"])()
        if command["what"] == "ZeRO-3":
            mesh = init_device_mesh("cpu", (self.ranks,))
            for layer in net:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            optimizer: Any = torch.optim.Adam(net.parameters(), lr=command["lr"])
        else:
            net = DistributedDataParallel(net)
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=command["lr"])
        pixels, classes = images(command["batch_size"], *command["shape"], seed=self.rank)
        inputs, labels = torch.from_numpy(pixels), torch.from_numpy(classes)
        loss = torch.tensor(0.0)

        def step() -> None:
            nonlocal loss
            loss = torch.nn.functional.cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        seconds = timed(step, self.barrier, command["count"])
        return seconds, math.isfinite(loss.item())


if __name__ == "__main__":
    main(ZeroPeer, int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
