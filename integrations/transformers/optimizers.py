"""An optimizer made before its model is sharded on a mesh follows the parameters to their new objects.

Accelerate does this by name inside ``prepare``; without Accelerate the lists that hold the old objects are changed in
place, an optimizer's parameter groups among them.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import Any

from torch import nn


def follow(moved: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Puts each new parameter where a list held the old one, and frees the memory of the old one.

    Args:
        moved: Old and new parameters.

    Raises:
        RuntimeError: An optimizer has taken steps with an old one; its state does not fit the new one.
    """
    successors: dict[int, nn.Parameter] = {id(old): new for old, new in moved}
    for holder in gc.get_referrers(*(old for old, _ in moved)):
        if isinstance(holder, defaultdict) and any(id(key) in successors for key in holder):
            raise RuntimeError(
                "the optimizer has taken steps before patch_model(model, mesh=mesh) sharded the experts: patch first, "
                "or make a new optimizer"
            )
        if isinstance(holder, list):
            _replace(holder, successors)
    for old, _ in moved:
        old.data = old.data.new_empty(0)


def _replace(holder: list[Any], successors: dict[int, nn.Parameter]) -> None:
    for at, item in enumerate(holder):
        if id(item) in successors:
            holder[at] = successors[id(item)]
