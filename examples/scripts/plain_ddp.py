"""A text classifier in a plain loop, under DistributedDataParallel."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=48)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/plain.pt")


class Classifier(nn.Module):
    def __init__(self, width, depth, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.layers(self.tokens(x) + self.places).mean(1))


def make_data(samples, length, seed):
    x = torch.randint(256, (samples, length), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].sum(1) % 10)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(-1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    data = make_data(args.samples, args.length, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=sampler)
    held_out = DataLoader(make_data(args.samples // 4, args.length, 2), args.batch_size)
    model = DistributedDataParallel(Classifier(args.width, args.depth, args.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, args.epochs * len(loader))
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(model.module)
            print(f"epoch {epoch}: loss {loss.item():.12g}, norm {norm.item():.12g}")
        accuracy = evaluate(model.module, held_out)
        print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    state = dict(model=model.module.state_dict(), ema=ema.state_dict(), optimizer=optimizer.state_dict())
    if dist.get_rank() == 0:
        torch.save(state, args.out)


if __name__ == "__main__":
    main(parser.parse_args())
