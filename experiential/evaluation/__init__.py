"""Evaluate: arms, visits, intervals and the card of runs; suites of environments for any agent."""
