"""What must be there before training: a target, references, held-out prompts and a drafter.

A toy target and the references are made once and saved in the run's folder. The target itself
writes the references: a dataset's answers are not its own. Held-out prompts are from other texts.

    pytest tests/support/test_prepare.py
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from drafter import PLAIN, Drafter
from hf import load_tokenizer
from hf.chat import PROMPT_SUFFIXES, read_prompts
from hf.drafters import ARCHITECTURES
from serve import generate
from support.cpu import for_cpu
from support.data import Corpus, References, draw_prompts, how_made, load_corpus, pack
from support.distributed import load_sharded_target
from support.fingerprint import difference, fingerprint, is_another_dtype, weights_fingerprint
from support.flags import dtype_of, option_name
from support.measure import Measure
from support.resume import stage
from support.toy import train_toy, write_byte_tokenizer
from target import Target, Trunk

PREFILL_ROWS = 32  # references prefilled at once, for the cache
GENERATE_ROWS = 128  # references generated at once


class Trunks:
    """Prefilled references by number. The target is frozen, so all are made once if they fit into
    cache_gib; else each is made whenever a step needs it."""

    def __init__(self, target: Target, references: References, tap_ids, cache_gib: float):
        self.target = target
        self.references = references
        self.tap_ids = tap_ids
        self.cache = None
        rows = torch.arange(len(references.lengths))
        width = references.tokens.shape[1]
        if cache_gib and self._prefill(rows[:1], width).nbytes * len(rows) <= cache_gib * 2**30:
            parts = [self._prefill(part, width) for part in rows.split(PREFILL_ROWS)]
            self.cache = _concatenated(parts, width)

    def _prefill(self, rows: Tensor, width: int) -> Trunk:
        device = self.target.lm_head.weight.device
        tokens = self.references.tokens[rows, :width].to(device)
        lengths = self.references.lengths[rows].to(device)
        return self.target.prefill(tokens, lengths, tap_ids=self.tap_ids)

    def __call__(self, rows: Tensor) -> Trunk:
        """The trunk of these references, as wide as the longest of them."""
        width = int(self.references.lengths[rows].max())
        if self.cache:
            return self.cache.select(rows.to(self.cache.tokens.device), width)
        return self._prefill(rows, width)


def _concatenated(parts: list[Trunk], width: int) -> Trunk:
    """One trunk of many. The parts are emptied name by name: only one exists twice at a time."""

    def joined(names, owners: list[dict]) -> dict:
        return {name: torch.cat([owner.pop(name) for owner in owners]) for name in names}

    tensors = joined(("tokens", "lengths", "hidden", "taps"), [vars(part) for part in parts])
    states = [joined(list(layer[0]), layer) for layer in zip(*(part.states for part in parts))]
    return replace(parts[0], **tensors, states=states, width=width)


def make_toy(config, corpus: Corpus, folder: Path) -> dict:
    """Train the toy target on the corpus and save it as an ordinary Hugging Face folder."""
    write_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    ids = [pack(texts, tokenizer) for texts in (corpus.train, corpus.held_out)]
    toy = Target.toy(config.arch, config.seed, num_hidden_layers=config.target_layers or None)
    toy.to(config.device)
    bits = train_toy(toy, *ids, config.target_steps, config.target_length, config.seed)
    toy.save_pretrained(folder, eos_token_id=tokenizer.stop_ids[0], pad_token_id=tokenizer.pad_id)
    return {"held_out_bits_per_byte": bits}


def provenance(config, target: dict | None, tokenizer, texts: list, prompts: list) -> dict:
    """What references were made with, causes first. target: the fingerprint of the weights, None
    where nobody saw them; texts: what the prompts are from."""
    keys = ("num_references", "prompt_length", "response_length", "seed", "corpus")
    made_with = {key: getattr(config, key) for key in keys} | {"target": target}
    made_with["temperature"] = getattr(config, "temperature", 1.0)  # train.py has no such flag
    is_chat = not isinstance(texts[0], str)
    made_with |= _tokenizer_facts(tokenizer, is_chat)
    name = "the prompts"
    if is_chat and tokenizer.template_names("strftime_now"):
        name += ", into which the chat template writes the time,"
    return made_with | {name: fingerprint(prompts)}


def _tokenizer_facts(tokenizer, is_chat: bool) -> dict:
    """What turns texts, and chats if there are any, into ids."""
    facts = {"the tokenizer": fingerprint([tokenizer.tokenizer_hash])}
    facts["stop ids"] = [*tokenizer.stop_ids]
    if is_chat:
        facts["the chat template"] = fingerprint([tokenizer.template_hash])
        facts["--chat-template-args"] = tokenizer.template_args
    return facts


def load_given(path: str, target: Target, tokenizer) -> References:
    """Read the references of --references. They must be this target's own, in whatever dtype, and
    made with its tokenizer and chat template."""
    references = References.load(path)
    made_with = how_made(path)
    recorded = made_with.get("target", "nothing")
    weights = weights_fingerprint(target)
    is_old = recorded is None and "the tokenizer" not in made_with
    if type(recorded) is int or is_old:
        print(f"{path} is of an earlier version: whether this target wrote it cannot be checked")
    elif is_another_dtype(recorded, weights):
        print(f"{path} was written by the same weights in {recorded['dtype']}")
    elif recorded is not None:  # None: a server wrote them, and nobody saw its weights
        change = difference("the target", recorded, weights)
        if change:
            raise ValueError(f"{path} {change}: --references must be what --target itself wrote")
    for name, value in _tokenizer_facts(tokenizer, True).items():
        change = difference(name, made_with[name], value) if name in made_with else ""
        if change and name == "--chat-template-args":
            raise ValueError(f"{path} {change}: give {name} '{json.dumps(made_with[name])}'")
        if change:
            raise ValueError(f"{path} {change}: --target must be as it was when they were written")
    return references


def _gives_chats(path: str) -> bool:
    """Whether --references are chats or were made of chats; empty: there are none. Raise a
    ValueError for a file that cannot hold references."""
    if not path or path.lower().endswith(PROMPT_SUFFIXES):
        return bool(path)
    if not path.endswith(".safetensors"):
        accepted = (
            f"what `lab references` wrote (.safetensors), chats ({' '.join(PROMPT_SUFFIXES)})"
        )
        raise ValueError(f"--references {path}: accepted are {accepted}")
    return "the chat template" in how_made(path)


def check_template_args(config, texts: list) -> None:
    """Raise a ValueError if --chat-template-args is given and the corpus is running text."""
    if config.chat_template_args and isinstance(texts[0], str):
        raise ValueError("there are no chats here: --chat-template-args means nothing for text")


def get_references(config, target, tokenizer, corpus: Corpus, path: Path) -> References:
    """Read the references of --references or of `path`, or let the target write them to `path`."""
    if config.references.lower().endswith(PROMPT_SUFFIXES):
        conversations = read_prompts(config.references, config.skip_bad_lines)
        length = config.prompt_length + config.response_length
        return References.from_conversations(conversations, tokenizer, length)
    if config.references:
        return load_given(config.references, target, tokenizer)
    size = (config.num_references, config.prompt_length)
    prompts = draw_prompts(corpus.train, tokenizer, *size, config.seed)
    weights = weights_fingerprint(target)
    made_with = provenance(config, weights, tokenizer, corpus.train, prompts)
    if path.is_file():
        return References.load(path, made_with)
    if config.drafter:
        start_drafter(config, target, tokenizer)  # an unfit drafter is an error before long work
    how = (config.response_length, PLAIN, config.seed, tokenizer.stop_ids)
    results = generate(target, None, prompts, *how, batch_size=GENERATE_ROWS, progress="references")
    references = References.from_lists(prompts, [r.tokens for r in results], tokenizer.pad_id)
    references.save(path, made_with)
    return references


def prepare(config, out: Path):
    """Target, tokenizer, held-out prompts (a `Measure`) and references of a run."""
    gives_chats = _gives_chats(config.references)
    corpus = load_corpus(config.corpus or None, config.skip_bad_lines)
    if not gives_chats:
        check_template_args(config, corpus.train)
    folder = Path(config.target or out / "target")
    if not config.target:
        keys = ("arch", "target_steps", "target_layers", "target_length", "seed", "corpus")
        made_with = {key: getattr(config, key) for key in keys}
        made_with["the corpus"] = fingerprint(corpus.train + corpus.held_out)
        result = stage(folder, made_with, lambda: make_toy(config, corpus, folder))
        print(f"toy target: {result['held_out_bits_per_byte']:.3f} held-out bits per byte")
    load = load_sharded_target if config.shard_target else Target.from_pretrained
    target = for_cpu(load(folder, config.device, dtype_of(config)))
    longest = config.prompt_length + max(config.response_length, config.eval_tokens)
    limit = target.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"prompts and texts of {longest} tokens exceed the target's {limit}")
    tokenizer = load_tokenizer(folder, config.chat_template_args)
    size = (config.eval_prompts, config.prompt_length)
    prompts = draw_prompts(corpus.held_out, tokenizer, *size, config.seed + 1)
    measure = Measure(prompts, config.eval_tokens, tokenizer.stop_ids, config.seed)
    references = get_references(config, target, tokenizer, corpus, out / "references.safetensors")
    _check_fit(references, target, config)
    return target, tokenizer, measure, references


def _check_fit(references: References, target: Target, config) -> None:
    """Raise a ValueError for references that cannot be this target's, or leave no room."""
    longest = int(references.lengths.max())
    highest = int(references.tokens.max())
    limit = target.config.max_position_embeddings
    vocab_size = target.config.vocab_size
    if longest > limit or highest >= vocab_size:
        raise ValueError(
            f"the references have texts of {longest} tokens and ids up to {highest}, the target "
            f"has room for {limit} tokens and {vocab_size} ids: are they its own?"
        )
    longest = int(references.prompt_lengths.max()) + config.response_length
    if config.mode == "rollout" and longest > limit:
        text = f"a prompt and --response-length {config.response_length}"
        raise ValueError(f"{text} make {longest} tokens, the target's limit is {limit}")


