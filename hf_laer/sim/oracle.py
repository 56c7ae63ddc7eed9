"""What no split can better, by a linear programme (HiGHS through SciPy): to judge planners by."""

from __future__ import annotations

import numpy as np

from hf_laer.plan import EMPTY, Placement


def lowest_maximum(totals: np.ndarray, placement: Placement) -> float:
    """The least load of the most loaded rank that any (fractional) split over ``placement`` reaches.

    Args:
        totals: int64 ``[E]``, tokens per expert.
        placement: Slot table ``[N, S]``.

    Raises:
        ValueError: SciPy is missing, or an expert with tokens has no replica.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ValueError("the oracle needs scipy: pip install scipy") from error
    rank, slot = np.nonzero(placement.slots != EMPTY)
    expert = placement.slots[rank, slot]
    size = len(rank)
    at = np.arange(size)
    served = csr_array((np.ones(size), (expert, at)), shape=(len(totals), size + 1))
    ranks = placement.num_ranks
    columns = np.concatenate([at, np.full(ranks, size)])
    values = np.concatenate([np.ones(size), -np.ones(ranks)])
    held = csr_array((values, (np.concatenate([rank, np.arange(ranks)]), columns)), shape=(ranks, size + 1))
    cost = np.zeros(size + 1)
    cost[-1] = 1
    done = linprog(cost, A_ub=held, b_ub=np.zeros(ranks), A_eq=served, b_eq=totals.astype(float), method="highs")
    if done.status != 0:
        raise ValueError(f"no split of {int(totals.sum())} tokens exists: {done.message}")
    return float(done.fun)
