"""Automatic parallelism: a program's graph, the strategies of its ops, their prices, and searches over them."""
