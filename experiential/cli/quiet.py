"""Keep what other libraries say about themselves out of the terminal."""

from __future__ import annotations

import os
import sys
import warnings

_LIBRARIES = (
    "accelerate chromadb google huggingface_hub opentelemetry peft pydantic sentence_transformers"
    " tensorboard torch transformers"
).split()


def quieten() -> None:
    """Silence bars, logs and deprecations of libraries, unless the user has set them otherwise.

    Their other warnings stay, such as torch's about a driver, and so do all of other modules.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if sys.warnoptions:
        return
    theirs = rf"({'|'.join(_LIBRARIES)})(\.|$)"
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=theirs)
