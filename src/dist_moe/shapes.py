"""The letter legend, the words of the wire and of the fault record, and arithmetic on plain ints.

Letters (suffix of a name = logical shape in memory order)
    T  tokens a rank passes in a call, T_max the most it may pass      K  experts of a token (top-k)
    D  hidden size            F  intermediate size                     E  experts, L = E / W experts of one rank
    W  ranks                  N  = T * K routes of a rank              R  rows a rank receives (capacity in tables)
    P  = L + 1 (starts and the end)       X  rows of the whole activation buffer       J  output rows of a token

A "route" is one (token, k); a "pair" is one (token, rank) with at least one route. Several routes of a token to
one rank are one pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .formats import Format

# Signal stages. PUBLISHED and COMBINED are used by every forward and backward, RESET by Context.reset() alone.
PUBLISHED, COMBINED, RESET = 0, 1, 2
NUM_STAGES = 3
STAGE_NAMES = ("published", "combined", "reset")

# A generation is (epoch << EPOCH_SHIFT) + number of the signal; a reset moves every rank to the next epoch, so that
# flags of the time before it are too small to satisfy a wait. The flag on the wire is 2 * generation + aborted.
EPOCH_SHIFT = 32

# Words of the header (int64 [16], 128 bytes). Each publish writes the first six, each backward the other four before
# it: what its forward left behind.
HEADER_VERSION, HEADER_CONFIG_HASH, HEADER_CALL, HEADER_KIND, HEADER_T, HEADER_ABORT = 0, 1, 2, 3, 4, 5
HEADER_KEPT, HEADER_SLOT, HEADER_LAYER, HEADER_FORWARD = 6, 7, 8, 9
HEADER_WORDS = 16
HEADER_NAMES = (
    "format version",
    "configuration",
    "call number",
    "call kind",
    "token count",
    "abort code",
    "choice of saved state",
    "activation slot of a backward",
    "layer in the activation slot of a backward",
    "forward of a backward",
)
WIRE_VERSION = 2

# Kinds of call. All ranks make the same kind at the same time.
KIND_TRAIN, KIND_NO_GRAD, KIND_BACKWARD = 1, 2, 3
KIND_NAMES = {KIND_TRAIN: "training forward", KIND_NO_GRAD: "forward without gradients", KIND_BACKWARD: "backward"}
# Added to the kind of a call whose rows go back to their owners route by route as the experts leave them.
KIND_BY_ROUTE = 4
KIND_NAMES |= {kind | KIND_BY_ROUTE: f"{name} with a postprocess" for kind, name in KIND_NAMES.items()}

# Resolved expert ids on the wire.
NO_EXPERT, INVALID_EXPERT = -1, -2

# Fault record: int64 [8]; word 0 = code | rank << FAULT_RANK_SHIFT, the other words depend on the code.
FAULT_WORDS = 8
FAULT_RANK_SHIFT = 8
FAULT_MISMATCH = 1  # rank differs from rank 0: header word, expected, found
FAULT_INVALID_ID = 2  # rank published it: token, k
FAULT_OVERFLOW = 3  # rank receives most: rows needed, rows available
FAULT_ABORTED = 4  # rank gave up its call: stage
FAULT_TIMEOUT = 5  # rank is missing: stage, generation
FAULT_SLOT = 6  # this rank's state is not the newest of its slot: slot, found, expected
FAULT_SLOT_ROOM = 7  # a slot has no room left for the x of a layer: slot, layer, layers it is to hold

MAX_EXPERTS = 2**15 - 1  # ids travel as int16
MAX_ROUTES = 2**31 - 1  # row maps hold (source rank * T_max + token) * K + k as int32


@dataclass(frozen=True)
class Activation:
    """Gate of an expert: "swiglu" is g * sigmoid(g) * u; "swiglu_clamped" is c * sigmoid(alpha * c) * (d + 1) with
    c = min(g, limit) and d = u clamped to [-limit, limit]."""

    kind: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def clamped(self) -> bool:
        return self.kind == "swiglu_clamped"


def cdiv(n: int, multiple: int) -> int:
    return -(-n // multiple)


def align(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return cdiv(n, multiple) * multiple


def next_power_of_2(n: int) -> int:
    """n >= 1 rounded up to a power of two; triton's own takes 2 us."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Small:
    """What of a forward is so small, as of few tokens, that the wait before it is in the same launch; the words are
    those of is_small_routing and is_small_sum."""

    routing: bool
    sum: bool


# Launches that wait for a peer themselves. All their programs hold a place while they wait, so there are few of them.
MOST_WAITING_PROGRAMS = 32
SMALL_SLOTS = 4096  # of all ranks, padded: what a program of wait_route_plan keeps in registers
SMALL_COUNTS = 4096  # ranks times experts, padded: its table of rows
SMALL_EXPERTS = 16 * (MOST_WAITING_PROGRAMS - 1)  # of one rank, at most 16 a program


