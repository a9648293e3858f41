"""The shared bytes of a run: the map of the segment, the arenas of the ranks, payloads staged in them."""
