"""DistributedDataParallel over gloo on four hosts at two sites, at three rates of the link between.

Two hosts a site, 1 Gbit/s each; the sites share one link of 1 Gbit/s, 100 or 20 Mbit/s. Variant A
is DDP, variant B is ``replicate(model, optimizer, "allreduce")``, with the codec of ``--codec``.
They run in the same ranks in turn, until the interval of the ratio is narrow or the time is up. A
run's time is that of the slowest rank; its bytes are what the link's own counters say, read between
runs.

There are more ranks than cores on many machines. ``--synthetic-compute`` puts waits in the place of
arithmetic: as long as one rank alone needs here for a forward and for a backward, the latter spread
over the parameters by their size, so that gradients become ready one after the other.

Claim: none of speed. That B sends at most DDP's bytes over the link, within 1 %.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from benchmarks._lab import ask, link_nbytes, run_ranks, serve_rank, two_sites
from isthmus.lab.cluster import Cluster
from isthmus.measure.timing import compare_until
from isthmus.model import Transformer, token_loss
from isthmus.spec.cluster import Nic
from isthmus.spec.model import ModelSpec
from isthmus.spec.units import parse_bytes_per_s
from isthmus.sync import replicate
from isthmus.sync.allreduce import AllReduce

RATES: Final = ("1 Gbit/s", "100 Mbit/s", "20 Mbit/s")
HOSTS_PER_SITE: Final = 2
NIC: Final = Nic(bandwidth_bytes_per_s=parse_bytes_per_s("1 Gbit/s"))
BATCH: Final = 4
SEQUENCE: Final = 128
STEPS: Final = 4
"""In a run; one below ``SLOW_BYTES_PER_S``."""
SLOW_BYTES_PER_S: Final = parse_bytes_per_s("200 Mbit/s")
WARM_UP_STEPS: Final = 3
BYTES: Final = "nbytes from "
BYTES_LIMIT: Final = 1.01
NARROW: Final = 0.04
"""An interval of +-2 % is enough."""
SECONDS_PER_RATE: Final = 180.0
QUICK_SECONDS_PER_RATE: Final = 2.0
QUICK_MODEL: Final = {"hidden_size": 64, "intermediate_size": 192}
"""0.9 MB of gradients instead of 4 MB: still 20 times what the shaper lets through at once."""


# --- synthetic compute ----------------------------------------------------------------------------


class WaitInBackward(torch.autograd.Function):
    """Passes a scalar through; its backward waits, then hands the parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, parameter: Tensor, wait_s: float) -> Tensor:
        """The scalar, unchanged."""
        ctx.save_for_backward(parameter)
        ctx.wait_s = wait_s
        return carried.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None]:
        """After the wait: the scalar's gradient, and ones for the parameter."""
        time.sleep(ctx.wait_s)
        return grad_outputs[0], torch.ones_like(ctx.saved_tensors[0]), None