def is_small_routing(W: int, num_tokens_max: int, K: int, num_experts: int) -> bool:
    """Whether one launch waits, routes and plans. Of what all ranks share, so that they answer alike.

    Example: 2 ranks of 128 tokens, 8 of 256 experts: 256 * 8 slots, yes; 256 tokens fill 4096, 257 are too many.
    """
    slots = next_power_of_2(W * num_tokens_max) * next_power_of_2(K)
    counts = next_power_of_2(W) * next_power_of_2(num_experts)
    if W > MOST_WAITING_PROGRAMS or num_experts // W > SMALL_EXPERTS:
        return False
    return slots <= SMALL_SLOTS and counts <= SMALL_COUNTS


MEGA_QUEUE_WORDS = 3  # of the launch that runs all of a rank's experts, before a word an expert


def mega_queue_words(num_local_experts: int) -> int:
    """int32 words of the queue of that launch."""
    return MEGA_QUEUE_WORDS + num_local_experts


# Of `outputs`, what few programs read about as fast as many launch; in decode 4 MB were (docs/performance.md).
SMALL_SUM_BYTES, DECODE_SUM_BYTES = 2**20, 2**22


def is_small_sum(W: int, num_tokens_max: int, outputs_per_token: int, hidden_dim: int, in_decode: bool) -> bool:
    """Whether one launch waits for what the experts' ranks pushed and adds it up; all ranks answer alike.

    in_decode: whether the routing is small. Example: 128 tokens of 2 BF16 rows of 2048 fill 1 MB, 4 of 4096 fill 4 MB.
    """
    most = DECODE_SUM_BYTES if in_decode else SMALL_SUM_BYTES
    return W <= MOST_WAITING_PROGRAMS and 2 * num_tokens_max * outputs_per_token * hidden_dim <= most


@dataclass(frozen=True)
class Geometry:
    """What the device-side slot planner must know of a Context: sizes in bytes, of one rank's activation buffer."""

    hidden_dim: int
    intermediate_dim: int
    slot_bytes: int
    x_bytes: int  # saved layer input, T_max rows
    x_h1_bytes: int  # saved by a layer of balanced rows that keeps x and h1
    total_bytes: int
    training: bool
    format: Format | None = None  # of block-scaled execution
    stage_columns: int = 0  # see planner
    output_columns: int = 0
    expanded: bool = False  # rows in inference, columns in training; see quantized.Bundle

    @property
    def place_words(self) -> int:
        return PLACE_WORDS if self.format is None else SCALED_PLACE_WORDS

    @property
    def expands_rows(self) -> bool:
        return self.expanded and not self.training

    @property
    def expands_columns(self) -> bool:
        return self.expanded and self.training

    @property
    def widest_rows(self) -> int:
        """Width of the row bundles' place."""
        return max(self.hidden_dim, self.intermediate_dim * (2 if self.training else 1))


# Words of a place record (int64): where the stages of one call find their rows in the activation buffer.
PLACE_KEPT = 0  # what stays in the slot: KEEPS_X alone (or nothing), KEEPS_H1 with x, KEEPS_ROWS: x_RD and h1
PLACE_SLOT, PLACE_LAYER, PLACE_EPOCH = 1, 2, 3
PLACE_X = 4  # saved x, in bf16 elements
PLACE_XR = 5  # x_RD, in rows of D; block-scaled the row bundle of x and dy
PLACE_H1 = 6  # h1, in rows of 2F
PLACE_H2 = 7  # h2 in forward, g2 in backward, in rows of F; block-scaled the row bundle of h2
PLACE_H3 = 8  # h3 in forward, dy_RD in backward, in rows of D; block-scaled h3 in rows of output_columns, x-gradients
PLACE_SKIP_X, PLACE_SKIP_H1 = 9, 10  # stop words of saving x and making x_RD again, and of making h1 again: 0 to run
PLACE_WORDS = 11
# More words of block-scaled calls. A bundle has a word for its values, in rows of its pitch, and one for its scales,
# in bytes, unused where it is expanded; all row bundles have the same place for scales.
PLACE_SKIP_COLUMNS = 11  # stop word of making the columns of x in forward
PLACE_ROW_SCALES, PLACE_OUTER = 12, 13  # bytes; FP32 elements
PLACE_G1_ROWS, PLACE_G2 = 14, 15  # rows of 2F values; g2_RF in rows of F
PLACE_X_COLUMNS, PLACE_DY_COLUMNS, PLACE_H2_COLUMNS, PLACE_G1_COLUMNS = 16, 18, 20, 22  # the next word: scales
PLACE_STAGE = 24  # bf16 rows before they are quantised, in rows of stage_columns
SCALED_PLACE_WORDS = 25
KEEPS_X, KEEPS_H1, KEEPS_ROWS = 0, 1, 2
KEPT_NAMES = ("x", "x and h1", "rows of x and h1")  # block-scaled the rows of x are its columns

# Statistics of one rank, int64: these words, then a word a slot (most bytes used), then one a local expert (its rows).
STATS_CALLS, STATS_ROWS, STATS_MOST_ROWS = 0, 1, 2  # forwards, the rows that they received here, the most in one
STATS_KEPT = 3  # layers that kept x, x and h1, rows
STATS_SCRATCH = 6  # most bytes of scratch in one call
STATS_SLOTS = 7
