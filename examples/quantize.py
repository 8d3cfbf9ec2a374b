"""What each block-scaled format costs on unit-normal data, and a weight prepared once and refilled after a step.

Run: python examples/quantize.py
"""

import torch

from dist_moe import BlockScaledConfig, formats, prepare_block_scaled_weight, reference_formats
from dist_moe.testing import rows_sqnr_db


def sqnr_db(out: torch.Tensor, ref: torch.Tensor) -> str:
    """SQNR of the whole tensor and of its worst row."""
    whole = rows_sqnr_db(out.flatten(), ref.flatten())
    return f"{whole:.1f} / {rows_sqnr_db(out, ref).min():.1f}"


torch.manual_seed(0)
x_RC = torch.randn(256, 2048).bfloat16()
w_NC = torch.randn(512, 2048).bfloat16()
product_RN = x_RC.float() @ w_NC.float().T
print("format      values, dB whole / worst row    product with a weight in the same format")
for format in formats.FORMATS:
    x, w = (
        reference_formats.dequantize_rows(reference_formats.quantize_rows(t, format=format), format=format)
        for t in (x_RC, w_NC)
    )
    print(f"{format.name:<11} {sqnr_db(x, x_RC.float()):<31} {sqnr_db(x @ w.T, product_RN)}")

# Training: blocks of 32 x 32, so that the values serve the forward and the gradient of x.
weight = torch.nn.Parameter(torch.randn(4, 256, 128).bfloat16())
prepared = prepare_block_scaled_weight(weight, BlockScaledConfig("mxfp8_e4m3"))
print(f"prepared: {sum(t.nbytes for t in prepared.storage_tensors()):,} bytes of {weight.nbytes:,}")
weight.sum().backward()
torch.optim.SGD([weight], lr=0.1).step()
try:
    prepared.dequantize()
except RuntimeError as error:
    print(error)
assert prepare_block_scaled_weight(weight, BlockScaledConfig("mxfp8_e4m3"), out=prepared) is prepared
print(f"refilled: {sqnr_db(prepared.dequantize(), weight.detach().float())} dB")
