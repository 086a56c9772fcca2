"""A script for one device that trains tiny modules with Lightning's Trainer: argument FOLDER.

``test_lightning`` runs it by itself with the strategy ``auto``, and under torchrun with ``mixmesh``'s."""

from __future__ import annotations

import random

import lightning as L
import lightning_manual
import torch
from launches import CLUSTER, WITHOUT_BF16, tell
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_runs import FOLDER, PARALLEL, RANK, Average, samples, trainer_with
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from mixmesh.errors import InputError, MixmeshError


class Net(L.LightningModule):
    """A classifier whose batches are tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64, bias=False)  # whose gradient would be zero up to rounding
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.right = SumMetric()

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        accuracy = (logits.argmax(-1) == y).double().mean()
        self.log_dict(
            {"accuracy": accuracy, "size": logits.square().mean()}, batch_size=len(x), on_epoch=True
        )
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.right.update((logits.argmax(-1) == y).sum())
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_right", self.right)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Named(Net):
    """The same with batches that are dicts."""

    def training_step(self, batch):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss, "logits": logits, "target": batch["y"]}


class Told(L.Callback):
    """Notes what is known after every step and every validation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.norm = 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        sums = {f"sum of {name}": float(value.double().square().sum()) for name, value in outputs.items()}
        weight = float(module.last.weight.norm())
        known = dict(rate=rate, scale=scale, weight=weight, gradient=self.norm)
        self._note(trainer, step=trainer.global_step, **known, **sums)

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        self.norm = float(nn.utils.get_total_norm([p.grad for p in module.parameters()]))

    def on_validation_end(self, trainer, module) -> None:
        self._note(trainer)

    def _note(self, trainer, **values) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append({**metrics, **values})


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def usual(name: str, planner: str, resumed: str | None = None) -> None:
    """Accumulation, clipping, schedulers, a smaller last batch, validation within epochs (within an optimizer
    step, too), callbacks, a logger, checkpoints."""
    seed(0)
    module = Net().double()
    seed(RANK)  # ranks go on as the first one
    told, stop = Told(), EarlyStopping("val_loss", patience=50)
    kept = ModelCheckpoint(FOLDER / name, "epoch{epoch}", monitor="val_loss", save_top_k=-1)
    kept.auto_insert_metric_name = False
    trainer = trainer_with(
        planner, CLUSTER, callbacks=[told, Average(), stop, kept], enable_checkpointing=True, max_epochs=2,
        accumulate_grad_batches=2, gradient_clip_val=0.3, val_check_interval=3,
        logger=CSVLogger(FOLDER / name, "log"), log_every_n_steps=1,
    )  # fmt: skip
    loader = DataLoader(samples(22), batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(samples(7), batch_size=3), ckpt_path=resumed)
    trainer.save_checkpoint(FOLDER / name / "final.ckpt")
    (tested,) = trainer.test(module, DataLoader(samples(10), batch_size=4), verbose=False)
    torch.save(module.state_dict(), FOLDER / name / f"module-{RANK}.pt")
    tell(
        FOLDER,
        name,
        told=told.rows,
        tested=tested,
        writes=trainer.is_global_zero,
        processes=trainer.world_size,
    )


def named(name: str, planner: str, cluster: str = CLUSTER, **options) -> None:
    """Batches that are dicts, in float32 or under autocast."""
    seed(1)
    told = Told()
    rows = [{"x": x.float(), "y": y} for x, y in samples(10)]
    trainer = trainer_with(planner, cluster, callbacks=[told], max_epochs=1, **options)
    trainer.fit(Named(), DataLoader(rows, batch_size=4))
    tell(FOLDER, name, told=told.rows)


class Wrong(Net):
    """A module whose ``training_step`` does what cannot be kept."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what, self.seen, self.mean = what, [], MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return self.what(self, loss, batch_idx)


def keep(self, loss, _):
    self.seen.append(loss.detach())
    return loss


def measure(self, loss, _):
    self.log("mean", self.mean)
    return loss


def count(self, loss, _):
    self.mean.update(loss)
    return loss * self.mean.compute()


def log_number(self, loss, _):
    self.log("number", 1.0)
    return loss


WRONG = {
    "index": lambda self, loss, index: loss * (1 + index % 2),
    "step": lambda self, loss, _: loss * self.global_step,
    "trainer": lambda self, loss, _: loss * self.trainer.max_epochs,
    "optimizers": lambda self, loss, _: self.optimizers() and loss,
    "keep": keep,
    "measure": measure,
    "count": count,
    "number": log_number,
    "more": lambda self, loss, _: {"loss": loss, "other": 2},
    "nothing": lambda self, loss, _: None,
    "batches": lambda self, loss, _: loss,
    "modes": lambda self, loss, _: loss,
    "rates": lambda self, loss, _: loss,
    "whole": lambda self, loss, _: loss,
}


class Disturbs(L.Callback):
    """Changes something after the first step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer, module, *_) -> None:
        if self.name == "modes":
            module.norm.eval()
        elif self.name == "rates" and RANK:
            trainer.optimizers[0].param_groups[0]["lr"] = 1.0
        elif self.name == "whole":
            trainer.strategy.lightning_module_state_dict()  # lends the whole module
            module.last.weight.data.mul_(2 + RANK)


def refused() -> None:
    """What is refused in the first steps."""
    for name, what in WRONG.items():
        seed(1)
        rows = samples(8)[RANK * (name == "batches") :]
        trainer = trainer_with("ddp-even", CLUSTER, callbacks=[Disturbs(name)], max_epochs=1)
        error = ""
        try:
            trainer.fit(Wrong(what).double(), DataLoader(rows, batch_size=4))
        except MixmeshError as raised:
            error = str(raised)
        tell(FOLDER, "refused", what=name, error=error)
    seed(1)
    module = Net().double()
    trainer = trainer_with("ddp-even", CLUSTER, max_epochs=1)
    for _ in range(2):
        try:
            trainer.fit(module, DataLoader(samples(8), batch_size=4))
        except InputError as raised:
            tell(FOLDER, "refused", what="again", error=str(raised))


def without_bf16() -> None:
    """A card that would compute in float16, where nothing scales the loss: refused."""
    try:
        named("", "ddp-even", cluster=WITHOUT_BF16, precision="bf16-mixed")
    except InputError as raised:
        tell(FOLDER, "without bf16", error=str(raised))


if __name__ == "__main__":
    usual("usual", "tensor-parallel")
    usual("resumed", "ddp-even", str(FOLDER / "usual" / "epoch0.ckpt"))
    named("whole", "ddp-even")
    named("half", "ddp-even", precision="bf16-mixed")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    named("scaled", "fsdp-even", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    lightning_manual.run("by-hand", "by-hand-resumed", "gan", "forward", "halves", "halves-resumed")
    if PARALLEL:
        without_bf16()
        refused()
        lightning_manual.run("refused")
