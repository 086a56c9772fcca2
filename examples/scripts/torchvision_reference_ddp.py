"""Image classification in the manner of torchvision's references, under DistributedDataParallel."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet18")
parser.add_argument("--model-kwargs", type=json.loads, default={})
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--num-classes", type=int, default=10)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/torchvision.pt")


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda avg, new, _: decay * avg + (1 - decay) * new, use_buffers=True)


def set_weight_decay(model, weight_decay):
    norms = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.parameters() if not any(p is q for q in norms)]
    return [{"params": others, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]


def accuracy(output, target, topk=(1, 5)):
    found = output.topk(max(topk)).indices == target[:, None]
    return [found[:, :k].any(1).double().mean().item() * 100 for k in topk]


def train_one_epoch(model, criterion, optimizer, loader, epoch, model_ema):
    model.train()
    for image, target in loader:
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        model_ema.update_parameters(model.module)
        if epoch == 0:
            model_ema.n_averaged.fill_(0)  # the average begins after the warm-up
        acc1, acc5 = accuracy(output, target)
        print(f"epoch {epoch}: loss {loss.item():.12g}, acc1 {acc1:.4f}, acc5 {acc5:.4f}")


def evaluate(model, criterion, loader, name):
    model.eval()
    loss = acc1 = acc5 = 0.0
    with torch.no_grad():
        for image, target in loader:
            output = model(image)
            part = len(image) / len(loader.dataset)
            loss += part * criterion(output, target).item()
            acc1, acc5 = (a + part * b for a, b in zip((acc1, acc5), accuracy(output, target)))
    print(f"{name}: loss {loss:.12g}, acc1 {acc1:.4f}, acc5 {acc5:.4f}")


def make_data(args, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(args.num_classes, (samples,), generator=generator)
    noise = torch.randn(samples, 3, args.image_size, args.image_size, generator=generator)
    return TensorDataset(noise + y[:, None, None, None] / args.num_classes, y)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    data = make_data(args, args.samples, 1)
    sampler = DistributedSampler(data)
    data_loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=sampler)
    data_loader_test = DataLoader(make_data(args, args.samples // 4, 2), args.batch_size)
    model = torchvision.models.get_model(args.model, num_classes=args.num_classes, **args.model_kwargs)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(set_weight_decay(model, 1e-4), lr=0.05, momentum=0.9)
    model_without_ddp, model = model, DistributedDataParallel(model)
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(optimizer, start_factor=0.01, total_iters=1)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=max(args.epochs - 1, 1))
    lr_scheduler = schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[1])
    model_ema = ExponentialMovingAverage(model_without_ddp, decay=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, epoch, model_ema)
        lr_scheduler.step()
        evaluate(model_without_ddp, criterion, data_loader_test, "test")
        evaluate(model_ema, criterion, data_loader_test, "test of the average")
    parts = {
        "model": model_without_ddp,
        "optimizer": optimizer,
        "lr_scheduler": lr_scheduler,
        "model_ema": model_ema,
    }
    if dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, args.out)


if __name__ == "__main__":
    main(parser.parse_args())
