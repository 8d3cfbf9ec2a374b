"""Quantisers against the oracle: equal bytes and scales, tails, strides, experts, and what a bad block becomes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format_cases import assert_same_bits, expert_rows, hard_values

from dist_moe import reference_formats as oracle
from dist_moe.formats import (
    FORMATS,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    ROW_ALIGNMENT,
    SCALE_ATOM,
    padded_scales,
)
from dist_moe.kernels_triton import quantize as kernels
from dist_moe.kernels_triton.quantize import Config, pick_config

# Where an expert or a row is not finite, numpy warns of what is meant to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN, INF = float("nan"), float("inf")
FP8 = (MXFP8_E4M3, MXFP8_E5M2)
EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
EACH_FP8 = pytest.mark.parametrize("format", FP8, ids=lambda f: f.name)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

ROW_CASES = (
    pytest.param(20, 96, False, id="20x96, less than a tile"),
    pytest.param(20, 96, True, id="20x96 blocked, scale columns not a multiple of 4"),
    pytest.param(133, 160, True, id="133x160 blocked, rows past an atom"),
    pytest.param(5, 2880, False, id="5x2880, a tail in the third chunk"),
)


@EACH_FORMAT
@EACH_DTYPE
@pytest.mark.parametrize("R, C, blocked", ROW_CASES)
def test_rows_equal_the_oracle(format, dtype, R, C, blocked, device):
    x = hard_values(R, C).to(dtype)
    want = oracle.quantize_rows(x, format=format, blocked=blocked)
    assert_same_bits(kernels.quantize_rows(x.to(device), format=format, blocked=blocked), want)


@EACH_FORMAT
@settings(max_examples=15)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_any_bits_equal_the_oracle(format, device, bits):
    x = torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32).view(2, 32)
    assert_same_bits(kernels.quantize_rows(x.to(device), format=format), oracle.quantize_rows(x, format=format))


@EACH_FORMAT
def test_every_bf16_number_equals_the_oracle(format, device):
    """In blocks of neighbours, so that all values of a block matter; and alone in a block with a fixed amax."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    mixed = every.view(-1, 32).clone()
    mixed[:, 0] = torch.tensor(1.0)
    for x in (every.view(-1, 1024), mixed[mixed.float().abs().amax(dim=1) <= 1.0]):
        assert_same_bits(kernels.quantize_rows(x.to(device), format=format), oracle.quantize_rows(x, format=format))


@EACH_FORMAT
def test_halfway_values_and_their_neighbours_equal_the_oracle(format, device):
    table = oracle.decode(torch.arange(format.largest_code + 1, dtype=torch.uint8), format)
    middle = (table[1:] + table[:-1]) / 2
    v = torch.cat([table, middle, middle.nextafter(torch.tensor(INF)), middle.nextafter(torch.tensor(0.0))])
    v = torch.cat([v, -v])
    blocks = torch.zeros(len(v), 32)
    blocks[:, 0], blocks[:, 1] = format.largest, v  # amax = largest: the scale is 1
    assert_same_bits(
        kernels.quantize_rows(blocks.to(device), format=format), oracle.quantize_rows(blocks, format=format)
    )


@EACH_FORMAT
@pytest.mark.parametrize(
    "counts, blocked", [([0, 1, 129], True), ([7], False), ([0, 0], True)], ids=["blocked", "natural", "no rows"]
)
def test_rows_of_experts_and_their_padding_equal_the_oracle(format, counts, blocked, device):
    """What lies between experts is NaN; scales that padding adds are written, what comes after the last is not."""
    x, start_P, num_rows_L = expert_rows(counts, 96)
    results = []
    for op, place in ((oracle.quantize_rows, "cpu"), (kernels.quantize_rows, device)):
        out = op(x.nan_to_num().to(place), format=format, blocked=blocked)
        for tensor in out[:2]:
            tensor.view(torch.uint8).fill_(0xAB)
        if out.outer_inv_R is not None:
            out.outer_inv_R.fill_(-1.0)
        experts = {"row_start_P": start_P.to(place), "num_rows_L": num_rows_L.to(place)}
        results.append(op(x.to(place), format=format, blocked=blocked, **experts, out=out))
    assert_same_bits(results[1], results[0])


