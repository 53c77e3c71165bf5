"""The two roles of the loop: an actor that plays and an extractor that distils, and what they are made of."""
