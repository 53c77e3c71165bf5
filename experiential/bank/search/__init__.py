"""Turn queries into hits: batches, filters and strategies."""
