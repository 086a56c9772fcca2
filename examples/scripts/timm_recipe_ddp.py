"""Image classification in the manner of timm's train.py, under DistributedDataParallel."""

import argparse
import os
from contextlib import nullcontext
from functools import partial

import timm
import torch
import torch.distributed as dist
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, ParseKwargs, accuracy, dispatch_clip_grad, random_seed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="convnext_atto")
parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--num-classes", type=int, default=100)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--amp", action="store_true", help="autocast to bfloat16")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/timm.pt")


def make_data(args, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(args.num_classes, (samples,), generator=generator)
    noise = torch.randn(samples, 3, args.image_size, args.image_size, generator=generator)
    return TensorDataset(noise + y[:, None, None, None] / args.num_classes, y)


def validate(model, loader, amp):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            images = images.contiguous(memory_format=torch.channels_last)
            with amp():
                output = model(images)
            top1.update(accuracy(output.float(), target)[0].item(), images.size(0))
    return top1.avg


def main(args):
    dist.init_process_group("gloo")
    random_seed(0, dist.get_rank())
    torch.set_default_dtype(getattr(torch, args.dtype))
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    data = make_data(args, args.samples, 1)
    sampler = DistributedSampler(data)
    batch_size = args.batch_size // dist.get_world_size()
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    held_out = DataLoader(make_data(args, args.samples // 4, 2), args.batch_size)
    model = timm.create_model(args.model, num_classes=args.num_classes, **args.model_kwargs)
    model = model.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    amp = partial(torch.autocast, "cpu", torch.bfloat16) if args.amp else nullcontext
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=args.num_classes)
    criterion = SoftTargetCrossEntropy()
    model_ema = ModelEmaV3(model.module, decay=0.9)
    scheduler, epochs = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=args.epochs,
        warmup_epochs=1,
        warmup_lr=1e-5,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    updates = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            images, target = mixup(images, target)
            images = images.contiguous(memory_format=torch.channels_last)
            with amp():
                loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), value=5.0)
            optimizer.step()
            updates += 1
            scheduler.step_update(num_updates=updates)
            model_ema.update(model.module, step=updates)
            print(f"epoch {epoch}: loss {loss.item():.12g}")
        top1, ema_top1 = (validate(m, held_out, amp) for m in (model.module, model_ema))
        print(f"epoch {epoch}: accuracy {top1:.4f}, of the average {ema_top1:.4f}")
    if dist.get_rank() == 0:
        torch.save({"state_dict": model.module.state_dict(), "ema": model_ema.state_dict()}, args.out)


if __name__ == "__main__":
    main(parser.parse_args())
