"""The routing kernels against their reference on this host's GPU, at sizes that no interpreter reaches.

python -m tests.gpu.tables
"""

from __future__ import annotations

import itertools
import sys

import torch

from tests.engine.cases_puts import check_puts
from tests.engine.cases_routing import KINDS, check_exchange

# Tokens of a rank, K, E, N; the last has more ranges per expert than a warp has lanes.
SIZES = ((8192, 8, 128, 8), (4097, 4, 128, 2), (3001, 2, 8, 5), (1500, 2, 6, 40))
# Tokens of a rank, K, E, N, H of what is written into other ranks' memory.
PUTS = ((8192, 8, 128, 8, 2048), (4097, 4, 128, 2, 2880), (3001, 2, 8, 5, 4096), (1000, 4, 30, 3, 77))


def main() -> int:
    """Every table of a whole exchange over posed ranks, and what they write; raises where one differs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for sizes, skew, kind in itertools.product(SIZES, (0.0, 1.5), KINDS):
        check_exchange(*sizes, skew, kind, device)
        sys.stdout.write(f"{sizes}, skew {skew}, {kind}: equal\n")
    for sizes, dtype in itertools.product(PUTS, (torch.float32, torch.bfloat16)):
        check_puts(*sizes, dtype, device)
        sys.stdout.write(f"puts of {sizes}, {dtype}: equal\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
