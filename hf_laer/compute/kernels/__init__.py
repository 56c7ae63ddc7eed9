"""Triton kernels, each the fast form of a plain PyTorch reference in :mod:`hf_laer.compute`."""

from __future__ import annotations

import importlib.util

import torch

# Ranks whose memory one launch can write to, each by numbers of its own.
MOST_RANKS = 8


def usable(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels run on the tensor's device."""
    return tensor.is_cuda and _HAS_TRITON


# Ranks whose places a launch that writes into other ranks' memory has numbers for.
MOST_RANKS = 8
_HAS_TRITON = importlib.util.find_spec("triton") is not None