@EACH_FP8
@pytest.mark.parametrize(
    "C, dtype, blocked",
    [
        pytest.param(160, torch.bfloat16, False, id="160 natural"),
        pytest.param(96, torch.bfloat16, True, id="96 blocked"),
        pytest.param(160, torch.float32, True, id="160 blocked, two rows of atoms"),
    ],
)
def test_columns_of_experts_equal_the_oracle(format, C, dtype, blocked, device):
    x, start_P, num_rows_L = expert_rows([0, 1, 0, 129], C, dtype)
    x[0, 5], x[140, 7], x[200, 9] = NAN, INF, -INF
    x[131:180, 11] = 0
    results = []
    for op, place in ((oracle.quantize_columns, "cpu"), (kernels.quantize_columns, device)):
        options = {"format": format, "blocked": blocked}
        options |= {"row_start_P": start_P.to(place), "num_rows_L": num_rows_L.to(place)}
        out = op(x.to(place), **options)
        for tensor in out[:2]:
            tensor.view(torch.uint8).fill_(0xAB)
        results.append(op(x.to(place), **options, out=out))
    assert_same_bits(results[1], results[0])


@EACH_FORMAT
@pytest.mark.parametrize("N, K, dtype", [(32, 96, torch.float32), (160, 160, torch.bfloat16)], ids=["32x96", "160x160"])
def test_weights_equal_the_oracle(format, N, K, dtype, device):
    w = torch.randn(3, N, K) * torch.exp2(torch.randint(-20, 20, (3, N, 1)).float())
    w[1] = 0  # an expert of zeros
    w[2, 3, 7], w[2, 9, 40] = NAN, INF
    w = w.to(dtype)
    assert_same_bits(kernels.quantize_weights(w.to(device), format=format), oracle.quantize_weights(w, format=format))


@EACH_FP8
@pytest.mark.parametrize("N, K, dtype", [(32, 96, torch.float32), (160, 160, torch.bfloat16)], ids=["32x96", "160x160"])
def test_square_blocks_of_weights_equal_the_oracle(format, N, K, dtype, device):
    w = torch.randn(2, N, K) * torch.exp2(torch.randint(-20, 20, (2, N, 1)).float())
    w[0, 3, 7], w[1, :32, :32] = INF, 0
    w = w.to(dtype)
    found = kernels.quantize_weights(w.to(device), format=format, square=True)
    assert_same_bits(found, oracle.quantize_weights(w, format=format, square=True))


@EACH_FORMAT
def test_strided_sources_and_outputs(format, device):
    def views(wide):
        return wide[:, 8:104], wide[::2, ::2][:, :96], wide.T[:96, :96]

    wide = torch.randn(300, 200).bfloat16()
    for x, y in zip(views(wide.to(device)), views(wide), strict=True):
        assert_same_bits(kernels.quantize_rows(x, format=format), oracle.quantize_rows(y, format=format))
    w = torch.randn(64, 3, 96).bfloat16()
    found = kernels.quantize_weights(w.to(device).transpose(0, 1), format=format)
    assert_same_bits(found, oracle.quantize_weights(w.transpose(0, 1), format=format))
    if format in FP8:
        experts = {"row_start_P": torch.tensor([0, 128]).int(), "num_rows_L": torch.tensor([120]).int()}
        on_device = {name: value.to(device) for name, value in experts.items()}
        found = kernels.quantize_columns(wide.to(device).T[:128, :96], format=format, **on_device)
        assert_same_bits(found, oracle.quantize_columns(wide.T[:128, :96], format=format, **experts))


