"""One engine per model: what all its MoE layers share, and how its parameters come to be sharded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hf_laer.choice import Choice, choose, settled
from hf_laer.comm.base import Communicator
from hf_laer.comm.groups import Communicators, communicators
from hf_laer.comm.local import LocalCommunicator
from hf_laer.comm.routes import Known, Sending, exchange
from hf_laer.comm.watch import Watch, Where
from hf_laer.compute.routing import Leaving, count
from hf_laer.compute.spec import ExpertsSpec
from hf_laer.config import AUTO, LaerConfig
from hf_laer.foresight import Foresight
from hf_laer.layer import MoELayer, Run
from hf_laer.memory import check_memory
from hf_laer.passes import Passes
from hf_laer.plan import CostModel, own_part
from hf_laer.plan.types import Placement, Plan
from hf_laer.profile import Profile, read_profile, shipped_profile
from hf_laer.shard.ahead import Era, Unsharder
from hf_laer.shard.exchange import SlotTable
from hf_laer.shard.home import plain_home
from hf_laer.shard.nodes import Nodes
from hf_laer.shard.returns import GradientReturns
from hf_laer.shard.slots import SlotPool
from hf_laer.start import arena_for, check_alone, compile_planners, device_of, home_of, told_alike, with_peers
from hf_laer.strategy import make_plan, needs_loads, relays, sharded_dim, token_groups
from hf_laer.tables import digests, table_of
from hf_laer.telemetry.record import LoadsWatcher, Recorder, holders_of, record_of
from hf_laer.told import Told, leave_early, tell, tell_ahead
from hf_laer.tuner import LayerTuner

# The token group of a layer that exchanges no tokens.
_ALONE = LocalCommunicator()


@dataclass
class Detached:
    """Expert parameters taken out of their modules, by layer and name, until :meth:`Engine.attach`."""

    parameters: dict[str, dict[str, nn.Parameter]] = field(default_factory=dict)


class Engine:
    """Runs the MoE layers of one model, but for those that ``auto`` leaves to FSDP2.

    Args:
        config: Strategy and settings; each layer has its own, whose strategy is never ``auto``.
        ranks_per_node: Ranks that share a node.
        profile: What the machine can do; ``None`` means the file that the config names, or what is shipped for the
            first rank's device.

    Attributes:
        layers: Those that it runs.
        choices: How each of the model's layers runs, and why; in the model's order.
        recorded: Whether loads will be recorded, for which all layers must be the engine's; as with a ``watcher``.
        expected_tokens: Tokens per rank and micro-batch as the trainer's arguments say them, for ``auto``.

    Raises:
        ValueError: The config's profile is none.
    """

    def __init__(self, config: LaerConfig, ranks_per_node: int, profile: Profile | None = None) -> None:
        self.config, self.ranks_per_node = config, ranks_per_node
        self.profile = read_profile(config.profile) if profile is None and config.profile else profile
        self.expected_tokens: int | None = None
        self.recorded = False
        self.layers: dict[str, MoELayer] = {}
        self.choices: dict[str, Choice] = {}
        self.recorder = Recorder()
        self.watcher: LoadsWatcher | None = None
        self.pool = SlotPool()
        self.unsharder = Unsharder(self.pool)
        self.passes = Passes()
        self.foresight = Foresight(self)
        self.watch = Watch()
        self.returns = GradientReturns(self.watch)
        self.comms = Communicators()
        self.mesh: DeviceMesh | None = None
        self.compute_dtype = _dtype(config.compute_dtype)
        self.reduce_dtype = _dtype(config.reduce_dtype)
        self._settled = False
        self._groups = [range(1)]
        self._announced = 0
        self._tuners: dict[str, LayerTuner] = {}
        self._held: dict[str, np.ndarray] = {}
        self._steps: dict[str, int] = {}
        self._before: tuple[str, SlotTable] | None = None
        self._costs: dict[tuple[str, int], CostModel] = {}
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_laer_tuner")

    def add_layer(self, name: str, module: nn.Module, spec: ExpertsSpec) -> MoELayer:
        """Takes on one experts module, as yet unsharded."""
        layer = self.layers[name] = MoELayer(name, module, spec, self, settled(self.config))
        layer.homes = {key: plain_home(module.get_parameter(key)) for key in spec.names}
        reason = "one rank" if self.config.strategy == AUTO else "given"
        self.choices[name] = Choice(layer.config.strategy, layer.config, reason)
        return layer

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are DTensors on a mesh."""
        return self.mesh is not None

    @property
    def shared_bytes(self) -> int:
        """Of this rank's memory that others read and write, which no allocator counts."""
        arena = self.unsharder.arena
        return self.comms.tokens.nbytes + (0 if arena is None else arena.nbytes)

    def settle(
        self,
        mesh: DeviceMesh,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        leave: Collection[str] = (),
        looped: Collection[str] = (),
        checkpointed: bool = False,
        reshard_after_forward: bool = True,
    ) -> list[MoELayer]:
        """Settles how each layer runs, before anything is sharded. Collective over the world.

        Args:
            mesh: See :meth:`attach`.
            compute_dtype: See :meth:`attach`.
            reduce_dtype: See :meth:`attach`.
            leave: Layers that may be left to FSDP2, which is about to shard the model.
            looped: Those whose own implementation runs expert by expert.
            checkpointed: Whether layers are recomputed in backward.
            reshard_after_forward: See :meth:`attach`.

        Returns:
            The layers that are left to FSDP2 and no longer the engine's.

        Raises:
            ValueError: Ranks were told different things, or the mesh and ``group_size`` do not go together.
        """
        told = {
            "config": self.config.to_dict(),
            "ranks_per_node": self.ranks_per_node,
            "profile": self.profile and self.profile.digest(),
            "number of tokens": self.expected_tokens,
        }
        everyone = told_alike(told)
        token_groups(self.config, mesh.size(mesh.ndim - 1))
        if self.profile is None:
            memory = min(other["memory"] for other in everyone)
            self.profile = replace(shipped_profile(str(everyone[0]["device"])), memory_bytes=memory)
        if self.config.homes is None:
            recompute = self.config.recompute if checkpointed else "none"
            dtypes = self.compute_dtype or compute_dtype, self.reduce_dtype or reduce_dtype
            sizes = {name: layer.sizes(*dtypes, recompute, name in looped) for name, layer in self.layers.items()}
            world = mesh.size(mesh.ndim - 1), self.ranks_per_node
            tokens, log = self.expected_tokens, dist.get_rank() == 0
            config = self.config
            if config.reshard_after_forward is None and not reshard_after_forward:
                config = replace(config, reshard_after_forward=False)
            self.choices = choose(config, sizes, self.profile, *world, tokens, log, leave)
        left = [layer for name, layer in self.layers.items() if self.choices[name].config is None]
        for layer in left:
            del self.layers[layer.name]
            # They would keep the whole parameters in memory.
            layer.homes.clear()
        for name, layer in self.layers.items():
            layer.config = self.choices[name].config or layer.config
        self._settled = True
        return left

    def take_back(self, layers: Iterable[MoELayer]) -> None:
        """Undoes :meth:`settle` where sharding failed: the layers that were left are the engine's again."""
        for layer in layers:
            layer.homes = {key: plain_home(layer.module.get_parameter(key)) for key in layer.spec.names}
            self.layers[layer.name] = layer
        self.layers = {name: self.layers[name] for name in self.choices}
        self._settled = False

    def detach(self) -> Detached:
        """Takes the expert parameters out of their modules, so that FSDP does not shard them."""
        detached = Detached()
        for name, layer in self.layers.items():
            # In the module's own order, which is the order that they are put back in.
            own = [key for key in layer.module._parameters if key in layer.spec.names]
            detached.parameters[name] = {key: layer.module.get_parameter(key) for key in own}
            for key in own:
                del layer.module._parameters[key]
        return detached

    def restore(self, detached: Detached) -> None:
        """Undoes :meth:`detach`."""
        for name, parameters in detached.parameters.items():
            for key, parameter in parameters.items():
                self.layers[name].module.register_parameter(key, parameter)

    def attach(
        self,
        detached: Detached,
        mesh: DeviceMesh,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        master_dtype: torch.dtype | None = None,
        src_rank: int | None = None,
        offload: bool = False,
        reshard_after_forward: bool = True,
    ) -> None:
        """Shards detached parameters on ``mesh`` and puts them back under their names. Collective over the world.

        Args:
            detached: What :meth:`detach` returned.
            mesh: 1-D (shard) or 2-D (replicate, shard).
            compute_dtype: FSDP's, used where the config names none.
            reduce_dtype: FSDP's, likewise.
            master_dtype: Trained parameters are cast to it before they are sharded.
            src_rank: The only rank that has the values; ``None`` if all have.
            offload: Homes live on the host.
            reshard_after_forward: FSDP's, used where the config names none.

        Raises:
            ValueError: The mesh and ``group_size`` or ``slots_per_rank`` do not go together.
        """
        try:
            if not self._settled:
                self.settle(mesh, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
            groups = self._checked_groups(mesh)
            told = self.config.check_collectives, self.ranks_per_node
            if self.layers:
                compile_planners(mesh, self.ranks_per_node)
            if self.layers or self.config.check_collectives:
                self.comms = communicators(mesh, len(groups[0]), self.watch, *told)
        except ValueError:
            self.restore(detached)
            raise
        self._groups, self.mesh = groups, mesh
        asked = self.config.reshard_after_forward
        self.unsharder.keeps = not (reshard_after_forward if asked is None else asked)
        node = self.comms.node
        self.unsharder.nodes = Nodes(self.ranks_per_node, node) if node is not None else None
        self.compute_dtype = self.compute_dtype or compute_dtype
        self.reduce_dtype = self.reduce_dtype or reduce_dtype
        for name in list(detached.parameters):
            parameters = detached.parameters.pop(name)
            layer = self.layers[name]
            for key in list(parameters):
                parameter = parameters.pop(key)
                dtype = master_dtype if master_dtype is not None and parameter.requires_grad else parameter.dtype
                self._shard(layer, key, parameter, dtype, src_rank, offload)
        sizes = [layer.staged_bytes(self.compute_dtype, len(groups[0])) for layer in self.layers.values()]
        host = self.ranks_per_node, device_of(mesh), self.watch.limit
        self.unsharder.arena = arena_for(self.comms.weights, max(sizes, default=0), self.config, *host)
        experts = max((layer.spec.num_experts for layer in self.layers.values()), default=0)
        self.comms = with_peers(self.comms, experts, self.config, *host)
        self._tuners.clear()
        self._held.clear()

    def _checked_groups(self, mesh: DeviceMesh) -> list[range]:
        """The token groups of the layers that exchange tokens, once the sizes are known to go together."""
        configs = [layer.config for layer in self.layers.values()] or [settled(self.config)]
        ranks = mesh.size(mesh.ndim - 1)
        groups = token_groups(next(filter(needs_loads, configs), configs[0]), ranks)
        for layer in self.layers.values():
            if relays(layer.config):
                layer.config.slots_for(layer.spec.num_experts, len(groups[0]))
        return groups

    def _shard(
        self,
        layer: MoELayer,
        key: str,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        src_rank: int | None,
        offload: bool,
    ) -> None:
        assert self.mesh is not None
        told = sharded_dim(layer.config), self.mesh, self.comms.weights, dtype, src_rank, offload
        layer.homes[key] = home = home_of(parameter, *told)
        layer.module.register_parameter(key, home.parameter)

    def state_dict(self) -> dict[str, Any]:
        """What the layers remember of recent micro-batches, in JSON's types; the same on all ranks."""
        return {
            name: {
                "strategy": self.layers[name].config.strategy,
                "step": step,
                "held": self._held[name].astype(int).tolist(),
                "tuner": self._tuners[name].state_dict() if name in self._tuners else None,
            }
            for name, step in self._steps.items()
        }

    def load_state_dict(self, memory: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`; where the number of ranks has changed, placements start anew.

        Raises:
            ValueError: It is no such memory, or another model's. Nothing of it was taken over.
        """
        experts = {name: layer.spec.num_experts for name, layer in self.layers.items()}
        for name, remembered in check_memory(memory, experts).items():
            self._steps[name] = remembered["step"]
            held = np.array(remembered["held"], bool)
            layer = self.layers[name]
            if held.shape[0] == sum(map(len, self._groups)):
                self._held[name] = held
            if remembered["tuner"] is not None and relays(layer.config):
                self.tuner_of(layer).load_state_dict(remembered["tuner"])

    def compute_dtype_for(self, hidden: torch.Tensor) -> torch.dtype:
        """Dtype of the expert GEMMs: the config's, FSDP's, autocast's, or that of the tokens."""
        if self.compute_dtype is not None:
            return self.compute_dtype
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    @torch.no_grad()
    def plan(
        self,
        layer: MoELayer,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        training: bool,
        adapted: bool,
    ) -> Run:
        """Plans one micro-batch and works out its exchange. Collective.

        Args:
            layer: The layer.
            hidden: ``[T, H]``.
            top_k_index: int64 ``[T, K]``.
            top_k_weights: ``[T, K]``.
            training: Whether the tuner and the recorder learn from it.
            adapted: Whether low-rank additions go with it.
        """
        if not self.is_sharded:
            check_alone(layer.name)
        self.passes.enter(layer.name)
        micro_batch = layer.forwards
        layer.forwards += 1
        self.watch.where = Where(layer.name, "forward" if training else "evaluation", micro_batch)
        counted, tokens, top_k = count(top_k_index, layer.spec.num_experts), self.tokens_of(layer), top_k_index.shape[1]
        leaving = leave_early(layer, tokens.size, top_k_index, top_k_weights, counted)
        self.unsharder.settle(layer.name, self.era())
        dtype = self.compute_dtype_for(hidden)
        meanwhile = partial(self.unsharder.convert, layer.want((), dtype, hidden.device, self.era()))
        of_tokens = hidden, dtype, top_k
        (loads, rows, gone), placements = self._gather(layer, counted.loads, leaving, of_tokens, meanwhile)
        started = time.perf_counter()
        plans = self._plans(layer, loads, placements, top_k)
        planned = time.perf_counter() - started
        if self.config.check_collectives and needs_loads(layer.config):
            self.comms.weights.agree("plan", digests(loads, plans))
        mine = plans[min(self.comms.weights.rank // tokens.size, len(plans) - 1)]
        group = self.comms.of_group(loads, tokens.size)
        own, table = own_part(mine, group, tokens.rank), self._table(plans)
        # Low-rank additions and chunks have stacks of their own.
        apart = not adapted and self.config.max_rows_per_rank is None
        arrangement = layer.arrangement(table, own.slots.tolist(), apart)
        layer.unspilled = not any(plan.spilled for plan in plans)
        known = None
        if layer.unspilled and leaving is not None and rows is not None:
            rows = self.comms.of_group(rows, tokens.size)
            known = Known(leaving, rows[tokens.rank], rows[:, tokens.rank], gone)
        choices = top_k_index, top_k_weights, counted
        routes = exchange(Sending(hidden, dtype, *choices, mine.split, group, own, arrangement), tokens, known)
        last = None if self.passes.is_first() else self._before
        run = Run(routes, table, top_k_index, micro_batch, self.era(), last)
        self._before = layer.name, table
        if training:
            about = layer, loads, group, plans, mine, planned
            run.afterwards = lambda: self._learn(*about, counts=counted.loads, top_k=top_k)
        return run

    def era(self) -> Era:
        """Which pass, or which backward, is running; the number of a backward may differ between ranks."""
        task = torch._C._current_graph_task_id()
        return ("forward", self.passes.number) if task == -1 else ("backward", task)

    @torch.compiler.disable
    def announce(self, model: nn.Module, *_: Any) -> None:
        """Under ``check_collectives``, a hook before the whole model's forward, whose first collective is FSDP's."""
        self.watch.where = Where("the model", "forward" if model.training else "evaluation", self._announced)
        self._announced += 1
        self.comms.weights.agree("call", {"gradients": str(torch.is_grad_enabled())})

    def tokens_of(self, layer: MoELayer) -> Communicator:
        """The token group in which the layer exchanges tokens."""
        return self.comms.tokens if needs_loads(layer.config) else _ALONE

    def _gather(
        self,
        layer: MoELayer,
        loads: torch.Tensor,
        leaving: Leaving | None,
        tokens: tuple[torch.Tensor, torch.dtype, int],
        meanwhile: Callable[[], None],
    ) -> tuple[Told, list[Placement] | None]:
        """Every rank's loads, and the layer's layout; tokens may set out. Waits for the device."""
        tuners = [self.tuner_of(one) for one in self.foresight.due(layer)]
        everyone = self.comms.everyone if needs_loads(layer.config) else _ALONE
        told = None
        if leaving is not None and not tuners and everyone.can_start:
            told = tell_ahead(everyone, loads, leaving, *tokens, meanwhile)
        if told is None:
            told = tell(everyone, loads, leaving, self.tokens_of(layer).size, tuners, meanwhile)
        return told, self.tuner_of(layer).layout if relays(layer.config) else None

    def _plans(self, layer: MoELayer, loads: np.ndarray, layout: list[Placement] | None, top_k: int) -> list[Plan]:
        """One plan for each token group whose loads are here."""
        groups = self._groups if len(loads) == self.comms.weights.size else [range(len(loads))]
        placements: list[Placement | None] = list(layout) if layout else [None] * len(groups)
        return [
            make_plan(
                layer.config, loads[group.start : group.stop], placement, self.ranks_per_node, self._cost(layer, top_k)
            )
            for group, placement in zip(groups, placements, strict=True)
        ]

    def _cost(self, layer: MoELayer, top_k: int) -> CostModel | None:
        """What spilling is weighed by; attention is left out, as what it hides is not known."""
        if self.profile is None or self.config.imbalance_threshold is not None:
            return None
        if (layer.name, top_k) not in self._costs:
            sizes = replace(layer.sizes(self.compute_dtype, self.reduce_dtype), top_k=top_k)
            machine = self.profile.of_ranks(len(self._groups[0]), self.ranks_per_node)
            self._costs[layer.name, top_k] = sizes.cost(machine, 0, self.config.max_rows_per_rank)
        return self._costs[layer.name, top_k]

    def tuner_of(self, layer: MoELayer) -> LayerTuner:
        """What makes the layer's layouts."""
        if layer.name not in self._tuners:
            cost = self._cost(layer, layer.sizes(self.compute_dtype).top_k) if layer.config.homes == "whole" else None
            told = layer.config, layer.spec.num_experts, self._groups, self.ranks_per_node, self._threads, cost
            self._tuners[layer.name] = LayerTuner(*told)
        return self._tuners[layer.name]

    def _table(self, plans: list[Plan]) -> SlotTable:
        """Per rank that shards the experts, the experts in its slots."""
        table = table_of([plan.placement for plan in plans])
        # Under fsdp only this rank's plan is at hand, and all are alike.
        return table if len(table) == self.comms.weights.size else table * self.comms.weights.size

    def _learn(
        self,
        layer: MoELayer,
        loads: np.ndarray,
        group: np.ndarray,
        plans: list[Plan],
        mine: Plan,
        seconds: float,
        *,
        counts: torch.Tensor,
        top_k: int,
    ) -> None:
        """Feeds tuner, recorder and watcher; only ever with a training micro-batch's first forward."""
        tuner = self.tuner_of(layer) if relays(layer.config) else None
        if tuner is not None:
            tuner.observe(loads, plans)
        held = holders_of(plans, layer.spec.num_experts)
        before, self._held[layer.name] = self._held.get(layer.name, held), held
        step = self._steps[layer.name] = self._steps.get(layer.name, -1) + 1
        about = layer.name, step, held, before, group, plans, mine
        forecast, strategy = "" if tuner is None else tuner.forecast, layer.config.strategy
        self.recorder.add(record_of(*about, plan_seconds=seconds, forecast=forecast, strategy=strategy))
        if self.watcher is not None:
            self.watcher(layer.name, self.comms.everyones(counts), top_k)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
