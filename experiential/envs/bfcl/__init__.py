"""Play the multi-turn dialogues of the Berkeley Function Calling Leaderboard (BFCL)."""