@pytest.mark.parametrize("width", [32, 96, 160, 544, 2880, 7168])
def test_tiles_lie_in_one_expert_and_fill_atoms(width):
    for op in ("quantize_rows", "quantize_columns", "quantize_weights"):
        for format in FORMATS:
            config = pick_config(op, width, format.two_level)
            assert ROW_ALIGNMENT % config.block_r == 0
            assert op == "quantize_columns" or config.block_c % (SCALE_ATOM[1] * format.block) == 0


@pytest.mark.parametrize(
    "C, config",
    [
        (288, Config(1, 128, 1, parts=3)),
        (288, Config(2, 128, 1)),
        (544, Config(1, 128, 1, parts=2)),
        (2880, None),
        (16416, None),
    ],
    ids=["parts with a tail", "rows of three tiles", "tiles of two parts", "a tail in the third part", "two tiles"],
)
def test_outer_scales_are_of_whole_rows(C, config, device):
    """The largest magnitude of a row in each of its parts in turn."""
    x = torch.randn(6, C)
    x[torch.arange(6), torch.linspace(0, C - 1, 6).long()] = 100.0
    for blocked in (False, True):
        found = kernels.quantize_rows(x.to(device), format=NVFP4, blocked=blocked, config=config)
        assert_same_bits(found, oracle.quantize_rows(x, format=NVFP4, blocked=blocked))


@EACH_FORMAT
def test_outputs_with_another_pitch_and_guards_round_them(format, device):
    x = torch.randn(9, 96).bfloat16().to(device)
    want = oracle.quantize_rows(x.cpu(), format=format)
    V, S = want.values.shape[1], want.scales.shape[1]
    buffer = torch.full((12, 160), 0xAB, dtype=torch.uint8, device=device)
    scales = torch.full((12, 16), 0xAB, dtype=torch.uint8, device=device)
    out = want._replace(
        values=buffer[1:10, 16 : 16 + V].view(format.value_dtype),
        scales=scales[1:10, 3 : 3 + S].view(format.scale_dtype),
        outer_inv_R=None if want.outer_inv_R is None else torch.empty(9, device=device),
    )
    kernels.quantize_rows(x, format=format, out=out)
    assert_same_bits(out, want)
    for guarded, first, width in ((buffer, 16, V), (scales, 3, S)):
        guarded[1:10, first : first + width] = 0xAB
        assert (guarded == 0xAB).all()


@EACH_FORMAT
def test_equal_bits_for_any_tile_and_number_of_programs(format, device):
    x = torch.randn(70, 288).to(device)
    first = kernels.quantize_rows(x, format=format)
    for more in ({"num_sms": 1}, {"config": Config(64, 128, 4)}, {"config": Config(16, 512, 8)}):
        assert_same_bits(kernels.quantize_rows(x, format=format, **more), first)


def test_groups_of_0_1_7_8_9_127_128_and_129_rows(device):
    counts = [0, 1, 7, 8, 9, 127, 128, 129]
    x, start_P, num_rows_L = expert_rows(counts, 32)
    results = []
    for ops, place in ((oracle, "cpu"), (kernels, device)):
        experts = {"row_start_P": start_P.to(place), "num_rows_L": num_rows_L.to(place)}
        end = int(start_P[-1])
        rows, columns = (
            op(x.to(place)[:end], format=MXFP8_E4M3, blocked=True, **experts)
            for op in (ops.quantize_rows, ops.quantize_columns)
        )
        results.append((rows, columns))
    for found, want in zip(results[1], results[0], strict=True):
        assert_same_bits(found, want)


@EACH_FORMAT
def test_no_rows_and_no_experts(format, device):
    assert kernels.quantize_rows(torch.zeros(0, 64, device=device), format=format).values.shape[0] == 0
    assert kernels.quantize_weights(torch.zeros(0, 32, 64, device=device), format=format).values.shape[0] == 0


