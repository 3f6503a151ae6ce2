"""What must be there before training: a target, references, held-out prompts and a drafter.

A toy target and the references are made once and saved in the run's folder. The target itself
writes the references: a dataset's answers are not its own. Held-out prompts are from other texts.

    pytest tests/support/test_prepare.py
"""

import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from drafter import PLAIN, Drafter
from hf import load_tokenizer
from hf.chat import PROMPT_SUFFIXES, read_prompts
from hf.drafters import ARCHITECTURES
from serve import generate
from support.cpu import for_cpu, sent
from support.data import (
    Corpus,
    draw_prompts,
    hold_out,
    load_corpus,
    pack,
    split_conversations,
    unseen,
)
from support.distributed import load_sharded_target
from support.fingerprint import difference, fingerprint, is_another_dtype, weights_fingerprint
from support.flags import dtype_of, option_name, precision_of
from support.measure import Measure, read_tasks
from support.references import References, how_made, load_held_out, write_in_parts
from support.resume import stage
from support.toy import train_toy, write_byte_tokenizer
from target import Target, Trunk

GENERATE_ROWS = 128  # references generated at once
TEXT_LENGTH = 512  # of a prompt cut from text, where --prompt-length is 0
RESPONSE_LENGTH = 1024  # of a response that is yet to be written, where --response-length is 0
NO_HELD_OUT = "{} holds no prompts to measure on, it {}: name some by --eval-prompts or --corpus"
PYTHON = "Python's own library"


class Trunks:
    """Prefilled references by number. The target is frozen, so each is made once, when a step first
    uses it, if all of them fit into cache_gib; else whenever a step needs it."""

    def __init__(self, target: Target, references: References, tap_ids, cache_gib: float):
        self.target = target
        self.references = references
        self.tap_ids = tap_ids
        self.cache = None  # one trunk of all; rows without meaning until is_cached
        count, width = references.tokens.shape
        self.is_cached = torch.zeros(count, dtype=torch.bool)
        first = self._prefill(torch.arange(1), width) if cache_gib else None
        if first and first.nbytes * count <= cache_gib * 2**30:
            self.cache = _room_for(first, count, width)

    def _prefill(self, rows: Tensor, width: int) -> Trunk:
        device = self.target.lm_head.weight.device
        tokens = sent(self.references.tokens[rows, :width], device)
        lengths = sent(self.references.lengths[rows], device)
        return self.target.prefill(tokens, lengths, tap_ids=self.tap_ids)

    def __call__(self, rows: Tensor) -> Trunk:
        """The trunk of these references, as wide as the longest of them."""
        width = int(self.references.lengths[rows].max())
        if not self.cache:
            return self._prefill(rows, width)
        for row in rows[~self.is_cached[rows]].tolist():
            self._keep(row)
        return self.cache.select(sent(rows, self.cache.tokens.device), width)

    def _keep(self, row: int) -> None:
        """Cache a reference. It is run by itself: its numbers must not depend on which others are
        in the batch that first uses it, or a run that goes on would differ in the last bits."""
        trunk = self._prefill(torch.tensor([row]), self.cache.width)
        for cached, new in zip(tensors_of(self.cache), tensors_of(trunk)):
            cached[row] = new[0]
        self.is_cached[row] = True


def tensors_of(trunk: Trunk) -> list[Tensor]:
    by_row = (trunk.tokens, trunk.lengths, trunk.hidden, trunk.taps)
    remembered = (tensor for state in trunk.states for tensor in state.values())
    return [tensor for tensor in (*by_row, *remembered) if tensor is not None]


def _room_for(one: Trunk, count: int, width: int) -> Trunk:
    """A trunk of `count` rows like that of `one`, still empty."""

    def rows(tensors: dict) -> dict:
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return {name: x.new_zeros(count, *x.shape[1:]) for name, x in present.items()}

    by_row = dict(tokens=one.tokens, lengths=one.lengths, hidden=one.hidden, taps=one.taps)
    return replace(one, **rows(by_row), states=[rows(state) for state in one.states], width=width)


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
    temperatures = getattr(config, "temperature", (1.0,))  # train.py has no such flag
    made_with["temperature"] = temperatures[0] if len(temperatures) == 1 else [*temperatures]
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


