"""What entries did: credit by lineage, uplift with intervals, trust, and the story of one episode."""
