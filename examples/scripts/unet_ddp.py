"""Unconditional image generation as diffusers' script does it, under DistributedDataParallel."""

import argparse
import os

import torch
import torch.distributed as dist
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--channels", type=int, nargs="+", default=[64, 128])
parser.add_argument("--image-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=500)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="out/unet")


def denoising_loss(predicted, noise):
    return F.mse_loss(predicted.sample, noise)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    shape = (args.samples, 3, args.image_size, args.image_size)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    data = TensorDataset(images)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // dist.get_world_size(), sampler=sampler)
    unet = UNet2DModel(
        sample_size=args.image_size,
        block_out_channels=tuple(args.channels),
        down_block_types=("DownBlock2D",) * (len(args.channels) - 1) + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (len(args.channels) - 1),
        layers_per_block=1,
        norm_num_groups=4,
    )
    unet = DistributedDataParallel(unet)
    torch.manual_seed(dist.get_rank())
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)

    def noised(clean):
        """The noised images that the model sees, and the noise that it is to find."""
        noise = torch.randn(clean.shape)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(clean),))
        return noise_scheduler.add_noise(clean, noise, timesteps), timesteps, noise

    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 2, args.epochs * len(loader))
    ema = EMAModel(unet.parameters(), decay=0.9, use_ema_warmup=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        unet.train()
        for (clean,) in loader:
            noisy, timesteps, noise = noised(clean)
            loss = denoising_loss(unet(noisy, timesteps), noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema.step(unet.parameters())
            print(f"epoch {epoch}: loss {loss.item():.12g}")
    ema.copy_to(unet.parameters())
    os.makedirs(args.out, exist_ok=True)
    unet.module.save_pretrained(args.out, is_main_process=dist.get_rank() == 0)


if __name__ == "__main__":
    main(parser.parse_args())
