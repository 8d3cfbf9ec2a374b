"""The memory plan: what a Context allocates, in bytes, before anything is allocated.

One activation buffer a rank, uint8: [slot 0 | slot 1 | ... | slot N-1 | scratch]. Slots hold what a forward saves for
its backward and grow up; scratch holds what lives within one call and grows down from the end of the buffer.

Regions that TMA reads start at a multiple of their row pitch, so that the whole buffer seen as rows of that pitch has
the region at a whole row number. Rounding a start loses at most one pitch, which is why R rows are counted as R + 1.

    region      row pitch   scratch of training       of inference        saved by a layer that recomputes nothing
    x_RD        2 D         yes                       yes                 yes
    h1_R2F      4 F         yes (grad_h1 over it)     yes                 yes
    h2_RF, g2   2 F         one place for both        yes                 no
    h3_RD, dy   2 D         one place for both        over x_RD           no
A layer that recomputes everything saves x_TD alone.

Block-scaled operands lie as bundles of values and scales, with one scale a block of the width ("row", for GEMMs that
sum over features) or of the rows ("column", for weight gradients). R is a multiple of 128, and so are the bytes of all
scales: they lie first, aligned by themselves, columns padded to whole atoms.

    region             row pitch, MXFP8   scratch of training             of inference         saved, recomputes nothing
    h1_R2F             4 F                yes                             yes                  yes
    row x, dy; h2; g1  D; F; 2 F          one place                       x and h2             no
    column x           D                  yes                             no                   yes
    column dy          D                  yes                             no                   no
    column h2, g1      F, 2 F             yes                             no                   no
    g2_RF              2 F                yes, but for F = 32             no                   no
On a device that multiplies them so (registry.expands_operands) operands that many tiles read are expanded: 16 bits a
value, no scales but for the outer ones. Those are the rows of inference and the columns of training:

    region             row pitch          scratch of training             of inference         saved, recomputes nothing
    row x; h2          2 align(C, group)  codes, as above                 one place            no
    column x           2 D                yes                             no                   yes
    column dy          2 D                yes                             no                   no
    column h2, g1      2 F, 4 F           yes, h2 over g2                 no                   no
The route outputs h3 and the x-gradient rows, 2 D a row, lie over the columns of x and dy, expanded over those of dy
alone, which neither a forward nor the last GEMM of a backward reads in scratch. In inference h3 lies over h1: see
output_columns.
De-duplicated rows of x and dy are quantised from BF16 ones that lie over g2 and the columns of h2 and g1, which are
not there yet, in passes over as many columns as these hold: see stage_columns. Where a row of g2 is one block, the
columns of g1 are written over it; expanded, those of h2 always are, element for element.
"""

import importlib
import logging
import math

import torch

from . import formats, shapes, vmm
from .config import Config, as_int
from .formats import ROW_ALIGNMENT, SCALE_ATOM, Format, by_name, padded_scales, row_pitch
from .memory_plan import MemoryPlan
from .shapes import Small, align, cdiv, is_small_routing, is_small_sum

logger = logging.getLogger(__name__)

SLOT_ALIGNMENT = 128  # bytes; slots and what a layer saves in them
MOST_PASSES = 4  # over columns of rows that are quantised after a de-duplicated pull
ONE_PASS_BYTES = 2**27  # of h3 beyond h1, at most, for W2 and the push to come in one pass
DECODE_ROWS = 64  # of an expert on average, at most
MEGA_ROWS = 2  # the same, of contexts whose forward runs its experts in one launch
DEDUP_MIN_ROUTES = (3, 2)  # as a fraction: mean routes of an arriving (token, rank) pair from which de-duplication pays


def _format(config: Config) -> Format:
    return by_name(config.block_scaled.format)


def routed_rows(config: Config, ep_size: int, factor: float) -> int:
    """Rows one rank may receive at a capacity factor: rounded half up, never more than routing can send to one rank.

    An expert appears once in a token, so a rank receives at most min(K, L) rows of each of the W T_max tokens.
    """
    T, K, L = config.num_local_input_tokens, config.top_k, config.num_experts // ep_size
    return min(int(T * K * factor + 0.5), T * ep_size * min(K, L))


