"""The decoding loop: draft, verify, commit.

1. The last committed token is the anchor. The drafter proposes y_1..y_W after it in one pass.
2. The target scores the chain anchor, y_1..y_W in one pass: p_1..p_{W+1}. (The same tree as in
   training.)
3. y_k is accepted with probability min(1, p_k(y_k) / q_k(y_k)); at the first rejection a token is
   drawn from the residual (p - q)+, normalised; if all are accepted, a bonus token from p_{W+1}.
4. The accepted path becomes trunk, the new token the next anchor. Text is distributed exactly as
   the target's.

At temperature 0, p and q are one-hot and this reads: accept while y_k is the target's argmax. Plain
decoding is the same loop with W = 0. Acceptance length (AL) = tokens committed per verification,
bonus included; the token that prefill commits is not counted, a round counts up to its stop token,
max_new_tokens cuts the text only.

    python serve.py --target runs/toy/target --drafter runs/toy/specopd --prompt "def main("
    python serve.py --target FOLDER --drafter FOLDER --eval math.jsonl code.jsonl     AL by task
    pytest tests/test_serve.py
"""

import dataclasses
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from drafter import Drafter, Sampling, draw
from support import data, files
from target import Target
from tree import build_tree, gather_slots


@dataclass
class Result:
    """What one prompt got."""

    # new tokens; a stop token that ended the text is the last
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # was this token an accepted draft?
    finish_reason: str = ""  # "stop" or "length"
    num_rounds: int = 0  # verifications by the target; prefill is none
    num_committed: int = 0  # tokens these rounds committed
    num_nodes: int = 0  # tokens these rounds verified, the anchors among them, no padding
    accepted: list[int] = field(default_factory=list)  # accepted drafts of each round, up to a stop

    @property
    def acceptance_length(self) -> float:
        return self.num_committed / self.num_rounds if self.num_rounds else float("nan")


def accept(p_y: Tensor, q_y: Tensor, uniforms: Tensor) -> Tensor:
    """True with probability min(1, p(y)/q(y)); q(y) > 0, since y was drawn from q."""
    return uniforms * q_y < p_y


def verify(
    logits: Tensor, drafts: Tensor, q, sampling: Sampling, uniforms
) -> tuple[Tensor, Tensor]:
    """Judge one chain per row (algorithm 1 of speculative decoding).

    logits (B,W+1,V) of the target, drafts (B,W), -1 behind the last that is to be judged, q (B,W,V)
    what they were drawn from, uniforms (B,W+1) -> number accepted (B,), the next token (B,), -1
    where the logits are NaN. At temperature 0, q and uniforms are not looked at: a draft is right
    or wrong.
    """
    rows = torch.arange(len(drafts), device=drafts.device)
    count, token = _judged(logits, drafts, q, sampling, uniforms, rows)
    return count, torch.where(logits[rows, count].isnan().any(-1), -1, token)


