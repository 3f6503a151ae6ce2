"""Decoding and prefill against transformers, with the same weights in one process.

Both run in turn: decoding of one and of eight prompts of the corpus, of one with drafts by prompt
lookup, and the prefill of a long text.

    python -m lab hf --target FOLDER --dtype bfloat16 --trunk-length 1024
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from drafter import LookupDrafter, Sampling
from lab.common import LabConfig, held_out_prompts, open_target, require, timed
from serve import generate
from support.flags import flag


@dataclass(frozen=True)
class Config(LabConfig):
    trunk_length: int = flag(512, "tokens of the text to prefill", low=2)
    prompt_length: int = flag(64, "tokens of a prompt", low=1)
    max_new_tokens: int = flag(200, "tokens decoded per prompt", low=2)
    temperature: float = flag(0.0, "of decoding", low=0)
    repeats: int = flag(7, "timed repeats", low=1)


@torch.inference_mode()
def run(config: Config) -> dict:
    require(config, "target")
    try:
        import transformers
    except ImportError:
        raise ValueError("python -m lab hf needs transformers: pip install transformers") from None
    transformers.logging.disable_progress_bar()
    ours = open_target(config)
    dtype = ours.lm_head.weight.dtype
    theirs = transformers.AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype)
    theirs.generation_config = transformers.GenerationConfig()  # no penalties, no end
    theirs.to(config.device)
    generator = torch.Generator().manual_seed(config.seed)

    def random_ids(B: int, T: int):
        ids = torch.randint(0, ours.num_tokens, (B, T), generator=generator)
        return ids.to(config.device)

    T = config.trunk_length
    num_new = config.max_new_tokens
    options = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": 0}
    if config.temperature:
        options |= {"do_sample": True, "temperature": config.temperature, "top_k": 0, "top_p": 1.0}
    sampling = Sampling(config.temperature)
    pairs = {}  # {title: (tokens, our function, theirs)}
    texts = torch.tensor(held_out_prompts(config, 8), device=config.device)
    lookup = LookupDrafter()
    drafts = {"prompt_lookup_num_tokens": lookup.config.num_draft_tokens}
    for name, B, drafter, changes in (
        ("decode, 1 row", 1, None, {}),
        ("decode, 8 rows", 8, None, {}),
        ("lookup, 1 row", 1, lookup, drafts),
    ):
        prompts = texts[:B]
        decode = partial(generate, ours, drafter, prompts.tolist(), num_new, sampling)
        mask = torch.ones_like(prompts)
        how = options | changes
        theirs_decode = partial(theirs.generate, prompts, attention_mask=mask, **how)
        pairs[name] = (B * num_new, decode, theirs_decode)
    text = random_ids(1, T)
    lengths = torch.tensor([T], device=config.device)

    def prefill():
        return ours.head(ours.prefill(text, lengths, 64, ()).hidden[:, -1:])

    theirs_prefill = partial(theirs, text, use_cache=True, logits_to_keep=1)
    pairs[f"prefill of {T:,}"] = (T, prefill, theirs_prefill)
    machine = f"{config.device}, {torch.get_num_threads()} threads"
    how = f"temperature {config.temperature:g}, {dtype}, {machine}"
    print(f"{how}; tokens/s, best of {config.repeats} [median]")
    figures = {"dtype": str(dtype)}
    for name, (num_tokens, *pair) in pairs.items():
        seconds = [[timed(function)[1] for function in pair] for _ in range(config.repeats + 1)]
        columns = list(zip(*seconds[1:]))  # the first repeat warms up
        best = [num_tokens / min(column) for column in columns]
        medians = [num_tokens / statistics.median_high(column) for column in columns]
        shown = [f"{b:8.1f} [{m:.1f}]" for b, m in zip(best, medians)]
        ratio = f"{best[0] / best[1]:.2f} [{medians[0] / medians[1]:.2f}] x"
        print(f"{name:18s} here {shown[0]}   transformers {shown[1]}   {ratio}")
        figures[name] = {"tokens_per_s": best, "medians": medians}
    return figures