class Waiting(nn.Module):
    """A model's parameters, with waits in the place of its arithmetic.

    Args:
        model: Has the parameters.
        forward_s: Length of a forward.
        backward_s: Length of a backward; each parameter waits its share by size.
    """

    def __init__(self, model: nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.parameters_of = nn.ParameterList(model.parameters())
        self._forward_s = forward_s
        total = sum(parameter.numel() for parameter in self.parameters_of)
        self._waits_s = [backward_s * each.numel() / total for each in self.parameters_of]

    def forward(self, tokens: Tensor) -> Tensor:
        """A scalar that depends on every parameter."""
        time.sleep(self._forward_s)
        carried = torch.zeros((), requires_grad=True)
        for parameter, wait_s in zip(self.parameters_of, self._waits_s, strict=True):
            carried = WaitInBackward.apply(carried, parameter, wait_s)
        return carried


def calibrate(spec: ModelSpec, rounds: int = 9) -> tuple[float, float]:
    """Seconds of a forward and of a backward on this machine: medians, one thread, nothing else."""
    torch.set_num_threads(1)
    model, (tokens, targets) = Transformer(spec), batch_of(spec, 0)
    forward_s, backward_s = [], []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        loss = token_loss(model(tokens), targets)
        middle_s = time.perf_counter()
        loss.backward()
        forward_s.append(middle_s - begin_s)
        backward_s.append(time.perf_counter() - middle_s)
    return sorted(forward_s)[rounds // 2], sorted(backward_s)[rounds // 2]


# --- a rank ---------------------------------------------------------------------------------------


def batch_of(spec: ModelSpec, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(spec.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Side:
    """A model, its optimizer, and a step of training."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._tokens, self._targets = batch

    def step(self) -> None:
        """Forward, backward with averaged gradients, and the update."""
        output = self._model(self._tokens)
        loss = token_loss(output, self._targets) / self._targets.numel() if output.ndim else output
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self, steps: int) -> dict[str, float]:
        """Some steps; per step the slowest rank's time, and bytes over the link, each way."""
        before = _link_nbytes()
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        wall_s = torch.tensor(time.perf_counter() - begin_s)
        dist.barrier()
        after = _link_nbytes()
        dist.all_reduce(wall_s, dist.ReduceOp.MAX)
        measures = {"wall_s": float(wall_s) / steps}
        for end in after:
            measures[end] = (after[end] - before[end]) / steps
        return measures


def _link_nbytes() -> dict[str, int]:
    """The link's counters. All ranks have them when the last does: nothing else is sent."""
    told: list[Any] = [ask("link_nbytes") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return told[0]


def one_rank(options: dict[str, Any]) -> dict[str, Any] | None:
    """Both sides in turn, at one rate after the other; rank 0 returns what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp, ours = sides_of(options)
    found = {}
    for rate in options["rates"]:
        if dist.get_rank() == 0:
            ask(rate)
        dist.barrier()
        found[rate] = one_rate(ddp, ours, rate, options)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return found if first else None


def sides_of(options: dict[str, Any]) -> tuple[Side, Side]:
    """DDP and isthmus, each with its model, warmed up."""
    spec = ModelSpec.model_validate(options["model"])
    batch = batch_of(spec, dist.get_rank())
    waits_s = options["waits_s"]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Waiting(Transformer(spec), *waits_s) if waits_s else Transformer(spec)

    theirs = DistributedDataParallel(model(), forward_sync_buffers=False)
    ddp = Side(theirs, torch.optim.AdamW(theirs.parameters(), fused=True), batch)
    mine = model()
    optimizer = torch.optim.AdamW(mine.parameters(), fused=True)
    replicate(mine, optimizer, AllReduce.model_validate({"codec": options["codec"]}))
    ours = Side(mine, optimizer, batch)
    for side in (ddp, ours):
        side.run(WARM_UP_STEPS)
    return ddp, ours


def one_rate(ddp: Side, ours: Side, rate: str, options: dict[str, Any]) -> dict[str, Any]:
    """Both sides at the link's present rate."""
    steps = options["steps"] if parse_bytes_per_s(rate) >= SLOW_BYTES_PER_S else 1
    for side in (ddp, ours):
        side.run(1)
    found = compare_until(
        partial(ddp.run, steps),
        partial(ours.run, steps),
        narrow=NARROW,
        time_s=options["time_s"],
        names=["wall_s"],
        control=options["control"],
        seed=options["seed"],
        agree=_as_rank_0_says,
    )
    return {"steps_a_run": steps} | {name: harness.shown(each) for name, each in found.items()}


def _as_rank_0_says(stop: bool) -> bool:
    said = torch.tensor(stop)
    dist.broadcast(said, 0)
    return bool(said)


# --- the benchmark --------------------------------------------------------------------------------


def summary(rate: str, found: dict[str, Any]) -> dict[str, Any]:
    """What was found at a rate, with its claim."""
    bandwidth = parse_bytes_per_s(rate)
    nbytes = {name: each for name, each in found.items() if name.startswith(BYTES)}
    return {
        "rate_bytes_per_s": bandwidth,
        "steps_a_run": found["steps_a_run"],
        "step_s": found["wall_s"],
        "link_nbytes_a_step": nbytes,
        "share_of_link": {
            side: max(each[side]["median"] for each in nbytes.values())
            / found["wall_s"][side]["median"]
            / bandwidth
            for side in ("a", "b")
        },
        "claims": [
            harness.claim(
                f"{rate}: B sends at most {BYTES_LIMIT:g} times DDP's bytes over the link",
                all(each["interval95"][1] <= BYTES_LIMIT for each in nbytes.values()) or None,
            )
        ],
    }


def measure(options: Namespace) -> dict[str, Any]:
    """Every rate."""
    spec = ModelSpec.model_validate(
        {"preset": options.model, **(QUICK_MODEL if options.quick else {})}
    )
    options.seconds = options.seconds or (
        QUICK_SECONDS_PER_RATE if options.quick else SECONDS_PER_RATE
    )
    waits_s = list(calibrate(spec)) if options.synthetic_compute else []
    rates = [rate for rate in options.rates.split(",") if rate]
    told = {
        "model": spec.model_dump(mode="json"),
        "waits_s": waits_s,
        "codec": options.codec,
        "rates": rates,
        "steps": 1 if options.quick else STEPS,
        "time_s": options.seconds,
        "control": not options.quick,
        "seed": options.seed,
    }
    first = parse_bytes_per_s(rates[0])
    with Cluster(two_sites(first, hosts=HOSTS_PER_SITE, nic=NIC)) as lab:
        found = run_ranks(lab, "benchmarks.ddp_in_lab", told, partial(_answer, lab))
    summaries = [summary(rate, each) for rate, each in found.items()]
    return {
        "a": "DistributedDataParallel, gloo",
        "b": f"isthmus.replicate, allreduce, codec {options.codec}, gloo",
        "ranks": 2 * HOSTS_PER_SITE,
        "gradient_nbytes": 4 * sum(p.numel() for p in Transformer(spec).parameters()),
        "synthetic_compute_s": dict(zip(("forward", "backward"), waits_s, strict=False)) or None,
        "claims": [claim for each in summaries for claim in each.pop("claims")],
        "rates": summaries,
    }


def _answer(lab: Cluster, question: str) -> Any:
    """What rank 0 asks: the link's counters, or that the link have a rate from now on."""
    if question == "link_nbytes":
        return {f"{BYTES}{end}": nbytes for end, nbytes in link_nbytes(lab).items()}
    harness.say(f"link at {question}")
    return lab.set_link_rate("east", "west", parse_bytes_per_s(question))


def add_options(parser: ArgumentParser) -> None:
    """Add what runs and for how long."""
    parser.add_argument("--rates", default=",".join(RATES), metavar="RATE,RATE")
    parser.add_argument("--model", default="gpt-1m", metavar="PRESET")
    parser.add_argument("--codec", default="none", help="of variant B")
    parser.add_argument(
        "--seconds", type=float, help="so long for each rate, once there are the 7 blocks it takes"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the order of the runs")
    parser.add_argument(
        "--synthetic-compute", action="store_true", help="calibrated waits instead of arithmetic"
    )


if __name__ == "__main__" and not serve_rank(one_rank):
    harness.run(__file__, __doc__ or "", measure, add_options)
