"""References at scale: written by the target in parts that are kept, here or by a server.

A server is sent token ids and asked for token ids. If it returns text, a
response is kept where the text, cut into tokens here, has as many as the server counted.
Some prompts are held out: they are written into the file, and train.py measures AL on them.

    python -m lab references --target FOLDER --corpus prompts.jsonl --num-references 20000
    torchrun --nproc_per_node=8 -m lab references ...          each process makes every n-th part
    python -m lab references ... --api http://localhost:8000/v1     vLLM or SGLang writes them
    pytest tests/lab/test_references.py
"""

import contextlib
import dataclasses
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from drafter import Sampling
from hf import load_tokenizer
from lab.common import LabConfig, open_target, require
from serve import generate
from support import distributed
from support.data import draw_prompts, hold_out, load_corpus
from support.files import locked
from support.fingerprint import weights_fingerprint
from support.flags import TEMPLATE_ARGS, flag
from support.measure import LOOP, loop_start
from support.prepare import check_template_args, provenance
from support.references import References, write_in_parts

PAUSES = (1, 2, 4, 8, 16, 0)  # seconds after each try
TIMEOUT = 600  # seconds to wait for an answer
# what a server would else take from generation_config.json
DEFAULTS_OFF = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Config(LabConfig):
    target: str = flag("", "the target's folder; with --api its tokenizer is enough")
    out: str = flag("runs/references", "folder: parts, and references.safetensors at the end")
    corpus: str = flag("", "text file or folder, or JSONL prompts; empty: Python's own library")
    chat_template_args: str = flag("", TEMPLATE_ARGS)
    skip_bad_lines: bool = flag(False, "leave malformed JSONL lines out instead of stopping")
    num_references: int = flag(512, "how many", low=1)
    answers: int = flag(1, "references of each prompt, drawn anew", low=1)
    prompt_length: int = flag(64, "tokens per prompt (JSONL prompts: at most)", low=1)
    response_length: int = flag(192, "tokens per response, at most", low=2)
    temperature: tuple = flag((1.0,), "of the responses; several: in turn", kind=float, low=0)
    cut_loops: bool = flag(
        False, f"end a response where it begins to repeat {2 * LOOP - 1} tokens of itself or more"
    )
    part: int = flag(256, "prompts per part, which is kept once it is whole", low=1)
    batch_size: int = flag(64, "prompts of a part decoded at once; as some end, others join", low=1)
    api: str = flag("", "an OpenAI-compatible server's URL, up to /v1; empty: decode here")
    api_model: str = flag("", "the model's name there; empty: the first it has")
    api_requests: int = flag(32, "requests at once", low=1)

    NEEDS = (
        ("skip_bad_lines", "--corpus", lambda c: c.corpus),
        ("api_model api_requests", "--api", lambda c: c.api),
        ("device dtype batch_size", "no --api", lambda c: not c.api),
    )


