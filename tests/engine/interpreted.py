"""The kernels' checks in a process of their own: Triton's interpreter is chosen when a kernel is made."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from tests.engine import test_kernels


def main(path: str) -> None:
    """Runs all checks; writes the traceback of each that fails, and nothing for the others, as JSON."""
    faults = {}
    for check in test_kernels.CHECKS:
        try:
            getattr(test_kernels, check)()
            faults[check] = ""
        except Exception:
            faults[check] = traceback.format_exc()
    Path(path).write_text(json.dumps(faults))


if __name__ == "__main__":
    main(sys.argv[1])
