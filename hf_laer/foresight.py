"""Which experts a layer will hold whatever its tokens, so that they can be sent for before it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_laer.comm.watch import Where
from hf_laer.layer import MoELayer
from hf_laer.shard.ahead import Era
from hf_laer.shard.exchange import SlotTable
from hf_laer.strategy import needs_loads, relays
from hf_laer.tables import table_of

if TYPE_CHECKING:
    from hf_laer.engine import Engine


class Foresight:
    """Sends for experts ahead of need: of the next layer, and before a whole model's forward of the first one.

    Ranks agree on a layout with the loads of the layer before; on that of a pass's first layer with those of the last
    layer of the pass before, if anything is sent before a pass.

    Args:
        engine: Whose layers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_told = False
        # Of the first layer's experts, in the last pass.
        self._kind: tuple[torch.dtype, torch.device] | None = None
        # The layer whose layout was agreed on for the next pass; the layer that was sent for, and before which pass.
        self._agreed: str | None = None
        self._begun: tuple[str, int] | None = None

    def follow(self, model: nn.Module) -> None:
        """Has the model's forward tell when it begins; once, however often it is asked for."""
        if self._engine.config.prefetch and self._engine.layers and not self._is_told:
            self._is_told = True
            model.register_forward_pre_hook(_Hook(self, "begin"))
            # Also where it raises.
            model.register_forward_hook(_Hook(self, "end"), always_call=True)

    def end(self, _: nn.Module) -> None:
        """After the whole model's forward: what one that ended early sent for may change before it is wanted."""
        self._engine.unsharder.drop()
        self._begun = None

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Before the whole model's forward: sends for the experts of the layer that came first in the last pass."""
        self.end(model)
        engine, name = self._engine, self._engine.passes.first()
        layer = engine.layers.get(name or "")
        if layer is None or self._kind is None or (relays(layer.config) and self._agreed != name):
            return
        table = self._foreseen(layer)
        if table is not None:
            coming = engine.passes.number + 1
            engine.watch.where = Where(layer.name, "forward" if model.training else "evaluation", layer.forwards)
            self.send((layer.name, table), *self._kind, ("forward", coming))
            self._begun = layer.name, coming

    def after(self, layer: MoELayer, dtype: torch.dtype, device: torch.device, era: Era) -> None:
        """In a forward: sends for the experts that the next layer is known to use, whatever its tokens."""
        passes, layers = self._engine.passes, self._engine.layers
        if passes.is_first():
            self._kind = dtype, device
        name = passes.after(layer.name)
        # A layout is agreed on with the loads of the layer before, if it gathers any.
        agreed = name in layers and (needs_loads(layer.config) or not relays(layers[name].config))
        if era[0] == "forward" and agreed and name is not None:
            table = self._foreseen(layers[name])
            self.send(None if table is None else (name, table), dtype, device, era)

    def send(
        self,
        what: tuple[str, SlotTable] | None,
        dtype: torch.dtype,
        device: torch.device,
        era: Era,
        forward: Era | None = None,
    ) -> None:
        """Sends for a layer's experts ahead of time, in a backward unless they are here since ``forward``."""
        engine = self._engine
        if what is not None and engine.config.prefetch:
            name, table = what
            where = engine.watch.where
            with engine.watch.at(replace(where, layer=name, phase=f"{where.phase}, ahead")):
                want = engine.layers[name].want(table, dtype, device, era)
                engine.unsharder.expect(want, engine.comms.weights, forward)

    def due(self, layer: MoELayer) -> list[MoELayer]:
        """The layers whose layouts ranks are to agree on along with this layer's loads.

        The one that comes next, whose experts can set out then; and its own, where none before it could.
        """
        passes, layers = self._engine.passes, self._engine.layers
        if passes.is_first():
            self._agreed = None
        if not needs_loads(layer.config):
            return []
        before, name = passes.before(), passes.after(layer.name)
        alone = before not in layers or not needs_loads(layers[before].config)
        own = alone and self._begun != (layer.name, passes.number)
        if name is None and self._is_told and passes.number > 1 and passes.first() != layer.name:
            name = self._agreed = passes.first()
        due = ([layer] if own else []) + [layers[one] for one in (name,) if one in layers]
        return [one for one in due if relays(one.config)]

    def _foreseen(self, layer: MoELayer) -> SlotTable | None:
        """The experts that a layer's next plan will hold at least, in each rank's first slots."""
        if layer.config.strategy == "fsdp":
            return (tuple(range(layer.spec.num_experts)),) * self._engine.comms.weights.size
        return table_of(self._engine.tuner_of(layer).layout) if relays(layer.config) else None


class _Hook:
    """Tells when the whole model's forward begins or ends. In a copied or pickled model, which has no engine, nothing.

    Args:
        foresight: Whom it tells.
        what: The method that is called.
    """

    def __init__(self, foresight: Foresight | None, what: str) -> None:
        self._foresight, self._what = foresight, what

    @torch.compiler.disable
    def __call__(self, model: nn.Module, *_: Any) -> None:
        # A forward that is repeated in a backward sends for nothing.
        if self._foresight is not None and torch._C._current_graph_task_id() == -1:
            getattr(self._foresight, self._what)(model)

    def __deepcopy__(self, _: dict[int, Any]) -> _Hook:
        return _Hook(None, self._what)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._what)