def test_docstring_examples(device):
    x = torch.zeros(2, 32, device=device)
    x[0, 0], x[1, :2] = 448.0, torch.tensor([960.0, 957.0])
    natural, blocked = (kernels.quantize_rows(x, format=MXFP8_E4M3, blocked=b) for b in (False, True))
    assert natural.scales.view(torch.uint8).flatten().tolist() == [127, 129]
    assert natural.values.view(torch.uint8)[1, 1] == 0x77
    flat = blocked.scales.view(torch.uint8).flatten().cpu()
    assert flat.nonzero().flatten().tolist() == [0, 16] and flat.numel() == 512

    x = torch.full((128, 32), NAN, device=device)
    x[:2, :2] = torch.tensor([[448.0, -960.0], [1.0, 0.0]])
    x[:2, 2:] = 0
    experts = {"row_start_P": torch.tensor([0, 128]).int(), "num_rows_L": torch.tensor([2]).int()}
    experts = {name: value.to(device) for name, value in experts.items()}
    found = kernels.quantize_columns(x, format=MXFP8_E4M3, **experts)
    scales = found.scales.view(torch.uint8)
    assert scales[0, :2].tolist() == [127, 129] and not scales[1:].any()
    assert not found.values.view(torch.uint8)[2:].any()

    w = torch.zeros(1, 32, 32, device=device)
    w[0, 4, 5] = 960.0
    found = kernels.quantize_weights(w, format=MXFP8_E4M3, square=True)
    for scale in (found.scales, found.transposed_scales):
        assert scale.view(torch.uint8).flatten().nonzero().flatten().tolist() == [16 * i for i in range(32)]
        assert scale.view(torch.uint8).max() == 129
    assert kernels.quantize_weights(w.fill_(-7.0), format=NVFP4).outer_G == 2688 * (1 / torch.tensor(7.0))


def test_refusals(device):
    x = torch.zeros(128, 64, device=device)
    with pytest.raises(TypeError, match="quantize_rows: x_RC must be bfloat16 or float32, got"):
        kernels.quantize_rows(x.half(), format=NVFP4)
    with pytest.raises(ValueError, match="quantize_rows: x_RC must have 2 dimensions, the last a multiple of 32"):
        kernels.quantize_rows(x[:, :48], format=NVFP4)
    experts = {"row_start_P": torch.tensor([0, 128]), "num_rows_L": torch.tensor([2])}
    experts = {name: value.int().to(device) for name, value in experts.items()}
    with pytest.raises(ValueError, match="quantize_columns: mxfp4 has two values of a row in a byte"):
        kernels.quantize_columns(x, format=MXFP4, **experts)
    with pytest.raises(ValueError, match="quantize_weights: nvfp4 has two values of a row"):
        kernels.quantize_weights(x[None], format=NVFP4, square=True)
    out = kernels.quantize_rows(x, format=MXFP8_E4M3, blocked=True)
    strided = out._replace(scales=torch.empty(128, 8, dtype=out.scales.dtype, device=device)[:, :4])
    with pytest.raises(ValueError, match="blocked order must be contiguous"):
        kernels.quantize_rows(x, format=MXFP8_E4M3, blocked=True, out=strided)
    with pytest.raises(ValueError, match=r"out\.values must be on the device of the source, .*, got meta"):
        kernels.quantize_rows(x, format=MXFP8_E4M3, blocked=True, out=out._replace(values=out.values.to("meta")))


def test_rows_past_two_to_the_31_elements(device):
    """On a CPU the memory before them is never touched."""
    x = torch.empty(2**26 + 4, 32, dtype=torch.bfloat16, device=device)[-4:]
    huge = torch.empty(2**26 + 128, 64, dtype=torch.uint8, device=device)
    x.copy_(torch.randn(4, 32))
    wide = torch.as_strided(x, (2, 32), (2 * 32, 1), x.storage_offset())
    out = oracle.quantize_rows(wide.cpu(), format=MXFP8_E4M3)
    far = torch.as_strided(huge, (2, 32), (2**31 + 64, 1)).view(torch.float8_e4m3fn)
    kernels.quantize_rows(wide, format=MXFP8_E4M3, out=out._replace(values=far, scales=out.scales.to(device)))
    assert_same_bits([far], [out.values])


