"""The bytes that a token occupies between ranks: counted in the symmetric regions, and where peers read them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.test_path import BACKENDS, device_of

from dist_moe import BlockScaledConfig, create_context
from dist_moe.formats import by_name, packed_row_bytes
from dist_moe.path_oracle import FORWARD_ONLY, Case, forward_only, on_device, prepared
from dist_moe.symm import World
from dist_moe.virtual import RankInputs, run_virtual

MXFP8, NVFP4 = BlockScaledConfig(), BlockScaledConfig("nvfp4")
SCHEMES = {"per-route": (2, 4), "de-duplicated": (4, 8)}  # K, E
each_precision = pytest.mark.parametrize("block_scaled", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
each_scheme = pytest.mark.parametrize("K, E", SCHEMES.values(), ids=SCHEMES)


def content_bytes(block_scaled, D: int) -> int:
    """What a row says: values, scales, the inverse of an outer scale."""
    if block_scaled is None:
        return 2 * D
    return {MXFP8: D + D // 32, NVFP4: D // 2 + D // 16 + 4}[block_scaled]


def wire_bytes(block_scaled, D: int) -> int:
    return -(-content_bytes(block_scaled, D) // 16) * 16


def serving(case: Case, block_scaled, backend: str, *, more_tokens: int = 0):
    """A Context of inference over virtual ranks, with room for more tokens than the case has, and what they pass."""
    tokens = case.T + more_tokens
    config = case.config(block_scaled=block_scaled, num_local_input_tokens=tokens, **FORWARD_ONLY)
    device = device_of(backend)
    inputs = forward_only(case.inputs())
    if block_scaled is not None:
        inputs = prepared(inputs, config, inference=True, device=device)
    context = create_context(group=World.virtual(case.W, device), config=config, backend=backend)
    return context, [on_device(rank, device) for rank in inputs]


def serve(context, inputs: list[RankInputs]) -> None:
    run_virtual(len(inputs), context.config, inputs, context=context)


def as_bytes(region) -> torch.Tensor:
    return region.own.view(torch.uint8).flatten()


@pytest.mark.parametrize("backend", BACKENDS)
@each_precision
@each_scheme
def test_a_call_writes_the_bytes_of_the_formula(K, E, block_scaled, backend):
    """Every byte of T rows, whatever was there, and none behind them. What comes back is BF16 in every precision."""
    case = Case("counted", T=3, D=96, F=32, K=K, E=E, routing="balanced")
    context, inputs = serving(case, block_scaled, backend, more_tokens=2)
    names = ("tokens", "ids", "scores", "outputs")
    with context:
        found = []
        for poison in (0xA5, 0x5A):
            for rank in context.ranks:
                for name in names:
                    as_bytes(rank.regions[name]).fill_(poison)
            serve(context, inputs)
            found.append([[as_bytes(rank.regions[name]).cpu().clone() for name in names] for rank in context.ranks])
        for rank in range(case.W):
            tokens, ids, scores, outputs = (a == b for a, b in zip(found[0][rank], found[1][rank], strict=True))
            row = wire_bytes(block_scaled, case.D)
            assert len(tokens) == (case.T + 2) * row
            assert tokens[: case.T * row].all() and not tokens[case.T * row :].any()
            assert ids.sum() == 2 * case.T * K and scores.sum() == 4 * case.T * K
            assert outputs.sum() == 2 * case.D * case.T * min(K, case.W if context.path.dedup else K)


@each_precision
@each_scheme
@pytest.mark.interpreter
def test_peers_read_a_row_once_for_every_pull(K, E, block_scaled, monkeypatch):
    """Per route for every expert, de-duplicated for every rank: its bytes, and no more than reach the next 16."""
    from triton.runtime.interpreter import InterpreterBuilder

    case = Case("counted", T=3, D=96, F=32, K=K, E=E)
    context, inputs = serving(case, block_scaled, "triton")
    stock, read = InterpreterBuilder.create_masked_load, []

    def create_masked_load(builder, pointers, mask, *args, **options):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        mask_array = np.asarray(mask.data, dtype=bool)  # of a handle, or of descriptors an array
        addresses = np.broadcast_to(pointers.data, mask_array.shape)[mask_array]
        read.append(size * sum(np.sum((first <= addresses) & (addresses < end)) for first, end in ranges))
        return stock(builder, pointers, mask, *args, **options)

    with context:
        regions = [as_bytes(rank.tokens) for rank in context.ranks]
        ranges = [(own.data_ptr(), own.data_ptr() + len(own)) for own in regions]
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
        serve(context, inputs)
        dedup = context.path.dedup
    assert dedup == (K > 2)
    ids = torch.cat([rank.ids_TK for rank in inputs])
    goals = ids // (E // case.W) if dedup else ids
    pulls = sum(len(row.unique()) for row in goals)
    assert pulls * content_bytes(block_scaled, case.D) <= sum(read) <= pulls * wire_bytes(block_scaled, case.D)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_scaled", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_every_byte_of_a_row_but_its_padding_reaches_the_peer(block_scaled, backend):
    """Each in turn is changed between publish and the pull."""
    case = Case("changed", T=1, D=32, F=32, K=1, E=2)
    context, inputs = serving(case, block_scaled, backend)
    inputs = [replace(rank, ids_TK=torch.ones_like(rank.ids_TK)) for rank in inputs]  # the expert of rank 1
    with context:
        pull, reached = context.path.ops.dispatch_packed, []
        receiver = context.ranks[1].buffer
        row_B = as_bytes(context.ranks[0].tokens)
        assert len(row_B) == wire_bytes(block_scaled, case.D)

        def pulls(plan, *, tokens, **how):
            how["num_sms"] = 1
            pull(plan, tokens=tokens, **how)
            if tokens is not context.ranks[1].tokens:
                return
            as_sent = receiver.clone()
            for byte in range(len(row_B)):
                row_B[byte] ^= 0xFF
                pull(plan, tokens=tokens, **how)
                reached.append(not torch.equal(receiver, as_sent))
                row_B[byte] ^= 0xFF
            pull(plan, tokens=tokens, **how)
            assert torch.equal(receiver, as_sent)

        context.path.ops.dispatch_packed = pulls
        serve(context, inputs)
    content = content_bytes(block_scaled, case.D)
    assert reached == [True] * content + [False] * (len(row_B) - content)


@pytest.mark.parametrize("D", [2048, 4096, 7168])
def test_the_bytes_of_large_rows(D):
    """As docs/formats.md has them."""
    table = {2048: (2112, 1168), 4096: (4224, 2320), 7168: (7392, 4048)}
    for block_scaled, want in zip((MXFP8, NVFP4), table[D], strict=True):
        assert packed_row_bytes(by_name(block_scaled.format), D) == wire_bytes(block_scaled, D) == want
