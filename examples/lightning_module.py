"""Lightning's Trainer on all devices: ``torchrun --nproc-per-node 2 examples/lightning_module.py``

For one device the script is the same, but for the two lines that are marked."""

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from mixmesh.lightning import Strategy  # new


class Stripes(L.LightningModule):
    """Tells in which of four stripes of a square a point is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch  # whole batches, on every rank
        loss = cross_entropy(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("right", (self.layers(x).argmax(-1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)]


def points(count, seed):
    """Points in a square, and the stripe of each."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (4 * (x[:, 0] + x[:, 1]) / 2).long())


def main():
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=5,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir="out/lightning",
        strategy=Strategy(),  # new
    )
    loader = DataLoader(points(2000, seed=1), batch_size=64, shuffle=True)
    trainer.fit(Stripes(), loader, DataLoader(points(500, seed=2), batch_size=64))
    if trainer.is_global_zero:
        print(f"{trainer.callback_metrics['right'].item():.1%} right")


if __name__ == "__main__":
    main()
