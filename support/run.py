"""A training in progress: all that happens around the steps of train.py.

Every step is a line of log.jsonl. Now and then the run saves its training state and measures AL by
real decoding; the drafter whose AL was best is kept, too. A run may be asked to end, or be killed,
at any time: the same command goes on from the last training state.

    pytest tests/support/test_run.py
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from drafter import Drafter
from hf.files import read_json
from loss import Objective
from support import distributed, resume
from support.files import write_json
from support.fingerprint import fingerprint, weights_fingerprint
from support.flags import Stopped
from support.log import open_log, peak_memory_gib
from support.measure import QUICK_SHARE, TEMPERATURES, Measure
from support.optim import make_optimizers
from support.prepare import Trunks
from support.references import References
from support.report import quick_source, tell_first_loss

SUMMED = ("seconds", "supervised", "nodes", "unmerged")  # of a step's record, over all steps


def nothing_yet() -> dict:
    """A run's totals before its first step."""
    names = "step supervised seconds eval_seconds nodes unmerged".split()
    return dict.fromkeys(names, 0) | {"best": {}}


@dataclass
class Run:
    """A training in progress."""

    config: object  # a train.TrainConfig
    drafter: Drafter
    trunks: Trunks
    measure: Measure
    out: Path
    made_with: dict  # what must be the same when the run goes on
    objective: Objective
    optimizers: list
    step_module: nn.Module  # train.Step, which averages gradients if there are several processes
    start: int = 0  # steps already done
    totals: dict = field(default_factory=nothing_yet)
    unmeasured: dict | None = None  # the last step's record while its AL is due
    write: Callable | None = None  # logs a record; these two are there while it is under way
    bar: tqdm | None = None

    def __post_init__(self):
        self.end_request = resume.EndRequest(self.drafter.target.model)

    @property
    def end(self) -> int:
        """The step to stop at."""
        return min(self.config.steps, self.config.stop_after or self.config.steps)

    # ------------------------------------------------------------------ while it is under way

    @contextlib.contextmanager
    def under_way(self):
        """Open the log and the bar. A request to end is noted; where work was dropped for it, the
        steps so far are saved. The last step is followed by the summary."""
        with self._open_log() as self.write, self._open_bar() as self.bar, self.end_request:
            try:
                yield
            except Stopped:
                if not self.unmeasured:  # else it is saved
                    self.save()
                distributed.barrier()  # the main process saves
                done = f"step {self.totals['step']} of {self.config.steps} is saved in {self.out}"
                raise Stopped(f"asked to end: {done}, the same command goes on") from None
            if distributed.is_main() and self.end == self.config.steps:
                self.finish()
            # in the last step: this run is done, what would follow is not wanted
            self.end_request.check(f"asked to end: {self.out} is done")

    def _open_log(self):
        if not distributed.is_main():
            return contextlib.nullcontext(lambda record: None)
        return open_log(self.out, self.config.log_to, asdict(self.config))

    def _open_bar(self) -> tqdm:
        title = f"{self.config.mode:8s}"
        is_hidden = not distributed.is_main()
        return tqdm(desc=title, initial=self.start, total=self.config.steps, disable=is_hidden)

    def show_progress(self, loss: float) -> None:
        totals = self.totals
        als = {n.replace("al_t", "AL@"): f"{x:.2f}" for n, x in totals.items() if n[:4] == "al_t"}
        speed = f"{totals['supervised'] / totals['seconds']:.0f}"
        self.bar.set_postfix({"loss": f"{loss:.3f}", **als, "tokens/s": speed}, refresh=False)
        self.bar.update(totals["step"] - self.bar.n)

    # ------------------------------------------------------------------------ after every step

    def check_sound(self, record: dict) -> None:
        """A step that is not finite must not change the drafter: keep it as it is, and stop."""
        loss = record["loss"]
        norm = record["grad_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            return
        folder = self.out / "sound"
        if distributed.is_main():
            self.drafter.save_pretrained(folder)
        raise ValueError(
            f"step {record['step']} is not finite (loss {loss:.3g}, gradient norm {norm:.3g}): go "
            f"on in another --out from --drafter {folder}, with a lower --lr and --matrix-lr"
        )

    def count(self, record: dict, seconds: float) -> dict:
        """Add a step to the totals -> its record with rates, speed and memory."""
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        record = record | dict(zip(("lr", "matrix_lr"), rates))
        record["seconds"] = seconds
        record["tokens_per_s"] = record["supervised"] / seconds
        record["memory_gib"] = peak_memory_gib(self.drafter.fc.weight.is_cuda)
        self.totals["step"] = record["step"]
        for name in SUMMED:
            self.totals[name] += record[name]
        return record

    def log_and_save(self, record: dict) -> None:
        """Log a step. Where it is due, measure AL and save the run."""
        step = record["step"]
        if step == 1:
            tell_first_loss(self.config, record["loss"], self.drafter.target.num_tokens)
        self.show_progress(record["loss"])
        if self.is_al_due(step):
            self.unmeasured = record
            self.save()  # a run that is stopped or killed while it measures measures again
            self.measure_and_log()
            return
        self.write(record)
        if step % self.config.save_every == 0 or step == self.end:
            self.save()

    def is_al_due(self, step: int) -> bool:
        """Whether AL is measured after this step: after the last, and every --eval-every steps
        unless measuring has had its --eval-share of the time so far. The main process's clock
        decides."""
        share = self.config.eval_share
        is_over = bool(share) and self.totals["eval_seconds"] > share * self.totals["seconds"]
        is_turn = step % self.config.eval_every == 0
        is_due = is_turn and not distributed.gather_numbers([is_over])[0][0]
        return is_due or step == self.config.steps

    def measure_and_log(self) -> None:
        """Measure AL after the step of which that is due, then log the step and save the run."""
        record = self.unmeasured | self.measure_and_keep_best()
        self.write(record)
        self.unmeasured = None
        self.save()
        self.show_progress(record["loss"])

    def measure_and_keep_best(self) -> dict:
        """AL at both temperatures on a share of the prompts, of several tasks their mean; the
        drafter of the best mean is kept -> what the log tells of it."""
        step = self.totals["step"]
        begin = time.perf_counter()
        als = {}
        by_task = {}
        for t in TEMPERATURES:
            measured = self.measure(
                self.drafter.target,
                self.drafter,
                t,
                QUICK_SHARE,
                progress=f"AL at temperature {t:g}, step {step}",
                run=self.end_request.run,
            )
            tasks = self.measure.by_task(measured)
            if tasks:
                by_task[f"by_task_t{t:g}"] = tasks
            als[f"al_t{t:g}"] = statistics.mean(tasks.values()) if tasks else measured.mean
        mean = sum(als.values()) / len(als)
        als |= by_task
        self.totals |= als
        self.totals["eval_seconds"] += time.perf_counter() - begin
        if mean > self.totals["best"].get("al", 0):
            self.totals["best"] = {"step": step, "al": mean}
            if distributed.is_main():
                self.drafter.save_pretrained(self.out / "best", full=self.config.full_folder)
        return als | {"al_source": quick_source(self.measure)}

    # ------------------------------------------------------------------------ what is written

    def save(self) -> None:
        """Write the training state."""
        if not distributed.is_main():
            return
        state = {
            "step": self.totals["step"],
            "made_with": self.made_with,
            "totals": self.totals,
            "unmeasured": self.unmeasured,
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        resume.save_training_state(self.out, state)

    def finish(self) -> None:
        """Save the drafter, then the summary: with it the run counts as done."""
        path = self.out / "summary.json"
        summary = read_json(path) if path.is_file() else {}  # a command of lab/ writes there, too
        if "config" in summary and (self.out / "model.safetensors").is_file():
            print(f"{self.out} was done before: nothing was trained, measured or saved again")
            return
        self.drafter.save_pretrained(self.out, full=self.config.full_folder)
        write_json(path, summary | self.totals | {"config": self.made_with})


# ------------------------------------------------------------------------------ a run's beginning


def ingredients(config, free, drafter: Drafter, references: References, measure: Measure) -> dict:
    """What must be the same when a run goes on: its flags, and what stood in the files that they
    name. The prompts that AL is measured on may change. free: flags that may differ; drafter: the
    one to start from."""
    made_with = {name: value for name, value in asdict(config).items() if name not in free}
    made_with |= {f"the drafter's {k}": v for k, v in drafter.config.to_dict().items()}
    made_with["the target"] = weights_fingerprint(drafter.target)
    if config.drafter:
        made_with["the starting drafter's weights"] = weights_fingerprint(drafter)["weights"]
    made_with["the references"] = fingerprint(vars(references).values())
    made_with["stop ids"] = [*measure.stop_ids]
    return made_with


def start_or_resume(
    config, free, drafter: Drafter, trunks: Trunks, measure: Measure, out: Path, step_module
) -> Run:
    """A fresh run in the folder `out`, or the one there, continued from its last training state.
    free: flags that may differ when a run goes on; step_module: train.Step."""
    drafter.recompute = config.recompute
    run = Run(
        config,
        drafter,
        trunks,
        measure,
        out,
        made_with=ingredients(config, free, drafter, trunks.references, measure),
        objective=step_module.objective,
        optimizers=make_optimizers(drafter, config.matrix_lr, config.lr),
        step_module=distributed.data_parallel(step_module),
    )
    measured_on = fingerprint([measure.prompts, measure.max_new_tokens])
    state = read_training_state(out)
    resume.check_processes_agree(state, run.made_with["the references"])
    if state:
        go_on_from(state, run, measured_on)
    elif (out / "model.safetensors").exists():
        raise ValueError(f"{out} holds a drafter without its training state: choose another --out")
    else:
        run.save()
    run.totals |= {"step": run.start, "measured_on": measured_on}
    if distributed.is_main():
        # a step whose AL is still due is logged with it
        resume.cut_log(out / "log.jsonl", run.start - bool(run.unmeasured))
        write_json(out / "run.json", asdict(config))
    return run


def read_training_state(out: Path) -> dict | None:
    state = resume.load_training_state(out)
    wanted = {"step", "made_with", "totals", "drafter", "optimizers"}
    if state and not wanted <= state.keys():
        missing = min(wanted - state.keys())
        raise ValueError(
            f"{state['path']} is no training state, it has no {missing}: choose another --out"
        )
    return state


def go_on_from(state: dict, run: Run, measured_on: str) -> None:
    """Put a training state into a fresh run. measured_on: fingerprint of what AL is measured on."""
    resume.check_same(state["made_with"], run.made_with, state["path"])
    resume.set_damaged_aside(state)
    resume.restore(state, run.drafter, run.optimizers)
    run.start = state["step"]
    run.unmeasured = state.get("unmeasured")
    run.totals |= state["totals"]
    if run.totals["best"] and run.totals["measured_on"] != measured_on:
        print("AL is measured on other prompts from now on: the best drafter is sought anew")
        run.totals["best"] = {}


# ----------------------------------------------------------------------------- figures of a step


def add_figures(sums: dict[str, Tensor], figures: dict) -> None:
    """Add a part's figures, tensors or numbers, to the sums so far, in float64. Nothing is read
    from the device."""
    for name, x in figures.items():
        if not isinstance(x, Tensor):  # new_full: a copy would make the host wait
            x = figures["loss"].new_full((), x, dtype=torch.double)
        sums[name] = sums.get(name, 0.0) + x.double()


def figures_of(sums: dict[str, Tensor]) -> dict:
    """What a step's log tells, from sums of parts: of all processes, and means where a mean is
    meant: alpha and survival (W,) over valid positions, the share of slots that are padding, the
    share of labels among DFlash 2's candidates."""
    figures = sum_over_processes(sums)
    positions = figures.pop("positions", None)
    if positions:
        for name in ("alpha", "survival"):
            figures[name] = [x / max(n, 1) for x, n in zip(figures[name], positions)]
    if "candidates" in figures:
        figures["coverage"] = figures.pop("candidates") / max(figures.pop("labels"), 1)
    figures["padding"] = figures["padding"] / figures.pop("slots")
    return figures | {name: int(figures[name]) for name in ("supervised", "nodes", "unmerged")}


def sum_over_processes(sums: dict[str, Tensor]) -> dict:
    """Each number's or vector's sum over all processes, in one message and one read, as a plain
    number or list."""
    flat = torch.cat([x.flatten() for x in sums.values()])
    totals = iter(distributed.all_reduce_sum(flat).tolist())
    return {
        name: list(itertools.islice(totals, len(x))) if x.dim() else next(totals)
        for name, x in sums.items()
    }
