"""torch.distributed.pipelining over gloo: `python gloo_pipeline.py RANKS DIRECTORY`, like `gloo.py`.

driver -> all      {"schedule": "1f1b", "microbatches": 8, "width": 256, "samples": 64, "lr": 0.001, "count": 100}
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from exchange import images, timed  # type: ignore[import-not-found]
from gloo import GlooPeer, main  # type: ignore[import-not-found]
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


class PipelinePeer(GlooPeer):
    def turn(self, command: dict[str, Any]) -> tuple[float, bool]:
        """Train a new model: (seconds, whether the loss is finite)."""
        width = command["width"]
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
        stage = PipelineStage(layer, self.rank, self.ranks, torch.device("cpu"))
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[command["schedule"]]
        schedule = kind(stage, command["microbatches"], loss_fn=torch.nn.functional.cross_entropy)
        optimizer = torch.optim.SGD(layer.parameters(), lr=command["lr"])
        pixels, classes = images(command["samples"], width, seed=0)
        inputs, labels = torch.from_numpy(pixels), torch.from_numpy(classes)
        losses: list[Any] = []

        def step() -> None:
            optimizer.zero_grad()
            losses.clear()
            if self.rank == self.ranks - 1:
                schedule.step(target=labels, losses=losses)
            elif self.rank == 0:
                schedule.step(inputs)
            else:
                schedule.step()
            optimizer.step()

        seconds = timed(step, self.barrier, command["count"])
        return seconds, all(math.isfinite(float(loss)) for loss in losses)


if __name__ == "__main__":
    main(PipelinePeer, int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
