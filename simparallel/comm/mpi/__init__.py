"""Ranks as MPI processes, each with a copy of the shared memory that messages keep up to date."""
