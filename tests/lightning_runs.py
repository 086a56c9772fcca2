"""Data and Trainers of the Lightning scripts, which run as one process and under torchrun: arguments FOLDER,
and what is the script's own."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from launches import cluster_file, rank

from mixmesh.lightning import Strategy

FOLDER, PARALLEL = Path(sys.argv[1]), "RANK" in os.environ
RANK = rank()
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def samples(count: int) -> list[tuple]:
    drawn = torch.Generator().manual_seed(1)
    xs = torch.randn(count, 8, generator=drawn, dtype=torch.float64)
    return [(x, int(x[0] > 0) + 2 * int(x[1] > 0)) for x in xs]


class Average(L.Callback):
    """Validates with a moving average of the weights, and trains on with the weights themselves."""

    def on_fit_start(self, trainer, module) -> None:
        self.average = self._copy(module)

    def on_train_batch_end(self, trainer, module, *_) -> None:
        for name, value in module.state_dict().items():
            self.average[name] = (0.9 * self.average[name] + 0.1 * value).to(value.dtype)

    def on_validation_start(self, trainer, module) -> None:
        self.weights = self._copy(module)
        module.load_state_dict(self.average)

    def on_validation_end(self, trainer, module) -> None:
        module.load_state_dict(self.weights)

    def _copy(self, module) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def trainer_with(planner: str, cluster: str, **options) -> L.Trainer:
    """In both runs, but for the strategy."""
    if PARALLEL:
        planning = {
            "profile_s": 0,
            "planner": planner,
            "cache": FOLDER / "cache",
            "cluster": cluster_file(FOLDER, cluster),
        }
        options["strategy"] = Strategy(planning=planning)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    usual = {"logger": False, "enable_checkpointing": False, **quiet}
    return L.Trainer(default_root_dir=FOLDER, **{**usual, **options})
