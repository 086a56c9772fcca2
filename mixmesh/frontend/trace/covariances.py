"""Export of ``torch.cov`` and ``torch.corrcoef``, whose own code compares a number of samples as a tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Computes ``torch.cov``: the covariances [variables, variables] of ``input`` [variables, samples], or
    the variance of [samples]. Weights are left to PyTorch's function, which looks at their values."""
    if fweights is not None or aweights is not None or input.ndim > 2:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    samples = input if input.ndim == 2 else input.reshape(1, -1)
    num_samples = samples.shape[1]
    centred = samples - samples.sum(1, keepdim=True) / num_samples
    products = centred @ centred.mT.conj()
    return (products / max(num_samples - correction, 0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Computes ``torch.corrcoef``: the correlations [variables, variables] of ``input`` [variables, samples],
    or 1 for [samples]."""
    if input.ndim > 2 or input.is_complex():
        return torch.corrcoef(input)
    covariances = cov(input)
    if covariances.ndim == 0:
        return covariances / covariances
    deviations = covariances.diagonal().sqrt()
    return (covariances / deviations[:, None] / deviations).clamp(-1, 1)


STAND_INS: dict[Callable, Callable] = {
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
