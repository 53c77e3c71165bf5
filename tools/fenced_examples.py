"""Let the site show the examples of docstrings as code: Markdown takes `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Put a fence around each block of a docstring that begins with ``>>>``."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object before it is rendered."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda block: f"```pycon\n{block[0]}\n```", text)
