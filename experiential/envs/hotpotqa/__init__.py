"""Answer multi-hop questions over a pool of paragraphs, real or invented."""
