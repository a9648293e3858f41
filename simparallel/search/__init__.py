"""Search for strategies: solvers of choosing one candidate for each node of a graph."""
