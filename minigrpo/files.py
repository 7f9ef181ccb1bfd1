"""Files: where the shipped data is, how a file is written in one piece, how a run goes on."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent


def data_folder() -> Path:
    """The folder of the shipped data: `data/` of the checkout, or the copy inside a wheel."""
    checkout = _PACKAGE.parent / "data"
    return checkout if (checkout / "README.md").is_file() else _PACKAGE / "data"


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` in one step if the block ends well."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile.mkstemp: its files, and with them the result, are readable by their owner only.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_run(
    path: str | Path, *, step: int, settings: Mapping, modules: Mapping, generators: Mapping
) -> None:
    """Write all that a run needs to go on as if it had never stopped, in one piece."""
    state = {
        "step": step,
        "settings": {name: repr(value) for name, value in settings.items()},
        "modules": {name: m.state_dict() for name, m in modules.items() if m is not None},
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }
    with atomic_path(path) as unfinished:
        torch.save(state, unfinished)


def load_run(path: str | Path, *, settings: Mapping, modules: Mapping, generators: Mapping) -> int:
    """Bring a run to where `save_run` left it; returns the steps done, 0 without such a file."""
    if not Path(path).exists():
        return 0
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        for name, now in settings.items():
            if (before := state["settings"][name]) != repr(now):
                raise ValueError(f"it was written with {name} = {before}, and this run has {now!r}")
        for name, saved in state["modules"].items():
            modules[name].load_state_dict(saved)
        for name, generator in generators.items():
            generator.set_state(state["generators"][name])
    except Exception as error:  # torch.load raises whatever broken bytes lead it to
        raise ValueError(f"checkpoint: {path} does not belong to this run: {error}") from error
    return state["step"]
