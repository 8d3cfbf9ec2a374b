"""Ranks as processes: run a function in W of them, on a gloo group over loopback, or (device="cuda") one GPU each.

    results = run_ranks(4, fn, arg, timeout_s=30)          # fresh processes, forked from one that has imported torch
    results = ranks(4).run(fn, arg)                        # processes kept for the session, some 20 ms a run

`fn(rank, group, *args)` is a top-level function of a module file (tests are: it is imported by its path); arguments and
results are pickled. Every run gets a process group of its own. With groups=[[2, 3], [0, 2]] fn gets, instead of the
group of all, a tuple with one entry for each list: the process group, or None on ranks that are not in it.

A rank that raises, dies unasked or does not return in time fails the run with RanksFailed: every rank's traceback, and
for those that hang the stack of all their threads. A test that kills a rank on purpose names it in `may_die`; the
result of that rank is then Died(exit code).
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, reduction
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 120  # to start the processes, import and connect: before a run's own time begins
DUMP_TIME_S = 0.5  # what faulthandler needs to write all stacks


@dataclass(frozen=True)
class Died:
    """Result of a rank that ended its process; negative: by that signal."""

    exit_code: int


class RanksFailed(Exception):
    pass


def run_ranks(
    W: int,
    fn: Callable,
    *args,
    timeout_s: float = 60,
    interpret: bool = False,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    **options,
) -> list:
    """Results by rank of fn(rank, group, *args) in W fresh processes; options: groups, may_die."""
    pool = RankPool(W, interpret=interpret, device=device, environment=environment)
    try:
        return pool.run(fn, *args, timeout_s=timeout_s, **options)
    finally:
        pool.close()


class RankPool:
    """W processes that wait for functions to run. Each is started when first needed, and again when it died or hung.

    They have the variables of this process, those of `environment` changed.
    """

    def __init__(
        self,
        W: int,
        *,
        interpret: bool = False,
        device: str = "cpu",
        environment: Mapping[str, str] | None = None,
    ):
        self.W, self.interpret, self.device, self.environment = W, interpret, device, environment or {}
        self._workers: list[_Worker | None] = [None] * W

    def run(
        self,
        fn: Callable,
        *args,
        timeout_s: float = 60,
        groups: Sequence[Sequence[int]] | None = None,
        may_die: Sequence[int] = (),
    ) -> list:
        self._workers = [
            worker or _Worker(rank, _template(self.interpret, *sorted(self.environment.items())))
            for rank, worker in enumerate(self._workers)
        ]
        module = sys.modules[fn.__module__]
        with tempfile.TemporaryDirectory(prefix="dist_moe_test_") as store:
            task = (
                timeout_s,
                fn.__module__,
                module.__file__,
                fn.__qualname__,
                args,
                self.W,
                f"{store}/store",
                self.device,
                groups,
            )
            try:
                for worker in self._workers:
                    worker.start(pickle.dumps(task))
                self._collect(lambda worker: worker.started, START_TIMEOUT_S)
                # A rank that leaves before the others are connected would fail them.
                for worker in self._workers:
                    worker.go()
                self._collect(lambda worker: worker.outcome is not None, timeout_s)
            except BaseException:  # interrupted: the workers are in the middle of something
                self.close()
                raise
        outcomes = [worker.outcome for worker in self._workers]
        reports = [
            worker.report()
            for worker, (kind, _) in zip(self._workers, outcomes, strict=True)
            if kind != "returned" and not (kind == "died" and worker.rank in may_die)
        ]
        for rank, (kind, _) in enumerate(outcomes):
            if kind in ("died", "hangs"):
                self._workers[rank].kill()
                self._workers[rank] = None
        if reports:
            raise RanksFailed("\n".join([f"{fn.__name__} on {self.W} ranks:", *reports]))
        return [Died(value) if kind == "died" else pickle.loads(value) for kind, value in outcomes]

    def _collect(self, is_done: Callable[["_Worker"], bool], timeout_s: float) -> None:
        """Hear the workers until all are done; those that are not in time hang."""
        deadline = time.monotonic() + timeout_s
        while pending := {worker.pipe: worker for worker in self._workers if not is_done(worker)}:
            ready = connection.wait(pending, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                pending[pipe].receive()
            if not ready:
                for worker in pending.values():
                    os.kill(worker.pid, signal.SIGUSR1)
                time.sleep(DUMP_TIME_S)
                for worker in pending.values():
                    worker.started, worker.outcome = True, ("hangs", None)

    def close(self) -> None:
        for worker in filter(None, self._workers):
            worker.kill()
        self._workers = [None] * self.W


class _Template:
    """A process that has done the imports which take long, and forks the workers: the parent's side."""

    def __init__(self, interpret: bool, environment: Mapping[str, str]):
        ours, theirs = socket.socketpair()
        self.orders = connection.Connection(ours.detach())
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        always = {**one_thread, "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": str(int(interpret))}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.process_group", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **always, **environment},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def fork(self, rank: int, *files: int) -> int:
        """Process id of a worker that has these files: its pipe and its log."""
        self.orders.send(("fork", rank))
        for file in files:
            reduction.send_handle(self.orders, file, self.process.pid)
        return self.orders.recv()

    def wait(self, pid: int) -> int:
        """Exit code of a worker that has ended, or will."""
        self.orders.send(("wait", pid))
        return self.orders.recv()


