"""Triton kernels, one op a file. Import as dist_moe.kernels_triton."""