def get_references(
    config, target, tokenizer, corpus: Corpus, path: Path, prompt=0, response=0
) -> References:
    """Read the references of --references or of `path`, or let the target write them to `path`.
    prompt, response: see `References.from_conversations`."""
    if config.references.lower().endswith(PROMPT_SUFFIXES):
        brings_chats = corpus and not config.corpus and not isinstance(corpus.train[0], str)
        how = (config.references, config.skip_bad_lines)
        conversations = corpus.train if brings_chats else read_prompts(*how)
        length = config.prompt_length + config.response_length
        return References.from_conversations(conversations, tokenizer, length, prompt, response)
    if config.references:
        return load_given(config.references, target, tokenizer)
    size = (config.num_references, config.prompt_length)
    prompts = draw_prompts(corpus.train, tokenizer, *size, config.seed)
    weights = weights_fingerprint(target)
    made_with = provenance(config, weights, tokenizer, corpus.train, prompts)
    if path.is_file():
        return References.load(path, made_with)
    # what it leaves out was told when the prompts to measure on were drawn
    measured_on = hold_out(corpus, tokenizer, config, prompts, tell=lambda line: None)
    start_drafter(config, target, tokenizer)  # an unfit drafter is an error before long work
    how = (config.response_length, PLAIN, config.seed, tokenizer.stop_ids)

    def write(prompts: list, prompt_ids: list) -> list[list[int]]:
        options = dict(batch_size=GENERATE_ROWS, prompt_ids=prompt_ids, progress="part")
        return [result.tokens for result in generate(target, None, prompts, *how, **options)]

    how_many = (GENERATE_ROWS, config.response_length)
    folder = path.with_name("parts")
    responses = write_in_parts(folder, made_with, prompts, write, *how_many, alone=True)
    references = References.from_lists(prompts, responses, tokenizer.pad_id)
    references.save(path, made_with, measured_on)
    return references


def check_sources(config) -> None:
    """Raise a ValueError if a given target would learn from, or be measured on, the toy's text."""
    if config.target and not (config.references or config.corpus):
        raise ValueError(
            f"--target {config.target} needs text of its own kind: --references (or --corpus, "
            "prompts that it answers first); --eval-prompts names further ones to measure on"
        )
    brings_prompts = config.target and not (config.corpus or config.eval_prompts)
    if brings_prompts and config.references.endswith(".safetensors"):
        if not load_held_out(config.references):
            raise ValueError(NO_HELD_OUT.format(config.references, "has none"))


