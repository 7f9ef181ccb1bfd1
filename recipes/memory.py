"""What a recipe needs at least, in GiB, from a model's config alone: the table of the README.

python recipes/memory.py                                  # the shapes below, without a network
python recipes/memory.py Qwen/Qwen3-0.6B some/folder      # others

Four bytes for each weight, twelve more for each that learns (its gradient and AdamW's two
averages), four for a reference. Activations come on top, and with --vllm its share of the card.
"""

from __future__ import annotations

import argparse

from gsm8k_trl import adapter_size
from running import load_config, plain_errors
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from minigrpo.text.models import memory


def shape(kind, width: int, inner: int, layers: int, heads: str, vocabulary: int, tied: bool):
    """A config; `heads` is "queries/keys"."""
    queries, keys = map(int, heads.split("/"))
    return kind(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=queries,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


SHAPES = {  # as their config.json has them
    "SmolLM2-135M": shape(LlamaConfig, 576, 1536, 30, "9/3", 49152, True),
    "Qwen2.5-0.5B": shape(Qwen2Config, 896, 4864, 24, "14/2", 151936, True),
    "Llama-3.2-1B": shape(LlamaConfig, 2048, 8192, 16, "32/8", 128256, True),
    "Qwen2.5-1.5B": shape(Qwen2Config, 1536, 8960, 28, "12/2", 151936, True),
    "Qwen2.5-7B": shape(Qwen2Config, 3584, 18944, 28, "28/4", 152064, False),
}


def line(name: str, config: PretrainedConfig) -> str:
    """A row of the table."""

    def gib(**sizes) -> float:
        return sum(memory(config, **{"rows": 0, "tokens": 0, **sizes}).values()) / 2**30

    count = memory(config, rows=0, tokens=0)["weights"] // 4
    logits = memory(config, rows=4, tokens=512)["logits"] / 2**30
    adapters = gib(trained=adapter_size(config), weight_bytes=2)
    numbers = [gib(), gib(reference=True), adapters, logits]
    cells = [name, f"{count / 1e6:,.0f} M", *(f"{number:.1f}" for number in numbers)]
    return f"| {' | '.join(cells)} |"


def table(configs: dict[str, PretrainedConfig]) -> str:
    """Markdown, in GiB."""
    head = "model | parameters | all weights learn | and a KL | LoRA, rank 32 | logits of a pass"
    lines = [f"| {head} |", "|---|" + "---:|" * 5]
    return "\n".join([*lines, *(line(name, config) for name, config in configs.items())])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="names on the hub, or folders")
    names = parser.parse_args(arguments).models
    with plain_errors():
        print(table({name: load_config(name)[0] for name in names} or SHAPES))


if __name__ == "__main__":
    main()
