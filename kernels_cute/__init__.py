"""CuTe DSL kernels for block-scaled operands on sm_100, one op a file. Import as dist_moe.kernels_cute."""