def with_lengths(config, target: Target, is_text: bool):
    """The config with lengths, where they are 0. What is not given cuts nothing but running text
    and what the target has yet to write."""
    limit = target.config.max_position_embeddings
    is_given = bool(config.references)
    response = config.response_length or min(RESPONSE_LENGTH, limit // 2)
    prompt = config.prompt_length or limit - max(response, config.eval_tokens)
    if is_given and 0 in (config.prompt_length, config.response_length):
        response = limit - prompt
    elif is_text and not config.prompt_length:
        prompt = min(TEXT_LENGTH, prompt)
    longest = prompt + max(response, config.eval_tokens)
    if longest > limit and not (is_given and not config.corpus):
        raise ValueError(f"prompts and texts of {longest} tokens exceed the target's {limit}")
    return replace(config, prompt_length=prompt, response_length=response)


def resolved(config, references: References, drafter: Drafter):
    """The config with numbers where 0 or nothing stands for what references, drafter and device
    say."""
    responses = references.lengths - references.prompt_lengths
    W = drafter.config.num_draft_tokens
    return replace(
        config,
        prompt_length=config.prompt_length or int(references.prompt_lengths.max()),
        response_length=config.response_length or int(responses.max()),
        ce_decay=config.ce_decay or decay_of(W),
        precision=precision_of(config),
    )


def held_out(config, target: Target, tokenizer, corpus: Corpus | None) -> Measure:
    """The prompts that AL is measured on: of --eval-prompts, of the corpus, or of the references'
    own source."""
    how = (tokenizer, config.num_eval_prompts)
    room = target.config.max_position_embeddings - config.eval_tokens
    tasks = []
    path = config.references if config.target else ""
    source = f"held out from {config.corpus or path or PYTHON}"
    if config.eval_prompts:
        by_task = read_tasks(config.eval_prompts, *how, room, config.seed + 1)
        # in turn, so that a share of them has a share of each task
        rows = zip_longest(*([(name, ids) for ids in each] for name, each in by_task.items()))
        tasks, prompts = map(list, zip(*filter(None, chain(*rows))))
        source = "of"  # the tasks
    elif corpus:
        length = config.prompt_length if config.corpus or not config.target else room
        texts = corpus.held_out
        prompts = draw_prompts(texts, *how, length, config.seed + 1) if texts else []
    else:
        prompts = load_held_out(path)[: config.num_eval_prompts]
    return Measure(prompts, config.eval_tokens, tokenizer.stop_ids, config.seed, source, tasks)


def check_held_out(measure: Measure, references: References, config, limit: int) -> None:
    """Leave out what is trained on. Raise a ValueError if no prompt is left, or one is too long."""
    sizes = set(map(len, measure.prompts))
    pairs = zip(references.tokens, references.prompt_lengths.tolist())
    rest = unseen(measure.prompts, [row[:end].tolist() for row, end in pairs if end in sizes])
    if not rest:
        raise ValueError(
            NO_HELD_OUT.format(
                config.corpus or config.references, "has too few, or all are trained on"
            )
        )
    if len(rest) < len(measure.prompts):
        count = len(measure.prompts) - len(rest)
        print(f"{count} prompts to measure on are references' prompts, too: left out")
    if measure.tasks:
        tasks = zip(measure.prompts, measure.tasks)
        measure.tasks = [task for prompt, task in tasks if prompt in rest]
        counts = Counter(measure.tasks).items()
        measure.source += " " + ", ".join(f"{name} ({count})" for name, count in counts)
    measure.prompts = rest
    measure.source = f"{len(rest)} prompts {measure.source}"
    longest = max(map(len, rest)) + config.eval_tokens
    if longest > limit:
        text = f"a held-out prompt and --eval-tokens {config.eval_tokens}"
        raise ValueError(f"{text} make {longest} tokens, the target's limit is {limit}")


def prepare(config, out: Path):
    """Target, tokenizer, held-out prompts (a `Measure`) and references of a run."""
    gives_chats = _gives_chats(config.references)
    check_sources(config)
    corpus = _source(config)
    texts = corpus.train if corpus else [""]
    if not (gives_chats or config.eval_prompts):
        check_template_args(config, texts)
    folder = Path(config.target or out / "target")
    if not config.target:
        prepare_toy(config, corpus, folder)
    load = load_sharded_target if config.shard_target else Target.from_pretrained
    target = for_cpu(load(folder, config.device, dtype_of(config)))
    tokenizer = load_tokenizer(folder, config.chat_template_args)
    sized = with_lengths(config, target, isinstance(texts[0], str))
    measure = held_out(sized, target, tokenizer, corpus)
    lengths = (config.prompt_length, config.response_length)
    alone = lengths if 0 in lengths else (0, 0)  # if both are given, their sum is the limit
    path = out / "references.safetensors"
    references = get_references(sized, target, tokenizer, corpus, path, *alone)
    _check_fit(references, target, config)
    check_held_out(measure, references, config, target.config.max_position_embeddings)
    return target, tokenizer, measure, references


def _source(config) -> Corpus | None:
    """The texts or chats that prompts come from; None: a file of references brings its own."""
    if config.corpus or not config.target:
        return load_corpus(config.corpus or None, config.skip_bad_lines)
    if config.eval_prompts or config.references.endswith(".safetensors"):
        return None
    return Corpus(*split_conversations(read_prompts(config.references, config.skip_bad_lines)))


def prepare_toy(config, corpus: Corpus, folder: Path) -> None:
    """Train the toy target, or find it in its folder."""
    keys = ("arch", "target_steps", "target_layers", "target_length", "seed", "corpus")
    made_with = {key: getattr(config, key) for key in keys}
    made_with["the corpus"] = fingerprint(corpus.train + corpus.held_out)
    result = stage(folder, made_with, lambda: make_toy(config, corpus, folder))
    print(f"toy target: {result['held_out_bits_per_byte']:.3f} held-out bits per byte")


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
    longest_response = int((references.lengths - references.prompt_lengths).max())
    response_length = config.response_length or longest_response
    longest = int(references.prompt_lengths.max()) + response_length
    if config.mode == "rollout" and longest > limit:
        text = f"a prompt and --response-length {response_length}"
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


def decay_of(W: int) -> float:
    """gamma_0 of CE: the papers' 4 for W = 7 and 7 for W = 15, linear between and beyond."""
    return 4.0 + 3.0 * (W - 7) / 8


def mask_row(config, target: Target, tokenizer) -> int | None:
    """The row of --mask-token-id; None: the first row beyond the tokenizer."""
    wanted = config.mask_token_id
    special = tokenizer.special if tokenizer else {}
    used = _used_special(tokenizer) if tokenizer else set()
    free = {id: name for name, id in special.items() if id not in used}
    # the last special tokens are the least used
    names = [f"{id} ({free[id]})" for id in sorted(free, reverse=True)]
    proposal = f"free are {', '.join(names[:5])}, and auto takes the first"
    proposal = proposal if names else "no special token is free"
    if wanted not in ("", "auto"):
        texts = {id: name for name, id in special.items() if tokenizer.template_names(name)}
        if int(wanted) in texts:
            name = texts[int(wanted)]
            raise ValueError(f"--mask-token-id {wanted}: the chat template uses {name}; {proposal}")
        return int(wanted)
    if target.num_tokens < target.config.vocab_size:
        return None
    if wanted == "auto" and free:
        return max(free)
    raise ValueError(f"the embedding has no spare row for MASK: give --mask-token-id; {proposal}")


def mask_in_words(drafter: Drafter, tokenizer) -> str:
    """Which row MASK is, with the token's name where it has one."""
    id = drafter.config.mask_token_id
    name = tokenizer.special.get(id) if tokenizer else None
    return f"{id} ({name})" if name else str(id)


def _used_special(tokenizer) -> set[int]:
    """Special tokens that a run writes: by the chat template, as BOS, stop or padding."""
    used = {*tokenizer.stop_ids, tokenizer.pad_id, *tokenizer.bos_ids}
    names = [str(name) for name in tokenizer.names.values()]
    for name, id in tokenizer.special.items():
        if tokenizer.template_names(name) or name in names:
            used.add(id)
    return used


def start_drafter(config, target: Target, tokenizer) -> Drafter:
    """The drafter to train, in float32: the one that --drafter names, or a fresh one."""
    if config.drafter:
        drafter = Drafter.from_pretrained(config.drafter, target, torch.float32)
        _check_flags(config, drafter)
    else:
        mask_token_id = mask_row(config, target, tokenizer)
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
        ("mask_token_id", "auto", str(fields.mask_token_id)),
        ("drafter_kind", "", fields.kind),
        ("rank", 0, ranks.get(fields.kind)),
        ("markov_head", "", fields.markov_head_type),
    )
    for name, unset, value in rows:
        flag_value = getattr(config, name)
        if flag_value not in ("", unset, value):
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