def fresh_drafter(config, target: Target, mask_token_id: int | None) -> Drafter:
    """An untrained drafter of the kind and size that the flags name."""
    kind = config.drafter_kind or "dflash"
    if config.markov_head and kind != "dspark":
        raise ValueError(f"--markov-head goes with --drafter-kind dspark, not {kind}")
    if config.rank and kind == "dflash":
        raise ValueError("--rank goes with --drafter-kind dspark or dflash2, not dflash")
    block_size = config.block_size or (7 if kind == "dspark" else 8)  # W = 7 for all kinds
    rank = config.rank or min(256, target.config.hidden_size)
    fields = {"selector_rank": rank} if kind == "dflash2" else {}
    if kind == "dspark":
        fields = {"markov_rank": rank, "markov_head_type": config.markov_head or "vanilla"}
    how = (config.draft_layers or 2, block_size, mask_token_id, config.seed)
    return Drafter.fresh(target, *how, architecture=ARCHITECTURES[kind], **fields)


def start_drafter(config, target: Target, tokenizer) -> Drafter:
    """The drafter to train, in float32: the one that --drafter names, or a fresh one."""
    if config.drafter:
        drafter = Drafter.from_pretrained(config.drafter, target, torch.float32)
        _check_flags(config, drafter)
    else:
        mask_token_id = None if config.mask_token_id < 0 else config.mask_token_id
        drafter = fresh_drafter(config, target, mask_token_id).to(config.device)
    drafter.config.check(target, tokenizer, config.drafter or "the fresh drafter")
    if tokenizer:
        drafter.config = replace(drafter.config, trained_with=tokenizer.template_facts)
    return drafter


