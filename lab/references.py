"""References at scale: the target's own answers to many prompts, made in parts that are kept.

    python references.py --target FOLDER --corpus prompts.jsonl --num-references 20000
    torchrun --nproc_per_node=8 references.py ...              each process makes every n-th part
    python references.py ... --api http://localhost:8000/v1    a vLLM or SGLang server writes them
    python train.py --references runs/references/references.safetensors ...
    pytest tests/test_references.py

A response depends on the seed and on its prompt's number alone, so it is the same however the work
is split and how often it was interrupted. A server is asked with token ids and for token ids; one
that gives text only is believed where the text, cut into tokens here, has as many as it counted.
"""

import dataclasses
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from serve import generate
from support import data, distributed, files
from support.data import References
from support.files import flag
from support.prepare import provenance, weights_checksum
from target import Target


@dataclass(frozen=True)
class ReferencesConfig:
    target: str = flag("", "the target's folder; with --api its tokenizer is enough")
    corpus: str = flag("", "text file or folder, or JSONL prompts; empty: Python's own library")
    skip_bad_lines: bool = flag(False, "leave malformed JSONL lines out instead of stopping")
    out: str = flag("runs/references", "folder: parts, and references.safetensors at the end")
    num_references: int = flag(512, "how many", low=1)
    prompt_length: int = flag(64, "tokens per prompt (JSONL prompts: at most)", low=1)
    response_length: int = flag(192, "tokens per response, at most", low=2)
    temperature: float = flag(1.0, "of the responses", low=0)
    seed: int = flag(0, "of prompts and responses")
    part: int = flag(128, "prompts per part, decoded at once and kept at once", low=1)
    device: str = flag("cpu", "cpu or cuda")
    dtype: str = flag("", "of the target; empty: what its config names", choices=files.DTYPES)
    api: str = flag("", "an OpenAI-compatible server's URL, up to /v1; empty: decode here")
    api_model: str = flag("", "the model's name there; empty: the first it has")
    api_requests: int = flag(32, "requests at once", low=1)
    timeout: float = flag(600.0, "api: seconds to wait for an answer", low=1)

    def __post_init__(self):
        files.check_ranges(self)
        if not self.target:
            raise ValueError("--target FOLDER is needed: its tokenizer cuts the prompts")


TRIES = 6  # half a minute of waiting in all


