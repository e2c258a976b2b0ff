"""From hidden states to the vectors that requests get. Knows no model and no batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from cores.pooling_params import PoolingParams
from cores.request import Request
from cores.runner.interface import ModelRunnerOutput


def pool(hidden: torch.Tensor, lengths: torch.Tensor, how: str) -> torch.Tensor:
    """[sequences, size] float32 of a padded [sequences, tokens, size]; sequence i has `lengths[i]` tokens, at the front."""
    # In float32: a mean over hundreds of tokens has more digits than bfloat16.
    hidden = hidden.float()
    if how == "cls":
        return hidden[:, 0]
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    is_token = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    # where, not ×: what a model computes for padding may be NaN, and 0 × NaN is NaN.
    return torch.where(is_token[:, :, None], hidden, 0.0).sum(dim=1) / lengths[:, None]


def make_vectors(pooled: torch.Tensor, requests: Sequence[Request], normalize: bool) -> ModelRunnerOutput:
    """`pooled` [n, size] float32, a row for each request. A row that is not finite is the failure of its request alone."""
    finite = pooled.isfinite().all(dim=1).tolist()
    output = ModelRunnerOutput([0] * len(requests))
    for i, request in enumerate(requests):
        if finite[i]:
            params = request.pooling_params or PoolingParams()
            vector = pooled[i, : params.dimensions]
            if normalize if params.normalize is None else params.normalize:
                vector = F.normalize(vector, dim=0)
            output.vectors[i] = vector.cpu().numpy().astype("<f4").tobytes()
        else:
            output.errors[i] = "the model's output has numbers that are not finite"
    return output
