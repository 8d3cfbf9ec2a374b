"""create_context: everything that calls of one Config on one group need, agreed on by its ranks and allocated."""

import contextlib
import importlib
import itertools
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor

from . import errors, shapes, vmm
from .calls import LocalRank, Path
from .config import Config, as_bool, as_float, config_hash
from .context import BUILD, Context, live
from .formats import by_name, row_pitch
from .planner import (
    MemoryPlan,
    dedup,
    mega,
    missing_route_bytes,
    output_columns,
    plan_memory,
    rows_per_expert,
    slot_geometry,
    small,
    stage_columns,
    sums_pairs,
    symmetric_regions,
)
from .registry import LOCAL_BACKENDS, call_of, default_device, resolve, unused_kernel_config
from .symm import World

logger = logging.getLogger(__name__)

DEFAULT_PEER_TIMEOUT_S = 600.0
_numbers = itertools.count()
_VERSION = version("dist-moe-triton")


@torch.inference_mode(False)  # what is made under it could never be written outside of it
def create_context(
    *,
    group,
    config: Config,
    device: torch.device | str | None = None,
    emulate_peer_buffers: bool | None = None,
    peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S,
    name: str | None = None,
    backend: str | None = None,
) -> Context:
    """Allocate everything that calls of one Config on one group need.

    Args:    group: a process group; None for the default group, or for a single process without one; or a World.
             device: default the current CUDA device, for a gloo group or without CUDA the CPU.
             emulate_peer_buffers: let every peer be this rank's own memory (shapes, memory and traces; with one rank
             the numbers too); None: only for the "fake" process-group backend.
             peer_timeout_s: how long a rank waits for a peer before PeerTimeoutError.
             name: of the Context in saved exports; must be unused in this process.
             backend: "triton" or "reference" for every op; None: the best that runs on the device.
    Returns: the Context; `with create_context(...) as context` closes it.
    Raises:  TypeError, ValueError for arguments; RuntimeError when CUDA or the backend is missing; RankMismatchError
             naming rank and field when configurations differ; PeerAbortedError when another rank failed here.
    Order:   collective over the group; all ranks in the same order.
    """
    # What one rank refuses, all learn of, instead of waiting for it: they meet first, whatever the arguments.
    refused, timeout_s = None, DEFAULT_PEER_TIMEOUT_S
    try:
        timeout_s = _check_timeout(peer_timeout_s)
        if not isinstance(config, Config):
            raise TypeError(f"create_context: config must be a Config, got {type(config).__name__}")
        if emulate_peer_buffers is not None:
            as_bool("create_context", "emulate_peer_buffers", emulate_peer_buffers)
        device = None if device is None else default_device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        refused, device, emulate_peer_buffers = error, None, None
    world = _world_of(group, device, emulate_peer_buffers, timeout_s)
    prepared, ranks, buffers = [], [], {}

    def prepare() -> dict:
        if refused is not None:
            raise refused
        prepared.append(_prepare(world, config, backend, name))
        chosen = prepared[0][1].backends.items()
        backends = {op: "triton" if name in LOCAL_BACKENDS else name for op, name in chosen}
        agreed = {"backend": backends, "peer_timeout_s": timeout_s, "dist_moe": _VERSION}
        if not config.inference:  # what all ranks keep in a slot depends on its size
            agreed["expanded operands"] = prepared[0][0].expanded
        return asdict(config) | agreed

    try:
        terms = world.together("create_context", prepare)
        for rank, other in enumerate(terms):
            for field, value in terms[0].items():
                if other[field] != value:
                    raise errors.RankMismatchError(
                        f"create_context: ranks differ in {field}: rank 0 has {value!r}, "
                        f"rank {rank} has {other[field]!r}"
                    )
        plan, ops, name = prepared[0]
        logger.info("%s", plan.explain())
        with _activation_buffers(world, config, plan) as buffers:
            regions = world.allocate(symmetric_regions(config, world.size))
            world.together(
                "create_context",
                lambda: ranks.extend(
                    _local_rank(world, config, plan, rank, regions[rank], buffers[rank]()) for rank in world.local_ranks
                ),
            )
    except BaseException:
        # The traceback keeps this frame alive for as long as somebody handles the error.
        ranks.clear()
        buffers.clear()
        world.close()
        raise
    path = Path(
        ops=ops,
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        num_tokens_max=config.num_local_input_tokens,
        num_experts=config.num_experts,
        capacity_rows=plan.total_scratch_capacity_rows,
        dedup=dedup(config, world.size),
        sums_pairs=sums_pairs(config, world.size),
        mega=mega(config, world.size),
        activation=config.activation_fn,
        geometry=slot_geometry(config, world.size, plan),
        config_hash=config_hash(config, world.size),
        timeout_ns=int(timeout_s * 1e9),
        exchanges=not world.emulated,
        num_sms=config.num_sms,
        preset=config.bf16_grouped_gemm_preset,
        rows_per_expert=rows_per_expert(config, world.size),
        small=small(config, world.size),
        fast_math=config.block_scaled is not None and config.block_scaled.fast_math,
    )
    context = Context(
        BUILD,
        group=group,
        world=world,
        config=config,
        device=world.device,
        plan=plan,
        path=path,
        ranks=ranks,
        name=name,
    )
    live[name] = context
    return context


def _check_timeout(peer_timeout_s) -> float:
    timeout_s = as_float("create_context", "peer_timeout_s", peer_timeout_s)
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"create_context: peer_timeout_s must be finite and positive seconds, got {peer_timeout_s}")
    return timeout_s