def _judged(logits, drafts, q, sampling: Sampling, uniforms, rows: Tensor):
    W = drafts.shape[1]
    if sampling.temperature == 0:
        best = logits.argmax(-1)  # (B, W+1)
        count = (drafts == best[:, :W]).cumprod(1).sum(1)
        return count, best[rows, count]
    p = sampling.probs(logits)  # (B, W+1, V)
    if W == 0:
        return torch.zeros_like(rows), draw(p[:, 0], uniforms[:, :1])[:, 0]
    there = drafts >= 0
    p_y, q_y = (t[:, :W].gather(2, drafts.clamp(min=0)[..., None])[..., 0] for t in (p, q))
    count = accept(p_y * there, q_y, uniforms[:, :W]).long().cumprod(1).sum(1)
    p_next = p[rows, count]  # (B, V)
    # nothing to subtract where no draft was rejected
    q_next = q[rows, count.clamp(max=W - 1)] * (count < there.sum(1))[:, None]
    residual = (p_next - q_next).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return count, draw(residual, uniforms[:, W:])[:, 0]


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids=(),
    top_k: int = 0,
    top_p: float = 1.0,
    draft_temperature: float | None = None,
    batch_size: int = 32,
    progress: str = "",
    num_branches: int = 1,
    draft_length: int = 0,
    choose=None,
    watch=None,
    places=None,
) -> list[Result]:
    """Continue every prompt (token ids); drafter=None is plain decoding.

    num_branches: chains drafted per round, one the argmax, the others drawn at temperature 1,
    scored as one tree; the longest accepted one wins. At temperature 0 only. draft_length: drafts
    verified of each chain, 0: all that the drafter proposes. choose: from the drafter's confidence
    logits (B,W) to how many drafts of each row are verified (B,), see confidence.py; costs a round
    one more synchronisation with the host, since it decides how much is run; a rule that looks at
    the whole batch makes a prompt's text depend on it. watch: is told of the prefill and of every
    round, see rollout.py. places: of the prompts in a larger set that these are a part of.

    draft_temperature: what drafts are drawn at, by default the temperature; 0 drafts the argmax,
    whose q is one-hot. A prompt's text depends on seed and its place in `prompts`, not on the batch
    it runs in.
    """
    sampling = Sampling(temperature, top_k, top_p)
    draft = sampling if draft_temperature is None else Sampling(draft_temperature, top_k, top_p)
    if temperature == 0 and draft.temperature > 0:
        raise ValueError("at temperature 0 drafts are greedy too: leave draft_temperature out")
    numbers = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    for name, value in (numbers | {"num_branches": num_branches}).items():
        if value < 1:
            raise ValueError(f"{name} is {value}, at least 1 is needed")
    if choose and not (drafter and drafter.has_confidence and num_branches == 1):
        raise ValueError("choosing by confidence needs a drafter with a confidence head, one chain")
    if draft_length < 0:
        raise ValueError(f"draft_length is {draft_length}: 0 is all, else at least 1")
    if num_branches > 1 and (temperature > 0 or not drafter):
        raise ValueError("num_branches above 1 needs a drafter and temperature 0")
    if num_branches > 1:
        draft = Sampling(1.0)
    limit = target.config.max_position_embeddings
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: at least one token is needed")
        if len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with {max_new_tokens} new ones it "
                f"exceeds the target's maximum length {limit}"
            )
    places = list(range(len(prompts)) if places is None else places)
    results = [Result() for _ in prompts]
    bar = tqdm(total=len(prompts), desc=progress, unit="prompt", disable=not progress, leave=False)
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        _generate_batch(
            target,
            drafter,
            prompts[part],
            results[part],
            places[part],
            max_new_tokens,
            sampling,
            draft,
            seed,
            set(stop_ids),
            bar,
            num_branches,
            draft_length,
            choose,
            watch,
        )
    bar.close()
    return results


