"""Agents of the loop: an actor that plays, an extractor that distils, and their parts."""
