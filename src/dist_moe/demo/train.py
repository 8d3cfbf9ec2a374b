"""What the processes of the demo run: training on ranks, the same by the oracle, serving what was trained, the check of
the Triton kernels."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..context import Context
from ..create import create_context
from ..symm import World
from ..testing import rows_sqnr_db
from .model import (
    BLOCK_SCALED,
    LanguageModel,
    ModelConfig,
    RunExperts,
    build_model,
    global_batch,
    in_service,
    on_one_rank,
    on_ranks,
    on_virtual_ranks,
    part_of_batch,
    split_text,
)

PEER_TIMEOUT_S = 120.0
LEARNING_RATE, WARMUP_STEPS = 2e-3, 20
BALANCE_WEIGHT = 0.02
CHECK_STEPS = 3
HELD_OUT_BATCHES = 8

Send = Callable[[dict], None]  # to the process that started this one


@dataclass(frozen=True)
class Job:
    """One run, as all its processes see it.

    num_processes is num_ranks, or 1: then that process runs all ranks on one device.
    """

    name: str
    model: ModelConfig
    num_ranks: int
    num_processes: int
    num_sequences: int  # of a step, over all ranks
    length: int  # bytes of a sequence
    steps: int
    seconds: float  # no step begins later than this
    seed: int
    device: str  # "cpu" or "cuda"
    backend: str | None
    precision: str  # of the experts on ranks: "bf16" or "mxfp8"
    folder: str  # for files that the processes share

    @property
    def is_virtual(self) -> bool:
        return self.num_processes < self.num_ranks

    def weights_file(self, rank: int) -> Path:
        return Path(self.folder) / f"weights-{rank}.pt"


def train_by_oracle(rank: int, job: Job, send: Send) -> dict:
    """The whole batch and all experts in this process, without any of the library's data path."""
    model = build_model(job.model, seed=job.seed, device=job.device)
    return _train(model, on_one_rank, rank, job, send)


def train_on_ranks(rank: int, job: Job, send: Send) -> dict:
    """This process's part of the batch and of the experts; leaves its trained weights in a file."""
    with _process_group(rank, job), _open_context(rank, job, job.backend) as context:
        model = _build(rank, job, context.device)
        result = _train(model, on_virtual_ranks(context) if job.is_virtual else on_ranks(context), rank, job, send)
        context.check()
        torch.save(model.state_dict(), job.weights_file(rank))
        return result | {"backends": context.path.ops.backends}


def serve_on_ranks(rank: int, job: Job, send: Send) -> dict:
    """The loss of the trained weights on text that no step has seen, global, by the precision of the experts."""
    losses, (_, text) = {}, split_text()
    with _process_group(rank, job), torch.no_grad():
        for precision in BLOCK_SCALED:
            with _open_context(rank, dataclasses.replace(job, precision=precision), job.backend, True) as context:
                model = _build(rank, job, context.device)
                model.load_state_dict(torch.load(job.weights_file(rank)))
                for weight in model.split_parameters()[1]:
                    weight.data = weight.data.bfloat16()
                run_experts = in_service(context)
                batches = [_sequences(text, step, rank, job) for step in range(HELD_OUT_BATCHES)]
                loss = torch.stack([model.loss(batch, run_experts)[0] for batch in batches]).mean()
                (loss,) = _sum_over_processes([], [loss / job.num_processes], job)
                context.check()
                losses[precision] = loss.item()
    return losses


