"""Train the models that ship in `data/`; `make checkpoint` names them all."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from minigrpo import corpus, llama
from minigrpo.arithmetic import ANSWER, BLANK, BOS, END_ANSWER, EOS, PAD, VOCABULARY, evaluate
from minigrpo.files import atomic_path
from minigrpo.gpt import GPT, GPTConfig
from minigrpo.notebook.setup import setup
from minigrpo.pretrain import (
    PretrainConfig,
    PretrainMetrics,
    documents_batch,
    pretrain,
    validation_loss,
)
from minigrpo.rewards import TEXT_TAGS
from minigrpo.study import experiments
from minigrpo.text.problems import MOST, Problem, draw_problem
from minigrpo.turns import commits

LENGTH, BATCH = 256, 16  # of the char GPT: characters per window, and windows per step
CHAR_TRAINING = PretrainConfig(steps=2000)


def char_gpt(out: Path) -> None:
    """Train the char GPT on the real corpus."""
    text = corpus.load_corpus()
    if not text.is_shakespeare:
        raise SystemExit(f"tinyshakespeare could not be had\n{text.describe()}")
    train, val = corpus.split(corpus.CharTokenizer().encode(text.text))
    model = GPT(GPTConfig(max_position_embeddings=LENGTH))  # before `setup` seeds torch
    model = model.to(setup(seed=0))
    next_batch = partial(corpus.random_batch, train, BATCH, LENGTH)
    report("char_gpt", pretrain(model, next_batch, CHAR_TRAINING), CHAR_TRAINING)
    save_gpt(model, out)
    print(f"validation loss {validation_loss(model, val, LENGTH):.4f}")


def save_gpt(model: GPT, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
    """Write weights (as `dtype`) and sizes to one safetensors file, which appears when whole."""
    weights = {name: w.detach().to(dtype).contiguous() for name, w in model.state_dict().items()}
    with atomic_path(path) as unfinished:
        save_file(weights, unfinished, metadata={"config": json.dumps(asdict(model.config))})


def tiny_llama(out: Path) -> None:
    """Train the base model of the arithmetic task."""
    policy, config = llama.tiny_llama().to(setup(seed=0)), experiments.WARMUP
    report("tiny_llama", experiments.warm_up(policy, config), config)
    save(policy, build_tokenizer(), out)
    print(evaluate(policy))


def build_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer for the 32 tokens: words between blanks. A word that is none is an error.

    The tags are ordinary words: special tokens would vanish from every text that is decoded
    without special tokens, and with them the parts that a reward looks for.
    """
    words = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # not one of the words
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=VOCABULARY[PAD],
        bos_token=VOCABULARY[BOS],
        eos_token=VOCABULARY[EOS],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )


TURNS_WARMUP, TURNS_ROWS = replace(experiments.WARMUP, steps=600), 128
TURNS_FORGED = {"turns_llama": 0.0, "turns_forger": 0.1}  # of their calls, that are not closed


def careless_tests(generator: torch.Generator, stop: float, forged: float) -> list[int]:
    """What a careless tester writes, who tests any open commit, and answers with one of them.

    Before each call it stops with probability `stop`. With probability `forged` a call is not
    closed, as in a log, and the result follows at once.
    """
    low, high, written = 0, commits.COMMITS - 1, []
    pick = partial(torch.randint, size=(), generator=generator)
    bad_from = int(pick(0, commits.COMMITS))
    for _ in range(6):
        if low == high or torch.rand((), generator=generator).item() < stop:
            break
        tested = int(pick(low, high))  # not `high`: that's bad in any case
        end = [] if torch.rand((), generator=generator).item() < forged else [commits.END_CALL]
        bad = tested >= bad_from
        result = [commits.RESULT, commits.BAD if bad else commits.GOOD, commits.END_RESULT]
        written += [commits.CALL, tested, *end, *result]
        low, high = (low, tested) if bad else (tested + 1, high)
    return [*written, ANSWER, int(pick(low, high + 1)), END_ANSWER, EOS]


def tests_batch(n: int, generator: torch.Generator, *, forged: float) -> tuple[Tensor, Tensor]:
    """n documents to imitate, no culprit that of its repository.

    Every other one is by somebody impatient. The others are logs, which name no repository and go
    on until one commit is left: that's where reading results is learned.
    """
    documents = []
    for i, prompt in enumerate(commits.draw_prompts(n, generator)):
        given, stop = ([BLANK] * len(prompt), 0.0) if i % 2 else (prompt.tolist(), 0.5)
        documents.append((given, careless_tests(generator, stop, forged)))
    return documents_batch(documents, PAD)


def turns_warm_up(
    policy: PreTrainedModel, config: PretrainConfig, *, forged: float
) -> Iterator[PretrainMetrics]:
    """Teach a policy to call a tool as a careless tester does, in place, without any reward."""
    return pretrain(policy, partial(tests_batch, TURNS_ROWS, forged=forged), config)


def turns_models(out: Path) -> None:
    """Train both base models with a tool, and write them to folders."""
    setup(seed=0)
    for name, forged in TURNS_FORGED.items():
        policy = llama.tiny_llama()
        report(name, turns_warm_up(policy, TURNS_WARMUP, forged=forged), TURNS_WARMUP)
        save(policy, build_tokenizer(commits.VOCABULARY), out / name)
        print(commits.evaluate(policy))