def _world_of(group, device, emulate: bool | None, timeout_s: float) -> World:
    """The World of a group, on the device that was asked for."""
    if isinstance(group, World):
        if device is not None and default_device(device) != group.device:
            raise ValueError(f"create_context: device is {device}, the World's is {group.device}; leave device out")
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return World.virtual(1, default_device(device))
    backend = dist.get_backend(group)
    device = default_device("cpu" if device is None and backend == "gloo" else device)
    if emulate is None:
        emulate = backend == "fake"
    if emulate:
        return World.emulated(dist.get_world_size(group), dist.get_rank(group), device)
    return World.from_group(group, device, timeout_s=timeout_s)


def _prepare(world: World, config: Config, backend: str | None, name: str | None):
    """The parts that need no other rank: plan, resolved ops and name."""
    # A custom op imports this in its first call, for seconds, which the peers' deadlines should not have to cover.
    importlib.import_module("torch._dynamo")
    if config.block_scaled is not None:
        importlib.import_module(f"{__package__}.ops_scaled")
    if config.num_experts % world.size:
        raise ValueError(
            f"create_context: num_experts must be divisible by the number of ranks, got {config.num_experts} experts "
            f"on {world.size} ranks"
        )
    plan = plan_memory(config, world.size, device=world.device, backend=backend)
    if config.vmm is not None and not plan.uses_host_scratch:
        logger.warning("create_context: VmmConfig has no effect: device scratch holds all rows, none lie on the host")
    if unused := unused_kernel_config(config, call_of(world.device, backend, config, world.size), backend):
        logger.warning("create_context: kernel_config has no effect on %s", unused)
    name = f"dist_moe-{next(_numbers)}" if name is None else name
    if name in live:
        raise ValueError(f"create_context: the name {name!r} is that of a live context; close it or choose another")
    return plan, resolve(world.device, backend, config, world.size), name


@contextlib.contextmanager
def _activation_buffers(world: World, config: Config, plan: MemoryPlan):
    """For each local rank, what returns its activation buffer.

    Pinning host memory takes time, so that it may begin in a thread while the symmetric regions are set up. On the way
    out the thread is waited for; a buffer that nobody took is gone with it.
    """

    def make() -> Tensor:
        if plan.vmm_granularity_bytes is None:
            return torch.empty(plan.total_virtual_bytes, dtype=torch.uint8, device=world.device)
        sections = (plan.vmm_device_prefix_bytes, plan.vmm_host_section_bytes, plan.vmm_device_scratch_section_bytes)
        return vmm.map_buffer(vmm.Sections(*sections), world.device)

    if plan.vmm_granularity_bytes is None or not config.vmm.prefetch:
        yield dict.fromkeys(world.local_ranks, make)
        return
    pool = ThreadPoolExecutor(1, "dist_moe-map")
    try:
        yield {rank: pool.submit(make).result for rank in world.local_ranks}
    finally:
        pool.shutdown(cancel_futures=True)


def _local_rank(world: World, config: Config, plan: MemoryPlan, rank: int, regions: dict, buffer: Tensor) -> LocalRank:
    def words(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=world.device)

    def rows(elements: Tensor, width: int) -> Tensor:
        num_rows = len(elements) // width
        return elements[: num_rows * width].view(num_rows, width)

    on_gpu, D, F = world.device.type == "cuda", config.hidden_dim, config.intermediate_dim
    elements, fault_F = buffer[: len(buffer) // 2 * 2].view(torch.bfloat16), words(shapes.FAULT_WORDS)
    widths, format, values = {D, F, 2 * F}, None, {}
    if config.block_scaled is not None:
        format = by_name(config.block_scaled.format)
        columns = (
            stage_columns(config, expanded=plan.expanded),
            output_columns(config, plan.total_scratch_capacity_rows),
        )
        widths |= {width for width in columns if width}
        expands_rows = plan.expanded and config.inference
        dtype = format.expanded_dtype if expands_rows else format.value_dtype
        values = {C: rows(buffer, row_pitch(format, C, expands_rows)).view(dtype) for C in (D, F, 2 * F)}
    T, K, W = config.num_local_input_tokens, config.top_k, world.size
    queue_words = 0
    if mega(config, W):
        queue_words = shapes.mega_queue_words(config.num_experts // W)
    return LocalRank(
        rank=rank,
        regions=regions,
        pair_outputs=regions["outputs"].first(T, min(K, W), D),
        route_grads=None if missing_route_bytes(config, W) else regions["outputs"].first(1, T * K, D),
        route_scores=regions["scores"].first(T * K, 1),
        buffer=buffer,
        elements=elements,
        rows={width: rows(elements, width) for width in widths},
        values=values,
        scales=None if format is None else buffer.view(format.scale_dtype),
        outer_inv=buffer.view(torch.float32) if format is not None and format.two_level else None,
        slot_used_NW=words(plan.num_activation_slots, world.size),
        slot_layers_N=words(plan.num_activation_slots),
        slot_calls_NM=words(plan.num_activation_slots, config.max_moe_layers_per_activation_slot),
        stats_S=words(shapes.STATS_SLOTS + plan.num_activation_slots + config.num_experts // world.size),
        fault_F=fault_F,
        stop_1=fault_F[:1],
        host_fault_F=torch.zeros(shapes.FAULT_WORDS, dtype=torch.int64, pin_memory=on_gpu),
        sent_S=words(shapes.NUM_STAGES),
        queue_Q=torch.zeros(queue_words, dtype=torch.int32, device=world.device),
        finished_1=words(1),
        call_1=words(1),
        zero_1=words(1),
    )
