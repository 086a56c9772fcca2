"""One global batch for each kind of model: the arguments of its forward pass, targets included."""

from __future__ import annotations

from typing import Any

import torch

SAMPLES = 10  # no plan for unequal devices divides it evenly
LENGTH = 8  # tokens of a text
VOCABULARY = 48
IMAGE = 32  # pixels
SOUND = 640  # samples of sound
FRAMES = 32  # in a spectrogram
MEL_BINS = 16
CLASSES = 2

Batch = dict[str, Any]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length), generator=_generator())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=_generator())


def classes() -> torch.Tensor:
    return torch.arange(SAMPLES) % CLASSES


def text() -> Batch:
    """Tokens that are their own targets; a model that predicts the next token shifts them itself."""
    return {"input_ids": ids(), "labels": ids()}


def padded_text() -> Batch:
    """Texts of several lengths, whose padding is no target."""
    keep = torch.arange(LENGTH) < (LENGTH - torch.arange(SAMPLES) % 3)[:, None]
    return {
        "input_ids": ids().masked_fill(~keep, 1),
        "attention_mask": keep.long(),
        "labels": ids().masked_fill(~keep, -100),
    }


def long_text() -> Batch:
    return {"input_ids": ids(4 * LENGTH), "labels": ids(4 * LENGTH)}


def classified_text() -> Batch:
    return {"input_ids": ids(), "labels": classes()}


def translation() -> Batch:
    """A text and another, shorter one."""
    return {"input_ids": ids(), "labels": ids(LENGTH - 2)}


def masked_translation() -> Batch:
    """A batch for models that do not make masks themselves."""
    return {
        **translation(),
        "attention_mask": torch.ones(SAMPLES, LENGTH, dtype=torch.long),
        "decoder_attention_mask": torch.ones(SAMPLES, LENGTH - 2, dtype=torch.long),
    }


def layout() -> Batch:
    """Words with their boxes on a page: left, top, right, bottom."""
    corner = ids(2 * LENGTH).view(SAMPLES, LENGTH, 2)
    return {**text(), "bbox": torch.cat([corner, corner + 8], dim=-1)}


def image() -> Batch:
    return {"pixel_values": normal(3, IMAGE, IMAGE), "labels": classes()}


def large_image() -> Batch:
    return {"pixel_values": normal(3, 2 * IMAGE, 2 * IMAGE), "labels": classes()}


def masked_image() -> Batch:
    """The noise says which patches are hidden."""
    return {"pixel_values": normal(3, IMAGE, IMAGE), "noise": torch.rand(SAMPLES, 16, generator=_generator())}


def image_and_text() -> Batch:
    return {"pixel_values": normal(3, IMAGE, IMAGE), "input_ids": ids(), "return_loss": True}


def sound() -> Batch:
    """Sound and its transcription."""
    return {"input_values": normal(SOUND), "labels": ids(3) % 20 + 1}


def classified_sound() -> Batch:
    return {"input_values": normal(SOUND), "labels": classes()}


def classified_spectrogram() -> Batch:
    return {"input_values": normal(FRAMES, MEL_BINS), "labels": classes()}


def spectrogram() -> Batch:
    """Bins before frames, and the transcript."""
    return {"input_features": normal(MEL_BINS, FRAMES), "labels": ids()}


def frames_of_spectrogram() -> Batch:
    """Frames before bins, and the transcript."""
    return {"input_features": normal(FRAMES, MEL_BINS), "labels": ids()}