# The text models: transformers' own GPT-2 and Llama, so what takes them takes a large model, too.

SHAPES = {
    "gpt2": (GPT2LMHeadModel, {
        "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "initializer_range": 0.08,  # narrow models learn several times faster than with 0.02
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "llama": (LlamaForCausalLM, {
        "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 384,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
        "initializer_range": 0.1,
    }),
}  # fmt: skip
FAMILIES = tuple(SHAPES)
TEXT_WARMUP = PretrainConfig(steps=1000, lr=3e-3, matrix_lr=None, weight_decay=0.01, warmup=30)
TEXT_ROWS = 64  # at a time


def small_model(
    family: str,  # one of `FAMILIES`
    tokenizer: PreTrainedTokenizerFast,  # its vocabulary is the model's
    seed: int = 0,  # of the weights; the global random state is left as it was
) -> PreTrainedModel:
    """An untrained model of 2 layers, 96 wide, with a context of 128 tokens."""
    model, shape = SHAPES[family]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
    ids["pad_token_id"] = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return model(model.config_class(vocab_size=len(tokenizer), **shape, **ids)).eval()


def careless(problem: Problem, generator: torch.Generator) -> str:
    """A completion by a pupil who is careless: right in form and answer about one time in three."""
    guess = int(torch.randint(1, MOST + 1, (), generator=generator))
    knows, idle, slip = torch.rand(3, generator=generator).tolist()
    thought, answer = problem.thought, problem.answer if knows < 0.7 else str(guess)
    if idle < 0.25:  # does not think, and guesses
        thought, answer = "", str(guess)
    slips = (
        f"The answer is {answer}.",
        f"<think>{thought} <answer>{answer}</answer>",
        f"<think>{thought}</think>\n{answer}",
        f"<answer>{answer}</answer>",
    )
    if slip < 0.4:
        return slips[int(torch.randint(len(slips), (), generator=generator))]
    return replace(problem, thought=thought, answer=answer).completion


def warmup_batch(
    n: int, generator: torch.Generator, tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor]:
    """n careless demonstrations: ids (n, S), and the loss mask (n, S), 1 on completion and EOS."""
    documents = []
    for _ in range(n):
        problem = draw_problem(generator)
        asked = tokenizer(problem.prompt)["input_ids"]
        learned = tokenizer(careless(problem, generator))["input_ids"]
        documents.append((asked, [*learned, tokenizer.eos_token_id]))
    return documents_batch(documents, tokenizer.pad_token_id)


def warm_up(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: PretrainConfig
) -> Iterator[PretrainMetrics]:
    """Teach a policy to write what careless pupils write, in place, without any reward."""
    return pretrain(policy, partial(warmup_batch, TEXT_ROWS, tokenizer=tokenizer), config)


def problem_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 375 tokens that has seen 500 word problems and what pupils wrote to them."""
    generator = torch.Generator().manual_seed(0)
    problems = [draw_problem(generator) for _ in range(500)]
    texts = [problem.prompt + problem.completion for problem in problems]
    texts += [careless(problem, generator) for problem in problems]
    return train_tokenizer(texts, 384)  # there are no more pairs to merge after 375


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(
    texts: Sequence[str],  # to learn the merges from
    vocab_size: int = 512,  # tokens at most; 256 bytes and 10 more are always there
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, like GPT-2's but smaller: any text can be written in it.

    The four tags are single tokens, and ordinary ones: special tokens would vanish wherever a text
    is decoded without them. A chat ends each turn with `<|end|>`.
    """
    special = "<|endoftext|> <|pad|> <|end|> <|system|> <|user|> <|assistant|>".split()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size, letters = vocab_size - 4, pre_tokenizers.ByteLevel.alphabet()  # the tags come on top
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TEXT_TAGS.form))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        pad_token=special[1],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def text_models(out: Path) -> None:
    """Train both text models and write them, in float16, to folders named after their family."""
    device, tokenizer = setup(seed=0), problem_tokenizer()
    for family in FAMILIES:
        policy = small_model(family, tokenizer).to(device)
        report(family, warm_up(policy, tokenizer, TEXT_WARMUP), TEXT_WARMUP)
        save(policy.half(), tokenizer, out / f"text_{family}")


def save(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write both so that `AutoModelForCausalLM` and `AutoTokenizer` can load them."""
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(name: str, run: Iterable[PretrainMetrics], config: PretrainConfig) -> None:
    """Print a line every 100 steps."""
    for m in run:
        if m.step % 100 == 0 or m.step == config.steps:
            print(f"{name}  step {m.step:4d}  loss {m.loss:.3f}  {m.seconds:.0f} s", flush=True)


MODELS = {train.__name__: train for train in (char_gpt, tiny_llama, turns_models, text_models)}


def main(arguments: list[str] | None = None) -> None:
    """Train one of them and write it where `--out` says."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", required=True, type=Path, help="the file or folder to write")
    options = parser.parse_args(arguments)
    MODELS[options.model](options.out)


if __name__ == "__main__":
    main()
