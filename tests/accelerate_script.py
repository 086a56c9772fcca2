"""A script for one device that trains tiny models with an Accelerator: arguments FOLDER LIBRARY.

``test_accelerate`` runs it with that of ``accelerate``, and under torchrun with ``mixmesh.accelerate``'s."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, on_main_process
from launches import WITHOUT_BF16, cluster_file, rank, tell
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from mixmesh.errors import InputError

FOLDER, LIBRARY = Path(sys.argv[1]), sys.argv[2]
PARALLEL = LIBRARY == "mixmesh.accelerate"
RANK = rank()
KEPT = {"cache": FOLDER / "cache", "cluster": cluster_file(FOLDER)}
Accelerator = importlib.import_module(LIBRARY).Accelerator


def accelerator_with(planner: str, planning: dict | None = None, **options):
    """In both libraries what differs is how a parallel step is planned."""
    AcceleratorState._reset_state()  # every scenario stands for a script of its own
    chosen = {"profile_s": 0, "planner": planner, **KEPT, **(planning or {})}
    accelerator = Accelerator(cpu=True, **options, **({"planning": chosen} if PARALLEL else {}))
    if accelerator.mixed_precision == "fp16":  # Accelerate scales on accelerators only
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return accelerator


class Net(nn.Module):
    """Gives the loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64, bias=False)  # whose gradient would be zero up to rounding
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, 4)

    def forward(self, x, labels=None):
        logits = self.last(torch.tanh(self.norm(self.first(x))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Plain(nn.Module):
    """Gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Written(GeneralTracker):
    """Keeps what is logged on the rank that logs."""

    name, requires_logging_directory, tracker = "written", False, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict] = []

    def store_init_configuration(self, values) -> None:
        self.rows.append(values)

    @on_main_process
    def log(self, values, step=None, **_) -> None:
        self.rows.append(values)


class Epochs:
    """A state of the script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def samples(count: int) -> list[dict]:
    drawn = torch.Generator().manual_seed(1)
    xs = torch.randn(count, 8, generator=drawn, dtype=torch.float64)
    return [{"x": x, "labels": int(x[0] > 0) + 2 * int(x[1] > 0)} for x in xs]


def pairs(count: int) -> list[tuple]:
    return [(row["x"], row["labels"]) for row in samples(count)]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def labelled(name: str, planner: str, resumed: bool = False) -> None:
    """The usual loop: batch norm, accumulation, clipping, a scheduler, a smaller last batch, evaluation,
    checkpoints."""
    seed(0)
    written, epochs = Written(), Epochs()
    accelerator = accelerator_with(planner, gradient_accumulation_steps=2, log_with=[written])
    accelerator.init_trackers("tiny")
    accelerator.register_for_checkpointing(epochs)
    # a hook may make a module, as that for an average of diffusers does
    accelerator.register_save_state_pre_hook(lambda *_: accelerator.is_main_process and nn.Linear(2, 2))
    with accelerator.main_process_first():
        first = FOLDER / name / "first"
        found = first.exists()
        first.parent.mkdir(exist_ok=True)
        first.touch()
    model, teacher = Net().double(), accelerator.prepare(Plain().double())
    seed(RANK)  # ranks go on as the first one
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(samples(22), batch_size=4, shuffle=True)
    held_out = DataLoader(samples(7), batch_size=3)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    told = []
    if resumed:
        accelerator.load_state(FOLDER / "labelled" / "state")
        loader = accelerator.skip_first_batches(loader, 2)
    for epoch in range(1 if resumed else 2):
        model.train()
        epochs.count += 1
        if epoch:
            accelerator.save_state(FOLDER / name / "state")
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    told.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            told += [loss.item(), len(batch["labels"]), scheduler.get_last_lr()[0]]
        model.eval()
        right = 0
        for batch in held_out:
            with torch.inference_mode():
                logits = model(batch["x"])["logits"]
            logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
            right += int((logits.argmax(-1) == labels).sum())
            told.append(logits.square().sum().item())
            told.append(teacher(batch["x"]).sum().item())
        told += [right, epochs.count]
        accelerator.log({"right": right})
    x = batch["x"].clone().requires_grad_()
    whole = accelerator.unwrap_model(model)
    (slope,) = torch.autograd.grad(whole(x)["logits"].square().sum(), x)
    told.append(slope.square().sum().item())
    if RANK == 0:
        accelerator.set_trigger()
    told.append(accelerator.check_trigger())
    accelerator.save_model(model, FOLDER / name / "model")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), FOLDER / name / "unwrapped.pt")
        torch.rand(3)
    accelerator.end_training()
    told.append(torch.rand(()).item())  # all go on as the first rank
    tell(
        FOLDER,
        name,
        told=told,
        kind=type(accelerator.unwrap_model(model)).__name__,
        processes=[accelerator.num_processes, accelerator.process_index],
        main=accelerator.is_main_process,
        logged=len(written.rows),
        found=found,
    )


