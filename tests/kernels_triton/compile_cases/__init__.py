"""Every kernel with the arguments it is compiled for: one file a kernel file, one Case for each choice that matters.

compile_cases/<module>.py holds CASES, a tuple of rows like this one:

    Case(
        "grouped_gemm:_rows_times_weight",       # module of dist_moe.kernels_triton : kernel
        {"x_ptr": "*bf16", "x_stride": "i64", "x_desc": "tensordesc<bf16[128, 64]>"},  # every argument that is no
                                                 # constexpr: * pointer; bf16 fp32 i32 i64 u8 fp8e4nv ...
        {"BLOCK_M": 128, "W": 2},                # every constexpr
        name="train",                            # tells cases of one kernel apart
        num_warps=8, num_stages=3,               # as the launcher passes them, and so
        options={"enable_fp_fusion": False},     # any other option of the launch
        aligned=("x_stride",),                   # integers that are multiples of 16; pointers are unless `unaligned`
        expect=("st.global.v4.b32",),            # what the PTX must hold, on both targets ...
        expect_sm90=("wgmma.mma_async",),        # ... or on one
        expect_sm100=("tcgen05.mma",),
        forbid=("ld.volatile",),                 # what it must not hold
        archs=(100,),                            # default: see below
    )

A kernel's first case, and every case with tensor cores, whose instructions differ, is compiled for
sm_90 and sm_100, the others for one of them in turn: what differs between the targets there is the assembler alone.
With ONE_TARGET=1, as under the newest Triton, every case is compiled for one of them in turn.
Spilled bytes and too much shared memory fail in every case. Choose the sizes that are really used (the widest tile, a
real number of experts), not the small ones of the interpreted tests. A launched kernel without a row fails
test_compile.py; helpers, which other jit functions call, need none. To look at a result:

    python -m tests.compile_check WORD --ptx /tmp/ptx
"""

import importlib
import os
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.compile_check import ARCHS, Case

ONE_TARGET = os.environ.get("ONE_TARGET") == "1"


def _in_turn(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, with their targets where a row leaves that open."""
    number = Counter()  # of the cases of a kernel so far
    for case in cases:
        if case.archs is None:
            one = ONE_TARGET or (number[case.kernel] and not case.expect_sm90 + case.expect_sm100)
            case = replace(case, archs=ARCHS[number[case.kernel] % 2 :][:1] if one else ARCHS)
        number[case.kernel] += 1
        yield case


CASES = tuple(
    _in_turn(
        case
        for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
        for case in importlib.import_module(f"{__name__}.{module.name}").CASES
    )
)