class Server:
    """An OpenAI-compatible server. A key, if it wants one, is OPENAI_API_KEY."""

    def __init__(self, config: Config, tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.model = config.api_model or self.first_model()

    def error(self, message: str) -> ValueError:
        return ValueError(f"--api {self.config.api}: {message}")

    def ask(self, path: str, body: dict | None = None) -> dict:
        """Send one request. A server that is busy or away is asked again; a refusal is final."""
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.config.api.rstrip('/')}/{path}"
        request = urllib.request.Request(url, data, headers)
        for pause in PAUSES:
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read(200).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
            time.sleep(pause)
        raise self.error(f"{path} was not answered: {reason:.200}")

    def first_model(self) -> str:
        try:
            return self.ask("models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise self.error("it names no model: give --api-model") from None

    def write(self, prompts: list[list[int]], prompt_ids: list[int]) -> list:
        with ThreadPoolExecutor(self.config.api_requests) as pool:
            responses = pool.map(self.respond, prompts, prompt_ids)
            how = dict(unit="text", leave=False, disable=not distributed.is_main())
            return list(tqdm(responses, "part", len(prompts), **how))

    def respond(self, prompt: list[int], prompt_id: int) -> list[int] | None:
        """A response's token ids; None where its text cannot be turned back into them."""
        config, tokenizer = self.config, self.tokenizer
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": config.response_length,
            "temperature": temperature_of(config, prompt_id),
            "seed": config.seed * 1_000_003 + prompt_id,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = self.ask("completions", body | DEFAULTS_OFF)
        try:
            choice = answer["choices"][0]
            is_text = choice.get("token_ids") is None
            ids = tokenizer.encode(choice["text"]) if is_text else choice["token_ids"]
            ids = [int(i) for i in ids]
            # a stop token has no text, and servers may leave it out
            stopped = choice.get("finish_reason") == "stop"
            lacks_stop = bool(stopped and ids and ids[-1] not in tokenizer.stop_ids)
            if is_text and len(ids) + lacks_stop != answer["usage"]["completion_tokens"]:
                return None
            stop_id = choice.get("stop_reason", choice.get("matched_stop"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self.error(f"an answer without {error}: {json.dumps(answer):.120}") from None
        if any(not 0 <= i < tokenizer.num_tokens for i in ids):
            raise self.error(f"ids that {config.target} does not have; is it the same model?")
        if lacks_stop and tokenizer.stop_ids:  # some servers say which one it was
            ids.append(stop_id if stop_id in tokenizer.stop_ids else tokenizer.stop_ids[0])
        return ids


def temperature_of(config: Config, prompt_id: int) -> float:
    return config.temperature[prompt_id % len(config.temperature)]


def make_writer(config: Config, tokenizer):
    """A function (prompts, their numbers) -> responses, and what is known of who writes them."""
    if config.api:
        server = Server(config, tokenizer)
        return server.write, {"target": None, "api_model": server.model}
    target = open_target(config)
    longest = config.prompt_length + config.response_length
    limit = target.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"prompts and responses of {longest} tokens exceed the target's {limit}")

    def write(prompts, prompt_ids):
        numbers = {}  # of the part, by temperature
        for number, prompt_id in enumerate(prompt_ids):
            numbers.setdefault(temperature_of(config, prompt_id), []).append(number)
        responses = {}
        for temperature, own in numbers.items():
            how = (config.response_length, Sampling(temperature), config.seed, tokenizer.stop_ids)
            options = {"batch_size": config.batch_size, "prompt_ids": [prompt_ids[i] for i in own]}
            options["progress"] = "part" if distributed.is_main() else ""
            results = generate(target, None, [prompts[i] for i in own], *how, **options)
            responses |= {i: result.tokens for i, result in zip(own, results)}
        return [responses[number] for number in range(len(prompts))]

    return write, {"target": weights_fingerprint(target)}


def run(config: Config) -> dict | None:
    require(config, "target")
    if config.answers > 1 and 0 in config.temperature:
        raise ValueError(f"--answers {config.answers}: at temperature 0 they would be the same")
    for temperature in config.temperature:
        Sampling(temperature)  # checks it
    config = dataclasses.replace(config, device=distributed.start(config.device))
    with locked(config.out) if distributed.is_main() else contextlib.nullcontext():
        return write_references(config, Path(config.out))


def write_references(config: Config, out: Path) -> dict | None:
    """Write the parts that are missing, and the file of all of them -> figures, on one process."""
    tokenizer = load_tokenizer(config.target, config.chat_template_args)
    if tokenizer.template and not config.corpus:
        raise ValueError("a target with a chat template answers prompts: give them by --corpus")
    corpus = load_corpus(config.corpus or None, config.skip_bad_lines)
    check_template_args(config, corpus.train)
    size = (-(-config.num_references // config.answers), config.prompt_length)
    prompts = draw_prompts(corpus.train, tokenizer, *size, config.seed)
    held_out = hold_out(corpus, tokenizer, config, prompts)
    prompts = (prompts * config.answers)[: config.num_references]
    print(
        f"on {config.device}: {len(prompts)} prompts, {len(held_out)} more held out for measuring"
    )
    write, writer = make_writer(config, tokenizer)
    made_with = provenance(config, writer["target"], tokenizer, corpus.train, prompts) | writer
    how = (write, config.part, config.response_length)
    responses = write_in_parts(out / "parts", made_with, prompts, *how)
    is_main = distributed.is_main()
    distributed.stop()
    if not is_main:
        return None
    pairs, figures = kept(config, prompts, responses)
    texts = ([prompt for prompt, _ in pairs], [response for _, response in pairs])
    references = References.from_lists(*texts, tokenizer.pad_id)
    made_with |= {"loops": "cut"} if config.cut_loops else {}
    references.save(out / "references.safetensors", made_with, held_out)
    figures["too_short"] = len(pairs) - len(references.lengths)
    figures |= {"references": len(references.lengths), "held_out": len(held_out)}
    figures["response_tokens"] = int((references.lengths - references.prompt_lengths).sum())
    print(json.dumps(figures))
    return figures


def kept(config: Config, prompts: list, responses: list) -> tuple[list, dict]:
    """Prompts with their responses, without those that a server's text did not give and, with
    --cut-loops, up to where a response begins to loop; and how much that left out."""
    pairs = [(prompt, r) for prompt, r in zip(prompts, responses) if r is not None]
    figures = {"prompts": len(prompts), "dropped": len(prompts) - len(pairs)}
    if config.cut_loops:
        cut = [(prompt, response[: loop_start(response)]) for prompt, response in pairs]
        lost = [len(whole) - len(rest) for (_, whole), (_, rest) in zip(pairs, cut)]
        figures |= {"cut": sum(n > 0 for n in lost), "cut_tokens": sum(lost)}
        pairs = cut
    return pairs, figures
