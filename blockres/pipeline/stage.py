"""`BlockResStage`: a stage of PyTorch's pipelining engine that sends only what the next rank does not hold.

The only file that overrides the engine's private members (`engine.py` lists them). The engine's schedules drive a stage
through a few calls per microbatch: receive, forward, send, and the same backward.

Forward. The state of the residual stream comes in: received sources and the partial sum from the wire (or by hand from
a stage on the same rank), held sources from the rank's cache. Each is a leaf of its own. What the rank will need again
goes into the cache, what the next rank lacks goes out.

Backward. All new outputs of a stage hang on one root node, whose backward hands each of them its gradient: what came
back over the wire plus what later stages on this rank deposited. The outputs themselves need not be kept for that, nor
are they detached in place. The gradient of a received source is the stage's own, plus what came back for it if it was
sent onward, plus the deposits; that of a cached one is deposited. Sums are formed in float32 and cast once.

A tally travels as the partial sum does, apart from its dtype.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from blockres.pipeline.batches import Shape, StepShapes
from blockres.pipeline.cache import BlockCache, add_gradients
from blockres.pipeline.engine import check_engine
from blockres.pipeline.plan import PARTIAL, TALLY, StagePlan
from blockres.pipeline.routing import BlockRouting
from blockres.pipeline.split_backward import backward_inputs, backward_weights
from blockres.pipeline.wire import TALLY_DTYPE, Header, HopFormat, Incoming, Link, Outbox, Traffic, agree

check_engine()


class BlockResStage(PipelineStage):
    """One stage of a model on a block residual stream, for any schedule of `torch.distributed.pipelining`.

    The stage's module sees no wire and no cache. The first is called with the user's input, every other one with
    `(sources, partial)`: a tuple of all sources that exist, and the open block's running sum or None. All but the last
    return `(sources, partial)` likewise, the sources that came in first and unchanged; the last returns the output.

    A loss over all layers, as one that balances experts, needs sums from every stage. They travel beside the stream as
    a tally: one float32 tensor, never cast, which each stage adds its own to, and which gradients come back for. With
    `tally_shape` modules take and return it after the partial sum: `(sources, partial, tally)`.

    Args:
        module: the stage's part of the model, already on `device`.
        index: which stage this is, in model order.
        routing: the same on all ranks.
        device: where the stage runs.
        cache: the rank's cache, the same object for all of the rank's stages.
        microbatch_shape: of a source: `(B, T, D)` for one microbatch. Under a schedule of `build_schedule` all but D is
            taken anew from every step's batch; under one of PyTorch's own it holds until `set_microbatch_shape`.
        dtype: of the sources and the partial sum in the model.
        pipeline_dtype: of every floating tensor on the wire, in both directions; default: `dtype`.
        group: the pipeline's ranks; default: the world.
        check_headers: check what hops say about themselves in every step. On the CPU that is always done; on a GPU it
            stops the host, so by default only the first step of training and of evaluation is checked.
        tally_shape: of the tally, for every microbatch; None where there is none.

    Attributes:
        step_shapes: of the step that is running, where its schedule has exchanged them.
        extra_settings: by name, whatever else must be the same on all ranks; compared with the stage's own settings
            before the first step (values that JSON can express).

    Raises:
        ValueError: where the index, the group and the routing do not fit together; at the first step, where ranks were
            given different settings.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        routing: BlockRouting,
        *,
        device: torch.device | str,
        cache: BlockCache,
        microbatch_shape: Sequence[int],
        dtype: torch.dtype,
        pipeline_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        check_headers: bool = False,
        tally_shape: Sequence[int] | None = None,
    ) -> None:
        _check_fits(index, routing, group)
        _check_floating("dtype", dtype)
        _check_floating("pipeline_dtype", pipeline_dtype or dtype)
        placeholder = torch.empty((), device="meta")
        self.plan = StagePlan.of(routing, index, tally=tally_shape is not None)
        super().__init__(
            module,
            index,
            routing.num_stages,
            torch.device(device),
            # With both given the engine neither runs the model once in advance nor sends pickled shapes around.
            input_args=(placeholder,) * len(self.plan.inputs),
            output_args=(placeholder,),
            group=group,
        )
        # The placeholders are no shapes to validate against, and the stage has checks of its own.
        self._runtime_validate = False
        self.routing, self.cache = routing, cache
        self.microbatch_shape = tuple(microbatch_shape)
        self.tally_shape = None if tally_shape is None else tuple(tally_shape)
        self.step_shapes: StepShapes | None = None
        self.dtype = dtype
        self.check_headers = check_headers or self.device.type == "cpu"
        self.format = HopFormat(dtype, pipeline_dtype or dtype)
        self.extra_settings: dict[str, Any] = {}
        neighbours = [stage for stage in (index - 1, index + 1) if 0 <= stage < routing.num_stages]
        self._links = {stage: Link(routing.rank_of(stage), group) for stage in neighbours}
        self._outbox = Outbox(self.device)
        self._traffic = Traffic()
        self._state = _StepState()
        self._gradient_flags: tuple[bool, ...] = ()
        self._announced_flags: tuple[bool, ...] = ()
        self._steps_begun = {True: 0, False: 0}

    def set_microbatch_shape(self, shape: Sequence[int]) -> None:
        """Change batch or sequence length from the next step on, where the schedule is one of PyTorch's own.

        Training or evaluation, on all ranks alike. A batch that does not fit is an error on the first stage's rank,
        and on the others once that rank ends or sends another step's hops.
        """
        self.microbatch_shape = tuple(shape)

    def traffic(self) -> Traffic:
        """What this stage has sent since it was built or since `reset_traffic`."""
        return self._traffic

    def reset_traffic(self) -> None:
        self._traffic = Traffic()

    def start_over(self) -> None:
        """Drop all that a step has left behind, in this stage and in the rank's cache; a failed step needs it."""
        self._outbox.abandon()
        self._state = _StepState()
        for leftovers in (self.fwd_cache, self.bwd_cache, self.backward_state, self.dw_runner, self.output_chunks):
            leftovers.clear()
        self.cache.clear()

    # The start of a pipeline and of a step.

    def agree_on_settings(self, n_microbatches: int) -> None:
        """Compare this rank's settings with all others': a collective, which a rank's first stage enters for all.

        Raises:
            ValueError: with the same message on all ranks, where one was given other settings.
        """
        self._agree(self._settings() | {"microbatches in this step": n_microbatches})

    def _agree(self, settings: dict[str, Any]) -> None:
        has_agreed_already = self.step_shapes is not None  # before the shapes were exchanged
        if self.plan.is_first_on_rank and not has_agreed_already:
            agree(settings, self.group, self.device)

    def _settings(self) -> dict[str, Any]:
        routing = self.routing
        return {
            "number of sublayers": routing.num_sublayers,
            "sublayers_per_block": routing.sublayers_per_block,
            "pp_size": routing.pp_size,
            "virtual stages": routing.num_stages // routing.pp_size,
            "placement": routing.placement,
            "sublayers_per_stage": routing.sublayers_per_stage,
            "cache": routing.cache,
            "microbatch_shape": self.microbatch_shape,
            "tally_shape": self.tally_shape,
            "dtype": str(self.dtype),
            "pipeline_dtype": str(self.format.wire_dtype),
            "check_headers": self.check_headers,
            "training step": self.has_backward,
            **self.extra_settings,
        }

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        # The engine's first exchange between neighbours: the last moment at which a disagreement cannot hang it.
        self._check_placement()
        self._agree(self._settings())
        return super()._warmup_forward_vote(has_backward, received_acc)

    def _check_placement(self) -> None:
        placed = [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)]
        routed = [self.routing.rank_of(stage) for stage in range(self.num_stages)]
        if placed != routed:
            raise ValueError(
                f"the schedule puts the stages on ranks {placed}, the routing on {routed}: build the routing with the "
                "placement of the schedule ('v' for ZBVZeroBubble and DualPipeV, else 'loop')"
            )

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self._agree({"microbatches in this step": num_microbatches})
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[()]:
        return ()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._outbox.flush()
        self.start_over()
        self._steps_begun[self.has_backward] += 1

    def begin_evaluation(self) -> None:
        """What a schedule does at the start of a forward-only step; for those that run stages without one."""
        self.has_backward = False
        self.clear_runtime_states()

    def finish_sends(self) -> None:
        """Wait for what this stage has sent."""
        self._outbox.flush()

    # Forward.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        header = torch.empty(Header.length(len(self.plan.received)), dtype=torch.int64, device=self.device)
        hop = self._incoming(fwd_chunk_id, self.plan.received)
        self._state.receiving[fwd_chunk_id] = (header, hop)
        return self._links[self.stage_index - 1].receive_operations([header, *hop.messages])

    def set_local_fwd_input(self, prev_stage_outputs: tuple[Tensor, ...], mb_index: int) -> None:
        self._state.handed_over[mb_index] = prev_stage_outputs

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The output on the last stage; elsewhere what goes to a next stage on the same rank, if there is one."""
        with self._start_over_on_error():
            leaves = {} if self.is_first else self._take_inputs(fwd_chunk_id)
            inputs = args if self.is_first else self._module_inputs(leaves)
            output = self.forward_maybe_with_nosync(*inputs, **(kwargs or {}))
            for source in self.plan.released:
                self.cache.release(fwd_chunk_id, source)
            if self.plan.is_last_on_rank:
                self.cache.check_sources_released(fwd_chunk_id)
            if self.is_last:
                return self._finish(fwd_chunk_id, leaves, output, save_forward_output)
            return self._hand_on(fwd_chunk_id, leaves, output)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        payload, wants = self._state.outgoing.pop(fwd_chunk_id)
        header = self._header(fwd_chunk_id, self.stage_index, self.plan.sent, wants).encode(self.device)
        messages, units = self._messages(self.plan.sent, payload), _in_stream(self.plan.sent)
        saved = self._saved_bytes(fwd_chunk_id, units)
        self._traffic = self._traffic.sent_forward(units, messages, header, saved)
        return self._dispatch(self.stage_index + 1, [header, *messages], fwd_chunk_id)

    def _take_inputs(self, microbatch: int) -> dict[int, Tensor]:
        """One leaf for each source and for the partial sum: those that came in, then those from the cache."""
        tensors, wants = self._take_hop(microbatch)
        leaves = {
            unit: tensor.detach().requires_grad_(self.has_backward and flag)
            for unit, tensor, flag in zip(self.plan.received, tensors, wants, strict=True)
        }
        for source in self.plan.kept_received:
            self.cache.put(microbatch, source, leaves[source])
        for source in self.plan.held:
            leaves[source] = self.cache.get(microbatch, source)
        return leaves

    def _take_hop(self, microbatch: int) -> tuple[Sequence[Tensor], Sequence[bool]]:
        if self.plan.previous_is_local:
            tensors = self._state.handed_over.pop(microbatch)
            return tensors, [tensor.requires_grad for tensor in tensors]
        header, hop = self._state.receiving.pop(microbatch)
        return hop.tensors(), self._read(header, microbatch)

    def _read(self, header: Tensor, microbatch: int) -> tuple[bool, ...]:
        """Check a header and say which tensors of the hop want a gradient."""
        if self._reads_headers:
            received = Header.decode(header)
            no_flags = (False,) * len(self.plan.received)
            expected = self._header(microbatch, self.stage_index - 1, self.plan.received, no_flags)
            received.check(expected, self.stage_index)
            if self.has_backward:
                self._gradient_flags = received.wants_gradient
        return self._gradient_flags if self.has_backward else (False,) * len(self.plan.received)

    @property
    def _reads_headers(self) -> bool:
        return self.check_headers or self._steps_begun[self.has_backward] <= 1

    def _incoming(self, microbatch: int, units: Sequence[int]) -> Incoming:
        tally = [self._unit_shape(microbatch, unit) for unit in units if unit == TALLY]
        return self.format.receive([self._shape(microbatch)] * _in_stream(units), self.device, *tally)

    def _messages(self, units: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        stream = _in_stream(units)
        return self.format.messages(tensors[:stream], *tensors[stream:])

    def _header(self, microbatch: int, stage: int, units: Sequence[int], wants: Sequence[bool]) -> Header:
        return Header(
            step=sum(self._steps_begun.values()),
            microbatch=microbatch,
            sending_stage=stage,
            sources_in_hop=_in_stream(units) - (PARTIAL in units),
            sources_that_exist=self.routing.num_sources(stage + 1),
            has_partial=int(PARTIAL in units),
            elements=sum(math.prod(self._unit_shape(microbatch, unit)) for unit in units),
            wants_gradient=tuple(wants),
        )

    def _module_inputs(self, leaves: dict[int, Tensor]) -> tuple[Any, ...]:
        tally = [leaves[TALLY]] if TALLY in leaves else []
        return tuple(leaves[source] for source in range(self.plan.sources_in)), leaves.get(PARTIAL), *tally

    def _hand_on(self, microbatch: int, leaves: dict[int, Tensor], output: Any) -> tuple[Tensor, ...]:
        units = self._outputs_by_unit(microbatch, leaves, output)
        for source in self.plan.kept_produced:
            self.cache.put(microbatch, source, units[source] if self.has_backward else units[source].detach())
        payload = tuple(units[unit] for unit in self.plan.sent)
        wants = tuple(self.has_backward and tensor.requires_grad for tensor in payload)
        if self.has_backward:
            self._remember(microbatch, leaves, {unit: units[unit] for unit in self.plan.new_units}, wants)
        if self.plan.next_is_local:
            return payload
        self._announce(wants)
        self._state.outgoing[microbatch] = ([tensor.detach() for tensor in payload], wants)
        return ()

    def _outputs_by_unit(self, microbatch: int, leaves: dict[int, Tensor], output: Any) -> dict[int, Tensor]:
        """The stage's outputs by source number; for those that came in, the leaves, past which no gradient goes."""
        sources, partial, tally = self._check_form(output)
        came_in = {source: leaf for source, leaf in leaves.items() if source not in (PARTIAL, TALLY)}
        for source, leaf in came_in.items():
            if sources[source] is not leaf and sources[source].data_ptr() != leaf.data_ptr():
                raise ValueError(
                    f"stage {self.stage_index} returned another tensor for source {source}, which came in: its module "
                    "must return the sources that it was given, unchanged and uncast, before those that it adds"
                )
        units = dict(enumerate(sources)) | came_in
        if partial is not None:
            units[PARTIAL] = partial
        if tally is not None:
            units[TALLY] = tally
        for unit, tensor in units.items():
            self._check_tensor(microbatch, unit, tensor)
        return units

    def _check_form(self, output: Any) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
        parts = ("sources", "partial", "tally") if self.tally_shape is not None else ("sources", "partial")
        has_all = isinstance(output, (tuple, list)) and len(output) == len(parts)
        if not has_all or not isinstance(output[0], (tuple, list)):
            raise TypeError(
                f"stage {self.stage_index} returned {type(output).__name__}; every stage but the last returns "
                f"({', '.join(parts)}), with a tuple of tensors first and a tensor or None as the partial"
            )
        sources, partial, *tally = output
        if len(sources) != self.plan.sources_out:
            raise ValueError(
                f"stage {self.stage_index} returned {len(sources)} sources; after its "
                f"{len(self.routing.sublayers(self.stage_index))} sublayers {self.plan.sources_out} exist"
            )
        if (partial is not None) != self.plan.partial_out:
            raise ValueError(
                f"stage {self.stage_index} returned {'no' if partial is None else 'a'} partial sum; after its "
                f"sublayers the block is {'open' if self.plan.partial_out else 'complete'}, so there must be "
                f"{'one' if self.plan.partial_out else 'none'}"
            )
        return sources, partial, tally[0] if tally else None

    def _check_tensor(self, microbatch: int, unit: int, tensor: Tensor) -> None:
        for what, got, want, advice in (
            ("shape", tuple(tensor.shape), self._unit_shape(microbatch, unit), self._advice_on_shapes(unit)),
            ("dtype", tensor.dtype, self._unit_dtype(unit), ""),
            ("device type", tensor.device.type, self.device.type, ""),
        ):
            if got != want:
                name = {PARTIAL: "the partial sum", TALLY: "the tally"}.get(unit, f"source {unit}")
                raise ValueError(
                    f"stage {self.stage_index} returned {name} with {what} {got}, it was set up for {want}{advice}"
                )

    def _advice_on_shapes(self, unit: int) -> str:
        if unit == TALLY:
            return ", its tally_shape"
        if self.step_shapes is None:
            return "; a schedule of build_schedule takes another shape from the batch, set_microbatch_shape sets it"
        return "; where inputs are not [B, T, …], say with shape_of which shape a source has" if self.is_first else ""

    def _announce(self, wants: tuple[bool, ...]) -> None:
        """Where receivers do not look at headers, they go by the gradient flags that they saw last."""
        if not self.has_backward:
            return
        if self._reads_headers:
            self._announced_flags = wants
        elif wants != self._announced_flags:
            raise RuntimeError(
                f"stage {self.stage_index}: which outputs want a gradient has changed from {self._announced_flags} to "
                f"{wants} since the headers were last read; set check_headers on all stages for the step that freezes "
                "or unfreezes parameters"
            )

    def _remember(
        self, microbatch: int, leaves: dict[int, Tensor], outputs: dict[int, Tensor], wants: tuple[bool, ...]
    ) -> None:
        """Keep what backward needs: the leaves, and one root over the new outputs that want a gradient."""
        new = {unit: tensor for unit, tensor in outputs.items() if tensor.requires_grad}
        flight = _Flight.of(leaves, sent_wants=dict(zip(self.plan.sent, wants, strict=True)), roots=new)
        root = (_Root.apply(flight.root_gradients, *new.values()),) if new else ()
        self._state.flights[microbatch] = flight
        self.fwd_cache[microbatch] = (root, list(leaves.values()))

    def _finish(self, microbatch: int, leaves: dict[int, Tensor], output: Any, save_output: bool) -> Any:
        """The end of the model: the engine computes the loss from what this returns."""
        if self.has_backward:
            self._state.flights[microbatch] = _Flight.of(leaves, sent_wants={}, roots={})
            self.fwd_cache[microbatch] = (_tensors(output), list(leaves.values()))
        if save_output:
            self.output_chunks.append(output)
        return output

    # Backward.

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        wanted = self._state.flights[bwd_chunk_id].wanted
        hop = self._incoming(bwd_chunk_id, wanted)
        self._state.receiving_gradients[bwd_chunk_id] = hop
        return self._links[self.stage_index + 1].receive_operations(hop.messages)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return tuple(self._state.upstream.pop(mb_index).values())

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        self._state.handed_back[mb_index] = next_stage_bwd_outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        with self._start_over_on_error():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if loss is not None and not loss._is_view():
                loss.detach_()  # the schedule keeps it to the end of the step, and with it the graph and the inputs
            own_gradients = self.bwd_cache.pop(bwd_chunk_id)
            upstream = self._route(bwd_chunk_id, own_gradients)
            if not self.is_first:
                self._state.upstream[bwd_chunk_id] = upstream
            if self.plan.is_first_on_rank:
                self.cache.check_deposits_collected(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """The engine's, which knows about data parallelism, but with halves of a backward that can share parameters."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, DistributedDataParallel):
            raise TypeError(
                "a schedule that splits the backward does not reach the hooks of DistributedDataParallel, so gradients "
                "would not be reduced; wrap the stage's module with fully_shard instead, or take a schedule that does "
                "not split (1F1B, Interleaved1F1B)"
            )
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "weight":
            backward_weights(bwd_kwargs["param_groups"])
            return (), None
        outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        inputs, bwd_kwargs["input_values"], bwd_kwargs["stage_output"] = bwd_kwargs["input_values"], (), ()
        return backward_inputs(outputs, gradients, inputs, self.submod.parameters())

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._start_over_on_error():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        found = self._state.upstream.pop(bwd_chunk_id)
        gradients = [self._zero(bwd_chunk_id, u) if gradient is None else gradient for u, gradient in found.items()]
        messages, units = self._messages(tuple(found), gradients), _in_stream(found)
        saved = self._saved_bytes(bwd_chunk_id, units)
        self._traffic = self._traffic.sent_backward(units, messages, saved)
        return self._dispatch(self.stage_index - 1, messages)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The end of a step on this stage. In an evaluation the gradients that parameters may have are left alone."""
        self.finish_sends()
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        """Put together the gradients of the new outputs; the engine gets one for the root that hands them out."""
        flight = self._state.flights[bwd_chunk_id]
        flight.returned = dict(zip(flight.wanted, self._take_gradients(bwd_chunk_id), strict=True))
        for unit in flight.root_gradients:
            deposited = self._collect(bwd_chunk_id, unit) if unit in self.plan.kept_produced else None
            total = add_gradients(flight.returned.pop(unit, None), deposited)
            flight.root_gradients[unit] = None if total is None else total.to(self._unit_dtype(unit))
        return (torch.ones((), device=self.device),) if flight.root_gradients else ()

    def _take_gradients(self, microbatch: int) -> Sequence[Tensor | None]:
        if self.plan.next_is_local:
            return self._state.handed_back.pop(microbatch)
        hop = self._state.receiving_gradients.pop(microbatch)
        if hop.messages:
            self._outbox.arrived(microbatch)
        return hop.tensors()

    def _route(self, microbatch: int, own_gradients: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """Deposit the gradients of cached sources; return those of the tensors that came in."""
        flight = self._state.flights.pop(microbatch)
        gradients = {
            unit: add_gradients(own, flight.returned.pop(unit, None))
            for unit, own in zip(flight.leaf_wants, own_gradients, strict=True)
            if flight.leaf_wants[unit]
        }
        for source in self.plan.held:
            if source in gradients:
                self.cache.deposit(microbatch, source, gradients[source])
        for source in self.plan.kept_received:
            if source in gradients:
                gradients[source] = add_gradients(gradients[source], self._collect(microbatch, source))
        return {unit: gradients[unit] for unit in self.plan.received if unit in gradients}

    def _collect(self, microbatch: int, source: int) -> Tensor | None:
        return self.cache.collect(microbatch, source, expected=self.plan.deposits[source])

    def _zero(self, microbatch: int, unit: int) -> Tensor:
        return torch.zeros(self._unit_shape(microbatch, unit), dtype=self._unit_dtype(unit), device=self.device)

    def _unit_shape(self, microbatch: int, unit: int) -> Shape:
        if unit != TALLY:
            return self._shape(microbatch)
        assert self.tally_shape is not None
        return self.tally_shape

    def _unit_dtype(self, unit: int) -> torch.dtype:
        return TALLY_DTYPE if unit == TALLY else self.dtype

    def _shape(self, microbatch: int) -> Shape:
        return self.microbatch_shape if self.step_shapes is None else self.step_shapes.by_microbatch[microbatch]

    def _saved_bytes(self, microbatch: int, units: int) -> int:
        """Of the payload of a hop of so many tensors, what would have been padding."""
        padding = 0 if self.step_shapes is None else self.step_shapes.padding(microbatch)
        return units * padding * self.format.wire_dtype.itemsize

    def _dispatch(self, stage: int, messages: Sequence[Tensor], microbatch: int | None = None) -> list[dist.P2POp]:
        """Send to a neighbour; what is returned is left to the schedule to send."""
        operations = self._links[stage].send_operations(messages)
        if self.plan.is_alone_on_rank and self.device.type != "cpu":
            return operations  # 1F1B pairs its sends with receives, without which NCCL would deadlock
        self._outbox.post(operations, microbatch)
        return []

    @contextmanager
    def _start_over_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.start_over()
            raise


@dataclass
class _Flight:
    """One microbatch between its forward and its backward on a stage.

    Attributes:
        leaf_wants: for each leaf, whether it wants a gradient.
        wanted: the tensors of the hop sent for which a gradient comes back.
        root_gradients: the gradients that the root hands to the new outputs; known when backward begins.
        returned: gradients that came back for sources that are not new here, but were sent onward.
    """

    leaf_wants: dict[int, bool]
    wanted: tuple[int, ...]
    root_gradients: dict[int, Tensor | None]
    returned: dict[int, Tensor | None] = field(default_factory=dict)

    @staticmethod
    def of(leaves: dict[int, Tensor], sent_wants: dict[int, bool], roots: dict[int, Tensor]) -> "_Flight":
        return _Flight(
            leaf_wants={unit: leaf.requires_grad for unit, leaf in leaves.items()},
            wanted=tuple(unit for unit, wants in sent_wants.items() if wants),
            root_gradients=dict.fromkeys(roots),
        )


@dataclass
class _StepState:
    """What a stage holds for single microbatches during a step; all of it is empty between steps."""

    receiving: dict[int, tuple[Tensor, Incoming]] = field(default_factory=dict)
    handed_over: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    outgoing: dict[int, tuple[Sequence[Tensor], tuple[bool, ...]]] = field(default_factory=dict)
    flights: dict[int, _Flight] = field(default_factory=dict)
    receiving_gradients: dict[int, Incoming] = field(default_factory=dict)
    handed_back: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    upstream: dict[int, dict[int, Tensor | None]] = field(default_factory=dict)


class _Root(torch.autograd.Function):
    """A scalar above all new outputs of a stage, whose backward gives each the gradient that was put together for it.

    It refers to the outputs' graph but not to the outputs: their memory can go once they are sent.
    """

    @staticmethod
    def forward(ctx: Any, gradients: dict[int, Tensor | None], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients.values())


def _in_stream(units: Collection[int]) -> int:
    """How many of some units are tensors of the residual stream."""
    return len(units) - (TALLY in units)


def _tensors(output: Any) -> tuple[Tensor, ...]:
    items = output if isinstance(output, (tuple, list)) else (output,)
    return tuple(item for item in items if isinstance(item, Tensor))


def _check_fits(index: int, routing: BlockRouting, group: dist.ProcessGroup | None) -> None:
    if not 0 <= index < routing.num_stages:
        raise ValueError(f"stage {index} does not exist: the routing has {routing.num_stages} stages, counted from 0")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != routing.pp_size:
        raise ValueError(f"the routing is for {routing.pp_size} pipeline ranks, the process group has {size}")
    if rank != routing.rank_of(index):
        own = routing.stages_of(rank)
        raise ValueError(f"stage {index} belongs to rank {routing.rank_of(index)}; rank {rank} runs stages {list(own)}")


def _check_floating(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"{name} is {dtype}; what travels is the residual stream, so it must be a floating dtype")