@functools.cache
def _template(interpret: bool, *environment: tuple[str, str]) -> _Template:
    return _Template(interpret, dict(environment))


class _Worker:
    """One process: the parent's side."""

    def __init__(self, rank: int, template: _Template):
        self.rank, self.template, self.started, self.outcome, self.exit_code = rank, template, False, None, None
        ours, theirs = socket.socketpair()
        self.pipe = connection.Connection(ours.detach())
        self.log = tempfile.TemporaryFile("w+", prefix=f"rank{rank}_")  # what the rank prints, and its stacks
        self.pid = template.fork(rank, theirs.fileno(), self.log.fileno())
        theirs.close()

    def start(self, task: bytes) -> None:
        self.started, self.outcome = False, None
        self.log.seek(0)
        self.log.truncate()
        with contextlib.suppress(OSError):  # it died between two runs: receive() will tell
            self.pipe.send_bytes(task)

    def go(self) -> None:
        if self.outcome is None:
            with contextlib.suppress(OSError):
                self.pipe.send_bytes(b"go")

    def receive(self) -> None:
        try:
            message = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            message = ("died", self.wait())
        self.started = True
        if message[0] != "started":
            self.outcome = message

    def report(self) -> str:
        kind, value = self.outcome
        what = {"raised": "raised", "died": f"died with exit code {value}", "hangs": "did not return in time"}[kind]
        self.log.seek(0)
        return f"---- rank {self.rank} {what}\n{value if kind == 'raised' else ''}{self.log.read()[-8000:]}"

    def wait(self) -> int:
        if self.exit_code is None:
            self.exit_code = self.template.wait(self.pid)
        return self.exit_code

    def kill(self) -> None:
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()
        self.pipe.close()
        self.log.close()


@functools.cache
def ranks(W: int, *, interpret: bool = False, device: str = "cpu") -> RankPool:
    """The pool of W processes that all tests of this session share."""
    pool = RankPool(W, interpret=interpret, device=device)
    atexit.register(pool.close)
    return pool


# ---- the template's and the worker's side


def _fork_workers(orders: connection.Connection) -> None:
    import torch

    if not torch.backends.cuda.is_built():  # with CUDA these imports may ask the driver, which does not survive a fork
        import torch._dynamo
    gc.freeze()  # workers leave the pages of what is there shared
    while True:
        try:
            order, value = orders.recv()
        except EOFError:  # the parent is gone
            os._exit(0)
        if order == "wait":
            orders.send(os.waitstatus_to_exitcode(os.waitpid(value, 0)[1]))
            continue
        pipe, log = (reduction.recv_handle(orders) for _ in range(2))
        pid = os.fork()
        if pid == 0:
            try:
                orders.close()
                for output in (1, 2):
                    os.dup2(log, output)
                _serve(connection.Connection(pipe), value)
            finally:
                os._exit(1)
        os.close(pipe)
        os.close(log)
        orders.send(pid)


def _serve(pipe: connection.Connection, rank: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    while True:
        try:
            task = pipe.recv_bytes()
        except EOFError:  # the parent is gone
            os._exit(0)
        try:
            message = ("returned", pickle.dumps(_run_task(pipe, rank, *pickle.loads(task))))
        except BaseException:
            message = ("raised", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(message))


def _run_task(pipe, rank, timeout_s, module_name, path, function, args, W, store, device, groups):
    import torch
    import torch.distributed as dist

    # A second belt: without parent, or deaf to signals, the process still ends.
    faulthandler.dump_traceback_later(START_TIMEOUT_S + timeout_s + 30, exit=True)
    fn = getattr(_import(module_name, path), function)
    limit = timedelta(seconds=START_TIMEOUT_S + timeout_s)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=W, timeout=limit)
    try:
        if groups is None:
            group = dist.group.WORLD
        else:
            made = [dist.new_group(list(members), backend=backend) for members in groups]
            group = tuple(g if rank in members else None for g, members in zip(made, groups, strict=True))
        pipe.send_bytes(pickle.dumps(("started", None)))
        pipe.recv_bytes()  # all have started
        return fn(rank, group, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _import(name: str, path: str):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if __name__ == "__main__":
    _fork_workers(connection.Connection(int(sys.argv[1])))
