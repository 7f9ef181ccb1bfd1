"""What a notebook needs before its first idea: seed, threads, device, style; and its drawings."""

from __future__ import annotations

import os
import sys
import warnings
from base64 import b64encode

import torch
import transformers

from minigrpo.files import data_folder
from minigrpo.notebook.plots import use_house_style


def setup(seed: int = 0) -> torch.device:
    """Prepare a notebook: the first cell of each one calls this.

    Seeds torch, chooses the number of threads, sets the house style of the figures, and turns off
    the progress bars and advice of the libraries (they write times into the output). A notebook
    stores its figures at 200 dpi and shows them at 100. Returns the device for `model.to(device)`.

    Environment:
        MINIGRPO_THREADS: torch threads. Default: OMP_NUM_THREADS if set; else one per core up to
            two, as these models are too small for more, and a single one if torch was imported
            before minigrpo, because its threads then spin (see `minigrpo/__init__.py`).
        MINIGRPO_DEVICE: where models go, such as "cuda" (default "cpu", whatever there is).
    """
    torch.manual_seed(seed)
    torch.set_num_threads(_num_threads())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    use_house_style()
    if "ipykernel" in sys.modules:  # twice the pixels, for screens that have them
        from matplotlib_inline.config import InlineBackend

        InlineBackend.instance().figure_formats = {"retina"}
    return torch.device(os.environ.get("MINIGRPO_DEVICE", "").strip() or "cpu")


def drawing(name: str) -> None:
    """Show a drawing of figures/, such as "gpt", as PNG, and as SVG if it is one.

    The metadata of the cell says what's in it for people who can't see it.
    """
    from IPython.display import display

    svg, png = (data_folder().with_name("figures") / f"{name}.{kind}" for kind in ("svg", "png"))
    data = {"image/png": b64encode(png.read_bytes()).decode(), "text/plain": f"drawing {name}"}
    vectors = {"image/svg+xml": svg.read_text("utf-8")} if svg.is_file() else {}
    display(data | vectors, metadata={"image/png": {"width": 560}}, raw=True)


def _num_threads() -> int:
    for name in ("MINIGRPO_THREADS", "OMP_NUM_THREADS"):
        if value := os.environ.get(name, "").strip():
            return int(value)
    threads_sleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return min(2, os.cpu_count() or 1) if threads_sleep else 1