def rows_per_expert(config: Config, ep_size: int) -> int:
    """On average, of full calls with balanced ranks: what the scratch holds beyond that is for routing that is not."""
    return cdiv(routed_rows(config, ep_size, 1.0), config.num_experts // ep_size)


def padding_rows(config: Config, ep_size: int) -> int:
    """The most rows that are padding: block-scaled, every expert begins at a multiple of ROW_ALIGNMENT."""
    return 0 if config.block_scaled is None else config.num_experts // ep_size * (ROW_ALIGNMENT - 1)


def capacity_rows(config: Config, ep_size: int, factor: float) -> int:
    """Rows one rank holds at a capacity factor, those of padding too."""
    rows = routed_rows(config, ep_size, factor) + padding_rows(config, ep_size)
    return rows if config.block_scaled is None else rows // ROW_ALIGNMENT * ROW_ALIGNMENT


def _region_bytes(rows: int, pitch: int) -> int:
    return (rows + 1) * pitch


def row_pitches(config: Config) -> dict[str, int]:
    """Bytes of one row of every scratch region."""
    D, F = 2 * config.hidden_dim, 2 * config.intermediate_dim
    pitches = {"x": D, "h1": 2 * F, "h2": F, "h3": D}
    return pitches if config.inference else pitches | {"g2": F, "dy": D}


def _row_bundle_bytes(config: Config, rows: int, width: int, expanded: bool) -> int:
    format = _format(config)
    scales = format.outer_scale_bytes + (0 if expanded else align(width // format.block, SCALE_ATOM[1]))
    return _region_bytes(rows, row_pitch(format, width, expanded)) + rows * scales


def _column_bundle_bytes(config: Config, rows: int, width: int, expanded: bool) -> int:
    if expanded:
        return _region_bytes(rows, 2 * width)
    return _region_bytes(rows, width) + rows // _format(config).block * align(width, SCALE_ATOM[0])


def _whole(num_bytes: int) -> int:
    """Bytes of block-scaled regions, rounded down to the alignment of slots.

    The row more that is counted for h1 has room for what is cut off: h1 is the first behind the scales, next to a
    multiple of 128, and its pitch is a multiple of 128, so that rounding its start loses 128 bytes less than a row.
    """
    return num_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT


def _block_scaled_scratch_regions(config: Config, rows: int, expanded: bool) -> dict[str, int]:
    D, F = config.hidden_dim, config.intermediate_dim
    h1_pitch = max(4 * F, 2 * output_columns(config, rows)) if config.inference else 4 * F  # h3 lies over it
    regions = {"h1": align(_region_bytes(rows, h1_pitch), SLOT_ALIGNMENT)}
    widest = max(D, F if config.inference else 2 * F)
    operands = _row_bundle_bytes(config, rows, widest, expanded and config.inference)
    if not config.inference:
        regions["columns"] = sum(_column_bundle_bytes(config, rows, width, expanded) for width in (D, D, F, 2 * F))
        if F > _format(config).block and not expanded:
            regions["g2"] = _region_bytes(rows, 2 * F)
    named = sum(regions.values())
    return regions | {"operands": _whole(named + operands) - named}


def output_columns(config: Config, rows: int) -> int:
    """Columns of h3 that W2 makes before they are pushed, in a Context for this many rows.

    All, but in block-scaled inference, where h3 lies over h1, those that do not reach beyond h1's 2 F, unless all of
    them need no more than ONE_PASS_BYTES beyond it: a pass more is two launches, and few rows make short ones. Of h1's
    columns those that fill atoms of W2's scales, or the half of one that F = 32 gives.
    """
    D, F, atom = config.hidden_dim, config.intermediate_dim, SCALE_ATOM[0]
    if config.block_scaled is None or not config.inference or D <= 2 * F:
        return D
    if config.vmm is None and 2 * rows * (D - 2 * F) <= ONE_PASS_BYTES:
        return D
    return 2 * F // atom * atom or 2 * F


def stage_columns(config: Config, *, expanded: bool = False) -> int:
    """Columns of BF16 rows that fit over g2 and the columns of h2 and g1, a multiple of 128, at most D.

    0: in block-scaled training rows are pulled route by route, because they are de-duplicated by nothing (bf16,
    inference) or would come in more passes over D than that is worth.
    """
    if config.block_scaled is None or config.inference:
        return 0
    atom = SCALE_ATOM[0]
    room = (2 + 4 if expanded else 2 + 1 + 2) * config.intermediate_dim // 2 // atom * atom
    if room == 0 or (passes := cdiv(config.hidden_dim, room)) > MOST_PASSES:
        return 0
    return align(cdiv(config.hidden_dim, passes), atom)


def scratch_regions(config: Config, rows: int, *, expanded: bool = False) -> dict[str, int]:
    """Bytes of every region of the scratch of one call with `rows` received rows."""
    if config.block_scaled is not None:
        return _block_scaled_scratch_regions(config, rows, expanded)
    names = ("x", "h1", "h2") if config.inference else ("x", "h1", "h2", "h3")
    pitches = row_pitches(config)
    return {name: _region_bytes(rows, pitches[name]) for name in names}


def scratch_bytes(config: Config, rows: int, *, expanded: bool = False) -> int:
    """Scratch of one call with `rows` received rows."""
    return sum(scratch_regions(config, rows, expanded=expanded).values())


def scratch_layout(config: Config, total_bytes: int, rows: int) -> dict[str, int]:
    """Byte offset of every bf16 scratch region in an activation buffer of total_bytes.

    Down from the end of the buffer: x, h1, h2 and g2 in one place, h3 and dy in one place. In inference h3 lies over
    x, which W13 has consumed, and there is neither g2 nor dy.
    Example: D = F = 32 (pitches 64, 128, 64, 64), 1024 bytes, 2 rows: x 896, h1 640, h2 512, h3 384.
    """
    pitches = row_pitches(config)
    shared = {"h3": "x"} if config.inference else {"g2": "h2", "dy": "h3"}
    offsets, end = {}, total_bytes
    for name, pitch in pitches.items():
        if name not in shared:
            end = (end - rows * pitch) // pitch * pitch
            offsets[name] = end
    assert end >= 0, f"{rows} rows do not fit in {total_bytes} bytes"
    return offsets | {name: offsets[place] for name, place in shared.items()}


def saved_input_bytes(config: Config) -> int:
    """What a layer saves that recomputes everything: x_TD."""
    return align(2 * config.num_local_input_tokens * config.hidden_dim, SLOT_ALIGNMENT)


def saved_full_bytes(config: Config, rows: int, *, expanded: bool = False) -> int:
    """What a layer saves that recomputes nothing but the activation: x_RD and h1_R2F.

    Block-scaled it is h1 and the columns of x: backward makes those of h2 from h1, which it reads in any case.
    Expanded, these have the size of x_RD.
    """
    if config.block_scaled is not None and not expanded:
        h1 = _region_bytes(rows, 4 * config.intermediate_dim)
        return _whole(h1 + _column_bundle_bytes(config, rows, config.hidden_dim, expanded=False))
    pitches = row_pitches(config)
    return align(_region_bytes(rows, pitches["x"]) + _region_bytes(rows, pitches["h1"]), SLOT_ALIGNMENT)


def saved_h1_bytes(config: Config, rows: int) -> int:
    """What a layer saves that makes x_RD again but not h1: x_TD and h1_R2F."""
    return align(saved_input_bytes(config) + _region_bytes(rows, row_pitches(config)["h1"]), SLOT_ALIGNMENT)


def slot_geometry(config: Config, ep_size: int, plan: MemoryPlan) -> shapes.Geometry:
    """What the device-side slot planner must know of a Context. For later layers it reserves balanced rows, or as many
    as there can be."""
    rows = min(capacity_rows(config, ep_size, 1.0), plan.total_scratch_capacity_rows)
    return shapes.Geometry(
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        slot_bytes=plan.activation_slot_bytes,
        x_bytes=saved_input_bytes(config),
        x_h1_bytes=saved_h1_bytes(config, rows),
        total_bytes=plan.total_virtual_bytes,
        training=not config.inference,
        format=None if config.block_scaled is None else _format(config),
        stage_columns=stage_columns(config, expanded=plan.expanded),
        output_columns=output_columns(config, plan.total_scratch_capacity_rows),
        expanded=plan.expanded,
    )


def dedup(config: Config, ep_size: int) -> bool:
    """Whether a token's row crosses once for each rank it visits rather than once for each of its routes.

    Under uniform routing a token visits W (1 - (1 - 1/W)^K) ranks, so an arriving pair stands for K divided by that
    many routes; de-duplication pays from 1.5 of them on. The border is provisional until it is measured on the
    benchmark's shapes. Whole numbers decide, so that every rank answers alike: K=8 gives W=8 True, W=9 False.
    """
    K, W = config.top_k, ep_size
    numerator, denominator = DEDUP_MIN_ROUTES
    routes_per_pair = (K * W ** (K - 1), W**K - (W - 1) ** K)
    return routes_per_pair[0] * denominator >= routes_per_pair[1] * numerator


def mega(config: Config, ep_size: int) -> bool:
    """Whether one launch runs all of a rank's experts in a forward: in decode, of BF16, where it takes no more time
    than the launches that it stands for (docs/performance.md).

    A preset asks for tiles that it does not have, and with a limit on SMs it was not timed.
    """
    few = rows_per_expert(config, ep_size) <= MEGA_ROWS and small_routing(config, ep_size)
    plain = config.block_scaled is None and config.bf16_grouped_gemm_preset is None and config.num_sms is None
    return config.inference and few and plain


def sums_pairs(config: Config, ep_size: int) -> bool:
    """Whether the experts' rank sums what they return for a token, which is pulled once, before it pushes that.

    One rank that runs its experts in one launch pushes their rows from where they are made, and sums once: to the same
    bits, for the sum of all routes of a token is the same there.
    """
    return dedup(config, ep_size) and not (ep_size == 1 and mega(config, ep_size))


def small_routing(config: Config, ep_size: int) -> bool:
    return is_small_routing(ep_size, config.num_local_input_tokens, config.top_k, config.num_experts)


def small(config: Config, ep_size: int) -> Small:
    """Which waits of a forward share a launch with what follows them: for decode, where launches are what is felt. Of
    Config and ranks alone, never of a call's tokens, and so the same on all ranks."""
    T, K, W = config.num_local_input_tokens, config.top_k, ep_size
    width = min(K, W) if sums_pairs(config, W) else K
    routing = small_routing(config, W)
    return Small(routing, sum=is_small_sum(W, T, width, config.hidden_dim, in_decode=routing))


def outputs_per_token(config: Config, ep_size: int) -> int:
    """Rows that `outputs` has for a token: one a route, or where calls are de-duplicated one a rank that the token can
    visit. A call with a postprocess needs the experts' rows one by one, so route_outputs asks for one a route anyway.
    """
    shares_rows = sums_pairs(config, ep_size) and not config.route_outputs
    return min(config.top_k, ep_size) if shares_rows else config.top_k


def missing_route_bytes(config: Config, ep_size: int) -> int:
    """What `outputs` lacks to have a row a route; 0: calls can have a postprocess. Of top_k, ranks and route_outputs
    alone, so that what is refused does not change with the tokens: also where decode on one rank has those rows.
    """
    shares_rows = dedup(config, ep_size) and not config.route_outputs
    missing = config.top_k - min(config.top_k, ep_size) if shares_rows else 0
    return config.num_local_input_tokens * missing * config.hidden_dim * torch.bfloat16.itemsize


def packed_row_bytes(config: Config) -> int:
    """A token as block-scaled inference sends it: values, scales, the scale of the row, padded to 16 bytes."""
    return formats.packed_row_bytes(_format(config), config.hidden_dim)


def symmetric_regions(config: Config, ep_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every region that peers read or write, by name, in the order of allocation."""
    T, D, K = config.num_local_input_tokens, config.hidden_dim, config.top_k
    tokens = ((1 if config.inference else 2, T, D), torch.bfloat16)
    if config.inference and config.block_scaled is not None:
        tokens = ((1, T, packed_row_bytes(config)), torch.uint8)
    regions = {
        "tokens": tokens,
        "header": ((shapes.HEADER_WORDS,), torch.int64),
        "ids": ((T, K), torch.int16),
        "scores": ((T, K), torch.float32),
        "outputs": ((T, outputs_per_token(config, ep_size), D), torch.bfloat16),
        "score_grads": ((T, K), torch.float32),
        "signals": ((shapes.NUM_STAGES, ep_size), torch.int64),
        "abort_text": ((256,), torch.uint8),
    }
    if config.inference:
        del regions["score_grads"]
    return regions


def routing_table_bytes(config: Config, ep_size: int) -> int:
    """Bytes of the RoutePlan of one call; training keeps one for every layer whose backward is still to come."""
    R = capacity_rows(config, ep_size, _total_factor(config, ep_size))
    L = config.num_experts // ep_size
    int32, int64 = 4, 8
    return 4 * R * int32 + (L + 1) * int32 + ep_size * int64 + int32


def _weight_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Rows and columns of an expert's weights; columns are what the forward sums over."""
    D, F = config.hidden_dim, config.intermediate_dim
    return {"w13": (2 * F, D), "w2": (D, F)}


def prepared_weight_bytes(config: Config, ep_size: int) -> dict[str, int]:
    """Bytes of one layer's quantised weights on a rank, values and scales; nothing in bf16."""
    if config.block_scaled is None:
        return {}
    format, num_experts = _format(config), config.num_experts // ep_size

    def scales(rows: int, columns: int) -> int:
        return math.prod(padded_scales(rows, columns // format.block))

    sizes = {}
    for name, (rows, columns) in _weight_shapes(config).items():
        num_scales = scales(rows, columns) + (0 if config.inference else scales(columns, rows))
        outer = 2 * format.outer_scale_bytes  # and its inverse
        sizes[f"{name}_values"] = num_experts * rows * columns // format.values_per_byte
        sizes[f"{name}_scales"] = num_experts * (num_scales + outer)
    return sizes


def weight_grad_bytes(config: Config, ep_size: int) -> dict[str, int]:
    """Bytes of one layer's weight gradients on a rank; they have bf16's size unless Config says fp32."""
    if config.inference:
        return {}
    itemsize, num_experts = (config.wgrad_dtype or torch.bfloat16).itemsize, config.num_experts // ep_size
    return {name: num_experts * rows * columns * itemsize for name, (rows, columns) in _weight_shapes(config).items()}


def _total_factor(config: Config, ep_size: int) -> float:
    factor = config.device_scratch_capacity_factor if config.vmm is None else config.vmm.total_scratch_capacity_factor
    return min(factor, float(ep_size))


def _check(config: Config, ep_size: int, device_factor: float, total_factor: float) -> None:
    if total_factor < device_factor:
        raise ValueError(
            f"plan_memory: VmmConfig.total_scratch_capacity_factor ({total_factor:g}) must cover at least "
            f"device_scratch_capacity_factor ({device_factor:g}); raise the first or lower the second"
        )
    num_routes = ep_size * config.num_local_input_tokens * config.top_k
    if num_routes > shapes.MAX_ROUTES:
        raise ValueError(
            f"plan_memory: ep_size * num_local_input_tokens * top_k must be at most {shapes.MAX_ROUTES}, "
            f"got {num_routes}; row maps are int32, so pass fewer tokens a call"
        )
    minimum = align(config.max_moe_layers_per_activation_slot * saved_input_bytes(config), SLOT_ALIGNMENT)
    if config.activation_slot_bytes is not None and config.activation_slot_bytes < minimum:
        raise ValueError(
            f"plan_memory: activation_slot_bytes is {config.activation_slot_bytes}, minimum required {minimum} bytes; "
            "every layer of a slot saves at least its input"
        )


def _slot_sizes(config: Config, balanced_rows: int, total_rows: int, expanded: bool) -> tuple[int, int, int, int]:
    """Minimum, balanced full-save, maximum useful and chosen bytes of one slot."""
    if config.inference:
        return 0, 0, 0, 0
    num_layers = config.max_moe_layers_per_activation_slot
    minimum = align(num_layers * saved_input_bytes(config), SLOT_ALIGNMENT)
    # Saving everything can take less than the minimum, which is there in any case: with few rows (a factor below 1), or
    # where MXFP8 rows of one expert a token replace a bf16 x and F is small.
    balanced, useful = (
        max(minimum, align(num_layers * saved_full_bytes(config, rows, expanded=expanded), SLOT_ALIGNMENT))
        for rows in (balanced_rows, total_rows)
    )
    if config.activation_slot_bytes is not None:
        chosen = align(config.activation_slot_bytes, SLOT_ALIGNMENT)
    elif config.activation_slot_capacity_factor is not None:
        step = math.ceil(config.activation_slot_capacity_factor * (balanced - minimum))
        chosen = align(minimum + step, SLOT_ALIGNMENT)
    else:
        chosen = minimum
    return minimum, balanced, useful, chosen


def _warn(config: Config, ep_size: int, useful_slot: int, chosen_slot: int) -> None:
    if config.device_scratch_capacity_factor > ep_size:
        logger.warning(
            "plan_memory: device_scratch_capacity_factor %g is capped to %d, the number of ranks",
            config.device_scratch_capacity_factor,
            ep_size,
        )
    if config.activation_slot_bytes is not None and chosen_slot > useful_slot:
        logger.warning(
            "plan_memory: activation_slot_bytes %d is more than the %d bytes that can be used", chosen_slot, useful_slot
        )


def _expands_operands(config: Config, device: torch.device | str, backend: str | None) -> bool:
    if config.block_scaled is None:
        return False
    registry = importlib.import_module(f"{__package__}.registry")  # which needs this module
    return registry.expands_operands(config, registry.call_of(device, backend, config), backend)


def plan_memory(
    config: Config,
    ep_size: int,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    vmm_granularity_bytes: int | None = None,
) -> MemoryPlan:
    """Plan the memory of one rank of ep_size ranks. Plain arithmetic on any machine; not collective.

    Args:    device: of the Context, which may expand block-scaled operands; without one they are codes and scales. A
             GPU of another machine by its compute capability, as "sm_90". With host scratch, the CUDA device whose
             driver gives the granularity; a CPU has none, and its plain buffer holds all of the scratch.
             backend: as in create_context.
             vmm_granularity_bytes: of the driver's mappings, usually 2 MiB, instead of asking a driver; with host
             scratch it gives the sizes of the physical mapping, which are None and 0 without it.
    Returns: the plan that create_context would allocate.
             num_experts / ep_size is rounded down here; create_context refuses a remainder.
    Raises:  TypeError, ValueError; with host scratch and a CUDA device, RuntimeError without cuda-python or a driver.
    """
    ep_size = as_int("plan_memory", "ep_size", ep_size)
    if ep_size <= 0:
        raise ValueError(f"plan_memory: ep_size must be positive, got {ep_size}")
    if vmm_granularity_bytes is not None:
        vmm_granularity_bytes = as_int("plan_memory", "vmm_granularity_bytes", vmm_granularity_bytes)
        if vmm_granularity_bytes <= 0:
            raise ValueError(f"plan_memory: vmm_granularity_bytes must be positive, got {vmm_granularity_bytes}")
    device_factor = min(config.device_scratch_capacity_factor, float(ep_size))
    total_factor = _total_factor(config, ep_size)
    _check(config, ep_size, device_factor, total_factor)

    balanced_rows = config.num_local_input_tokens * config.top_k
    device_rows = capacity_rows(config, ep_size, device_factor)
    total_rows = capacity_rows(config, ep_size, total_factor)
    full_rows = capacity_rows(config, ep_size, 1.0)
    expanded = device is not None and _expands_operands(config, device, backend)
    minimum, balanced_slot, useful, slot = _slot_sizes(config, full_rows, total_rows, expanded)
    _warn(config, ep_size, useful, slot)

    num_slots = 0 if config.inference else config.num_activation_slots
    device_scratch = scratch_bytes(config, device_rows, expanded=expanded)
    host_scratch = max(0, scratch_bytes(config, total_rows, expanded=expanded) - device_scratch)
    used_bytes = num_slots * slot + device_scratch + host_scratch
    granularity, mapped, virtual_bytes = None, (None, None, None), used_bytes
    if host_scratch:
        granularity = vmm_granularity_bytes
        if granularity is None and device is not None and str(device).partition(":")[0] == "cuda":
            granularity = vmm.granularity_bytes(device)
        if granularity is not None:
            mapped = vmm.sections(num_slots * slot, host_scratch, device_scratch, granularity)
            virtual_bytes = sum(mapped)
    regions = symmetric_regions(config, ep_size).items()
    return MemoryPlan(
        balanced_recv_rows=balanced_rows,
        device_scratch_capacity_rows=device_rows,
        total_scratch_capacity_rows=total_rows,
        device_scratch_capacity_factor=device_factor,
        total_scratch_capacity_factor=total_factor,
        saved_input_bytes_per_layer=saved_input_bytes(config),
        device_scratch_bytes=device_scratch,
        host_scratch_bytes=host_scratch,
        minimum_activation_slot_bytes=minimum,
        balanced_full_save_activation_slot_bytes=balanced_slot,
        maximum_useful_activation_slot_bytes=useful,
        activation_slot_bytes=slot,
        activation_slot_capacity_factor=config.activation_slot_capacity_factor,
        total_activation_bytes=num_slots * slot,
        total_device_buffer_bytes=num_slots * slot + device_scratch,
        total_virtual_bytes=virtual_bytes,
        num_activation_slots=num_slots,
        inference=config.inference,
        expanded=expanded,
        vmm_granularity_bytes=granularity,
        vmm_device_prefix_bytes=mapped[0],
        vmm_host_section_bytes=mapped[1],
        vmm_device_scratch_section_bytes=mapped[2],
        vmm_padding_bytes=virtual_bytes - used_bytes,
        symmetric_bytes=tuple((name, math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in regions),
        routing_table_bytes=routing_table_bytes(config, ep_size),
        prepared_weight_bytes=tuple(prepared_weight_bytes(config, ep_size).items()),
        weight_grad_bytes=tuple(weight_grad_bytes(config, ep_size).items()),
    )
