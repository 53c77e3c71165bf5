"""Multi-hop questions over a pool of paragraphs: HotpotQA, files of its format, or an invented world."""
