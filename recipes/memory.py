"""Will it fit, how long does it take, what does it cost? From a model's config alone.

    python recipes/memory.py                                  # the table of the README, no network
    python recipes/memory.py Qwen/Qwen3-0.6B some/folder      # the same for others
    python recipes/memory.py Qwen2.5-7B --card 80 --cards 4 --stage 3 --vllm 0.3 --price 2

With --card it plans a run of `gsm8k_trl.py` and says what each part takes. The page "Will it fit?"
(minigrpo/notebook/interactive/calculator.html) computes the same with the same constants. Hours
come from tokens per second, yours (--sampled, --trained: `log.csv` has them) or a guess, that
sampling a token takes 2 FLOP per parameter, and learning from one 6: 2 forward, 4 back, 2 more with
checkpointing, 2 more for a reference, 2 fewer with LoRA; at a fraction of the card's speed.
"""

from __future__ import annotations

import argparse

from gsm8k_trl import adapter_size
from running import count, load_config, plain_errors
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from minigrpo.text.models import kept, memory

GIB = 2**30


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
        return sum(memory(config, **{"rows": 0, "tokens": 0, **sizes}).values()) / GIB

    parameters = memory(config, rows=0, tokens=0)["weights"] // 4
    logits = memory(config, rows=4, tokens=512)["logits"] / GIB
    adapters = gib(trained=adapter_size(config), weight_bytes=2)
    numbers = [gib(), gib(reference=True), adapters, logits, 2 * parameters / GIB]
    cells = [name, f"{parameters / 1e6:,.0f} M", *(f"{number:.1f}" for number in numbers)]
    return f"| {' | '.join(cells)} |"


def table(configs: dict[str, PretrainedConfig]) -> str:
    """Markdown, in GiB."""
    head = "model | parameters | all weights learn | and a KL | LoRA, rank 32 | logits of a pass"
    lines = [f"| {head} | vLLM's copy |", "|---|" + "---:|" * 6]
    return "\n".join([*lines, *(line(name, config) for name, config in configs.items())])


def plan(config: PretrainedConfig, o: argparse.Namespace) -> dict[str, float]:
    """Bytes on one card while it learns and while it samples; hours, and what they cost."""
    parameters, text = memory(config, rows=0, tokens=0)["weights"] // 4, config.get_text_config()
    learn = adapter_size(config) if o.lora else parameters
    lora = {"trained": learn, "weight_bytes": 2} if o.lora else {}
    sizes = {"rows": o.rows, "tokens": o.tokens, "tiles": not o.whole_logits}
    sizes |= {"reference": o.kl and not o.lora, "cards": o.cards, "stage": o.stage}
    needs = memory(config, **sizes, **lora, autocast=True, sampler=int(o.vllm * o.card * GIB))
    rows, length = o.prompts * o.group / o.cards, o.prompt + o.tokens
    needs["activations"] = kept(config, o.rows * length, checkpointing=not o.no_checkpointing)
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads  # of a head
    width *= getattr(text, "num_key_value_heads", None) or heads
    cache = 2 * (2 if o.vllm else 4) * width * text.num_hidden_layers  # bytes per token
    averages = 8 * learn // (o.cards if o.stage else 1)
    sampling = needs["weights"] + averages + needs["reference"] + needs["sampler"]
    sampling += 0 if o.vllm else int(rows * length) * cache
    learning = 6 + 2 * (not o.no_checkpointing) + 2 * bool(o.kl) - 2 * bool(o.lora)
    sampled = o.sampled or o.tflops * 1e12 * o.busy_sampling / (2 * parameters)
    trained = o.trained or o.tflops * 1e12 * o.busy_training / (learning * parameters)
    seconds = rows * (o.length / sampled + (o.prompt + o.length) / trained)
    hours = o.steps * seconds / 3600
    return {
        **needs,
        "learning": sum(needs.values()),
        "sampling": sampling,
        "copy": 2 * parameters if o.vllm else 0,
        "at once": max(0, int(o.vllm * o.card * GIB) - 2 * parameters) // (cache * length),
        "sampled": sampled,
        "trained": trained,
        "hours": hours,
        "price": hours * o.cards * o.price,
    }


def told(name: str, config: PretrainedConfig, o: argparse.Namespace) -> str:
    """A plan in words."""
    found = plan(config, o)
    names = ("weights", "gradients and averages", "copies", "reference", "logits", "activations")
    parts = ", ".join(
        f"{name} {found[name] / GIB:.1f}" for name in (*names, "sampler") if found[name]
    )
    learning, sampling = found["learning"] / GIB, found["sampling"] / GIB
    lines = [f"{name}, on each of {o.cards} x {o.card:g} GiB:"]
    lines += [f"  learning {learning:.1f} GiB ({parts}), sampling {sampling:.1f}"]
    if found["copy"] > o.vllm * o.card * GIB:
        lines += [f"  No: vLLM's share doesn't hold its copy, {found['copy'] / GIB:.1f} GiB."]
    elif max(learning, sampling) > o.card:
        lines += ["  No: that doesn't fit."]
    else:
        lines += [f"  It fits by this count; {o.card - max(learning, sampling):.1f} GiB are left."]
    if o.vllm:
        lines += [f"  vLLM has room for {found['at once']:,} completions at once."]
    guess = "" if o.sampled and o.trained else " (a guess: nothing was measured)"
    lines += [
        f"  {found['sampled']:,.0f} tokens per second sampled, {found['trained']:,.0f} learned"
    ]
    lines[-1] += f" from, on each card{guess}: {found['hours']:.1f} hours for {o.steps} steps"
    lines[-1] += f", {found['price']:.2f} at your price." if o.price else "."
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("models", nargs="*", help="of the table, names on the hub, or folders")
    add("--card", type=float, help="GiB of a card: plan a run on it")
    add("--cards", type=count, default=1, help="how many")
    add(
        "--stage", type=int, default=0, choices=range(4), help="what they divide: ZeRO's; FSDP is 3"
    )
    add("--rows", type=count, default=8, help="in a pass")
    add("--prompt", type=count, default=200, help="tokens of a prompt")
    add("--tokens", type=count, default=512, help="of a completion, at most")
    add("--length", type=float, default=250, help="tokens of a completion, on average")
    add("--lora", action="store_true", help="adapters of rank 32")
    add("--kl", action="store_true", help="with a reference")
    add("--no-checkpointing", action="store_true", help="keep all activations")
    add("--whole-logits", action="store_true", help="of all tokens of a pass; TRL holds a tile")
    add("--vllm", type=float, default=0.0, help="its share of each card")
    add("--steps", type=count, default=200, help="updates")
    add("--prompts", type=count, default=16, help="questions per step")
    add("--group", type=count, default=8, help="completions per question")
    add("--sampled", type=float, help="tokens per second of a card, measured")
    add("--trained", type=float, help="tokens per second of a card, measured, prompts included")
    add("--tflops", type=float, default=400, help="of a card in bfloat16, for the guess")
    add("--busy-sampling", type=float, default=0.01, help="fraction of them, for the guess")
    add("--busy-training", type=float, default=0.3, help="fraction of them, for the guess")
    add("--price", type=float, default=0.0, help="of a card and an hour")
    return parser


def main(arguments: list[str] | None = None) -> None:
    o = options().parse_args(arguments)
    with plain_errors():
        models = {name: SHAPES.get(name) or load_config(name)[0] for name in o.models} or SHAPES
        print(table(models))
        for name, config in models.items() if o.card else ():
            print(told(name, config, o))


if __name__ == "__main__":
    main()
