"""One rule of time: the recorder of a run, programs of ranks and their solvers, memory, the critical path."""
