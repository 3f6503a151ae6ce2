"""Speculative against plain decoding, one prompt at a time, and the stages of a round.

Both decode the same prompts in turn, and their texts must be the same. Then both decode a few
prompts once more with the stages timed.

    python -m lab decode --target FOLDER --drafter FOLDER
    pytest tests/lab/test_commands.py
"""

import time
from dataclasses import dataclass

import torch

from hf import load_tokenizer
from lab.common import LabConfig, StageClock, held_out_prompts, open_pair
from serve import Batch, Options
from support.flags import flag
from support.measure import Measure, decoding_speed

NUM_WATCHED = 4  # prompts decoded with the stages timed


@dataclass(frozen=True)
class Config(LabConfig):
    drafter: str = flag("", "the drafter's folder")
    num_prompts: int = flag(16, "held-out prompts", low=1)
    prompt_length: int = flag(64, "tokens of a prompt", low=1)
    max_new_tokens: int = flag(200, "tokens decoded per prompt", low=2)


@torch.inference_mode()
def stage_shares(target, drafter, measure: Measure) -> dict:
    """The share of each stage, and the milliseconds of a round."""
    clock, num_rounds = StageClock(), 0
    options = Options(measure.max_new_tokens, stop_ids=frozenset(measure.stop_ids))
    begin = time.perf_counter()
    for prompt in measure.prompts[:NUM_WATCHED]:
        batch = clock("prefill", Batch, target, drafter, [prompt], [0], options)
        while batch.alive:  # Batch.round, stage by stage
            batch.num_rounds += 1
            drafts, q = clock("draft", batch.draft)
            tree, scored = clock("score", batch.score, drafts)
            num_accepted, token = clock("verify", batch.verify, drafts, q, scored)
            clock("commit", batch.commit, drafts, tree, scored, num_accepted, token)
            clock("retire", batch.retire, drafts, tree, num_accepted)
        num_rounds += batch.num_rounds
    seconds = time.perf_counter() - begin
    shares = {stage: value / seconds for stage, value in clock.seconds().items()}
    return shares | {"ms_per_round": 1e3 * seconds / num_rounds}


def run(config: Config) -> dict:
    target, drafter = open_pair(config)
    stop_ids = load_tokenizer(config.target).stop_ids
    prompts = held_out_prompts(config, config.num_prompts)
    measure = Measure(prompts, config.max_new_tokens, stop_ids, config.seed)
    speeds = decoding_speed(target, drafter, measure, len(prompts))
    if not speeds["same_text"]:
        raise ValueError(
            "greedy speculative text differs from plain decoding: no speed-up is reported"
        )
    ratio = speeds["speculative"] / speeds["plain"]
    al = measure(target, drafter, 0.0).mean
    print(
        f"{config.num_prompts} prompts x {config.max_new_tokens} tokens, temperature 0, batch 1, "
        f"{config.device}, {torch.get_num_threads()} threads: the same text\n"
        f"plain {speeds['plain']:.1f} tokens/s, speculative {speeds['speculative']:.1f} tokens/s, "
        f"AL {al:.3f}: {ratio:.2f} times as fast"
    )
    shares = {}
    for name, proposer in (("plain", None), ("speculative", drafter)):
        shares[name] = stage_shares(target, proposer, measure)
        stages = [
            f"{stage} {100 * share:.0f} %"
            for stage, share in shares[name].items()
            if stage != "ms_per_round"
        ]
        print(f"{name:12s} {shares[name]['ms_per_round']:.2f} ms a round: {', '.join(stages)}")
    return {"speeds": speeds, "ratio": ratio, "al": al, "shares": shares}
