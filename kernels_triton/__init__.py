"""Triton kernels, one op a file. Import as dist_moe.kernels_triton.

Under TRITON_INTERPRET they run on the CPU, with the interpreter repaired first.
"""

import triton

if triton.knobs.runtime.interpret:
    from dist_moe import _interpreter

    _interpreter.install()
