"""Closed forms of a GPT's training step: `transformer`, its memory, its time."""
