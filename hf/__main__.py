"""Describe a target's folder, and let it say hello in 20 tokens of greedy text.

python -m hf FOLDER     a folder, or OWNER/NAME of a hub's repository
"""

import sys

from hf.tokenizer import Tokenizer, load_tokenizer
from serve import generate
from support.cpu import for_cpu
from support.flags import run_command
from target import Target

USAGE = "usage: python -m hf FOLDER"
ATTENTION = {  # of a family's attention layers
    "llama": "attention",
    "qwen3": "attention with q/k norms",
    "qwen3_5_text": "gated attention",
    "qwen4_exp_text": "indexed attention",
}
GREETING_TOKENS = 20


def describe(target: Target, tokenizer: Tokenizer) -> None:
    """Print what a folder holds."""
    config = target.config
    num_linear = sum(config.is_linear(layer) for layer in range(config.num_hidden_layers))
    tied = "tied" if config.tie_word_embeddings else "untied"
    streams = f", {config.num_streams} residual streams" if config.streams else ""
    heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} key-value heads"
    print(f"family      {config.model_type}, width {config.hidden_size}, {tied} head{streams}")
    print(
        f"layers      {config.num_hidden_layers}: {config.num_hidden_layers - num_linear} of "
        f"{ATTENTION[config.model_type]}, {heads} of {config.head_dim}"
    )
    if num_linear:
        print(
            f"            {num_linear} of gated delta net, {config.linear_num_value_heads} value "
            f"and {config.linear_num_key_heads} key heads"
        )
    if config.streams:
        print(
            f"            {config.num_experts_per_tok} of {config.num_experts} experts and a "
            f"shared one; n-gram layers {list(config.ple_layer_ids)}"
        )
    parameters = {id(p): p for p in target.parameters()}.values()  # a tied head once
    print(f"parameters  {sum(p.numel() for p in parameters):,}")
    print(f"bytes       {sum(p.nbytes for p in parameters):,}, {target.lm_head.weight.dtype}")
    print(f"taps        layers {list(target.tap_ids)}, unless a drafter wants others")
    template = "with" if tokenizer.template else "without"
    print(
        f"tokenizer   {tokenizer.num_tokens} ids of {config.vocab_size} rows, "
        f"{template} chat template"
    )
    print(f"stop ids    {list(tokenizer.stop_ids)}\n")


def greet(target: Target, tokenizer: Tokenizer) -> None:
    """Print a prompt and the target's answer."""
    text = tokenizer.chat([{"role": "user", "content": "Hello!"}])
    prompts = [tokenizer.encode(text)]
    [result] = generate(target, None, prompts, GREETING_TOKENS, stop_ids=tokenizer.stop_ids)
    answer = [token for token in result.tokens if token not in tokenizer.stop_ids]
    print(f"{text}{tokenizer.decode(answer)}")


def main(folder: str) -> None:
    target = for_cpu(Target.from_pretrained(folder))
    tokenizer = load_tokenizer(folder)
    describe(target, tokenizer)
    greet(target, tokenizer)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    sys.exit(run_command(lambda: main(sys.argv[1])))
