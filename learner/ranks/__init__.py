"""Several learner ranks: rank 0 leads, the others follow; each trains on its share of a step's rows."""
