"""The described hardware: clusters, devices, links, presets, rank tables, and what work and collectives cost on it."""
