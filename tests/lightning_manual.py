"""Modules that are trained by manual optimization with Lightning's Trainer: arguments FOLDER, and scenarios.

``lightning_script`` trains them too, in the processes that it has."""

from __future__ import annotations

import os
from itertools import islice

import lightning as L
import torch
from launches import cluster_text, tell
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_runs import FOLDER, PARALLEL, RANK, Average, samples, trainer_with
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mixmesh.errors import MixmeshError

SPEEDS = {"d0": 0.08, "d1": 0.02, "d2": 0.04}
CLUSTER = cluster_text(**dict(islice(SPEEDS.items(), int(os.environ.get("WORLD_SIZE", "1")))))


def layers(*sizes: int, norm: bool = False) -> nn.Sequential:
    """Linear layers with activations between them."""
    made: list[nn.Module] = []
    for n, (a, b) in enumerate(zip(sizes, sizes[1:])):
        made += [nn.Linear(a, b)]
        if n < len(sizes) - 2:
            made += [nn.BatchNorm1d(b)] * norm + [nn.Tanh()]
    return nn.Sequential(*made)


class Told(L.LightningModule):
    """A module that notes the losses of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.told: list[list[float]] = []

    def note(self, *values) -> None:
        self.told.append([float(value) for value in values])


class Usual(Told):
    """Accumulation by hand, clipping, a scheduler, numbers and losses that are logged, validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(8, 64, 4, norm=True)

    def compute(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        loss = self.compute(batch) / 2
        self.manual_backward(loss)
        norm = 0.0
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            norm = nn.utils.get_total_norm([p.grad for p in self.net.parameters()])
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({"step": float(self.global_step), "epoch": float(self.current_epoch)})
        self.note(loss, norm, scheduler.get_last_lr()[0], self.net[0].weight.norm())
        return {"loss": loss, "batch": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note(outputs["loss"], outputs["batch"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.compute(batch))

    def on_validation_epoch_end(self):
        self.note(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Gan(Told):
    """A generator and a discriminator in turns, with noise that the step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = layers(4, 32, 8, norm=True), layers(8, 32, 1)

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        first, second = self.optimizers()
        z = torch.randn(len(real), 4, dtype=real.dtype)
        ones, zeros = torch.ones(len(real), 1, dtype=real.dtype), torch.zeros(len(real), 1, dtype=real.dtype)
        self.toggle_optimizer(first)
        made = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), ones)
        self.manual_backward(made)
        assert all(p.grad is None for p in self.discriminator.parameters())
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        seen = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        fake = F.binary_cross_entropy_with_logits(self.discriminator(self(z).detach()), zeros)
        self.manual_backward((seen + fake) / 2)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.note(made, seen, fake)

    def configure_optimizers(self):
        parts = (self.generator, self.discriminator)
        made = [torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.5, 0.999)) for part in parts]
        return made, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in made]


class Halves(Told):
    """Two modules and a parameter of no module, of one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(8, 32, 3), layers(3, 32, 8)
        self.scale = nn.Parameter(torch.zeros(()))
        if PARALLEL:
            self.decoder = torch.compile(self.decoder)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        z = self.encoder(x)
        again = self.decoder(z + torch.randn_like(z))
        loss = F.mse_loss(again, x) * torch.exp(-self.scale) + self.scale + 0.01 * z.square().mean()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        self.scale.grad += 1e-3 * RANK  # a device that rounds otherwise
        optimizer.step()
        self.note(loss, self.scale)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Forward(Told):
    """A forward of the module's own over several layers, which reads a number that changes; a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 4)
        self.bias, self.heat = nn.Parameter(torch.zeros(4)), 1.0

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.heat + self.bias

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            loss = F.cross_entropy(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.note(loss)
            return loss

        optimizer.step(closure=closure)

    def on_train_epoch_start(self):
        self.heat = 1.0 / (1 + self.current_epoch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.note(F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Wrong(Forward):
    """What cannot be kept: a module is called after a part that has it; a forward that reads the epoch;
    gradients of gradients."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x):
        return super().forward(x) * (self.current_epoch + 1 if self.what == "epoch" else 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = self(x.requires_grad_()).square().mean()
        if self.what == "within":
            loss = loss + self.last(x.new_ones(4, 64)).mean()
        if self.what == "second":
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = gradient.square().mean()
        self.manual_backward(loss)


def train(name: str, kind: type[Told], planner: str, resumed: str | None = None, **options) -> None:
    """Two epochs with a smaller last batch, and a checkpoint at their end."""
    torch.manual_seed(0)
    module = kind().double()
    torch.manual_seed(RANK)  # ranks go on as the first one
    trainer = trainer_with(planner, CLUSTER, **{"max_epochs": 2, **options})
    validates = kind.validation_step is not L.LightningModule.validation_step
    held_out = DataLoader(samples(7), batch_size=3) if validates else None
    trainer.fit(module, DataLoader(samples(25), batch_size=7, shuffle=True), held_out, ckpt_path=resumed)
    trainer.save_checkpoint(FOLDER / f"{name}.ckpt")
    torch.save(module.state_dict(), FOLDER / f"{name}-{RANK}.pt")
    tell(FOLDER, name, told=module.told)


def usual(name: str, planner: str, resumed: str | None = None) -> None:
    kept = ModelCheckpoint(FOLDER / "kept", "epoch{epoch}", monitor="val_loss", save_top_k=-1)
    kept.auto_insert_metric_name = False
    callbacks = [Average(), EarlyStopping("val_loss", patience=50), kept]
    train(name, Usual, planner, resumed, callbacks=callbacks, enable_checkpointing=True)


def refused() -> None:
    for what in ("within", "epoch", "second"):
        trainer, error = trainer_with("ddp-proportional", CLUSTER, max_epochs=1), ""
        try:
            trainer.fit(Wrong(what).double(), DataLoader(samples(6), batch_size=6))
        except MixmeshError as raised:
            error = str(raised)
        tell(FOLDER, "manual refused", what=what, error=error)


SCENARIOS = {
    "by-hand": lambda: usual("by-hand", "fsdp-even"),
    "by-hand-resumed": lambda: usual(
        "by-hand-resumed", "ddp-proportional", str(FOLDER / "kept" / "epoch0.ckpt")
    ),
    "gan": lambda: train("gan", Gan, "ddp-proportional"),
    "forward": lambda: train("forward", Forward, "tensor-parallel"),
    "halves": lambda: train("halves", Halves, "fsdp-even"),
    "halves-resumed": lambda: train(
        "halves-resumed", Halves, "tensor-parallel", str(FOLDER / "halves.ckpt"), max_epochs=3
    ),
    "refused": refused,
}


def run(*names: str) -> None:
    for name in names:
        SCENARIOS[name]()


if __name__ == "__main__":
    run("by-hand", "gan", "halves", "halves-resumed")
