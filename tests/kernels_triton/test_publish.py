"""publish against its oracle: equal bits of everything it writes, nothing else written."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format_cases import assert_same_bits, hard_values
from tests.strategies import routings

from dist_moe import reference, shapes
from dist_moe.formats import FORMATS, MXFP8_E4M3, NVFP4, packed_row_bytes
from dist_moe.kernels_triton.publish import PACKED_TILE, _publish, pick_config, publish
from dist_moe.reference_formats import pack_rows
from dist_moe.symm import World

# Where a row is not finite, numpy warns of what is meant to happen.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

NAN, INF = float("nan"), float("inf")
HASH = 0x0123456789ABCDEF


def published(
    op, device, x_TD, ids_TK, scores_TK, *, E, T_max, half=0, check_TD=None, format=None, **words
) -> SimpleNamespace:
    """All that an op may write, as it is after one call; what it does not write keeps its poison."""
    K, D, dtype = ids_TK.shape[1], x_TD.shape[1], torch.bfloat16 if format is None else torch.uint8
    regions = World.virtual(1, device).allocate(
        {
            "tokens": ((2, T_max, D if format is None else packed_row_bytes(format, D)), dtype),
            "header": ((shapes.HEADER_WORDS,), torch.int64),
            "ids": ((T_max, K), torch.int16),
            "scores": ((T_max, K), torch.float32),
        }
    )[0]
    r = SimpleNamespace(**regions)
    r.tokens.own.fill_(7.0)
    r.scores.own.fill_(NAN)
    r.ids.own.fill_(99)
    r.header.own.fill_(-5)

    def word(name, value=0):
        return torch.full((1,), words.get(name, value), dtype=torch.int64, device=device)

    call_1 = word("call", 41)
    op(
        x_TD,
        ids_TK,
        scores_TK,
        half=half,
        check_TD=x_TD if check_TD is None else check_TD,
        check_skip_1=word("check_skip"),
        kind=shapes.KIND_TRAIN,
        config_hash=HASH,
        num_experts=E,
        call_1=call_1,
        tokens=r.tokens,
        header=r.header,
        ids=r.ids,
        scores=r.scores,
        stop_1=word("stop"),
        format=format,
    )
    return SimpleNamespace(tokens=r.tokens.own, header=r.header.own, ids=r.ids.own, scores=r.scores.own, call=call_1)


def bits(t):
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_equals_oracle(*args, **kwargs) -> SimpleNamespace:
    got, want = published(publish, *args, **kwargs), published(reference.publish, *args, **kwargs)
    for name, tensor in vars(want).items():
        assert torch.equal(bits(getattr(got, name)), bits(tensor)), name
    return got


def random_call(device, T, K, E, D, *, ids_dtype=torch.int64, scores_dtype=torch.float32):
    """Ids with "no expert" and repetitions, scores with zeros, and every third token broken in its last column."""
    x = torch.randn(T, D).to(torch.bfloat16)
    x[::3, -1] = INF
    ids = torch.randint(-2, E, (T, K)).to(ids_dtype)
    scores = torch.randint(-2, 3, (T, K)).to(scores_dtype)
    return x.to(device), ids.to(device), scores.to(device)


def test_example(device):
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    x[1, 3] = NAN
    ids = torch.tensor([[2, -7, 2, 9], [0, 3, 1, 1]])
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 2.0, -2.0]])
    got = published(publish, device, x.to(device), ids.to(device), scores.to(device), E=4, T_max=2)
    assert got.ids.tolist() == [[2, -1, -1, -2], [0, 3, 1, -1]]
    assert got.scores.tolist() == [[4, 0, 0, 0], [0, 5, 0, 0]]
    assert torch.signbit(got.scores).tolist() == [[False] * 4, [True, False, True, False]]
    assert got.header[: shapes.HEADER_ABORT + 1].tolist() == [shapes.WIRE_VERSION, HASH, 42, shapes.KIND_TRAIN, 2, 0]
    assert torch.equal(bits(got.tokens[0]), bits(x.to(device)))


@pytest.mark.parametrize(
    ("T", "K", "E", "D"),
    [
        pytest.param(1, 1, 1, 32, id="one-of-all"),
        pytest.param(5, 3, 60, 96, id="K-and-E-odd"),
        pytest.param(4, 6, 72, 2880, id="D-2880"),
        pytest.param(3, 8, 256, 7168, id="two-steps-of-D"),
        pytest.param(6, 10, 10, 160, id="K-is-E"),
        pytest.param(2, 70, 1025, 32, id="several-steps-of-K"),
        pytest.param(3, 4, shapes.MAX_EXPERTS, 32, id="most-experts"),
        pytest.param(0, 4, 8, 64, id="no-token"),
    ],
)
def test_equals_the_oracle(device, T, K, E, D):
    assert_equals_oracle(device, *random_call(device, T, K, E, D), E=E, T_max=T + 2)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_tokens_around_a_block(device, more):
    T = 2 * pick_config(D=64, K=2).block_t + more
    assert_equals_oracle(device, *random_call(device, T, 2, 4, 64), E=4, T_max=T)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("scores_dtype", [torch.bfloat16, torch.float32])
def test_dtypes(device, ids_dtype, scores_dtype):
    call = random_call(device, 5, 4, 8, 64, ids_dtype=ids_dtype, scores_dtype=scores_dtype)
    assert_equals_oracle(device, *call, E=8, T_max=5)


def test_repeated_scores_are_added_in_slot_order(device):
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device)
    scores = torch.tensor([[1e8, 1.0, -1e8]], device=device)  # 1e8 + 1 is 1e8 in FP32
    got = assert_equals_oracle(
        device, torch.ones(1, 32, dtype=torch.bfloat16, device=device), ids, scores, E=1, T_max=1
    )
    assert got.scores.tolist() == [[0, 0, 0]]


@settings(max_examples=30)
@given(routing=routings(num_ranks=(1,), max_experts=5, invalid=True), data=st.data())
def test_any_ids_and_broken_tokens(device, routing, data):
    T = len(routing.ids[0])
    broken = data.draw(st.lists(st.sampled_from([1.0, NAN, INF, -INF]), min_size=T, max_size=T))
    x = torch.ones(T, 32, dtype=torch.bfloat16)
    x[:, 5] = torch.tensor(broken)
    call = (t.to(device) for t in (x, routing.ids[0], routing.scores[0]))
    assert_equals_oracle(device, *call, E=routing.num_experts, T_max=routing.num_tokens_max)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.repeat_interleave(2, 1)[:, ::2], id="every-second-column"),
        pytest.param(lambda t: torch.cat([t, t + 1], 1)[:, : t.shape[1]], id="left-part-of-wider"),
        pytest.param(lambda t: t.T.contiguous().T, id="transposed"),
        pytest.param(lambda t: torch.cat([t + 1, t])[len(t) :], id="lower-part-of-longer"),
        pytest.param(lambda t: t[:1].expand(len(t), -1), id="row-stride-0"),
    ],
)
def test_views_of_ids_and_scores(device, view):
    x, ids, scores = random_call(device, 6, 3, 5, 64)
    assert_equals_oracle(device, x, view(ids), view(scores), E=5, T_max=6)


@pytest.mark.parametrize(("first", "width"), [(0, 96), (8, 80), (3, 101)], ids=["aligned", "aligned-16-bytes", "odd"])
def test_rows_of_x_with_a_stride(device, first, width):
    _, ids, scores = random_call(device, 5, 3, 5, 64)
    wide = torch.randn(5, width, device=device).to(torch.bfloat16)
    assert_equals_oracle(device, wide[:, first : first + 64], ids, scores, E=5, T_max=5)


def test_row_times_stride_past_2_31(device):
    stride = 2**30 + 32
    memory = torch.empty(
        2 * stride + 32, dtype=torch.bfloat16, device=device
    )  # pages that nothing touches cost nothing
    x = memory.as_strided((3, 32), (stride, 1))
    x.copy_(torch.randn(3, 32))
    _, ids, scores = random_call(device, 3, 2, 4, 32)
    assert_equals_oracle(device, x, ids, scores, E=4, T_max=3)


def test_half_1_checks_another_x(device):
    """Backward: dy travels, broken or not; the x that will be dispatched decides about -0.0."""
    x, ids, scores = random_call(device, 6, 3, 4, 64)
    dy = torch.full_like(x, NAN)
    got = assert_equals_oracle(device, dy, ids, scores, E=4, T_max=8, half=1, check_TD=x)
    assert torch.isnan(got.tokens[1, :6]).all() and (got.tokens[0] == 7).all() and (got.tokens[1, 6:] == 7).all()


@pytest.mark.parametrize("check_is_x", [True, False])
@pytest.mark.parametrize("check_skip", [0, 1])
def test_x_may_stay_where_it_is(device, check_is_x, check_skip):
    x, ids, scores = random_call(device, 6, 3, 4, 64)
    how = {"check_TD": None if check_is_x else x.flip(0), "check_skip": check_skip}
    got = assert_equals_oracle(device, x, ids, scores, E=4, T_max=8, half=None, **how)
    copied = published(publish, device, x, ids, scores, E=4, T_max=8, **how)
    assert (got.tokens == 7).all() and (got.header == copied.header).all() and (got.ids == copied.ids).all()
    assert torch.equal(bits(got.scores), bits(copied.scores))


EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@EACH_FORMAT
@pytest.mark.parametrize("check_skip", [0, 1])
@pytest.mark.parametrize("D", [32, 96, 544])
def test_wire_rows_equal_the_oracle(device, format, D, check_skip):
    """At D = 96 the FP32 scale of a row lies at an odd multiple of two bytes. All else is as without a format."""
    x = hard_values(20, D).bfloat16().to(device)
    _, ids, scores = random_call(device, 20, 3, 4, D)
    got = assert_equals_oracle(device, x, ids, scores, E=4, T_max=22, format=format, check_skip=check_skip)
    assert_same_bits([got.tokens[0, :20]], [pack_rows(x.cpu(), format=format)])
    assert (got.tokens[0, 20:] == 7).all() and (got.tokens[1] == 7).all()
    copied = published(publish, device, x, ids, scores, E=4, T_max=22, check_skip=check_skip)
    assert torch.equal(got.ids, copied.ids) and torch.equal(bits(got.scores), bits(copied.scores))


@pytest.mark.parametrize("D", [2880, PACKED_TILE + 96])
@pytest.mark.parametrize("format", [MXFP8_E4M3, NVFP4], ids=lambda format: format.name)
def test_wire_rows_wider_than_a_tile(device, format, D):
    """The largest magnitude, or what is not finite, in each part of a row in turn; rows of x lie apart."""
    wide = torch.randn(6, D + 64, device=device).bfloat16()
    x = wide[:, 32 : 32 + D]
    x[torch.arange(6), torch.linspace(0, D - 1, 6).long()] = 100.0
    x[4, 0] = x[5, -1] = NAN
    _, ids, scores = random_call(device, 6, 3, 4, 32)
    assert_equals_oracle(device, x, ids, scores, E=4, T_max=6, format=format)


@EACH_FORMAT
def test_no_wire_rows(device, format):
    assert_equals_oracle(device, *random_call(device, 0, 3, 4, 64), E=4, T_max=2, format=format)


def test_check_is_left_out_where_told(device):
    got = assert_equals_oracle(device, *random_call(device, 6, 3, 4, 64), E=4, T_max=6, check_skip=1)
    assert not torch.signbit(got.scores[got.scores == 0]).any()


def test_a_stopped_call_touches_nothing(device):
    got = assert_equals_oracle(device, *random_call(device, 6, 3, 4, 64), E=4, T_max=6, stop=3)
    assert got.call.item() == 41 and (got.header == -5).all() and (got.tokens == 7).all() and (got.ids == 99).all()


@pytest.mark.gpu
@EACH_FORMAT
def test_a_million_blocks_of_wire_rows(device, format):
    T, D = 10**6 * format.block // 7168 + 1, 7168
    x = hard_values(T, D).bfloat16().to(device)
    _, ids, scores = random_call(device, T, 2, 4, 32)
    assert_equals_oracle(device, x, ids, scores, E=4, T_max=T, format=format)


@pytest.mark.gpu
def test_more_than_65535_programs(device):
    T = 65_600
    assert_equals_oracle(device, *random_call(device, T, 2, 4, 4096), E=4, T_max=T)


@pytest.mark.gpu
def test_no_token_count_compiles_again(device):
    def num_compiled():
        return sum(len(cache[0]) for cache in _publish.fn.device_caches.values())

    assert_equals_oracle(device, *random_call(device, 7, 8, 256, 2048), E=256, T_max=8193)
    before = num_compiled()
    for T in (1, 16, 8191, 8192, 8193):
        assert_equals_oracle(device, *random_call(device, T, 8, 256, 2048), E=256, T_max=8193)
    assert num_compiled() == before