@torch.inference_mode()
def _generate_batch(
    target,
    drafter,
    prompts,
    results,
    places,
    max_new,
    sampling,
    draft,
    seed,
    stop,
    bar,
    K,
    draft_length,
    choose,
    watch,
):
    device = target.lm_head.weight.device
    W = drafter.config.num_draft_tokens if drafter else 0
    most = n = min(draft_length or W, W)  # of which so many are verified
    noise = None
    # round r of a prompt takes noise[r]: K * W drafts, W acceptances, one token
    if sampling.temperature > 0 or K > 1:
        seeds = ((seed * 1_000_003 + place) % (2**63 - 1) for place in places)
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        noise = torch.stack([torch.rand(max_new, (K + 1) * W + 1, generator=g) for g in generators])
        noise = noise.to(device)

    # prefill, and the first token
    rows = [torch.tensor(p) for p in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    taps = drafter.config.target_layer_ids if drafter else ()
    trunk = target.prefill(tokens, lengths, max_new + (K + 1) * (W + 1), taps, checkpoint_every=0)
    room = max_new + 3 * (W + 1)
    memory = drafter.remember(trunk, room, bounded=True) if drafter else None
    last = gather_slots(trunk.hidden, lengths[:, None] - 1)  # (B, 1, C)
    empty = lengths.new_zeros(len(prompts), 0)
    first_noise = None if noise is None else noise[:, 0, -1:]
    _, anchor = verify(target.head(last), empty, None, sampling, first_noise)
    if watch:
        watch.start(trunk)
    trunk.hidden = trunk.taps = None  # from here on nobody reads them
    pairs = zip(results, anchor.tolist())
    alive = [i for i, (r, new) in enumerate(pairs) if _take(r, [new], [False], max_new, stop)]
    bar.update(len(results) - len(alive))
    if len(alive) < len(results):
        trunk, memory, anchor, noise = _select(alive, trunk, memory, anchor, noise)

    chain, rows = torch.arange(n + 1, device=device), torch.arange(len(prompts), device=device)
    round_number = 0
    while alive:
        round_number += 1
        u = None if noise is None else noise[:, round_number]  # (B, (K+1)W+1)
        # 1. draft
        at_anchor = trunk.lengths[:, None]  # (B, 1) the anchor's position, not yet run
        trunk.tokens.scatter_(1, at_anchor, anchor[:, None])
        q, drafts = None, anchor.new_zeros(len(alive), 1, 1, 0)
        if drafter:
            memory.width = trunk.width
            u_draft = None if u is None else u[:, : K * W].view(-1, 1, K, W)
            proposal = drafter.propose(
                trunk, at_anchor, K, draft, u_draft, memory, sampling.temperature > 0, int(K > 1)
            )
            drafts, q = proposal.tokens[..., :most], proposal.q_probs
            if choose:  # each row's own, the others -1; no more columns than the longest needs
                sure = drafter.confidence(proposal.hidden, proposal.before)[:, 0, 0]  # (B, W)
                keep = choose(sure).clamp(max=most)[:, None, None, None]
                n = int(keep.max())
                drafts = torch.where(chain[:n] < keep, drafts[..., :n], -1)
        # 2. score the chain, or the tree of K chains
        upto = trunk.tokens[:, : trunk.width + 1]
        tree = build_tree(upto, trunk.lengths, at_anchor, drafts, merge=K > 1, include_anchor=True)
        scored = target.score(trunk, tree)
        logits = target.head(scored.hidden[:, 0])  # (B, K, W+1, V)
        # 3. judge it, of several the one that is right for longest
        right = drafts[:, 0] == logits[:, :, :n].argmax(-1) if K > 1 else drafts[:, 0] >= 0
        best = right.long().cumprod(-1).sum(-1).argmax(1)  # (B,)
        logits, drafts, slots = (
            x[rows[: len(best)], best] for x in (logits, drafts[:, 0], tree.slots[:, 0])
        )
        q = None if q is None else q[:, 0, 0, :n]
        # the next token's uniform is the last, however many drafts are verified
        u_judge = None if u is None else torch.cat([u[:, K * W : K * W + n], u[:, -1:]], 1)
        count, anchor = verify(logits, drafts, q, sampling, u_judge)
        # 4. commit
        path = torch.where(chain[: n + 1] <= count[:, None], slots - tree.num_trunk_slots, -1)
        if watch:
            watch.round(alive, at_anchor, drafts, scored, path)
        trunk = target.commit(trunk, tree, scored, path)
        if drafter:
            taps = gather_slots(scored.taps, path.clamp(min=0))
            memory = drafter.extend(memory, taps, at_anchor[:, 0])
        # the round's one synchronisation with the host, but for merging and tables kept there
        nodes = tree.valid.sum(1, keepdim=True)
        report = torch.cat([count[:, None], nodes, drafts, anchor[:, None]], 1).tolist()
        going = []
        for row, (accepted, run, *ids) in enumerate(report):
            result = results[alive[row]]
            result.num_rounds += 1
            result.num_nodes += run
            new = [*ids[:accepted], ids[-1]]
            if _take(result, new, [True] * accepted + [False], max_new, stop):
                going.append(row)
        trunk.width = max((len(prompts[i]) + len(results[i].tokens) - 1 for i in alive), default=0)
        if len(going) < len(alive):
            bar.update(len(alive) - len(going))
            alive = [alive[row] for row in going]
            trunk, memory, anchor, noise = _select(going, trunk, memory, anchor, noise)


def _take(result: Result, new: list[int], drafted: list[bool], max_new: int, stop: set) -> bool:
    """Append a round's tokens up to a stop token or the limit; True if the prompt goes on."""
    if new[-1] < 0:
        raise ValueError("the target's logits are NaN; an overflow? --dtype float32 would tell")
    stopped = next((i for i, token in enumerate(new) if token in stop), None)
    if stopped is not None:
        new, drafted = new[: stopped + 1], drafted[: stopped + 1]
    if result.num_rounds:
        result.num_committed += len(new)
        result.accepted.append(sum(drafted))
    space = max_new - len(result.tokens)
    result.tokens += new[:space]
    result.drafted += drafted[:space]
    if stopped is not None and stopped < space:
        result.finish_reason = "stop"
    elif len(result.tokens) == max_new:
        result.finish_reason = "length"
    return not result.finish_reason


def _select(going: list[int], trunk, memory, anchor, noise):
    """Everything a round needs, for the rows that go on."""
    rows = torch.tensor(going, dtype=torch.long, device=anchor.device)
    picked = [None if x is None else x.select(rows) for x in (trunk, memory)]
    return *picked, anchor[rows], None if noise is None else noise[rows]


# ------------------------------------------------------------------------------------- command line


@dataclass(frozen=True)
class ServeConfig:
    target: str = files.flag("", "the target's folder")
    drafter: str = files.flag("", "the drafter's folder; without one, plain decoding")
    prompt: tuple = files.flag((), "texts to continue")
    prompts: str = files.flag("", "a JSONL file of prompts to continue")
    eval: tuple = files.flag((), "JSONL files of held-out prompts, one task each: measure AL")
    eval_prompts: int = files.flag(64, "--eval: prompts of each task", low=1)
    eval_length: int = files.flag(512, "--eval: prompts of at most so many tokens", low=1)
    temperatures: tuple = files.flag((0.0, 1.0), "--eval: at which", kind=float, low=0)
    out: str = files.flag("", "--eval: folder for summary.json")
    max_new_tokens: int = files.flag(200, "tokens to generate per prompt")
    temperature: float = files.flag(0.0, "0 is greedy")
    top_k: int = files.flag(0, "sample among the k likeliest tokens only; 0 is off")
    top_p: float = files.flag(1.0, "sample among the likeliest that make up this share; 1 is off")
    num_branches: int = files.flag(1, "chains drafted per round, greedy decoding only", low=1)
    draft_length: int = files.flag(0, "drafts verified of each chain; 0: all", low=0)
    verify_by: str = files.flag(
        "",
        "choose how many by the drafter's confidence (confidence.py)",
        choices=("", "threshold", "throughput"),
    )
    confidence_threshold: float = files.flag(0.5, "of --verify-by threshold", low=0)
    batch_size: int = files.flag(32, "prompts decoded at once")
    seed: int = files.flag(0, "of everything drawn")
    compare: bool = files.flag(True, "decode plainly too, for the speed-up and as a check")
    color: str = files.flag(
        "auto",
        "mark accepted drafts by colour, or by [brackets]",
        choices=("auto", "always", "never"),
    )
    device: str = files.flag("cpu", "cpu or cuda")
    dtype: str = files.flag("", "empty: what the target's config names", choices=files.DTYPES)


def marked(result: Result, tokenizer, color: bool) -> str:
    """The text with its accepted drafts in green (or [in brackets]); the target's own tokens
    plain."""
    begin, end = ("\033[32m", "\033[0m") if color else ("[", "]")
    pieces, i = [], 0
    while i < len(result.tokens):
        j = i
        while j < len(result.tokens) and result.drafted[j] == result.drafted[i]:
            j += 1
        text = tokenizer.decode(result.tokens[i:j])
        pieces.append(f"{begin}{text}{end}" if result.drafted[i] else text)
        i = j
    return "".join(pieces)


def _timed(run) -> tuple[list[Result], float]:
    begin = time.perf_counter()
    results = run()
    return results, sum(len(r.tokens) for r in results) / (time.perf_counter() - begin)


def measure_tasks(config: ServeConfig, target, drafter, tokenizer, how: dict) -> None:
    from support.measure import read_tasks, report_tasks  # it builds on this file

    if not drafter:
        raise ValueError("--eval needs --drafter")
    if config.num_branches > 1 and max(config.temperatures) > 0:
        raise ValueError("--num-branches above 1 is for greedy decoding: --temperatures 0")
    size = config.eval_prompts, config.eval_length
    tasks = read_tasks(config.eval, tokenizer, *size, config.seed)
    figures = report_tasks(
        target,
        drafter,
        tasks,
        config.max_new_tokens,
        config.temperatures,
        seed=config.seed,
        stop_ids=tokenizer.stop_ids,
        batch_size=config.batch_size,
        top_k=config.top_k,
        top_p=config.top_p,
        **how,
    )
    if config.out:
        path = Path(config.out) / "summary.json"
        files.write_json(path, figures | {"config": dataclasses.asdict(config)})


def main():
    config = files.parse_flags(ServeConfig, __doc__)
    if not config.target:
        raise ValueError("--target FOLDER is needed (train.py writes one to runs/toy/target)")
    asked = [[{"role": "user", "content": text}] for text in config.prompt]
    if config.prompts:
        asked += [data.first_turn(messages) for messages in data.read_prompts(config.prompts)]
    if not asked and not config.eval:
        raise ValueError("nothing to continue: give --prompt TEXT ... or --prompts FILE")
    target = Target.from_pretrained(config.target, config.device, files.dtype_of(config))
    tokenizer = data.load_tokenizer(config.target)
    drafter = None
    if config.drafter:
        drafter = Drafter.from_pretrained(config.drafter, target, target.lm_head.weight.dtype)
        drafter.config.check(target, tokenizer)
    texts = [tokenizer.chat(messages) for messages in asked]
    prompts = [tokenizer.encode(text) for text in texts]
    names = ("max_new_tokens", "temperature", "seed", "top_k", "top_p", "batch_size")
    how = {name: getattr(config, name) for name in names} | {"stop_ids": tokenizer.stop_ids}
    warm = how | {"max_new_tokens": min(8, config.max_new_tokens)}
    K = {name: getattr(config, name) for name in ("num_branches", "draft_length")}
    if config.verify_by:
        if not drafter:
            raise ValueError("--verify-by needs --drafter")
        from lab.confidence import load_rule  # it builds on this file

        drafts = drafter.config.num_draft_tokens
        rows = min(config.batch_size, len(prompts) or config.batch_size)
        K["choose"] = load_rule(
            config.verify_by, config.confidence_threshold, config.drafter, drafts, rows
        )
    if config.eval:
        return measure_tasks(config, target, drafter, tokenizer, K)
    generate(target, drafter, prompts[:1], **warm, **K)
    results, speed = _timed(lambda: generate(target, drafter, prompts, **how, **K))
    color = config.color == "always" or (
        config.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    for text, result in zip(texts, results):
        print(f"{'─' * 80}\n{text}{marked(result, tokenizer, color)}")
        al = f", AL {result.acceptance_length:.2f}" if result.num_rounds and drafter else ""
        counts = f"{len(result.tokens)} tokens, {result.num_rounds} verifications{al}"
        print(f"── {counts}, {result.finish_reason}")
    print("─" * 80)
    if not drafter:
        print(f"plain decoding: {speed:.1f} tokens/s")
        return
    print("green" if color else "[in brackets]", "= drafted and accepted, plain = the target's own")
    rounds = sum(r.num_rounds for r in results)
    al = sum(r.num_committed for r in results) / max(rounds, 1)
    heat = f"temperature {config.temperature:g}"
    print(f"AL {al:.3f} over {rounds} verifications, {heat}: {speed:.1f} tokens/s")
    if not config.compare or not rounds:
        return
    generate(target, None, prompts[:1], **warm)
    plain, plain_speed = _timed(lambda: generate(target, None, prompts, **how))
    differ = [i for i, (a, b) in enumerate(zip(results, plain)) if a.tokens != b.tokens]
    if config.temperature == 0 and differ:
        raise ValueError(
            f"greedy text differs from plain decoding in {len(differ)} of {len(prompts)} prompts "
            f"(first: {differ[0]}): no speed-up is reported (near-ties in low precision do this)"
        )
    note = "same text" if config.temperature == 0 else "another draw from the same distribution"
    ratio = f"{speed / plain_speed:.2f} times as fast"
    print(f"plain decoding {plain_speed:.1f} tokens/s ({note}): {ratio}")


if __name__ == "__main__":
    sys.exit(files.run_command(main))
