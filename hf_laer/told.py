"""What ranks tell each other before a plan: loads, rows for the experts' owners, and which layouts are ready.

Where a layer's last plan left every token to its expert's owner, this one most likely does: what leaves this rank is
worked out before the loads are known, and how many rows that is goes along with them. The host then waits once. Where
ranks share memory the rows set out along with them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from hf_laer.comm.base import Communicator, Gone
from hf_laer.compute.routing import Counted, Leaving, Shares, leave
from hf_laer.layer import MoELayer
from hf_laer.plan import chunk_owners
from hf_laer.strategy import relays
from hf_laer.tuner import LayerTuner


class Told(NamedTuple):
    """What this rank knows of all ranks.

    Args:
        loads: int64 ``[N, E]``, their loads.
        rows: int64 ``[N, G]``, their rows for each owner in their token group of G ranks, where all worked them out.
        gone: These rows, where they have set out.
    """

    loads: np.ndarray
    rows: np.ndarray | None
    gone: Gone | None = None


def leave_early(
    layer: MoELayer, ranks: int, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, counted: Counted
) -> Leaving | None:
    """What leaves this rank if every token goes to its expert's owner, where that is likely; as likely on all ranks.

    Args:
        layer: Whose tokens.
        ranks: Of the token group.
        top_k_index: int64 ``[T, K]``, chosen experts.
        top_k_weights: ``[T, K]``, routing weights.
        counted: The choices, counted.
    """
    if relays(layer.config) or not layer.unspilled:
        return None
    shares = _shares_of_owners(layer.spec.num_experts, ranks, top_k_index.device)
    return leave(top_k_index, top_k_weights, shares, counted)


@lru_cache(maxsize=16)
def _shares_of_owners(experts: int, ranks: int, device: torch.device) -> Shares:
    # Also for the training that follows an evaluation.
    with torch.inference_mode(False):
        return Shares.of_owners(chunk_owners(experts, ranks), ranks, device)


def tell_ahead(
    everyone: Communicator,
    loads: torch.Tensor,
    leaving: Leaving,
    hidden: torch.Tensor,
    dtype: torch.dtype,
    top_k: int,
    meanwhile: Callable[[], None],
) -> Told | None:
    """As :func:`tell`, and rows set out at once, where they can. Collective; the same on all ranks.

    Args:
        everyone: The ranks that shard the experts, and exchange tokens.
        loads: int64 ``[E]``, this rank's.
        leaving: From :func:`leave_early`.
        hidden: ``[T, H]``, its tokens.
        dtype: In which they travel.
        top_k: K.
        meanwhile: As in :func:`tell`.
    """
    gone = everyone.start(hidden.to(dtype), leaving, top_k, loads)
    if gone is None:
        return None
    told = everyone.to_host(gone.told, meanwhile).numpy()
    rows = np.diff(told[:, len(loads) :], prepend=0)
    return Told(np.ascontiguousarray(told[:, : len(loads)]), rows, gone)


def tell(
    everyone: Communicator,
    loads: torch.Tensor,
    leaving: Leaving | None,
    ranks: int,
    tuners: Sequence[LayerTuner],
    meanwhile: Callable[[], None],
) -> Told:
    """Gathers loads int64 ``[E]``, and lets tuners agree on their layouts. Collective; waits for the device.

    Args:
        everyone: The ranks that shard the experts.
        loads: This rank's.
        leaving: From :func:`leave_early`.
        ranks: Of the token group.
        tuners: Of the layers whose layouts are due.
        meanwhile: Called while the loads are on their way to the host; for what it asks of the device nobody waits.
    """
    parts = [loads]
    if leaving is not None:
        parts.append(leaving.ends[:ranks, -1])
    if tuners:
        newest = torch.tensor([told for tuner in tuners for told in tuner.newest()], dtype=torch.int64)
        parts.append(newest.to(loads.device, non_blocking=True))
    message = loads if len(parts) == 1 else torch.cat(parts)
    told = everyone.to_host(everyone.all_gather(message), meanwhile).numpy()
    if len(parts) == 1:
        return Told(told, None)
    at = len(loads) + (0 if leaving is None else ranks)
    for nth, tuner in enumerate(tuners):
        tuner.agree(*told[:, at + 2 * nth :][:, :2].T)
    rows = None if leaving is None else np.diff(told[:, len(loads) : at], prepend=0)
    return Told(np.ascontiguousarray(told[:, : len(loads)]), rows)