def criterion(name: str, planner: str, **options) -> None:
    """A loss outside of the model, logits in training, and parameters that were listed before ``prepare``. At
    the end weights change between evaluations."""
    seed(1)
    planning = {"loss": F.cross_entropy, "outputs": ("logits",)}
    accelerator = accelerator_with(planner, planning, **options)
    model = Plain() if options else Plain().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    listed = list(model.parameters())
    loader = DataLoader(pairs(10), batch_size=4)
    # the loop casts what the loader gives
    called_with = torch.zeros(4, 8, dtype=listed[0].dtype), torch.zeros(4, dtype=torch.long)
    planned = {"planning": {"batch": called_with}} if PARALLEL else {}
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader, **planned)
    told, scales = [], []
    for x, y in loader:
        x = x.to(listed[0].dtype)
        if PARALLEL:
            out = model(x, y)
            loss, logits = out.loss, out.logits
        else:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        accelerator.backward(loss)
        told += [loss.item(), accelerator.clip_grad_norm_(listed, 0.2).item()]
        told.append(logits.detach().square().sum().item())
        optimizer.step()
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0)
    model.eval()
    with torch.no_grad():
        told.append(model(x).sum().item())
        for p in model.parameters():
            p.data.mul_(0.5)
        told.append(model(x).sum().item())
    tell(FOLDER, name, told=told, scales=scales)


def losses_of_epoch(accelerator, model, optimizer, loader) -> list[float]:
    """Trains for an epoch."""
    losses = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def frozen_later(name: str, planner: str) -> None:
    """Batch norm that evaluates, and a layer that is frozen, from the second epoch on, both by the script's
    own module."""
    seed(2)
    accelerator = accelerator_with(planner)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    told = []
    for epoch in range(3):
        model.train()
        own = accelerator.unwrap_model(model)
        if epoch:
            own.norm.eval()
            own.first.requires_grad_(epoch == 2)
        told += losses_of_epoch(accelerator, model, optimizer, loader)
    tell(FOLDER, name, told=told)


def evaluated_between(name: str, planner: str) -> None:
    """Evaluations around the optimizer's step, where some ranks may hold no weights, and of other weights
    that the script's own module has for a while."""
    seed(3)
    accelerator = accelerator_with(planner)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(8), batch_size=4))
    told = []

    def evaluate(batch) -> None:
        model.eval()
        with torch.no_grad():
            told.append(model(**batch)["loss"].item())
        model.train()

    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        evaluate(batch)
        optimizer.step()
        optimizer.zero_grad()
        evaluate(batch)
    kept = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    accelerator.unwrap_model(model).load_state_dict({key: 2 * value for key, value in kept.items()})
    evaluate(batch)
    accelerator.unwrap_model(model).load_state_dict(kept)
    told.append(model(**batch)["loss"].item())  # trains with the weights that were put back
    best = {key: 0.5 * value for key, value in accelerator.get_state_dict(model).items()}
    accelerator.unwrap_model(model).load_state_dict(best)
    evaluate(batch)
    told.append(model(**batch)["loss"].item())  # trains with the best weights
    with torch.no_grad():
        for p in accelerator.unwrap_model(model).parameters():
            p.clamp_(-0.1, 0.1)
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    evaluate(batch)
    tell(FOLDER, name, told=told)


def two_models(name: str, planner: str) -> None:
    """A GAN: two models, each with its optimizer in a call of its own, planned by a batch without a loader
    or with one whose batches are those of the other model."""
    seed(4)
    accelerator = accelerator_with(planner)
    generator, critic = nn.Linear(2, 8).double(), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(each.double().parameters(), lr=0.01) for each in (generator, critic)]
    loader = DataLoader(torch.stack([row["x"] for row in samples(8)]), batch_size=4)
    noise = torch.randn(4, 2, dtype=torch.float64)
    planned = {"planning": {"batch": (noise,)}} if PARALLEL else {}
    generator, optimizers[0] = accelerator.prepare(generator, optimizers[0], **planned)
    critic, optimizers[1], loader = accelerator.prepare(critic, optimizers[1], loader)
    told = []
    for real in loader:
        losses = (
            lambda real=real: critic(generator(noise).detach()).mean() - critic(real).mean(),
            lambda: -critic(generator(noise)).mean(),
        )
        for loss_of, optimizer in zip(losses, reversed(optimizers)):
            loss = loss_of()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            told.append(loss.item())
    tell(FOLDER, name, told=told)


