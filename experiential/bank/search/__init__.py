"""From a query to the entries it receives: batches, filters and strategies."""
