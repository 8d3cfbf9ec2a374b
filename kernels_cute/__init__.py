"""The place of the CuTe DSL kernels for block-scaled operands on sm_100; this release has none yet."""
