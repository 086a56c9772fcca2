"""A module of Lightning with its Trainer, for one device."""

import argparse
import os

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/lightning.ckpt")


class Stripes(L.LightningModule):
    """Tells in which of four stripes of a square a point is."""

    def __init__(self, width, epochs):
        super().__init__()
        self.epochs = epochs
        layers = nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = cross_entropy(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(-1) == y).to(x.dtype).mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


class Losses(L.Callback):
    """Prints the loss of every batch and the metrics of every epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print(f"epoch {trainer.current_epoch}: loss {outputs['loss'].item():.12g}")

    def on_validation_epoch_end(self, trainer, module):
        print(f"epoch {trainer.current_epoch}: accuracy {trainer.callback_metrics['accuracy'].item():.4f}")


def points(count, seed):
    """Points in a square, and the stripe of each."""
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (4 * (x[:, 0] + x[:, 1]) / 2).long())


def main(args):
    L.seed_everything(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    trainer = L.Trainer(
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=args.accumulate,
        callbacks=[Losses()],
        default_root_dir=os.path.dirname(args.out),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(points(args.samples, seed=1), args.batch_size, shuffle=True)
    held_out = DataLoader(points(args.samples // 4, seed=2), args.batch_size)
    trainer.fit(Stripes(args.width, args.epochs), loader, held_out)
    trainer.save_checkpoint(args.out)


if __name__ == "__main__":
    main(parser.parse_args())
