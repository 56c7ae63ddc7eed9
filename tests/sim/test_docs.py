"""``docs/planners.md`` shows worked examples; here they are worked again."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from hf_laer.plan import (
    CostModel,
    Plan,
    chunk_owners,
    ep,
    eplb,
    eplb_placement,
    fastermoe,
    flexmoe,
    flexmoe_placement,
    fsdp,
    fsdp_ep,
    fsep,
    fsep_llep,
    fsep_placement,
    imbalance,
    initial_placement,
    laer,
    laer_placement,
    llep,
    llep_at_home,
    lplb,
    predict,
    prophet,
    prophet_placement,
    smartmoe,
    smartmoe_owners,
    spilling_plans,
)
from hf_laer.profile import shipped_profile

DOCUMENT = Path(__file__).parents[2] / "docs" / "planners.md"
# Per rank and step: the last step's and this step's tokens per expert. Expert 2 has become hot.
LAST = [32, 12, 8, 8, 8, 4, 4, 4]
NOW = [24, 10, 18, 8, 8, 4, 4, 4]


def example(ranks: int) -> dict[str, Plan]:
    """All planners on the document's example: 8 experts, 8 ranks (2 x 4) or 16 (4 x 4), 2 slots, m = 8."""
    last, now = (np.tile(row, (ranks, 1)) for row in (LAST, NOW))
    owners = chunk_owners(8, ranks)
    last_laer = laer_placement(last, ranks, 2, 4)
    last_fsep = fsep_placement(last, ranks, 2, 4)
    last_eplb = eplb_placement(last, ranks, 2)
    even = initial_placement(8, ranks, 2, 4)
    return {
        "ep": ep(now, owners),
        "fsdp": fsdp(now),
        "fsdp_ep": fsdp_ep(now, 2),
        "llep": llep(now, owners, min_tokens_per_gemm=8, imbalance_threshold=1.3, ranks_per_node=4),
        "llep+home": llep_at_home(now, owners, min_tokens_per_gemm=8, ranks_per_node=4),
        "laer": laer(now, last_laer, 4),
        "fsep": fsep(now, last_fsep, 4),
        "fsep+llep": fsep_llep(now, last_fsep, 4, min_tokens_per_gemm=8),
        "eplb": eplb(now, last_eplb),
        "lplb": lplb(now, last_eplb),
        "fastermoe": fastermoe(now, owners, transfer_tokens=8),
        "smartmoe": smartmoe(now, smartmoe_owners(last, owners, ranks)),
        "flexmoe": flexmoe(now, flexmoe_placement(last, even)),
        "prophet": prophet(now, prophet_placement(last, owners, transfer_tokens=8), owners),
    }


def line(name: str, plan: Plan) -> str:
    """One row of the document's tables."""
    held = plan.rank_loads
    slots = int((plan.placement.slots >= 0).sum())
    return f"| `{name}` | {' '.join(map(str, held))} | {imbalance(held):.2f} | {slots} |"


@pytest.mark.parametrize("ranks", [8, 16])
def test_worked_examples(ranks):
    text = DOCUMENT.read_text()
    for name, plan in example(ranks).items():
        assert line(name, plan) in text, f"{ranks} ranks, {name}"


def spilled_line(name: str, sizes: tuple[int, int, int, int], ranks: int, share: int) -> str:
    """One row of the document's table of what spilling to where tokens come from is predicted to save."""
    experts, hidden, intermediate, top_k = sizes
    cost = CostModel(shipped_profile("NVIDIA H200").of_ranks(ranks, 8), hidden, intermediate, top_k)
    tokens = 32768 * top_k
    hot = tokens * share // 100
    loads = np.full((ranks, experts), (tokens - hot) // (experts - top_k))
    loads[:, :top_k] = hot // top_k
    owners = chunk_owners(experts, ranks)
    plans = spilling_plans(loads, owners, ranks_per_node=8)
    predicted = [predict(plan, loads, cost, home="whole", owners=owners).predicted for plan in plans]
    cells = []
    for plan, one in zip(plans, predicted, strict=True):
        assert one is not None
        fetched = int((plan.placement.slots >= 0).sum()) - experts
        cells.append(f"{1e3 * one.seconds:.1f} ({1e3 * one.exchange_seconds:.1f}; {fetched})")
    return f"| {name} | {ranks} | {share}% on {top_k} | {' | '.join(cells)} |"


SIZES = {"E 128, H I 2880, K 4": (128, 2880, 2880, 4), "E 128, H 2048, I 768, K 8": (128, 2048, 768, 8)}


def test_what_spilling_at_home_is_predicted_to_save():
    text = DOCUMENT.read_text()
    for (name, sizes), ranks, share in itertools.product(SIZES.items(), (2, 8, 32), (95, 50)):
        assert spilled_line(name, sizes, ranks, share) in text
