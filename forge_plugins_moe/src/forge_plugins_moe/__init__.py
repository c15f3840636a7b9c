"""Mixture of experts: routers, sparse feed-forward layers, expert parallelism."""
