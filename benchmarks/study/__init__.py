"""Compare the methods: environments x recipes x training seeds, each under every arm.

``python -m benchmarks.study`` is its command. `setups` says what is played, `cells` plays and
stores one cell, `runs` runs many, `tables` lays out what was found, and `orderings` what the papers
report.
"""
