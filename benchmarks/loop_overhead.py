"""What isthmus's training loop costs beside a bare PyTorch loop of the same model, data and steps.

Both loops run in this process, in turn, a few steps at a time, with the same weights, batches,
rates and optimizer; the JSON says whether their losses were equal. The bare one (variant A) is what
a script would have: batch, forward, backward, clip, step. The other (B) is ``Trainer`` as
``isthmus train --ranks 1`` has it, events written to a file, with validation and checkpoints off:
those are work that was asked for, not overhead. What the command itself does while its rank works,
following the events to show them, is not in it: that is another process.

Two models: that of the default run, and a tiny one whose steps are so short that what the loop adds
to each stands out from the noise.

Claim: at most 3 % of wall time a step, or at most 1 ms of CPU time (all threads of the process).
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import harness
from isthmus.data import TextData
from isthmus.elastic.environment import RankEnvironment
from isthmus.elastic.launcher import threads_per_rank
from isthmus.elastic.signals import StopRequest
from isthmus.measure.timing import compare_each
from isthmus.model import Transformer, token_loss
from isthmus.observe.events import Step
from isthmus.observe.log import EventLog, read_events
from isthmus.spec.load import load
from isthmus.spec.run import RunSpec
from isthmus.train.assembly import assembled, build_optimizer
from isthmus.train.run_directory import RunDirectory
from isthmus.train.trainer import Trainer

RATIO_LIMIT: Final = 1.03
CPU_LIMIT_S: Final = 1e-3
WARM_UP_STEPS: Final = 5
ENDLESS: Final = [
    "train.device=cpu",
    "train.steps=1_000_000",
    "train.validate_every_steps=0",
    "checkpoint.every_steps=0",
]
TINY: Final = [
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "data.sequence_length=16",
    "train.global_batch_size=1",
]
_ANSWER_S: Final = 600.0

OnStep = Callable[[int], None]
Loop = Callable[[OnStep], None]


def bare_loop(spec: RunSpec, data: TextData, losses: list[float], on_step: OnStep) -> None:
    """The loop that somebody would write who needs nothing else."""
    model = Transformer(spec.model, seed=spec.seed)
    optimizer = build_optimizer(spec.optimizer, model)
    size = spec.train.global_batch_size
    for step in itertools.count():
        for group in optimizer.param_groups:
            group["lr"] = spec.optimizer.learning_rate_at(step, spec.train.steps)
        tokens, targets = data.samples(step * size, (step + 1) * size)
        loss = token_loss(model(tokens), targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(step + 1)


class Paced:
    """An endless loop in a thread of its own, of which a few steps run whenever they are asked for.

    Args:
        loop: Calls its argument after each step.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._measured: queue.SimpleQueue[dict[str, float] | BaseException] = queue.SimpleQueue()
        self._left = 0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def run(self, num_steps: int) -> dict[str, float]:
        """Let some steps run; return the seconds a step, of wall time and of CPU time."""
        self._wanted.put(num_steps)
        answer = self._measured.get(timeout=_ANSWER_S)
        if isinstance(answer, BaseException):
            raise answer
        return {name: value / num_steps for name, value in answer.items()}

    def __enter__(self) -> Paced:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted.put(None)
        self._thread.join(_ANSWER_S)

    def _work(self) -> None:
        try:
            self._await_more()
            self._loop(self._after_step)
        except _EnoughError:
            pass
        except BaseException as error:
            self._measured.put(error)

    def _after_step(self, _: int) -> None:
        self._left -= 1
        if self._left == 0:
            wall_s = time.perf_counter() - self._began_wall_s
            cpu_s = time.process_time() - self._began_cpu_s
            self._measured.put({"wall_s": wall_s, "cpu_s": cpu_s})
            self._await_more()

    def _await_more(self) -> None:
        wanted = self._wanted.get()
        if wanted is None:
            raise _EnoughError
        self._left = wanted
        self._began_wall_s, self._began_cpu_s = time.perf_counter(), time.process_time()


class _EnoughError(Exception):
    """Unwinds an endless loop."""


@contextmanager
def trainer_of(spec: RunSpec, place: Path) -> Generator[Trainer, None, None]:
    """The trainer of a run with one rank, as ``isthmus train --ranks 1`` makes it."""
    directory, environment = RunDirectory(place / "run"), RankEnvironment.single()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as stack:
            log = stack.enter_context(EventLog(directory.events(0)))
            parts = stack.enter_context(
                assembled(
                    spec,
                    directory,
                    environment,
                    torch.device("cpu"),
                    log,
                    cache_dir=place / "cache",
                )
            )
            yield Trainer(spec, parts, environment, StopRequest())
    finally:
        dist.destroy_process_group()


def compare_loops(options: Namespace, case: str, steps: int, sets: list[str]) -> dict[str, Any]:
    """Both loops in turn on one run; its part of the JSON."""
    spec = load(RunSpec, None, [*ENDLESS, *sets, *options.set]).spec
    blocks, bare_losses = harness.blocks_of(options), list[float]()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as place:
        with trainer_of(spec, Path(place)) as trainer:
            data, log_path = trainer.parts.data, trainer.parts.log.path
            bare = Paced(partial(bare_loop, spec, data, bare_losses))
            ours = Paced(trainer.run)
            with bare, ours:
                for loop in (bare, ours):
                    loop.run(WARM_UP_STEPS)
                harness.say(f"{case}: {blocks} blocks, {steps} steps a run")
                found = compare_each(
                    partial(bare.run, steps),
                    partial(ours.run, steps),
                    blocks=blocks,
                    seed=options.seed,
                    on_block=harness.say_blocks(case, blocks),
                )
        losses = [e.loss_nats for e in read_events(log_path).events if isinstance(e, Step)]
    same = losses == bare_losses[: len(losses)]
    return {
        "case": case,
        "parameters": spec.model.num_parameters,
        "per_step": {name: harness.shown(each) for name, each in found.items()},
        "same_work": {"steps_compared": len(losses), "losses_equal": same},
        "claims": [
            harness.claim(
                f"{case}: at most 3 % of wall time or 1 ms of CPU time a step",
                _either(
                    found["wall_s"].at_most(RATIO_LIMIT), _cpu_holds(found["cpu_s"].difference95)
                ),
            )
        ],
    }


def measure(options: Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    steps = options.steps or (4 if options.quick else 10)
    cases = [("default", steps, []), ("tiny", 10 * steps, TINY)]
    found = [compare_loops(options, *case) for case in cases]
    return {
        "a": "bare loop",
        "b": "isthmus Trainer, one rank",
        "claims": [claim for case in found for claim in case.pop("claims")],
        "cases": found,
    }


def _cpu_holds(difference95_s: tuple[float, float]) -> bool | None:
    low_s, high_s = difference95_s
    return True if high_s <= CPU_LIMIT_S else False if low_s > CPU_LIMIT_S else None


def _either(*verdicts: bool | None) -> bool | None:
    return True if True in verdicts else None if None in verdicts else False


def add_options(parser: ArgumentParser) -> None:
    harness.add_block_options(parser)
    parser.add_argument("--steps", type=int, help="steps in a run (default 10, with --quick 4)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the run"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=threads_per_rank(1),
        help="CPU threads (default %(default)s: those that isthmus train --ranks 1 would use)",
    )


if __name__ == "__main__":
    harness.run(__file__, __doc__ or "", measure, add_options)