def check_triton(rank: int, job: Job, send: Send) -> dict:
    """Some steps on the Triton kernels, each beside the same step of the reference backend from the same weights.

    Both take the same expert choices: a near tie that rounding decides otherwise would be another model, not an error.

    Returns: one record a step: worst row of the layers' outputs, on the same inputs, in dB; both losses; the parameter
             whose gradients differ most, in dB over the whole tensor.
    """
    records = []
    with (
        _process_group(rank, job),
        _open_context(rank, job, "triton") as triton_context,
        _open_context(rank, job, "reference") as reference_context,
    ):
        model = _build(rank, job, triton_context.device)
        model.load_state_dict(torch.load(job.weights_file(rank)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        by_triton, by_reference = on_ranks(triton_context), on_ranks(reference_context)
        rows_db: list[float] = []

        def by_both(*inputs):
            out_TD = by_triton(*inputs)
            with torch.no_grad():
                rows_db.append(rows_sqnr_db(out_TD, by_reference(*inputs)).min().item())
            return out_TD

        text, _ = split_text()
        for step in range(job.steps):
            sequences = _sequences(text, step, rank, job)
            rows_db.clear()
            wanted_loss, wanted, ids = _gradients(model, by_reference, sequences, job)
            loss, found, _ = _gradients(model, by_both, sequences, job, ids)
            gradients_db = {name: rows_sqnr_db(found[name].flatten(), wanted[name].flatten()).item() for name in wanted}
            parameter = min(gradients_db, key=gradients_db.__getitem__)
            records.append(
                {
                    "rows_db": min(rows_db),
                    "loss": loss,
                    "reference_loss": wanted_loss,
                    "gradients_db": gradients_db[parameter],
                    "parameter": parameter,
                }
            )
            optimizer.step()
        triton_context.check()
        reference_context.check()
        return {"records": records, "backends": triton_context.path.ops.backends}


def _gradients(model: LanguageModel, run_experts: RunExperts, sequences, job: Job, ids=None):
    """Global loss, all gradients of this process by name, and the expert ids; the gradients stay on the parameters."""
    model.zero_grad()
    loss, balance, ids = model.loss(sequences, run_experts, ids)
    ((loss + BALANCE_WEIGHT * balance) / job.num_processes).backward()
    (loss,) = _sum_over_processes(_dense_grads(model), [loss.detach() / job.num_processes], job)
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}, ids


def _train(model: LanguageModel, run_experts: RunExperts, rank: int, job: Job, send: Send) -> dict:
    """Returns: loss of every step (global), rows by layer and expert (global, mean of a step), seconds a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    (text, _), losses, times = split_text(), [], []
    rows_LE = torch.zeros(job.model.num_layers, job.model.num_experts)
    started = start = time.perf_counter()
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        sequences = _sequences(text, step, rank, job)
        loss, balance, ids = model.loss(sequences, run_experts)
        ((loss + BALANCE_WEIGHT * balance) / job.num_processes).backward()

        # One sum for everything that is global. Expert gradients are whole where they are: their rank saw all tokens.
        step_rows_LE = torch.stack([F.one_hot(ids_TK, job.model.num_experts).sum(dim=(0, 1)) for ids_TK in ids]).float()
        out_of_time = torch.tensor(float(time.perf_counter() - started > job.seconds), device=loss.device)
        loss, step_rows_LE, out_of_time = _sum_over_processes(
            _dense_grads(model), [loss.detach() / job.num_processes, step_rows_LE, out_of_time], job
        )
        optimizer.step()
        optimizer.zero_grad()

        rows_LE += step_rows_LE.cpu()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        start += times[-1]
        if rank == 0:
            send({"step": step, "loss": losses[-1], "seconds": times[-1]})
        if out_of_time:
            break
    return {"losses": losses, "rows": (rows_LE / len(losses)).tolist(), "seconds_per_step": statistics.median(times)}


def _dense_grads(model: LanguageModel) -> list[torch.Tensor]:
    return [weight.grad for weight in model.split_parameters()[0]]


def _sum_over_processes(grads: list[torch.Tensor], values: list[torch.Tensor], job: Job) -> list[torch.Tensor]:
    """Sum `grads` and `values`, in place, over all processes, in one all-reduce; returns values."""
    if job.num_processes == 1:
        return values
    tensors = grads + values
    bucket = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(bucket)
    parts = bucket.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
    return values


def _sequences(text: torch.Tensor, step: int, rank: int, job: Job) -> torch.Tensor:
    batch = global_batch(text, seed=job.seed, step=step, num_sequences=job.num_sequences, length=job.length)
    return part_of_batch(batch, rank, job.num_processes).to(job.device)


def _build(rank: int, job: Job, device: torch.device) -> LanguageModel:
    return build_model(job.model, seed=job.seed, rank=rank, num_ranks=job.num_processes, device=device)


@contextlib.contextmanager
def _process_group(rank: int, job: Job) -> Iterator[None]:
    """The default group, where there are several processes; after a failure it is left to the end of the process."""
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    if job.num_processes == 1:
        yield
        return
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{job.folder}/{job.name}",
        rank=rank,
        world_size=job.num_processes,
        timeout=timedelta(seconds=PEER_TIMEOUT_S),
        device_id=torch.device("cuda", rank) if job.device == "cuda" else None,
    )
    yield
    dist.destroy_process_group()


def _open_context(rank: int, job: Job, backend: str | None, inference: bool = False) -> Context:
    num_tokens = job.num_sequences * job.length // job.num_ranks
    return create_context(
        group=World.virtual(job.num_ranks, job.device) if job.is_virtual else None,
        config=job.model.moe(num_tokens, job.num_ranks, job.precision, inference),
        device=None if job.is_virtual else torch.device(job.device, rank if job.device == "cuda" else None),
        peer_timeout_s=PEER_TIMEOUT_S,
        backend=backend,
    )