@dataclass
class Server:
    """An OpenAI-compatible server; the key, if it wants one, is OPENAI_API_KEY."""

    url: str
    model: str
    timeout: float

    def ask(self, path: str, body: dict | None = None) -> dict:
        """One request; a server that is busy or away is asked again, one that refuses is not."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", sent, headers)
        for attempt in range(TRIES):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                    found = json.loads(answer.read())
                if not isinstance(found, dict):
                    raise ValueError("no JSON object")
                return found
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read(200).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
            if attempt < TRIES - 1:
                time.sleep(2**attempt)
        raise ValueError(f"--api {self.url}: {path} was not answered: {reason:.200}")

    def first_model(self) -> str:
        try:
            return self.ask("models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"--api {self.url} names no model: give --api-model") from None

    def respond(self, prompt: list[int], place: int, config, tokenizer) -> list[int] | None:
        """The response's token ids; None where text cannot be told back into them."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": config.response_length,
            "temperature": config.temperature,
            "seed": config.seed * 1_000_003 + place,
            "return_token_ids": True,
            "skip_special_tokens": False,
            # a server has defaults of its own, from generation_config.json
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        answer = self.ask("completions", body)
        try:
            choice = answer["choices"][0]
            ids, stopped = choice.get("token_ids"), choice.get("finish_reason") == "stop"
            if ids is None:
                ids = tokenizer.encode(choice["text"])
                # the stop token was counted, and has no text
                silent = stopped and ids[-1:] and ids[-1] not in tokenizer.stop_ids
                if len(ids) != answer["usage"]["completion_tokens"] - bool(silent):
                    return None
            ids = [int(i) for i in ids]
            last = choice.get("stop_reason", choice.get("matched_stop"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"--api {self.url}: an answer without {error}: {json.dumps(answer):.120}"
            ) from None
        if any(not 0 <= i < tokenizer.num_tokens for i in ids):
            raise ValueError(
                f"--api {self.url}: ids that {config.target} does not have; is it the same model?"
            )
        if stopped and ids and ids[-1] not in tokenizer.stop_ids and tokenizer.stop_ids:
            # servers may leave out what they stopped at; some say what it was
            ids.append(last if last in tokenizer.stop_ids else tokenizer.stop_ids[0])
        return ids


def writer(config: ReferencesConfig, tokenizer):
    """What makes the responses to some prompts, and what is known of the target's weights."""
    if config.api:
        server = Server(config.api, config.api_model, config.timeout)
        server.model = server.model or server.first_model()

        def write(prompts, places):
            with ThreadPoolExecutor(config.api_requests) as pool:
                return list(
                    pool.map(
                        lambda pair: server.respond(*pair, config, tokenizer), zip(prompts, places)
                    )
                )

        return write, {"api_model": server.model}
    kind = files.dtype_of(config)
    target = Target.from_pretrained(config.target, config.device, kind)
    longest = config.prompt_length + config.response_length
    if longest > (limit := target.config.max_position_embeddings):
        raise ValueError(f"prompts and responses of {longest} tokens exceed the target's {limit}")

    def write(prompts, places):
        results = generate(
            target,
            None,
            prompts,
            config.response_length,
            config.temperature,
            config.seed,
            tokenizer.stop_ids,
            batch_size=config.part,
            places=places,
        )
        return [result.tokens for result in results]

    return write, {"target": weights_checksum(target)}


def make(config: ReferencesConfig, place: str) -> dict:
    """Every part that is not there yet, this process's share of them; then all in one file."""
    config = dataclasses.replace(config, device=place)
    out, lead = Path(config.out), distributed.rank() == 0
    tokenizer = data.load_tokenizer(config.target)
    corpus = data.load_corpus(config.corpus or None, config.skip_bad_lines)
    prompts = data.draw_prompts(
        corpus.train, tokenizer, config.num_references, config.prompt_length, config.seed
    )
    write, known = writer(config, tokenizer)
    made_with = provenance(config, None) | known
    parts_of = made_with | {"temperature": config.temperature, "part": config.part, "by": "length"}
    if lead:
        files.stage(out / "parts", parts_of, lambda: {})
    distributed.barrier()
    # of a part all prompts are about as long, so little of it is padding
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    parts = [order[start : start + config.part] for start in range(0, len(order), config.part)]
    paths = [out / "parts" / f"{number:06d}.json" for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    distributed.barrier()  # all have looked before anyone writes
    mine = missing[distributed.rank() :: distributed.num_processes()]
    for number in tqdm(mine, desc="references", unit="part", disable=not lead):
        places = parts[number]
        responses = write([prompts[i] for i in places], places)
        files.write_json(paths[number], {"responses": responses})
    distributed.barrier()
    if not lead:
        return {}
    responses = [one for path in paths for one in files.read_json(path).get("responses", [])]
    if len(responses) != len(prompts):
        raise ValueError(
            f"{out}/parts holds {len(responses)} responses to {len(prompts)} prompts: remove it"
        )
    responses = [response for _, response in sorted(zip(order, responses))]
    pairs = [(p, r) for p, r in zip(prompts, responses) if r is not None]
    found = References.from_lists(*map(list, zip(*pairs)) if pairs else ([], []), tokenizer.pad_id)
    found.save(out / "references.safetensors", made_with)
    figures = {
        "prompts": len(prompts),
        "references": len(found.lengths),
        "not_told_back": len(prompts) - len(pairs),
        "response_tokens": int((found.lengths - found.prompt_lengths).sum()),
    }
    files.write_json(out / "summary.json", figures | {"config": dataclasses.asdict(config)})
    print(json.dumps(figures))
    return figures


def main():
    config = files.parse_flags(ReferencesConfig, __doc__)
    make(config, distributed.start(config.device))
    distributed.stop()


if __name__ == "__main__":
    sys.exit(files.run_command(main))