# A million blocks


@pytest.mark.gpu
@EACH_FORMAT
@EACH_DTYPE
@pytest.mark.parametrize("blocked", [False, True], ids=["natural", "blocked"])
def test_a_million_blocks_of_rows(format, dtype, blocked, device):
    C = 7168
    x = hard_values(10**6 * format.block // C + 1, C).to(dtype).to(device)
    want = oracle.quantize_rows(x, format=format, blocked=blocked)
    assert_same_bits(kernels.quantize_rows(x, format=format, blocked=blocked), want)


@pytest.mark.gpu
@EACH_FP8
@pytest.mark.parametrize("blocked", [False, True], ids=["natural", "blocked"])
def test_a_million_blocks_of_columns(format, blocked, device):
    counts = [640, 0, 1000, 129, 2571]
    x, start_P, num_rows_L = expert_rows(counts, 2880 * 3, torch.bfloat16)
    hard = hard_values(x.shape[1], len(x)).T.bfloat16()  # blocks of all magnitudes and edge values, along the columns
    x = torch.where(x.isnan(), x, hard)
    x, start_P, num_rows_L = (t.to(device) for t in (x, start_P, num_rows_L))
    options = {"format": format, "blocked": blocked, "row_start_P": start_P, "num_rows_L": num_rows_L}
    end = int(start_P[-1])
    found, want = kernels.quantize_columns(x, **options), oracle.quantize_columns(x, **options)
    assert torch.equal(found.values[:end].view(torch.uint8), want.values[:end].view(torch.uint8))
    scales = [t.scales.view(torch.uint8) for t in (found, want)]
    if blocked:
        scales = [oracle.from_blocked(s, x.shape[1], len(x) // 32)[0].T for s in scales]
    assert torch.equal(scales[0][: end // 32], scales[1][: end // 32])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "format, square",
    [*((format, False) for format in FORMATS), *((format, True) for format in FP8)],
    ids=lambda v: v.name if hasattr(v, "name") else ("square" if v else "along K"),
)
def test_a_million_blocks_of_weights(format, square, device):
    """Of all magnitudes, an expert of zeros and one of edge values; square ones of 1024 values in several passes."""
    G, N, K = 8, 2880, 1440
    num_blocks = 0
    while num_blocks < 10**6:
        magnitude = torch.exp2(torch.randint(-140, 100, (G, N // 32, 1, K // 32, 1), device=device).float())
        w = torch.randn(G, N // 32, 32, K // 32, 32, device=device).mul_(magnitude).view(G, N, K).bfloat16()
        w[3], w[5] = 0, hard_values(N, K).bfloat16()
        found, want = (q.quantize_weights(w, format=format, square=square) for q in (kernels, oracle))
        for name, a, b in zip(want._fields, found, want, strict=True):
            assert (a is None) == (b is None), name
            assert b is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
        num_blocks += w.numel() // (format.block * (32 if square else 1))
    assert found.scales.shape[0] == G * padded_scales(N, 4)[0]


@pytest.mark.gpu
def test_replayed_in_a_graph_they_follow_new_data(device):
    x = torch.randn(256, 512, device=device).bfloat16()
    w = torch.randn(2, 128, 512, device=device).bfloat16()
    outs = [kernels.quantize_rows(x, format=NVFP4, blocked=True), kernels.quantize_weights(w, format=NVFP4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.quantize_rows(x, format=NVFP4, blocked=True, out=outs[0])
        kernels.quantize_weights(w, format=NVFP4, out=outs[1])
    x.copy_(3 * x.roll(1, 0))
    w.mul_(0.5)
    graph.replay()
    assert_same_bits(outs[0], oracle.quantize_rows(x, format=NVFP4, blocked=True))
    assert_same_bits(outs[1], oracle.quantize_weights(w, format=NVFP4))