def unplanned(name: str) -> None:
    """A model that is prepared without its optimizer trains whole on every rank, with a warning."""
    accelerator = accelerator_with("ddp-even")
    model = accelerator.prepare(Plain().double())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.backward(model(torch.ones(4, 8, dtype=torch.float64)).sum())
    try:
        accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    except InputError as error:
        tell(FOLDER, name, error=str(error), warned=[str(each.message) for each in caught])


class Stream(IterableDataset):
    """Samples in an order that is drawn from the process's numbers when it is read."""

    def __iter__(self):
        rows = samples(11)
        yield from (rows[n] for n in torch.randperm(len(rows)).tolist())


def streamed(name: str, planner: str) -> None:
    """Data without indices, to train and to evaluate on."""
    seed(5)
    accelerator = accelerator_with(planner)
    model = Net().double()
    seed(RANK)  # ranks go on as the first one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, held_out = DataLoader(Stream(), batch_size=4), DataLoader(Stream(), batch_size=3)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    told = []
    for _ in range(2):
        told += losses_of_epoch(accelerator, model, optimizer, loader)
        model.eval()
        with torch.no_grad():
            told += [model(**batch)["loss"].item() for batch in held_out]
        model.train()
    tell(FOLDER, name, told=told)


def refused(name: str) -> None:
    """What only a prepared model can refuse."""
    planning = {"loss": F.cross_entropy, "outputs": ("logits",)}
    accelerator = accelerator_with("ddp-even", planning)
    seed(1)
    model = Plain().double()
    model.first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(pairs(8), batch_size=4))
    errors = []

    def expect(action) -> None:
        try:
            action()
        except InputError as error:
            errors.append(str(error))
        else:
            errors.append("")

    x, y = torch.ones(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    expect(lambda: model(x + RANK, y))
    expect(lambda: accelerator.backward(model(x, y).logits.sum()))
    with torch.no_grad():
        accelerator.unwrap_model(model).last.bias.zero_().add_(1 + RANK)
    expect(lambda: model(x, y))
    model(x, y)  # and goes on
    optimizer.param_groups[0]["lr"] += RANK
    expect(lambda: model(x, y))
    optimizer.param_groups[0]["lr"] = 0.1
    accelerator.unwrap_model(model).first.requires_grad_(True)
    expect(lambda: model(x, y))
    accelerator.sync_gradients = False  # as before the last batch of a step
    expect(lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))
    expect(lambda: accelerator.clip_grad_value_(list(model.parameters()), 0.1))
    tell(FOLDER, name, errors=errors)


def without_bf16(name: str) -> None:
    """A card that would compute in float16, where nothing scales the loss: refused."""
    planning = {"loss": F.cross_entropy, "cluster": cluster_file(FOLDER, WITHOUT_BF16)}
    accelerator = accelerator_with("ddp-even", planning, mixed_precision="bf16")
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called_with = torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
    try:
        accelerator.prepare(
            model, optimizer, DataLoader(pairs(8), batch_size=4), planning={"batch": called_with}
        )
    except InputError as error:
        tell(FOLDER, name, error=str(error))


if __name__ == "__main__":
    labelled("labelled", "tensor-parallel")
    labelled("resumed", "ddp-even", resumed=True)
    criterion("criterion", "ddp-even")
    frozen_later("frozen later", "fsdp-even")
    evaluated_between("evaluated between", "tensor-parallel")
    evaluated_between("by one rank", "single")
    two_models("two models", "tensor-parallel")
    streamed("streamed", "fsdp-even")
    criterion("half", "tensor-parallel", mixed_precision="bf16")
    criterion("scaled", "fsdp-even", mixed_precision="fp16")
    if PARALLEL:
        refused("refused")
        unplanned("unplanned")
        without_bf16("without bf16")
    else:
        criterion("whole", "", mixed_precision="no")
