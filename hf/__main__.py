"""Describe a target's folder, and let it say hello in 20 tokens of greedy text.

python -m hf FOLDER     a folder, or OWNER/NAME of a hub's repository
"""

import sys

from hf.tokenizer import Tokenizer, load_tokenizer
from serve import generate
from support.cpu import for_cpu
from support.flags import TEMPLATE_ARGS, OneLineParser, run_command
from target import Target

ATTENTION = {  # of a family's attention layers
    "llama": "attention",
    "qwen3": "attention with q/k norms",
    "qwen3_5_text": "gated attention",
    "qwen4_exp_text": "indexed attention",
}


def describe(target: Target, tokenizer: Tokenizer) -> None:
    """Print what a folder holds."""
    config = target.config
    num_linear = sum(config.is_linear(layer) for layer in range(config.num_hidden_layers))
    kinds = f"{config.num_hidden_layers - num_linear} of {ATTENTION[config.model_type]}"
    heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} key-value heads"
    tied = "tied" if config.tie_word_embeddings else "untied"
    streams = f", {config.num_streams} residual streams" if config.has_streams else ""
    print(f"family      {config.model_type}, width {config.hidden_size}, {tied} head{streams}")
    print(f"layers      {config.num_hidden_layers}: {kinds}, {heads} of {config.head_dim}")
    if num_linear:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        print(f"            {num_linear} of gated delta net, {values} value and {keys} key heads")
    if config.has_streams:
        experts = f"{config.num_experts_per_tok} of {config.num_experts} experts and a shared one"
        print(f"            {experts}; n-gram layers {list(config.ple_layer_ids)}")
    parameters = {id(p): p for p in target.parameters()}.values()  # a tied head once
    print(f"parameters  {sum(p.numel() for p in parameters):,}")
    print(f"bytes       {sum(p.nbytes for p in parameters):,}, {target.lm_head.weight.dtype}")
    print(f"taps        layers {list(target.tap_ids)}, unless a drafter wants others")
    template = f"{'with' if tokenizer.template else 'without'} chat template"
    print(f"tokenizer   {tokenizer.num_tokens} ids of {config.vocab_size} rows, {template}")
    print(f"stop ids    {list(tokenizer.stop_ids)}\n")


def greet(target: Target, tokenizer: Tokenizer) -> None:
    """Print a prompt and the target's answer."""
    text = tokenizer.chat([{"role": "user", "content": "Hello!"}])
    [result] = generate(target, None, [tokenizer.encode(text)], 20, stop_ids=tokenizer.stop_ids)
    answer = [token for token in result.tokens if token not in tokenizer.stop_ids]
    print(f"{text}{tokenizer.decode(answer)}")


def main(folder: str, template_args: str = "") -> None:
    target = for_cpu(Target.from_pretrained(folder))
    tokenizer = load_tokenizer(folder, template_args)
    describe(target, tokenizer)
    greet(target, tokenizer)


if __name__ == "__main__":
    parser = OneLineParser("python -m hf", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a target's folder, or OWNER/NAME of a hub's repository")
    parser.add_argument("--chat-template-args", metavar="JSON", default="", help=TEMPLATE_ARGS)
    flags = parser.parse_args()
    sys.exit(run_command(lambda: main(flags.folder, flags.chat_template_args)))
