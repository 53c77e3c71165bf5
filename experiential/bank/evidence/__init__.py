"""Judge entries by the outcomes of their uses: counters, uplift, standing."""
