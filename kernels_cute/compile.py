"""python -m dist_moe.kernels_cute.compile: the sm_100 kernels as PTX, cubin and numbers, without a GPU or a driver."""

import enum
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dist_moe.formats import MXFP8_E4M3, NVFP4

from .tiles import picked, products

FORMATS = {"mxfp8": MXFP8_E4M3, "nvfp4": NVFP4}


class Name(enum.StrEnum):
    mxfp8 = "mxfp8"
    nvfp4 = "nvfp4"


class Op(enum.StrEnum):
    forward = "forward"
    dgrad = "dgrad"
    wgrad = "wgrad"
    swiglu = "swiglu"


class Arch(enum.StrEnum):
    sm_100a = "sm_100a"
    sm_103a = "sm_103a"


def main(
    format: Annotated[Name, typer.Option(help="Of the operands.")],
    op: Annotated[Op, typer.Option(help="swiglu: W13 with SwiGLU and quantised h2.")],
    out: Annotated[Path, typer.Option(help="Folder for what is written.")],
    arch: Annotated[Arch, typer.Option(help="Compute capability 10.0 or 10.3.")] = Arch.sm_100a,
) -> None:
    """Compile every variant of an op with every tile that it may get; writes PTX, cubin, object, header and a JSON."""
    found = products(op, FORMATS[format])
    if not found:
        sys.exit(f"{op} exists in formats with one value in a byte, not in {format}")
    if importlib.util.find_spec("cutlass") is None:
        sys.exit("nvidia-cutlass-dsl is not installed: pip install 'dist-moe-triton[cute]'")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".written").touch()
        (out / ".written").unlink()
    except OSError as error:
        sys.exit(f"cannot write to --out {out}: {error.strerror}")
    os.environ["CUTE_DSL_ARCH"] = arch  # before the DSL is imported
    from . import build

    rows = []
    for product in found:
        for tile in picked(product):
            start = time.monotonic()
            row = build.report(product, tile, arch)
            row["files"] = [path.name for path in build.export(product, tile, out, arch).values()]
            rows.append(row)
            (out / f"{op}_{format}_{arch}.json").write_text(json.dumps(rows, indent=2) + "\n")
            print(
                f"{row['name']}: {row['registers']} registers, {row['spill_instructions']} spills, "
                f"{row['shared_bytes']} shared bytes, {row['tensor_columns']} tensor columns, "
                f"{row['mma_instructions']}, {time.monotonic() - start:.1f} s"
            )


if __name__ == "__main__":
    typer.run(main)
