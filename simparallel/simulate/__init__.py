"""Runs without data, and their times.

Dry runs: `arrays` without data, the `medium` of their collectives, `folding` of ranks that are alike, `dry_run`, and
the `prediction` that it gives. Engines: a `program` of each rank (`programs` notes those of dry runs), the `task_graph`
of all, their times by `algebra` or by `events`, and their `critical_path`. Closed forms of a GPT's
step: `transformer`, `transformer_time`, `transformer_memory`.
"""
