"""One MoE layer, forward and backward.

forward   router's choices → loads → plan → dispatch → unshard → experts → combine; the next layer's experts set out
backward  the same plan: dispatch of gradients → unshard → experts' backward → combine; weight gradients go home
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from hf_laer import tape
from hf_laer.choice import USUAL_TOP_K, LayerSizes
from hf_laer.comm.base import Sums
from hf_laer.comm.routes import Routes
from hf_laer.comm.tokens import (
    Combining,
    return_gates,
    start_combine,
    start_combine_sums,
    start_dispatch,
    start_forward,
)
from hf_laer.comm.watch import Where
from hf_laer.compute.chunks import backward_in_chunks, chunks_of, forward_in_chunks
from hf_laer.compute.experts import Weights, bias_of
from hf_laer.compute.grouped_gemm import Arrangement, alone_from
from hf_laer.compute.low_rank import FactorGradients, LowRank
from hf_laer.compute.rows import gather_sum
from hf_laer.compute.spec import ExpertsSpec
from hf_laer.config import LaerConfig
from hf_laer.shard.ahead import Coming, Era, Want
from hf_laer.shard.exchange import SlotTable, stacks_of, start_reshard
from hf_laer.shard.home import Home
from hf_laer.shard.pull import staged_bytes
from hf_laer.strategy import relays

if TYPE_CHECKING:
    from hf_laer.engine import Engine


@dataclass(eq=False)
class Run:
    """One micro-batch through one layer: everything its backward and recompute must share with its forward.

    Args:
        routes: The tokens' exchange.
        table: Per rank that shards the experts, the experts in its slots.
        top_k_index: int64 ``[T, K]``, the routing that the plan was made for.
        micro_batch: How many forwards the layer had before.
        era: Of its forward.
        before: The layer that ran before it in the same pass, and its slot table: what backward needs next.
        afterwards: What is left to do once the layer has been given to the device; done once.
        rows: The dispatched rows, kept for a recompute of the experts alone.
        out: The layer's output, kept likewise.
    """

    routes: Routes
    table: SlotTable
    top_k_index: torch.Tensor
    micro_batch: int
    era: Era
    before: tuple[str, SlotTable] | None = None
    afterwards: Callable[[], None] | None = None
    rows: torch.Tensor | None = None
    out: torch.Tensor | None = None


class MoELayer:
    """The engine's side of one experts module.

    Args:
        name: The module's name in the model.
        module: The experts module.
        spec: Its family.
        engine: What all layers share.
        config: The layer's own settings; its strategy is settled.
    """

    def __init__(self, name: str, module: nn.Module, spec: ExpertsSpec, engine: Engine, config: LaerConfig) -> None:
        self.name, self.module, self.spec, self.engine, self.config = name, module, spec, engine, config
        self.homes: dict[str, Home] = {}
        self.forwards = 0
        # Whether its last plan left every token to its expert's owner; alike on all ranks.
        self.unspilled = True
        self._rerouted: torch.Tensor | None = None

    def __call__(
        self,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Sequence[LowRank] = (),
    ) -> torch.Tensor:
        """Runs the layer.

        Args:
            hidden: ``[T, H]``; T may differ between ranks and be 0.
            top_k_index: int ``[T, K]``, the router's choices.
            top_k_weights: ``[T, K]``, its weights.
            adapters: Low-rank additions to the weights of all experts, whole and the same on every rank. Their factors
                get this rank's part of their gradients, which is to be averaged like any dense parameter's.

        Returns:
            ``[T, H]`` in the dtype of ``hidden``.
        """
        # Selective checkpointing counts operations through a dispatch mode and refuses a recompute that does others
        # than its forward; here a recompute replays a plan instead of making one.
        with _disable_current_modes():
            self._check_parameters()
            run = self._run_for(hidden, top_k_index, top_k_weights, bool(adapters))
            # So that autograd calls the backward of a layer whose tokens need no gradient. Not the parameters: their
            # hooks would run for the gradient that this function does not return.
            anchor = torch.empty(0, requires_grad=bool(self.trained))
            factors = [factor for adapter in adapters for factor in (adapter.a, adapter.b)]
            kinds = [(adapter.weight, adapter.scaling) for adapter in adapters]
            out = _MoE.apply(hidden, top_k_weights, self, run, anchor, kinds, *factors)
            if not torch.is_grad_enabled():
                # No backward will want it.
                self.engine.unsharder.release(self.name)
            afterwards, run.afterwards = run.afterwards, None
            if afterwards is not None:
                afterwards()
            return out

    def _check_parameters(self) -> None:
        """Follows a parameter that was replaced by a plain one; refuses what else stands in its place.

        Raises:
            RuntimeError: See above.
        """
        for name, home in list(self.homes.items()):
            now = self.module._parameters.get(name)
            if now is home.parameter:
                continue
            same = now is not None and type(now) is type(home.parameter) and now.shape == home.parameter.shape
            if (
                now is None
                or not same
                or getattr(now, "placements", None) != getattr(home.parameter, "placements", None)
            ):
                raise RuntimeError(
                    f"{self.name}.{name} is no longer the parameter that was patched (pruned, parametrized, wrapped, "
                    "or loaded with assign=True after sharding): change the model before patch_model"
                )
            self.homes[name] = replace(home, parameter=now)

    def _run_for(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, adapted: bool
    ) -> Run:
        frame = tape.current()
        if isinstance(frame, tape.Replay):
            run = frame.take(self.name)
            self._note_rerouted(run.top_k_index, top_k_index)
            self.engine.watch.where = Where(self.name, "recompute", run.micro_batch)
            return run
        if torch._C._current_graph_task_id() == -1:
            self.engine.returns.forget()
        else:
            raise RuntimeError(
                f"{self.name} is recomputed in backward without the plan of its forward: switch activation "
                "checkpointing on through the model (gradient_checkpointing=True, "
                "model.gradient_checkpointing_enable()) or Accelerate's plugin, after patch_model"
            )
        training = torch.is_grad_enabled() and self.module.training
        run = self.engine.plan(self, hidden, top_k_index.long(), top_k_weights, training, adapted)
        if isinstance(frame, tape.Recording):
            frame.tape.append(self.name, run)
        return run

    def _note_rerouted(self, planned: torch.Tensor, now: torch.Tensor) -> None:
        if planned.shape != now.shape:
            raise RuntimeError(
                f"{self.name} got {tuple(now.shape)} routing choices in a recompute, {tuple(planned.shape)} in its "
                "forward: a checkpointed block must see the same tokens in both"
            )
        changed = (planned != now).any(1).sum()
        self._rerouted = changed if self._rerouted is None else self._rerouted + changed

    @property
    def rerouted(self) -> int:
        """Tokens that the router sent elsewhere in a recompute than in its forward; they follow the forward's plan."""
        return 0 if self._rerouted is None else int(self._rerouted)

    def sizes(
        self,
        dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None = None,
        recompute: str = "none",
        looped: bool = False,
    ) -> LayerSizes:
        """What predictions need of it; ``dtype`` of compute and of gradients on their way, or the parameters'."""
        up, down = (self.homes[name] for name in (self.spec.up, self.spec.down))
        width = up.layout.shape[2 if self.spec.is_transposed else 1]
        intermediate = down.layout.shape[1 if self.spec.is_transposed else 2]
        top_k = min(self.spec.top_k or USUAL_TOP_K, self.spec.num_experts)
        value_bytes = (dtype or down.parameter.dtype).itemsize
        gated = width == 2 * intermediate
        reduce_bytes = (reduce_dtype or down.parameter.dtype).itemsize if self.trained else 0
        kind = gated, value_bytes, reduce_bytes, recompute, looped
        return LayerSizes(self.spec.num_experts, self.spec.hidden_size, intermediate, top_k, *kind)

    def staged_bytes(self, dtype: torch.dtype | None, ranks: int) -> int:
        """Of a rank's memory that others are to read this layer's experts from; 0 where they get messages.

        Args:
            dtype: Of compute, or the parameters'.
            ranks: Of one token group.
        """
        experts = self.spec.num_experts
        slots = self.config.slots_for(experts, ranks) if relays(self.config) else experts
        kind = dtype or self.homes[self.spec.down].parameter.dtype
        return staged_bytes(self.homes, slots, self.engine.comms.weights.size, kind)

    def versions(self) -> list[tuple[int, int]]:
        """Other ones after every change in place of a parameter, as autograd counts it, and where one was replaced."""
        return [(id(home.parameter), home.parameter._version) for home in self.homes.values()]

    @property
    def trained(self) -> dict[str, Home]:
        """The homes whose parameters get gradients."""
        return {name: home for name, home in self.homes.items() if home.parameter.requires_grad}

    def want(self, table: SlotTable, dtype: torch.dtype, device: torch.device, era: Era) -> Want:
        """This layer's experts in the slots of ``table``."""
        return Want(self.name, self.homes, table, dtype, device, tuple(self.versions()), era)

    def _begin(self, run: Run, dtype: torch.dtype, device: torch.device, era: Era) -> Coming:
        """Sends for the run's experts, unless they are on their way or here."""
        want = self.want(run.table, dtype, device, era)
        return self.engine.unsharder.begin(want, self.engine.comms.weights, run.era)

    def held(self, run: Run) -> tuple[int, ...]:
        """The experts in this rank's slots."""
        return run.table[self.engine.comms.weights.rank]

    def arrangement(self, table: SlotTable, counts: list[int], apart: bool) -> Arrangement:
        """How the rows of this rank's slots are to lie.

        Args:
            table: Per rank that shards the experts, the experts in its slots.
            counts: Rows of each of this rank's slots.
            apart: Whether products of large groups may be calls of their own.
        """
        stacks = stacks_of(self.homes, table, self.engine.comms.weights.rank)
        one = self.homes[self.spec.up].layout.shape[1:]
        return Arrangement.of(counts, stacks, alone_from(*one) if apart else None)

    def forward(
        self, run: Run, hidden: torch.Tensor, dtype: torch.dtype, adapters: Sequence[LowRank]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Output ``[T, H]``, dispatched rows ``[R_in, H]`` and the first product ``[A_in, 2I]``, if whole."""
        routes, tokens = run.routes, self.engine.tokens_of(self)
        era = self.engine.era()
        dispatching = start_forward(hidden, dtype, routes, tokens)
        # Parameters are cast while tokens travel.
        coming, served = self._begin(run, dtype, hidden.device, era), routes.served
        terms = [adapter.at(self.held(run), dtype) for adapter in adapters]
        rows, weights = dispatching.wait(), self.engine.unsharder.finish(coming)
        chunks = chunks_of(served.groups, self.engine.config.max_rows_per_rank)
        # The next layer's experts travel under this one's products, which nothing is to delay.
        ahead = partial(self.engine.foresight.after, self, dtype, hidden.device, era)
        experts_out, up = forward_in_chunks(self.spec, weights, rows, served.source_row, chunks, terms, ahead)
        bias = bias_of(weights, self.spec.down_bias)
        sums = Sums(experts_out, served.row_places, dtype, served.gates, bias, served.groups.slot)
        return start_combine_sums(sums, routes, tokens).finish(hidden.dtype), rows, up

    def backward(
        self,
        run: Run,
        grad: torch.Tensor,
        rows: torch.Tensor,
        up: torch.Tensor | None,
        adapters: Sequence[LowRank],
    ) -> tuple[torch.Tensor, torch.Tensor, list[FactorGradients]]:
        """Gradients of ``hidden`` ``[T, H]``, routing weights ``[T * K]`` and factors; those of the weights go home."""
        routes, served, tokens, dtype = run.routes, run.routes.served, self.engine.tokens_of(self), rows.dtype
        self.engine.watch.where = Where(self.name, "backward", run.micro_batch)
        era = self.engine.era()
        self.engine.passes.end()
        share = 1.0 if adapters else self._share(dtype, self._reduce_dtype)
        dispatching = start_dispatch(grad.to(dtype), routes, tokens)
        coming = self._begin(run, dtype, rows.device, era)
        terms = [adapter.at(self.held(run), dtype) for adapter in adapters]
        weights = self.engine.unsharder.finish(coming)
        chunks, wanted = chunks_of(served.groups, self.engine.config.max_rows_per_rank), frozenset(self.trained)
        retained = torch._C._autograd._get_current_graph_task_keep_graph()
        gone: list[tuple[Combining, torch.Tensor]] = []

        def rows_known(grad_inputs: torch.Tensor, grad_gates: torch.Tensor) -> None:
            summed = gather_sum(grad_inputs, served.row_places, dtype)
            gone.append((start_combine(summed, routes, tokens), grad_gates))

        grads = backward_in_chunks(
            self.spec,
            weights,
            rows,
            served.source_row,
            up,
            served.gates if share == 1 else served.gates * share,
            dispatching.wait,
            chunks,
            wanted,
            terms,
            not retained,
            rows_known,
            partial(self.engine.foresight.send, run.before, dtype, rows.device, era, run.era),
        )
        if up is not None and not retained:
            # Its gradient stands there, done with; autograd would hold it while the weights' gradients are packed.
            up.untyped_storage().resize_(0)
        if not retained:
            self.engine.unsharder.release(self.name)
        self._send_home(run, grads.weights, share)
        ((combining, grad_gates),) = gone
        grad_hidden = combining.finish(dtype, 1 / share)
        factors = [adapter.over_all(self.held(run), own) for adapter, own in zip(adapters, grads.factors, strict=True)]
        return grad_hidden, return_gates(grad_gates, routes, tokens), factors

    def _share(self, *dtypes: torch.dtype) -> float:
        """A rank's part in the mean of gradients, if routing weights can be scaled by it, and tokens' gradients back.

        It then costs a pass over the routing weights and none over the experts' gradients. A power of two changes no
        bit of a mantissa; float16, in products or on the way home, might lose small numbers.
        """
        ranks = self.engine.comms.averaged_over
        exact = ranks & (ranks - 1) == 0 and torch.float16 not in dtypes
        return 1 / ranks if exact and self.trained else 1.0

    @property
    def _reduce_dtype(self) -> torch.dtype:
        """In which gradients go home."""
        return self.engine.reduce_dtype or next(iter((self.trained or self.homes).values())).parameter.dtype

    def _send_home(self, run: Run, grads: Weights, share: float) -> None:
        if not grads:
            return
        engine, homes = self.engine, self.trained
        comms = engine.comms
        scale = 1 / comms.averaged_over / share
        told = comms.weights, comms.replicas, self._reduce_dtype, scale, engine.unsharder.nodes
        engine.returns.push(start_reshard(homes, grads, run.table, *told))


class _MoE(torch.autograd.Function):
    """The layer as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        layer: MoELayer,
        run: Run,
        anchor: torch.Tensor,
        kinds: list[tuple[str, float]],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.layer, ctx.run, ctx.kinds = layer, run, kinds
        ctx.versions = layer.versions()
        ctx.dtypes = hidden.dtype, top_k_weights.dtype
        up = None
        if run.rows is not None and run.out is not None:
            out, rows = run.out.clone(), run.rows
        else:
            dtype = layer.engine.compute_dtype_for(hidden)
            with _without_autocast(hidden.device.type):
                out, rows, up = layer.forward(run, hidden, dtype, _adapters(kinds, factors))
        if layer.engine.config.recompute == "experts" and tape.current() is not None:
            # A copy of the output: blocks add to what they get in place.
            run.rows, run.out, up = rows, out.clone(), None
        if layer.engine.config.max_rows_per_rank is not None:
            up = None
        # Every rank saves the same tensors, after its last collective: a recompute that stops early stops alike.
        ctx.save_for_backward(rows, up, *factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, up, *factors = ctx.saved_tensors
        layer: MoELayer = ctx.layer
        if ctx.versions != layer.versions():
            raise RuntimeError(
                f"the expert parameters of {layer.name} were modified in place, or replaced, between its "
                "forward and its backward"
            )
        with _without_autocast(grad.device.type):
            grad_hidden, grad_gates, grad_factors = layer.backward(
                ctx.run, grad, rows, up, _adapters(ctx.kinds, factors)
            )
        hidden_dtype, gates_dtype = ctx.dtypes
        gates = grad_gates.to(gates_dtype).view(ctx.run.top_k_index.shape)
        of_factors = [factor for pair in grad_factors for factor in pair]
        return (grad_hidden.to(hidden_dtype), gates, None, None, None, None, *of_factors)


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    # Mostly it is off already, and to switch it takes the host some microseconds.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _adapters(kinds: list[tuple[str, float]], factors: Sequence[torch.Tensor]) -> list[LowRank]:
    """The additions, from what autograd sees of them."""
    pairs = zip(factors[::2], factors[1::2], strict=True)
    return [LowRank(weight, a, b, scaling) for (weight, scaling), (a, b) in zip(kinds, pairs, strict=True)]