def _check_flags(config, drafter: Drafter) -> None:
    """Raise a ValueError that names the first flag which contradicts the drafter's folder."""
    fields = drafter.config
    ranks = {"dspark": fields.markov_rank, "dflash2": fields.selector_rank}
    rows = (  # the flag's name, its value for "as the folder says", the drafter's value
        ("draft_layers", 0, len(drafter.layers)),
        ("block_size", 0, fields.block_size),
        ("mask_token_id", -1, fields.mask_token_id),
        ("drafter_kind", "", fields.kind),
        ("rank", 0, ranks.get(fields.kind)),
        ("markov_head", "", fields.markov_head_type),
    )
    for name, unset, value in rows:
        flag_value = getattr(config, name)
        if flag_value not in (unset, value):
            flag = f"{option_name(name)} {flag_value}"
            raise ValueError(f"{config.drafter} has {name} {value}: {flag} cannot change it")


@lru_cache(maxsize=2)  # a step sees one epoch, or the end of one and the start of the next
def epoch_order(seed: int, epoch: int, lengths: Tensor, batch_size: int, bucket: int) -> Tensor:
    """The references (n,) in an epoch's order, from seed and epoch alone. Only batches
    that lie wholly in the epoch are bucketed."""
    count = len(lengths)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (2**63 - 1))
    order = torch.randperm(count, generator=generator)
    if bucket == 1:
        return order
    start = -epoch * count % batch_size  # where this epoch's first whole batch starts
    num_batches = max(0, count - start) // batch_size
    whole_batches = order[start : start + num_batches * batch_size]
    for window in whole_batches.split(bucket * batch_size):  # views, changed in place
        batches = window[lengths[window].argsort(stable=True)].view(-1, batch_size)
        window.copy_(batches[torch.randperm(len(batches), generator=generator)].flatten())
    return order


def batch_rows(seed: int, step: int, lengths: Tensor, batch_size: int, bucket: int = 1) -> Tensor:
    """The references (batch_size,) of a step. bucket: batches sorted by length together."""
    rows = []
    for number in range(step * batch_size, (step + 1) * batch_size):
        epoch, position = divmod(number, len(lengths))
        rows.append(epoch_order(seed, epoch, lengths, batch_size, bucket)[position])
    rows = torch.stack(rows)
    return rows[lengths[rows].argsort(stable=True)]
